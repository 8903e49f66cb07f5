"""The worker process of ``xla_fsdp.testing``: one XLA runtime, one launch after another.

Requests and replies are pickled tuples over a socket. A request is ``(sys_path, cwd, call)``, where
``call`` is a pickled ``(fn, args, kwargs)``. A reply is ``(outcome, value, healthy)``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import cloudpickle
import torch
import torch_xla.core.xla_model as xm

from ..compiled.cache import enable_compilation_cache
from .errors import RankError, portable
from .launch import _runtime, launch


def serve(descriptor: int, size: int, programs: str | None) -> NoReturn:
    """Runs the calls that come over the socket as ``size`` ranks, until the socket is closed.

    ``programs``: a folder for compiled programs, if this machine can load them.
    """
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    connection = Connection(descriptor)
    if programs is not None:
        with contextlib.suppress(NotImplementedError):
            enable_compilation_cache(programs)
    random_state = torch.get_rng_state()
    xla_seed: int | None = None
    environment: dict[str, str] = {}
    while True:
        try:
            sys_path, cwd, call = connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # skip the destructors, which take time
        sys.path[:] = sys_path
        os.chdir(cwd)
        # Every call starts with the state of the first one, independent of earlier calls.
        torch.set_rng_state(random_state)
        if xla_seed is None:
            xla_seed = _first_seed(size)
            environment = dict(os.environ)
        os.environ.clear()  # libraries, for example Accelerate, leave settings in it
        os.environ.update(environment)
        xm.set_rng_state(xla_seed, "xla:0")
        outcome = _run(call, size)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send((*outcome, not _runtime.leftover))


def _run(call: bytes, size: int) -> tuple[str, Any]:
    try:
        fn, args, kwargs = pickle.loads(call)
        results = launch(_Call(fn, kwargs), args, size)
        assert results is not None  # launch on a CPU returns results
        return "results", [_dumps(result, f"the result of rank {r}") for r, result in
                           enumerate(results)]  # fmt: skip
    except RankError as error:
        cause = error.__cause__
        return "rank error", (type(error).__name__, *error.__reduce__()[1], portable(cause, _dumps))
    except BaseException as error:
        return "error", (portable(error, _dumps), f"{type(error).__name__}: {error}")


class _Call:
    def __init__(self, fn: Callable, kwargs: dict[str, Any]) -> None:
        self.fn, self.kwargs = fn, kwargs

    def __call__(self, rank: int, *args: Any) -> Any:
        return self.fn(rank, *args, **self.kwargs)


def _first_seed(size: int) -> int:
    _runtime.start(size)
    return xm.get_rng_state("xla:0")


class _ToCpuPickler(cloudpickle.Pickler):
    """Pickles XLA tensors in a result as CPU tensors, because the receiver has no XLA device."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor) and obj.device.type == "xla":
            copy = obj.detach().cpu()
            if isinstance(obj, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, obj.requires_grad)
            return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(obj)


def _dumps(value: Any, what: str = "the exception") -> bytes:
    buffer = io.BytesIO()
    try:
        _ToCpuPickler(buffer).dump(value)
    except Exception as error:
        raise TypeError(f"{what} cannot be pickled: {error}") from error
    return buffer.getvalue()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)

"""Runs the ranks of one launch and waits for them, whatever happens."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla.core.xla_model as xm

from ... import xlac
from ..errors import RankStopped
from . import sync_points
from .collectives import Collectives
from .fresh_state import FreshState
from .patches import Patches
from .rank_thread import RankThread
from .rendezvous import Rendezvous
from .rng import GeneratorOfThisRank
from .runtime import CpuRuntime
from .session import Session, drop_pending, wait_for_programs

# A failed launch returns within 5 seconds; by then every rank has either ended or is left behind.
_INTERRUPT_AFTER = 1.5
_LEAVE_AFTER = 3.5
_POLL_SECONDS = 0.2


def run_ranks(
    runtime: CpuRuntime, fn: Callable, args: Sequence, size: int, timeout: float, slices: int = 1
) -> list[Any]:
    """``fn(rank, *args)`` on ``size`` threads, which stand for ``slices`` TPU slices; their results
    by rank.

    Raises:
        RankError: a rank failed, or the ranks could not meet.
        Preempted: all ranks ended with it.
        KeyboardInterrupt: as usual; the ranks are stopped first.
    """
    runtime.start(size)
    runtime.gate.open_for(size)
    session = Session(size, timeout, runtime.gate, slices)
    caller_device = xlac.default_device()
    caller_seed = xm.get_rng_state(caller_device)
    patches = Patches()
    fresh_state = FreshState(session)
    ended = threading.Semaphore(0)
    threads = [RankThread(session, c, fn, tuple(args), ended.release) for c in session.contexts]
    try:
        _install(session, patches, caller_seed)
        patches.set(sys, "unraisablehook", _interrupt_again(threads, sys.unraisablehook))
        for thread in threads:
            thread.start()
        _wait(session, threads, ended)
    except BaseException as error:  # KeyboardInterrupt, most likely
        session.barrier.stop(error)
        _wait(session, threads, ended)
    finally:
        fresh_state.remove()
        _clean_up(runtime, session, patches, threads)
        xm.set_rng_state(caller_seed, caller_device)
    if session.barrier.failure is not None:
        raise session.barrier.failure
    if session.preempted is not None:
        raise session.preempted
    return [thread.result for thread in threads]


def _wait(session: Session, threads: list[RankThread], ended: threading.Semaphore) -> None:
    stopping_since: float | None = None
    while any(thread.is_alive() for thread in threads):
        ended.acquire(timeout=_POLL_SECONDS)
        session.barrier.watch()
        session.stop_if_deadlocked()
        if session.barrier.failure is None:
            continue
        now = time.monotonic()
        stopping_since = stopping_since or now
        if now - stopping_since > _LEAVE_AFTER:
            return
        if now - stopping_since > _INTERRUPT_AFTER:
            session.gate.close()
            for rank, thread in enumerate(threads):
                if thread.is_alive() and not thread.interrupted and not session.dispatching[rank]:
                    thread.interrupted = True
                    _raise_in(thread, RankStopped)


def _raise_in(thread: threading.Thread, exception: type[BaseException]) -> None:
    # Takes effect at the thread's next bytecode: ends loops, not calls into C++.
    assert thread.ident is not None  # it was started
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(exception)
    )


def _interrupt_again(threads: list[RankThread], report: Callable) -> Callable:
    """A ``sys.unraisablehook`` for interrupts that Python discards.

    An interrupt that arrives inside of a ``__del__``, a data loader's for example, ends only that
    method. The rank is interrupted again, and nothing is printed.
    """

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not RankStopped:
            report(unraisable)
        for thread in threads:
            if unraisable.exc_type is RankStopped and thread.ident == threading.get_ident():
                thread.interrupted = False

    return hook


def _install(session: Session, patches: Patches, seed: int) -> None:
    devices = xm.get_xla_supported_devices()
    # Names, whatever torch_xla's annotation says.
    replicas = xm.xla_replication_devices(devices)  # type: ignore[arg-type]
    xlac.set_replication_devices(replicas)
    for device in devices:
        xlac.set_collective_token(device, None)
        xm.set_rng_state(seed, device)
        xlac.drop_step_closures(device)  # of an earlier launch
    # torch_xla caches these for the process, perhaps from before the launch.
    patches.replace(xlac.WORLD_SIZE, None)
    patches.replace(xlac.ORDINAL, None)
    sync_points.install(session, patches)
    patches.set_everywhere(
        {**Collectives(session).replacements(), **Rendezvous(session).replacements()}
    )
    patches.set(
        torch.random,
        "default_generator",
        GeneratorOfThisRank(session.generators, torch.default_generator),
    )


def _clean_up(
    runtime: CpuRuntime, session: Session, patches: Patches, threads: list[RankThread]
) -> None:
    for context in session.contexts:
        context.active = False
    runtime.leftover = [thread for thread in threads if thread.is_alive()]
    patches.undo()
    session.generators.restore_caller()
    xlac.set_replication_devices([])
    failed = session.barrier.failure is not None
    if failed:
        session.gate.close()
    if runtime.leftover:
        runtime.unfinished = session.contexts
        _skip_destructors()
        return
    wait_for_programs(failed)
    runtime.settle_autograd_threads()
    drop_pending(session.contexts)


def _skip_destructors() -> None:
    """Makes the process end without waiting for XLA, its exit status kept.

    torch_xla's exit handler and the C++ static destructors would wait for programs that never end.
    glibc runs ``on_exit`` handlers last registered first, with the exit status as first argument:
    that of ``_exit``.
    """
    xlac.skip_exit_handler()
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)

"""Runs each rank of a launch on a thread and waits for all of them, also after failures."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch.autograd.graph import saved_tensors_hooks

from ... import xlac
from ...tree import map_tensors, tensors_in
from ..autograd_thread import run_there
from ..errors import Preempted, RankError, RankStopped, described
from ..rank import RankContext, _set_current_rank, current_rank
from .cpu_collectives import Collectives
from .mode import RankMode, StateAsDeviceData
from .patches import Patches
from .rng import GeneratorOfThisRank
from .runtime import CpuRuntime
from .session import Session, drop_pending, wait_for_programs

# A failed launch returns within 5 seconds, even if ranks have not ended.
_INTERRUPT_AFTER = 1.5
_LEAVE_AFTER = 3.5
_POLL_SECONDS = 0.2


def run_ranks(
    runtime: CpuRuntime, fn: Callable, args: Sequence, size: int, timeout: float, slices: int = 1
) -> list[Any]:
    """Returns the results by rank.

    Raises RankError, Preempted if all ranks ended with it, or KeyboardInterrupt.
    """
    runtime.start(size)
    runtime.gate.open_for(size)
    session = Session(size, timeout, runtime.gate, slices)
    caller_device = xlac.default_device()
    caller_seed = xm.get_rng_state(caller_device)
    patches = Patches()
    state_as_data = StateAsDeviceData(session)
    ended = threading.Semaphore(0)
    threads = [
        _RankThread(session, context, partial(fn, context.rank, *args), ended.release)
        for context in session.contexts
    ]
    try:
        _install_patches(session, patches, caller_seed)
        patches.set(sys, "unraisablehook", _interrupt_again(sys.unraisablehook))
        for thread in threads:
            thread.start()
        _join_threads(session, threads, ended)
    except BaseException as error:
        session.barrier.stop(error)
        _join_threads(session, threads, ended)
    finally:
        state_as_data.remove()
        _clean_up(runtime, session, patches, threads)
        xm.set_rng_state(caller_seed, caller_device)
    failure = session.barrier.failure or session.preempted
    if failure is not None and not runtime.leftover:
        # The failure refers to the ranks' models: only its receiver may keep it.
        session.barrier.failure, session.preempted = RankStopped(), None
    try:
        if failure is not None:
            raise failure
        return [thread.result for thread in threads]
    finally:
        del failure


def _join_threads(session: Session, threads: list[_RankThread], ended: threading.Semaphore) -> None:
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
                    thread.interrupt()


def _interrupt_again(report: Callable) -> Callable:
    """Interrupts again, because an interrupt inside of a ``__del__`` ends only that method."""

    def hook(unraisable: Any) -> None:
        thread = threading.current_thread()
        if unraisable.exc_type is not RankStopped:
            report(unraisable)
        elif isinstance(thread, _RankThread):
            thread.interrupted = False

    return hook


def _install_patches(session: Session, patches: Patches, seed: int) -> None:
    devices = xm.get_xla_supported_devices()
    # Device names, although torch_xla's annotation differs.
    replicas = xm.xla_replication_devices(devices)  # type: ignore[arg-type]
    xlac.set_replication_devices(replicas)
    for device in devices:
        xlac.set_collective_token(device, None)
        xm.set_rng_state(seed, device)
        xlac.drop_step_closures(device)
    # torch_xla caches these for the process.
    patches.replace(xlac.WORLD_SIZE, None)
    patches.replace(xlac.ORDINAL, None)
    _replace_sync_points(session, patches)
    # AOTAutograd's tables are not thread-safe.
    one_rank, capture = threading.RLock(), xlac.capture_scan.value

    def capture_alone(*args: Any, **kwargs: Any) -> Any:
        with one_rank:
            return capture(*args, **kwargs)

    patches.replace(xlac.capture_scan, capture_alone)
    patches.set_everywhere(Collectives(session).replacements())
    generator = GeneratorOfThisRank(session.generators, torch.default_generator)
    patches.set(torch.random, "default_generator", generator)


def _replace_sync_points(session: Session, patches: Patches) -> None:
    """torch_xla looks these functions up by name: this affects every cut that Python makes."""
    sync_device = xlac.sync_device.value
    sync_tensors = xlac.sync_tensors.value
    copy_to_host = xlac.copy_to_host.value
    start_thread = threading.Thread.start

    def gated_sync_device(
        device: str = "", devices: Sequence[str] = (), wait: bool = True, reset_scope: bool = True
    ) -> None:
        context = session.rank_of(device)
        if context is None:
            sync_device(device, list(devices), wait=wait, reset_scope=reset_scope)
        else:
            session.sync(context, device, list(devices), wait, reset_scope)

    def gated_sync_tensors(
        tensors: Sequence[torch.Tensor],
        devices: Sequence[str] = (),
        wait: bool = True,
        sync_xla_data: bool = True,
    ) -> None:
        context = session.rank_of(tensors[0].device if tensors else None)
        if context is None:
            sync_tensors(tensors, list(devices), wait=wait, sync_xla_data=sync_xla_data)
        else:
            session.sync_tensors(
                context, "a sync of some tensors", tensors, devices, wait, sync_xla_data
            )

    def gated_copy_to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        context = session.rank_of(tensors[0].device if tensors else None)
        if context is None:
            return copy_to_host(tensors)
        what = "a copy of tensors to the host"
        return session.fetch(context, what, tensors, partial(copy_to_host, tensors))

    def start_as_same_rank(thread: threading.Thread) -> None:
        # A thread belongs to the rank that started it.
        context = current_rank()
        if context is not None:
            run = thread.run

            def run_as_rank() -> None:
                session.adopt_thread(context)
                try:
                    with RankMode(session, context):
                        run()
                finally:  # breaks a reference cycle
                    vars(thread).pop("run", None)

            vars(thread)["run"] = run_as_rank
        start_thread(thread)

    make_hooks = saved_tensors_hooks.__init__

    def hooks_in_mode(hooks: Any, pack: Callable, unpack: Callable) -> None:
        context = current_rank()
        if context is not None:
            pack, unpack = (_in_mode(session, context, hook) for hook in (pack, unpack))
        make_hooks(hooks, pack, unpack)

    patches.set(saved_tensors_hooks, "__init__", hooks_in_mode)
    patches.replace(xlac.sync_device, gated_sync_device)
    patches.replace(xlac.sync_tensors, gated_sync_tensors)
    patches.replace(xlac.copy_to_host, gated_copy_to_host)
    patches.set(threading.Thread, "start", start_as_same_rank)


def _in_mode(session: Session, context: RankContext, hook: Callable) -> Callable:
    """``hook``, which autograd calls within an operator, where torch has disabled the mode."""
    mode = RankMode(session, context)

    def run(value: Any) -> Any:
        with mode:
            return hook(value)

    return run


def _clean_up(
    runtime: CpuRuntime, session: Session, patches: Patches, threads: list[_RankThread]
) -> None:
    for context in session.contexts:
        context.active = False
    runtime.leftover = [thread for thread in threads if thread.is_alive()]
    patches.undo()
    session.generators.run(None, lambda: None)  # restores the caller's state
    xlac.set_replication_devices([])
    failed = session.barrier.failure is not None
    if failed:
        session.gate.close()
    if runtime.leftover:
        runtime.unfinished = session.contexts
        _skip_destructors()
        return
    wait_for_programs(failed)
    runtime.wait_for_autograd_threads()
    drop_pending(session.contexts)


def _skip_destructors() -> None:
    """Makes the process end with its exit status, but without waiting for XLA.

    Exit handlers would wait for programs that never end. glibc runs ``on_exit`` handlers in reverse
    order, with the exit status as first argument.
    """
    xlac.skip_exit_handler()
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)


class _RankThread(threading.Thread):
    """A daemon, so that a rank in C++ does not keep the process from ending."""

    def __init__(
        self, session: Session, context: RankContext, fn: Callable, on_end: Callable[[], None]
    ) -> None:
        super().__init__(name=f"rank {context.rank}", daemon=True)
        self.result: Any = None
        self.interrupted = False
        self._session, self._context = session, context
        self._fn, self._on_end = fn, on_end

    def interrupt(self) -> None:
        # Takes effect at the next bytecode: this ends loops, not calls into C++.
        self.interrupted = True
        ident = ctypes.c_ulong(self.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(RankStopped))

    def run(self) -> None:
        session, context = self._session, self._context
        context.thread = threading.get_ident()
        session.adopt_thread(context)
        try:
            with RankMode(session, context):
                # That thread outlives the launch.
                run_there(context.device, lambda: session.adopt_thread(context))
                value = self._call()
                results = [t for t in tensors_in(value) if t.device.type == "xla"]
                if results:
                    session.sync_tensors(context, "its function returned", results)
                self.result = map_tensors(lambda t: t.detach().cpu() if t.is_xla else t, value)
                session.wait_for_all_ranks(context)
        except RankStopped:
            pass
        except BaseException as error:
            _stop_ranks(session, context, error)
        finally:
            _set_current_rank(None)
            # The caller may keep the error, and so this frame, but must not keep the model.
            del self._fn
            self._on_end()

    def _call(self) -> Any:
        try:
            return self._fn()
        except Preempted as error:
            # Launch raises it when all ranks have ended.
            self._session.preempted = error
            return None
        except SystemExit as error:
            if error.code in (None, 0):
                return None
            raise


def _stop_ranks(session: Session, context: RankContext, error: BaseException) -> None:
    """Stops all ranks because this one has raised ``error``."""
    users = error.__traceback__
    while users is not None and users.tb_frame.f_code.co_filename == __file__:
        users = users.tb_next
    error.__traceback__ = users or error.__traceback__
    others = session.barrier.places().splitlines()
    del others[context.rank]
    stopped = "\n\nThe other ranks were stopped:\n" + "\n".join(others) if others else ""
    raised = f"rank {context.rank} of {context.size} raised "
    # The launcher may leave before a slow message is complete.
    failure = RankError(f"{raised}{type(error).__name__}{stopped}", context.rank)
    failure.__cause__ = error
    session.barrier.stop(failure)
    # A message may read a tensor: if the collectives of its value are pending, that raises now.
    with RankMode(session, context):
        message = f"{raised}{described(error)}{stopped}"
        failure.traceback = "".join(traceback.format_exception(error))
    failure.args = (message,)

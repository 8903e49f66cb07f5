"""``launch``: starts ranks on a TPU or on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist
import torch_xla.runtime as xr

from .. import compiler_options, xlac
from ..compiled.cache import in_spawned_processes, platform_of_ranks
from . import spawned
from .cpu.host import run_ranks
from .cpu.runtime import ONE_AT_A_TIME, CpuRuntime
from .errors import CollectiveMismatchError, Preempted, RankError, RankTimeoutError
from .rank import current_rank
from .slices import (
    OnAllSlices,
    multislice_config,
    number_of_slices,
    prepare_host,
    prepare_process,
    require_all_slices,
    require_slices,
)
from .watchdog.watch import watched
from .watchdog.watch_settings import watch_settings

__all__ = ["CollectiveMismatchError", "Preempted", "RankError", "RankTimeoutError", "launch"]

cpu_runtime = CpuRuntime()


def launch(
    fn: Callable,
    args: Sequence[Any] = (),
    num_devices: int | None = None,
    *,
    timeout: float = 600.0,
    slices: int | None = None,
) -> list[Any] | None:
    """Runs ``fn(rank, *args)`` on every rank and waits for all ranks.

    On TPU this calls ``torch_xla.launch``. On CPU the ranks are threads of this process with an XLA
    device each. ``PJRT_DEVICE`` selects TPU or CPU; if it is not set, a TPU is used if there is
    one. Under ``torchrun`` this process is one rank.

    On CPU every rank has a separate torch random state, a copy of the caller's, but shares Python's
    ``random``, numpy's generators and all globals. A data loader with workers needs
    ``multiprocessing_context="forkserver"`` or ``"spawn"``.

    Args:
        fn: called as ``fn(rank, *args)``. On TPU it must be picklable and defined in a file.
        args: further arguments for ``fn``. CPU ranks share these objects.
        num_devices: on CPU the number of ranks, 1 to 8; ``None`` means ``CPU_NUM_DEVICES`` if set,
            else 4. On TPU ``None`` or the number of devices of all slices together.
        timeout: seconds that ranks wait for a rank that is still running. CPU ranks that can never
            continue raise immediately. On TPU the stacks of all ranks are printed after this time
            without progress (four times this during compilations). ``XLA_FSDP_WATCHDOG`` changes
            that: ``off``, seconds, or seconds and ``end`` (``900,end``), which ends the ranks.
        slices: on CPU, the number of TPU slices that the ranks simulate, a divisor of the number of
            ranks. ``None`` means ``XLA_FSDP_SLICES`` if set, else 1. On TPU it must be the actual
            number of slices.

    Returns:
        On CPU the results of ``fn``, by rank, with XLA tensors in (nested) lists, tuples and dicts
        moved to the CPU. On TPU ``None``.

    Raises:
        RankError: a rank raised. All ranks of this host are stopped within 5 seconds. This process
            cannot launch again while a CPU rank is stuck in C++ code.
        CollectiveMismatchError: the ranks wait for different collectives, syncs or rendezvous.
        RankTimeoutError: a rank kept others waiting for longer than ``timeout``; on TPU only with
            ``end`` in ``XLA_FSDP_WATCHDOG``.
        Preempted: ``fn`` ended with it on every rank, see :class:`xla_fsdp.Preemption`.
        RuntimeError: launch was called inside a rank; the runtime was started before with other
            devices or settings; ``torchrun`` started a wrong number of processes; or, on TPU,
            ``fn`` is defined in a notebook.
        ValueError, TypeError: an argument or environment variable is wrong.
    """
    inside = current_rank()
    if inside is not None:
        raise RuntimeError(
            f"launch was called inside rank {inside.rank} of a launch, and ranks cannot start "
            "ranks. Call it from the main program, under `if __name__ == '__main__':`"
        )
    if not callable(fn):
        raise TypeError(f"fn must be callable, called as fn(rank, *args); got {fn!r}")
    if isinstance(args, str) or not isinstance(args, Iterable):
        remedy = f"; for {args} ranks pass num_devices={args}" if isinstance(args, int) else ""
        raise TypeError(
            f"args must be a tuple of further arguments for fn, such as (config,); got {args!r:.60}"
            f"{remedy}"
        )
    if xr.is_spmd():
        raise RuntimeError(
            "launch runs one program for each rank, but SPMD mode runs one program for all "
            "devices. Do not call torch_xla.runtime.use_spmd(), and unset XLA_USE_SPMD"
        )
    under_torchrun = dist.is_torchelastic_launched()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    if platform_of_ranks() != "CPU" or under_torchrun:
        found = multislice_config()
        require_slices(slices, found)
        _check_device_count(num_devices, found.count if found else 1)
        if not under_torchrun:
            spawned.require_importable(fn)
        prepare_host(found)
        # libtpu reads them when it starts.
        compiler_options.add_to_environment()
        if under_torchrun:
            _join_torchrun()
            require_all_slices()
            watched(fn, timeout)(xr.global_ordinal(), *args)
        else:
            prepared = watched(in_spawned_processes(fn), timeout)
            spawned.run_spawned(prepared if found is None else OnAllSlices(prepared), args)
        return None
    watch_settings(timeout)  # a wrong value raises here too, not first on a TPU
    size = cpu_runtime.size_for(num_devices)
    count = number_of_slices(slices, size)
    if not ONE_AT_A_TIME.acquire(blocking=False):
        raise RuntimeError(
            "this process is already launching ranks or planning; wait for that, and do not call "
            "launch inside a step that is being planned"
        )
    try:
        return run_ranks(cpu_runtime, fn, args, size, timeout, count)
    finally:
        ONE_AT_A_TIME.release()


def _join_torchrun() -> None:
    """Joins by "xla://", which assigns a chip to this process.

    With ``torch_xla.launch`` the processes of a host would compete for its chips.
    """
    if not dist.is_initialized():
        prepare_process(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("xla", init_method="xla://")
    started, found = int(os.environ["WORLD_SIZE"]), xr.world_size()
    if started != found:
        remedy = {
            "CPU": "on a CPU, XLA has no collectives between processes, so ranks are threads: "
            "start the script with plain python",
            "TPU": "on a TPU, pass torchrun --nproc-per-node=<chips of a host>. On v2 and v3, "
            "where a process has two ranks, start the script with plain python on every host",
        }.get(xr.device_type() or "", "pass another torchrun --nproc-per-node")
        raise RuntimeError(
            f"torchrun started {started} processes, but XLA has a world size of {found}; {remedy}"
        )


def _check_device_count(num_devices: int | None, slices: int) -> None:
    if num_devices is None:
        return
    if dist.is_torchelastic_launched():
        found, remedy = int(os.environ["WORLD_SIZE"]), "pass torchrun --nproc-per-node"
    elif xr.device_type() == "TPU":
        # The runtime must start in the ranks' processes.
        found = xlac.slice_device_count() * slices
        remedy = "choose another slice"
    else:
        return
    if num_devices != found:
        raise ValueError(
            f"num_devices={num_devices}, but there are {found} devices; leave num_devices out to "
            f"use all of them, or {remedy}"
        )

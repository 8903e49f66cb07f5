"""Starting ranks: ``launch(fn)`` runs ``fn`` once a rank, on a TPU or on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
import torch_xla.runtime as xr

from .. import xlac
from ..compiled.cache import in_spawned_processes
from ..tpu import compiler_options
from . import spawned
from .cpu.host import run_ranks
from .cpu.runtime import CpuRuntime
from .errors import CollectiveMismatchError, Preempted, RankError, RankTimeoutError
from .rank import current_rank
from .slices import (
    OnAllSlices,
    number_of_slices,
    place,
    prepare_host,
    prepare_process,
    require_all_slices,
    require_slices,
)
from .watchdog.watch import watched

__all__ = ["CollectiveMismatchError", "Preempted", "RankError", "RankTimeoutError", "launch"]

# The one XLA runtime of this process, which is process-wide by nature.
_runtime = CpuRuntime()


def launch(
    fn: Callable,
    args: Sequence[Any] = (),
    num_devices: int | None = None,
    *,
    timeout: float = 600.0,
    slices: int | None = None,
) -> list[Any] | None:
    """Runs ``fn(rank, *args)`` on every rank and waits for all of them.

    On TPU this hands over to ``torch_xla.launch``. On CPU the ranks are threads of this process,
    each with its own XLA device and true collectives between them, and ``fn`` is written as for
    TPU: ``torch_xla.sync()``, ``.item()``, ``xm.rendezvous``, ``xm.mesh_reduce``, step closures.
    Which of the two: ``PJRT_DEVICE`` if set, else TPU if there is one, else CPU. Under ``torchrun``
    this process is one rank, which joins the others and calls ``fn`` itself.

    On CPU every rank has a random state of its own, which starts as the caller's: a rank that calls
    ``torch.manual_seed(k)`` draws what a process of its own would draw. Python's ``random`` and
    numpy's generators stay shared between ranks, as are all globals; give each rank its own
    ``random.Random`` and ``numpy.random.Generator``. A data loader with workers needs
    ``multiprocessing_context="forkserver"`` or ``"spawn"``: a process with threads must not fork.

    Args:
        fn: called as ``fn(rank, *args)``. On TPU it must be picklable, and not from a notebook.
        args: further arguments for ``fn``. CPU ranks share these objects.
        num_devices: how many ranks, 1 to 8, on CPU; ``None`` means ``CPU_NUM_DEVICES`` if set, else
            4. On TPU ``None`` or the number of devices there are.
        timeout: seconds that ranks wait for one that is still running. On CPU they wait at a
            collective or rendezvous, and those that can never meet are found at once, whatever the
            timeout. On TPU, when no rank has gone on for that long, the stacks of all are printed
            and ranks are left alone, unless ``XLA_FSDP_WATCHDOG`` says otherwise: ``off``, seconds,
            or seconds and ``end`` (``900,end``). Compilations are given four times as long
            (docs/how-to/debug-and-profile.md).
        slices: on CPU, how many TPU slices the ranks stand for, which divides their number: the
            first ranks are the first slice. ``None`` means ``XLA_FSDP_SLICES`` if set, else 1.
            On TPU there must be as many (docs/how-to/several-slices.md).

    Returns:
        On CPU what ``fn`` returned, by rank, with XLA tensors in (nested) lists, tuples and dicts
        moved to the CPU. On TPU ``None``, like ``torch_xla.launch``.

    Raises:
        RankError: a rank raised; ``rank``, ``traceback`` and ``__cause__`` tell which and why. All
            ranks are stopped within 5 seconds, on TPU those of this host, by ending their
            processes. A rank that can not be stopped on CPU (it sits in C++ or in a long sleep) is
            left behind; until it ends the process can launch no more.
        CollectiveMismatchError: ranks can not meet: one skips a collective, a sync or a rendezvous
            that others run, or runs another. The message says where each rank is.
        RankTimeoutError: a rank kept others waiting for longer than ``timeout``. On TPU only with
            ``end`` in ``XLA_FSDP_WATCHDOG``, on every host.
        Preempted: ``fn`` ended with it on every rank, see :class:`xla_fsdp.Preemption`.
        RuntimeError: called inside a rank; or this process's runtime was started before with
            another number of devices, or without the settings that CPU ranks need; or ``torchrun``
            started another number of processes than XLA has ranks; or ``fn`` is defined in a
            notebook and there is a TPU.
        ValueError, TypeError: wrong ``num_devices``, ``timeout``, ``slices`` or
            ``XLA_FSDP_WATCHDOG``; on TPU: libtpu refuses LIBTPU_INIT_ARGS, or what the environment
            says of several slices (``MEGASCALE_...``) does not fit together.
    """
    inside = current_rank()
    if inside is not None:
        raise RuntimeError(
            f"launch was called inside rank {inside.rank} of a launch; ranks can not start "
            "ranks. Call it from the main program, under `if __name__ == '__main__':`"
        )
    if not callable(fn):
        raise TypeError(f"fn must be callable, called as fn(rank, *args); got {fn!r}")
    if xr.is_spmd():
        raise RuntimeError(
            "launch runs one program a rank and SPMD mode one program for all devices; "
            "do not call torch_xla.runtime.use_spmd() (or unset XLA_USE_SPMD)"
        )
    under_torchrun = dist.is_torchelastic_launched()
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    if not _on_cpu() or under_torchrun:
        found = place()
        require_slices(slices, found)
        _check_device_count(num_devices, found.count if found else 1)
        if not under_torchrun:
            spawned.require_importable(fn)
        prepare_host(found)
        # Read by libtpu when it starts, in this process or those that are started now.
        compiler_options.add_to_environment()
        if under_torchrun:
            _join_torchrun()
            require_all_slices()
            watched(fn, timeout)(xr.global_ordinal(), *args)
        else:
            prepared = watched(in_spawned_processes(fn), timeout)
            spawned.run(prepared if found is None else OnAllSlices(prepared), args)
        return None
    size = _runtime.size_for(num_devices)
    parts = number_of_slices(slices, size)
    if not _runtime.launching.acquire(blocking=False):
        raise RuntimeError(
            "another thread of this process is in launch; one launch can run at a time"
        )
    try:
        return run_ranks(_runtime, fn, args, size, timeout, parts)
    finally:
        _runtime.launching.release()


def _on_cpu() -> bool:
    # torch_xla sets PJRT_DEVICE on import; an unset one was removed since.
    device = os.environ.get("PJRT_DEVICE")
    if device is None:
        device = "TPU" if xlac.chips_of_host() > 0 else "CPU"
        os.environ["PJRT_DEVICE"] = device
    return device.split("_")[0] == "CPU"


def _join_torchrun() -> None:
    """Makes this process, started by torchrun, the one rank that it is among all of them.

    ``torch_xla.launch`` would call ``fn`` with ``LOCAL_RANK``, which every host has again, and
    leave the chips of the host to whoever takes them first: "xla://" is what gives this process
    its own chip, and tells libtpu of the processes of the other hosts.
    """
    if not dist.is_initialized():
        prepare_process(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("xla", init_method="xla://")
    started, found = int(os.environ["WORLD_SIZE"]), xr.world_size()
    if started != found:
        remedy = {
            "CPU": "on a CPU, XLA has no collectives between processes, and ranks are threads: "
            "start the script with plain python",
            "TPU": "on a TPU, pass torchrun --nproc-per-node=<chips of a host>, and on v2 and v3, "
            "where a process has two ranks, start the script with plain python on every host",
        }.get(os.environ["PJRT_DEVICE"].split("_")[0], "pass another torchrun --nproc-per-node")
        raise RuntimeError(
            f"torchrun started {started} processes and XLA sees a world size of {found}; {remedy}"
        )


def _check_device_count(num_devices: int | None, slices: int) -> None:
    if num_devices is None:
        return
    if dist.is_torchelastic_launched():
        found, remedy = int(os.environ["WORLD_SIZE"]), "pass torchrun --nproc-per-node"
    elif os.environ["PJRT_DEVICE"] == "TPU":
        # Asks the machine, not the runtime, which must start in the ranks' own processes.
        found = xlac.devices_of_slice() * slices
        remedy = "choose another slice"
    else:
        return
    if num_devices != found:
        raise ValueError(
            f"num_devices={num_devices}, but there are {found} devices; leave num_devices out to "
            f"use all of them, or {remedy}"
        )

"""The functions of torch_xla that cut a graph, replaced by ones that go through the session."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
import torch_xla

from ..autograd_thread import run_there
from ..rank import RankContext, current_rank
from .mode import RankMode
from .patches import Patches
from .session import Session


def install(session: Session, patches: Patches) -> None:
    """Replaces what every cut from Python goes through: torch_xla looks these up by name."""
    xlac = torch_xla._XLAC
    step_marker = xlac._xla_step_marker
    sync_multi = xlac._xla_sync_multi
    get_cpu_tensors = xlac._xla_get_cpu_tensors
    start_thread = threading.Thread.start

    def gated_step_marker(
        device: str = "", devices: Sequence[str] = (), wait: bool = True, reset_scope: bool = True
    ) -> None:
        context = session.rank_of(device)
        if context is None:
            step_marker(device, list(devices), wait=wait, reset_scope=reset_scope)
        else:
            session.sync(context, device, list(devices), wait, reset_scope)

    def gated_sync_multi(
        tensors: Sequence[torch.Tensor],
        devices: Sequence[str] = (),
        wait: bool = True,
        sync_xla_data: bool = True,
    ) -> None:
        context = session.rank_of(tensors[0].device if tensors else None)
        if context is None:
            sync_multi(tensors, list(devices), wait=wait, sync_xla_data=sync_xla_data)
        else:
            session.sync_tensors(
                context, "a sync of some tensors", tensors, devices, wait, sync_xla_data
            )

    def gated_get_cpu_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        context = session.rank_of(tensors[0].device if tensors else None)
        if context is None:
            return get_cpu_tensors(tensors)
        what = "a copy of tensors to the host"
        return session.fetch(context, what, tensors, lambda: get_cpu_tensors(tensors))

    def start_as_same_rank(thread: threading.Thread) -> None:
        # A data loader's thread belongs to the rank that started it, as in a process of its own.
        context = current_rank()
        if context is not None:
            run = thread.run

            def run_as_rank() -> None:
                session.adopt_thread(context)
                with RankMode(session, context):
                    run()

            vars(thread)["run"] = run_as_rank
        start_thread(thread)

    patches.set(xlac, "_xla_step_marker", gated_step_marker)
    patches.set(xlac, "_xla_sync_multi", gated_sync_multi)
    patches.set(xlac, "_xla_get_cpu_tensors", gated_get_cpu_tensors)
    patches.set(threading.Thread, "start", start_as_same_rank)


def adopt_autograd_thread(session: Session, context: RankContext) -> None:
    """Tells autograd's thread for the rank's device, which outlives the launch, its rank."""

    def adopt() -> None:
        if threading.get_ident() != context.thread:
            session.adopt_thread(context)

    run_there(context.device, adopt)

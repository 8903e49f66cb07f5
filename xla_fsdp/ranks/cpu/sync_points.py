"""The functions of torch_xla that cut a graph, replaced by ones that go through the session."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from ... import xlac
from ..autograd_thread import run_there
from ..rank import RankContext, current_rank
from .mode import RankMode
from .patches import Patches
from .session import Session


def install(session: Session, patches: Patches) -> None:
    """Replaces what every cut from Python goes through: torch_xla looks these up by name."""
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
        return session.fetch(context, what, tensors, lambda: copy_to_host(tensors))

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

    patches.replace(xlac.sync_device, gated_sync_device)
    patches.replace(xlac.sync_tensors, gated_sync_tensors)
    patches.replace(xlac.copy_to_host, gated_copy_to_host)
    patches.set(threading.Thread, "start", start_as_same_rank)


def adopt_autograd_thread(session: Session, context: RankContext) -> None:
    """Tells autograd's thread for the rank's device, which outlives the launch, its rank."""

    def adopt() -> None:
        if threading.get_ident() != context.thread:
            session.adopt_thread(context)

    run_there(context.device, adopt)

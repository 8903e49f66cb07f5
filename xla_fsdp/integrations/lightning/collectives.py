"""Collectives of both strategies and of torchmetrics."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torchmetrics import Metric

from ...checkpoint.rank_exchange import RankExchange
from ...collectives.random_state import preserve_random_state
from ...layers.gathering import all_gather_with_grad
from .ranks import in_rank, root_device, to_host

T = TypeVar("T")

_REDUCTIONS = {
    "sum": xm.REDUCE_SUM,
    "mean": xm.REDUCE_SUM,
    "avg": xm.REDUCE_SUM,
    "min": xm.REDUCE_MIN,
    "max": xm.REDUCE_MAX,
    "product": xm.REDUCE_MUL,
}


class CollectivesMixin:
    """Collectives: every rank must call each. They do not change the random state of the device.

    Results are computed on return, so that a single rank (a progress bar, a logger) can read them.
    Within :meth:`computing` they are part of the step's program instead.
    """

    _computing = False

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        self._computing = True
        try:
            yield
        finally:
            self._computing = False

    def _run_pending(self) -> None:
        if not self._computing:
            with preserve_random_state():
                torch_xla.sync()

    @property
    def root_device(self) -> torch.device:
        return root_device()

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if several_ranks():
            with preserve_random_state():
                xm.rendezvous(name or "barrier")

    def broadcast(self, obj: T, src: int = 0) -> T:
        if not several_ranks():
            return obj
        own = pickle.dumps(to_host(obj)).hex() if xr.global_ordinal() == src else None
        found = pickle.loads(bytes.fromhex(RankExchange().gather_values("broadcast", own)[src]))
        on_device = isinstance(obj, torch.Tensor) and obj.device.type == "xla"
        return found.to(root_device()) if on_device else found

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Gathers along a new first dimension, or returns ``tensor`` with one rank. A gradient with
        ``sync_grads`` is the sum of all ranks' gradients for this rank's part."""
        _require_no_group(group)
        if not several_ranks():
            return tensor
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"all_gather takes tensors, got {type(tensor).__name__}")
        value = tensor.to(root_device())
        if sync_grads and torch.is_grad_enabled() and value.requires_grad:
            gathered = all_gather_with_grad(value[None])
        else:
            gathered = xm.all_gather(value.detach()[None], dim=0)
        self._run_pending()
        return gathered.to(tensor.device)

    def reduce(self, value: Any, group: Any = None, reduce_op: Any = "mean") -> torch.Tensor:
        _require_no_group(group)
        name = "sum" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
        if name not in _REDUCTIONS:
            raise ValueError(
                f"reduce_op must be one of {', '.join(_REDUCTIONS)} or None for sum, got "
                f"{reduce_op!r}"
            )
        device = root_device()
        given = value if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
        own = given.detach().to(device)
        if own.dtype == torch.bool:
            own = own.to(torch.int32)
        total: Any = own.clone()
        if xr.world_size() > 1:
            total = xm.all_reduce(_REDUCTIONS[name], total)
        if name in ("mean", "avg"):
            total = total / xr.world_size()
        self._run_pending()
        return total.to(given.device) if isinstance(value, torch.Tensor) else total

    all_reduce = reduce  # its name in Fabric

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether ``decision`` is true on all ranks, or on any."""
        if not in_rank():
            return decision
        said = self.reduce(torch.tensor(int(decision), device=root_device()), reduce_op="sum")
        return int(said.item()) >= (xr.world_size() if all else 1)


def sync_metrics(module: nn.Module, device: torch.device) -> None:
    """Moves the metrics in ``module`` to ``device`` and makes them compute over all ranks, unless
    the user has set another synchronization."""
    for each in module.modules():
        if isinstance(each, Metric):
            each.to(device)
            if each.dist_sync_fn is None:
                each.dist_sync_fn = gather_states
                each.distributed_available_fn = several_ranks


def several_ranks() -> bool:
    return in_rank() and xr.world_size() > 1


def gather_states(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks, whose lengths may differ, but not their numbers of dimensions."""
    _require_no_group(group)
    device = state.device
    own = state.to(root_device())
    whole = own.reshape(-1)
    shape = torch.tensor([*own.shape, whole.numel()], device="cpu").to(own.device)
    shapes = xm.all_gather(shape[None], dim=0).tolist()
    longest = max(each[-1] for each in shapes)
    padded = torch.cat([whole, whole.new_zeros(longest - whole.numel())])
    rows = xm.all_gather(padded[None], dim=0)
    torch_xla.sync()
    found = [row[: each[-1]].reshape(each[:-1]) for row, each in zip(rows, shapes, strict=True)]
    return [each.to(device) for each in found]


def _require_no_group(group: Any) -> None:
    if group is not None and group is not dist.group.WORLD:
        raise ValueError(
            f"group={group!r} is not supported, because XLA ranks have no process groups. Leave "
            "it out"
        )

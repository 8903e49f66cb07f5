"""What ranks tell each other in Lightning's words; a part of both strategies."""

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
from lightning.fabric.utilities.apply_func import move_data_to_device

from ...collectives.random_state import preserve_random_state
from .ranks import in_rank, root_device

T = TypeVar("T")

_REDUCTIONS = {
    "sum": xm.REDUCE_SUM,
    "mean": xm.REDUCE_SUM,
    "avg": xm.REDUCE_SUM,
    "min": xm.REDUCE_MIN,
    "max": xm.REDUCE_MAX,
    "product": xm.REDUCE_MUL,
}


class Talking:
    """Collectives, each to be called on every rank.

    What they return is there when they return it, so that the first rank alone may look at it (a
    progress bar, a logger). Within :meth:`computing` it is part of the step's program instead. The
    random state of the device stays as it is.
    """

    _computing = False

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """A step: its program is not cut."""
        self._computing = True
        try:
            yield
        finally:
            self._computing = False

    def _settle(self) -> None:
        if not self._computing:
            with preserve_random_state():
                torch_xla.sync()

    @property
    def root_device(self) -> torch.device:
        return root_device()

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        if in_rank() and xr.world_size() > 1:
            with preserve_random_state():
                xm.rendezvous(name or "barrier")

    def broadcast(self, obj: T, src: int = 0) -> T:
        """``obj`` of rank ``src``, anything that can be pickled."""
        if not in_rank() or xr.world_size() == 1:
            return obj
        own = pickle.dumps(on_host(obj)) if xr.global_ordinal() == src else b""
        # On TPU every length of payload is a program of its own: few lengths.
        own = own.ljust(1 << max(8, len(own).bit_length()), b"\0")
        with preserve_random_state():
            sent = xm.rendezvous("broadcast", own)
        found = pickle.loads(bytes(sent[src]))
        on_device = isinstance(obj, torch.Tensor) and obj.device.type == "xla"
        return found.to(root_device()) if on_device else found

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """A new first dimension, by rank; with one rank ``tensor`` as it is. With ``sync_grads``
        a rank's gradient is the sum of what all have for its part."""
        _require_no_group(group)
        if not in_rank() or xr.world_size() == 1:
            return tensor
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"all_gather takes tensors, got {type(tensor).__name__}")
        value = tensor.to(root_device())
        if sync_grads and torch.is_grad_enabled() and value.requires_grad:
            gathered = _Gather.apply(value)
        else:
            gathered = xm.all_gather(value.detach()[None], dim=0)
        self._settle()
        return gathered.to(tensor.device)

    def _reduced(self, value: Any, group: Any, reduce_op: Any) -> torch.Tensor:
        """A new tensor on the device of ``value``."""
        _require_no_group(group)
        name = "sum" if reduce_op is None else str(getattr(reduce_op, "name", reduce_op)).lower()
        if name not in _REDUCTIONS:
            raise ValueError(
                f"reduce_op must be one of {', '.join(_REDUCTIONS)} or None for sum, got "
                f"{reduce_op!r}"
            )
        device = root_device()
        given = value if isinstance(value, torch.Tensor) else torch.tensor(value)
        own = given.detach().to(device)
        if own.dtype == torch.bool:
            own = own.to(torch.int32)
        total: Any = own.clone()
        if xr.world_size() > 1:
            total = xm.all_reduce(_REDUCTIONS[name], total)
        if name in ("mean", "avg"):
            total = total / xr.world_size()
        self._settle()
        return total.to(given.device) if isinstance(value, torch.Tensor) else total

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """The same answer on all ranks: whether all of them, or any, say so."""
        if not in_rank():
            return decision
        said = self._reduced(torch.tensor(int(decision), device=root_device()), None, "sum")
        return int(said.item()) >= (xr.world_size() if all else 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.rank = xr.global_ordinal()  # autograd's thread may be another's
        return xm.all_gather(value[None], dim=0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        total: Any = xm.all_reduce(xm.REDUCE_SUM, gradients[0].clone())
        # As data: as a constant it would make a program for each rank.
        own = torch.tensor([ctx.rank]).to(total.device)
        return total.index_select(0, own)[0]


def gather_states(state: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """What torchmetrics wants of all ranks: a tensor's values by rank, of any lengths."""
    _require_no_group(group)
    device = state.device
    own = state.to(root_device())
    whole = own.reshape(-1)
    # Ranks may have seen other numbers of examples; all have as many dimensions.
    shape = torch.tensor([*own.shape, whole.numel()]).to(own.device)
    shapes = xm.all_gather(shape[None], dim=0).tolist()
    longest = max(each[-1] for each in shapes)
    padded = torch.cat([whole, whole.new_zeros(longest - whole.numel())])
    rows = xm.all_gather(padded[None], dim=0)
    torch_xla.sync()
    found = [row[: each[-1]].reshape(each[:-1]) for row, each in zip(rows, shapes, strict=True)]
    return [each.to(device) for each in found]


def on_host(obj: Any) -> Any:
    """``obj`` with all its tensors on the CPU."""
    return move_data_to_device(obj, torch.device("cpu"))


def _require_no_group(group: Any) -> None:
    if group is not None and group is not dist.group.WORLD:
        raise ValueError(f"group={group!r}: ranks of XLA are in no process groups; leave it out")

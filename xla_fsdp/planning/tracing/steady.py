"""Creates optimizer state before the planned step, so that it is an argument of the program.

Tensors of ``cpu_offload`` may be larger than this machine's memory, so each has two elements while
an optimizer steps; the size of the full state follows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ...ranks.cpu.session import is_xla
from ...sharding.cpu_offload import HostShard
from ...sharding.sharded_parameter import local, on_local_parts
from ...tree import tensors_in
from .live import SavedValue
from .naming import Naming
from .simulated_rank import fill_pending

_FEW = 2  # elements


class SteadyOptimizers:
    """Runs an extra step before the first step of each optimizer, and keeps only the state.

    ``all``: optimizers that stepped, or are stepping; ``stepped``: those whose step was traced.
    ``untrained``: trainable parameters without a gradient at the first step.
    """

    def __init__(
        self, naming: Naming, on_state: Callable[[Optimizer], None], on_repeat: Callable[[], None]
    ) -> None:
        self._on_state = on_state
        self._on_repeat = on_repeat
        self.all: list[Optimizer] = []
        self.stepped: list[Optimizer] = []
        self._naming = naming
        self.with_closure = False
        self.untrained: list[torch.Tensor] = []
        self.warming_up = False
        self._restored = contextlib.ExitStack()
        self.host = HostSteps()

    @contextlib.contextmanager
    def active(self) -> Iterator[SteadyOptimizers]:
        with self._restored as stack:
            stack.callback(register_optimizer_step_pre_hook(self._before).remove)
            stack.callback(register_optimizer_step_post_hook(self._after).remove)
            try:
                yield self
            finally:
                self.host.restore()

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if self.warming_up:
            return
        if optimizer in self.stepped:
            self._on_repeat()
        if optimizer not in self.all:
            self.all.append(optimizer)
            self._restored.callback(_OptimizerBackup(optimizer).restore)
            # A closure runs forward and backward, perhaps often: too much to revert.
            closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
            if closure is None:
                self.untrained += [
                    p for group in optimizer.param_groups for p in group["params"]
                    if p.requires_grad and p.grad is None and p.numel()
                ]  # fmt: skip
                self._warm_up(optimizer, args, kwargs)
            else:
                self.with_closure = True
            self._on_state(optimizer)
        self._naming.enter("optimizer")
        self.host.shrink(optimizer)

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if not self.warming_up:
            self.host.restore()
            self._naming.leave()
            self.stepped.append(optimizer)

    def _warm_up(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [SavedValue(p) for p in parameters if is_xla(p)]
        before += [SavedValue(p.grad) for p in parameters if p.grad is not None and is_xla(p.grad)]
        self.warming_up = True
        self.host.shrink(optimizer)
        try:
            optimizer.step(*args[1:], **kwargs)
        finally:
            self.warming_up = False
            self.host.restore()
            for kept in before:
                kept.restore()
        fill_pending(state_tensors(optimizer))


class _OptimizerBackup:
    """State and settings of an optimizer; XLA tensors are restored elsewhere."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.state = {
            key: dict(value) if isinstance(value, dict) else value
            for key, value in optimizer.state.items()
        }
        self.settings = [
            {k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups
        ]
        on_host = [t for t in tensors_in([self.state, self.settings]) if not is_xla(t)]
        self.values = [(tensor, tensor.clone()) for tensor in on_host]

    def restore(self) -> None:
        self.optimizer.state.clear()
        self.optimizer.state.update(self.state)
        for group, settings in zip(self.optimizer.param_groups, self.settings, strict=True):
            group.update(settings)
        with torch.no_grad():
            for tensor, value in self.values:
                tensor.copy_(value)


class HostSteps:
    """Measures the optimizer state on the host: ``state``, in bytes."""

    def __init__(self) -> None:
        self.state = 0
        self._known: dict[HostShard, int] = {}
        self._kept: list[tuple[Optimizer, HostShard, torch.Tensor, Any, Any]] = []

    def shrink(self, optimizer: Optimizer) -> None:
        if getattr(optimizer, "knows_shards", False):  # stores bfloat16 shards differently
            return
        for group in optimizer.param_groups:
            for shard in group["params"]:
                if not isinstance(shard, HostShard) or not local(shard).numel():
                    continue
                state = optimizer.state.pop(shard, None)
                with on_local_parts():
                    grad = shard.grad
                    self._kept.append((optimizer, shard, shard.detach(), grad, state))
                    shard.grad = None
                    few = torch.zeros(_FEW, dtype=shard.dtype, device="cpu")
                    torch.Tensor.data.__set__(shard, few)  # type: ignore[attr-defined]
                    shard.grad = None if grad is None else torch.zeros_like(few)

    def restore(self) -> None:
        while self._kept:
            optimizer, shard, values, grad, state = self._kept.pop()
            made = optimizer.state.pop(shard, {}).values()
            tensors = [local(value) for value in made if isinstance(value, torch.Tensor)]
            sizes = [values.numel() if t.numel() == _FEW else 1 for t in tensors]
            size = sum(n * t.dtype.itemsize for n, t in zip(sizes, tensors, strict=True))
            self._known[shard] = max(size, self._known.get(shard, 0))
            with on_local_parts():
                shard.grad = None
                torch.Tensor.data.__set__(shard, values)  # type: ignore[attr-defined]
                shard.grad = grad
            if state is not None:
                optimizer.state[shard] = state
        self.state = sum(self._known.values())


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    return [t for t in tensors_in(list(optimizer.state.values())) if is_xla(t)]


def named_state(optimizer: Optimizer, names: dict[torch.Tensor, str]) -> Iterator[tuple[str, Any]]:
    """Each XLA tensor of the state, called e.g. ``exp_avg of blocks.3.mlp.weight``."""
    for parameter, state in optimizer.state.items():
        owner = names.get(parameter, "a parameter")
        for key, value in state.items() if isinstance(state, dict) else ():
            for tensor in tensors_in(value):
                if is_xla(tensor):
                    yield f"{key} of {owner}", tensor

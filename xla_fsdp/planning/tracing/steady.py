"""The state that an optimizer has after its first step, from the start.

A first step differs from all others: the optimizer's state does not exist yet, so it is computed
from nothing instead of being read and updated. What is planned is a later step, whose state
occupies memory as arguments.
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

from ...tree import tensors_in
from .host_step import HostSteps
from .live import Kept, is_xla
from .naming import Naming
from .pretend import settle


class SteadyOptimizers:
    """Runs an extra step before the first of each optimizer, and keeps only the state it made.

    Attributes:
        stepped: optimizers whose step was traced.
        all: every optimizer that has stepped, or is about to.
        with_closure: whether one was called with a closure.
        untrained: parameters that one is to train and that had no gradient at its first step.
        warming_up: whether the extra step is under way.
    """

    def __init__(
        self, naming: Naming, on_state: Callable[[Optimizer], None], on_repeat: Callable[[], None]
    ) -> None:
        self._on_state = on_state  # called with an optimizer whose state has just been made
        self._on_repeat = on_repeat  # called before an optimizer steps once more
        self.all: list[Optimizer] = []
        self.stepped: list[Optimizer] = []
        self._naming = naming
        self.with_closure = False
        self.untrained: list[torch.Tensor] = []
        self.warming_up = False
        self._saved: list[_Saved] = []
        self.host = HostSteps()

    @contextlib.contextmanager
    def active(self) -> Iterator[SteadyOptimizers]:
        with contextlib.ExitStack() as stack:
            for register, hook in (
                (register_optimizer_step_pre_hook, self._before),
                (register_optimizer_step_post_hook, self._after),
            ):
                stack.callback(register(hook).remove)
            stack.callback(self._put_back)
            yield self

    def _put_back(self) -> None:
        self.host.restore()
        while self._saved:
            self._saved.pop().restore()

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        # torch hands over the arguments with the optimizer itself as the first.
        if self.warming_up:
            return
        if optimizer in self.stepped:
            self._on_repeat()
        if optimizer not in self.all:
            self.all.append(optimizer)
            self._saved.append(_Saved(optimizer))
            # With a closure the step runs forward and backward, perhaps often: too much to undo.
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
        before = [Kept(p) for p in parameters if is_xla(p)]
        before += [Kept(p.grad) for p in parameters if p.grad is not None and is_xla(p.grad)]
        self.warming_up = True
        self.host.shrink(optimizer)
        try:
            optimizer.step(*args[1:], **kwargs)
        finally:
            self.warming_up = False
            self.host.restore()
            for kept in before:
                kept.restore()
        settle(state_tensors(optimizer))


class _Saved:
    """An optimizer's state and settings, to be put back; its XLA tensors are put back elsewhere."""

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


def state_tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The XLA tensors in an optimizer's state."""
    return [t for t in tensors_in(list(optimizer.state.values())) if is_xla(t)]


def named_state(optimizer: Optimizer, names: dict[torch.Tensor, str]) -> Iterator[tuple[str, Any]]:
    """Each XLA tensor of the state, called e.g. ``exp_avg of blocks.3.mlp.weight``."""
    for parameter, state in optimizer.state.items():
        owner = names.get(parameter, "a parameter")
        for key, value in state.items() if isinstance(state, dict) else ():
            for tensor in tensors_in(value):
                if is_xla(tensor):
                    yield f"{key} of {owner}", tensor

"""Makes new optimizer state device data, so that all steps run the same program.

An optimizer creates its state in the first step that needs it. On a lazy device the initial zeros
would be constants in the program of that step, and input data in that of the next: XLA would
compile two programs and run the first one once. CPU ranks compile on the cores that they train on,
so tensors that an optimizer step fills with a constant are put on the device instead. Their values
are the same.

Computations that an optimizer does only in its first step still need another program.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ... import xlac
from ..rank import RankContext, current_rank
from .session import Session

_CONSTANTS: dict[Callable, int] = {
    torch.zeros: 0,
    torch.zeros_like: 0,
    torch.Tensor.new_zeros: 0,
    torch.ones: 1,
    torch.ones_like: 1,
    torch.Tensor.new_ones: 1,
}
FACTORIES: set[Callable] = {*_CONSTANTS, torch.full_like}


class FreshState:
    """Marks ranks that are in an optimizer's step, until it is removed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._known: list[WeakSet[Optimizer]] = [WeakSet() for _ in session.contexts]
        self._hooks = (
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        context = current_rank()
        if context is None or context.as_on_tpu:
            return
        # A step that raises leaves it set. Until the next step, more constants than necessary
        # become data, which is harmless.
        context.stepping = True
        if optimizer not in self._known[context.rank]:
            self._known[context.rank].add(optimizer)
            if type(optimizer) is torch.optim.SGD:
                _start_momentum(optimizer)
            self._run_constructors(context, optimizer)

    def _after(self, optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        context = current_rank()
        if context is not None:
            context.stepping = False

    def _run_constructors(self, context: RankContext, optimizer: Optimizer) -> None:
        # Adagrad creates its state in its constructor.
        state = [
            value
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor) and value.device.type == "xla"
        ]
        needed = xlac.are_pending(state) if state else ()
        pending = [value for value, needs in zip(state, needed, strict=True) if needs]
        if pending:
            self._session.sync_tensors(context, "the optimizer's first step", pending)


def _start_momentum(optimizer: torch.optim.SGD) -> None:
    # Without dampening, the first momentum is the gradient; a momentum of zeros gives the same.
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"]:
            for parameter in group["params"]:
                grad, state = parameter.grad, optimizer.state[parameter]
                if grad is not None and grad.is_xla and state.get("momentum_buffer") is None:
                    with torch.no_grad():  # see make
                        state["momentum_buffer"] = torch.zeros_like(grad)


def make(session: Session, context: RankContext, func: Callable, args: tuple, kwargs: dict) -> Any:
    """Calls a factory function; inside an optimizer's step its result becomes device data."""
    value = func(*args, **kwargs)
    if not context.stepping or torch.is_grad_enabled() or value.device.type != "xla":
        return value
    fill = _CONSTANTS.get(func)
    if fill is None:
        fill = kwargs["fill_value"] if "fill_value" in kwargs else args[1]
    if isinstance(fill, torch.Tensor) or kwargs.get("out") is not None:
        return value
    data = _filled(value, fill)
    if not data.dim():
        # Filling with a number would make a constant if the number is 0 or 1.
        session.sync_tensors(context, "the optimizer's state", [data])
    return data


def _filled(like: torch.Tensor, fill: float) -> torch.Tensor:
    return torch.full(like.shape, fill, dtype=like.dtype, device="cpu").to(like.device)

"""The order of a CPU rank's collectives, as data dependencies of its program.

XLA on a CPU runs the collectives of a program one at a time, in an order that it chooses for each
program. Ranks whose programs differ, because an optimizer holds its parameters in another order or
a batch has another length, would wait for each other in different collectives. So each collective
depends on the one before it, in the order in which the rank traced them, and a program ends with a
value that depends on the last one. Two ranks that traced the same collectives can then run any two
programs together.

The dependency is a boolean that is false whenever the program runs, which the compiler cannot know.
An operand becomes ``where(boolean, 0, operand)``, so a NaN in one result does not reach the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
import torch_xla.core.xla_builder as xb

from .. import xlac


class CollectiveOrder:
    """Chains the collectives that one rank traces.

    Args:
        device: the rank's XLA device.
        first: gives the boolean that a program's first collective depends on.
    """

    def __init__(self, device: torch.device, first: Callable[[], torch.Tensor]) -> None:
        self._device = str(device)
        self._first = first
        self._last: torch.Tensor | None = None
        self._computations: dict[tuple, object] = {}

    def after_the_last(self, operand: torch.Tensor) -> torch.Tensor:
        """``operand`` of the next collective, dependent on all collectives before it."""
        # torch_xla's own chain adds a number to operands, which is NaN after a result with NaN.
        xlac.set_collective_token(self._device, None)
        if self._last is None:
            self._last = self._first()
        if not operand.numel():
            return operand
        return self._call("after_the_last", _guarded, [operand, self._last])

    def add(self, result: torch.Tensor) -> None:
        """``result`` is what the collective gave: the next one depends on it."""
        xlac.set_collective_token(self._device, None)
        if self._last is not None and result.numel():
            self._last = self._call("collective_order", _dependent, [result, self._last])

    def end(self) -> torch.Tensor | None:
        """The boolean that depends on all collectives so far; the next begin a new chain."""
        last, self._last = self._last, None
        return last

    @contextlib.contextmanager
    def apart(self, first: Callable[[], torch.Tensor] | None = None) -> Iterator[None]:
        """Collectives traced within are a chain of their own, which begins with ``first``."""
        before = self._last, self._first
        self._last, self._first = None, first or self._first
        try:
            yield
        finally:
            self._last, self._first = before

    def _call(self, name: str, build: Callable, operands: list[torch.Tensor]) -> torch.Tensor:
        value = operands[0]
        key = (name, value.dtype, value.shape)
        computation = self._computations.get(key)
        if computation is None:
            builder = xb.create_builder(name)
            shapes = [(xb.Op.from_torch_type(value.dtype), value.shape), (xb.Type.PRED, ())]
            given = [
                xb.mkparam(builder, number, xb.mkshape(dtype, tuple(shape)))
                for number, (dtype, shape) in enumerate(shapes)
            ]
            computation = self._computations[key] = build(*given).build(name)
        with torch.no_grad():
            made = xlac.call_computation(f"xla::{name}", operands, computation)
        return made[0]


def _guarded(operand: xb.Op, last: xb.Op) -> xb.Op:
    zero = operand.zeros_like()
    return last.broadcast(tuple(operand.shape().sizes)).select(zero, operand)


def _dependent(result: xb.Op, last: xb.Op) -> xb.Op:
    rank = len(result.shape().sizes)
    one = result.slice([0] * rank, [1] * rank, [1] * rank).reshape(())
    return last & (one != one.zeros_like())

"""A Python function as the body of an XLA while loop, which is a node of the lazy graph.

The body may use collectives and draw random numbers. The loop has no gradient.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm

from .. import xlac
from ..collectives.order import separate_collectives
from ..ranks.rank import current_rank
from ..sharding.trace_cache import Tensors, Traced, placeholder, separate_copy

# (carry, slices, constants) -> (carry, results)
Body = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]

# 2**64 over the golden ratio, odd.
_SEED_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def loop(
    body: Body,
    carry: Sequence[torch.Tensor],
    stacked: Sequence[torch.Tensor],
    constants: Sequence[torch.Tensor],
    device: torch.device,
    *,
    seed: int | None = None,
    reverse: bool = False,
    ahead: Collection[int] = (),
    traced: Callable[[Tensors], None] | None = None,
    unroll: int = 1,
) -> tuple[Tensors, Tensors]:
    """Runs ``carry, results[i] = body(carry, [s[i] for s in stacked], constants)`` for every i.

    Args:
        body: called once, on placeholders. Must return a carry of the shapes and dtypes it got.
            All tensors that it uses must be arguments: pending computations would join the body.
        stacked: at least one tensor, ``(depth, ...)`` each.
        device: of all of them; autograd's threads have another default device.
        seed: random numbers of iteration i depend on this and i. Default: the device's random
            state, which advances.
        reverse: from the last i to the first.
        ahead: numbers of ``stacked`` tensors of which an iteration gets the next one's row; the
            last iteration gets its own.
        traced: called with the arguments of the trace after it; its other tensors are free then.
        unroll: bodies in an iteration of the compiled loop; the rest runs after the loop. With one,
            a recomputed carry is copied between two places in memory.

    Returns:
        The last carry, and the results stacked, ``(depth, ...)`` each.
    """
    with _fresh_trace(device, seed):
        try:
            made = _Loop(body, carry, stacked, constants, traced, reverse, ahead, unroll)
        except Exception as error:
            # Tensors in the frames have no value: torch_xla ends the process when it computes them.
            traceback.clear_frames(error.__traceback__)
            raise
    operands = [*carry, *stacked, *constants, *made.traced.hoisted.values()]
    with torch.device("cpu"):  # torch_xla makes constants on the default device
        computation = made.build(operands)
    rank = current_rank()
    order = rank.order if rank is not None and rank.pending else None
    if order is not None:
        operands[0] = order.depend_on_last(operands[0])
    outputs = xlac.call_computation("xla::scan_blocks", operands, computation)
    if order is not None:
        order.add(outputs[0])
    return outputs[: len(carry)], outputs[len(carry) :]


class _Loop:
    def __init__(
        self,
        body: Body,
        carry: Sequence[torch.Tensor],
        stacked: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
        traced: Callable[[Tensors], None] | None,
        reverse: bool,
        ahead: Collection[int],
        unroll: int,
    ) -> None:
        arguments = [placeholder(t.shape, t.dtype) for t in carry]
        arguments += [placeholder(t.shape[1:], t.dtype) for t in stacked]
        arguments += [placeholder(t.shape, t.dtype) for t in constants]
        given = [separate_copy(argument) for argument in arguments]
        first, second = len(carry), len(carry) + len(stacked)
        new_carry, results = body(given[:first], given[first:second], given[second:])
        self.traced = Traced("scan_body", arguments, [*new_carry, *results])
        self.depth = stacked[0].shape[0]
        self.carried = first
        self.sliced = range(first, second)
        self.reverse = reverse
        self.ahead = {first + number for number in ahead}
        self.unroll = min(unroll, self.depth)
        self.results = [(tuple(t.shape), xb.Op.from_torch_type(t.dtype)) for t in results]
        del given, new_carry, results
        if traced is not None:
            traced(arguments)

    def build(self, operands: Sequence[torch.Tensor]) -> object:
        """A computation of carry, stacked, constants and hoisted tensors."""
        builder = xb.create_builder("scan_blocks")
        shapes = [xb.mkshape(xb.Op.from_torch_type(t.dtype), tuple(t.shape)) for t in operands]
        given = [xb.mkparam(builder, number, shape) for number, shape in enumerate(shapes)]
        stacks = [
            xb.Op.scalar(builder, 0, dtype=dtype).broadcast((self.depth, *shape))
            for shape, dtype in self.results
        ]
        # The state of the loop: counter, results, operands.
        state = [_integer(builder, 0), *stacks, *given]
        end = xb.Op.mkwhile(state, self._more, self._steps)
        state = [end.get_tuple_element(number) for number in range(len(state))]
        for _ in range(self.depth % self.unroll):
            state = self._step(*state)
        first = 1 + len(stacks)
        kept = [*range(first, first + self.carried), *range(1, first)]
        return xb.Op.tuple([state[n] for n in kept]).build("scan_blocks")

    def _more(self, counter: xb.Op, *rest: xb.Op) -> xb.Op:
        return counter < _integer(counter.builder(), self.depth - self.depth % self.unroll)

    def _steps(self, *state: xb.Op) -> list[xb.Op]:
        stepped = [*state]
        for _ in range(self.unroll):
            stepped = self._step(*stepped)
        return stepped

    def _step(self, counter: xb.Op, *rest: xb.Op) -> list[xb.Op]:
        builder, carried = counter.builder(), self.carried
        number = len(self.results)
        index = _integer(builder, self.depth - 1) - counter if self.reverse else counter
        stacks, operands = rest[:number], rest[number:]
        made = xb.Op.call(self.traced.computation, self._inputs(operands, index), builder=builder)
        carry = [made.get_tuple_element(n) for n in range(carried)]
        rows = [made.get_tuple_element(carried + n).broadcast([1]) for n in range(len(stacks))]
        filled = [
            stack.dynamic_update_slice(row, _start(stack, index))
            for stack, row in zip(stacks, rows, strict=True)
        ]
        return [counter + _integer(builder, 1), *filled, *carry, *operands[carried:]]

    def _inputs(self, operands: Sequence[xb.Op], index: xb.Op) -> list[xb.Op]:
        """The parameters of the body, in order of their numbers."""
        traced = self.traced
        inputs: dict[int, xb.Op] = {}
        for parameter, argument in traced.argument_of.items():
            value, at = operands[argument], index
            if argument in self.ahead:  # past the end, use the last slice
                step = _integer(index.builder(), 1)
                at = index - step if self.reverse else index + step
            if argument in self.sliced:
                sizes = list(value.shape().sizes)[1:]
                value = value.dynamic_slice(_start(value, at), [1, *sizes]).reshape(sizes)
            inputs[parameter] = value
        hoisted = operands[len(operands) - len(traced.hoisted) :]
        for parameter, value in zip(traced.hoisted, hoisted, strict=True):
            if parameter == traced.seed:
                stride = xb.Op.scalar(index.builder(), _SEED_STRIDE, dtype=xb.Type.S64)
                value = value + index.cast(xb.Type.S64) * stride
            inputs[parameter] = value
        return [inputs[parameter] for parameter in range(len(inputs))]


def _integer(builder: Any, value: int) -> xb.Op:
    return xb.Op.scalar(builder, value, dtype=xb.Type.S32)


def _start(stack: xb.Op, index: xb.Op) -> list[xb.Op]:
    return [index, *(index.zeros_like() for _ in stack.shape().sizes[1:])]


@contextlib.contextmanager
def _fresh_trace(device: torch.device, seed: int | None) -> Iterator[None]:
    """Within, this thread traces for ``device``, independently of everything traced before.

    Random numbers and reduce-scatters would tie the body to the graph around it.
    """
    name = str(device)
    thread_device = xlac.default_device()
    xlac.set_default_device(name)
    with separate_collectives(device):
        state = xm.get_rng_state(name)
        # Setting the state makes the seed a value instead of a pending computation.
        xm.set_rng_state(state if seed is None else seed, name)
        try:
            yield
        finally:
            xm.set_rng_state(xm.get_rng_state(name) if seed is None else state, name)
            xlac.set_default_device(thread_device)

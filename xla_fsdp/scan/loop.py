"""A Python function as the body of an XLA while loop.

The body is called once, on placeholders, and what it traces becomes one computation that the
compiled program runs ``depth`` times. It may use collectives and draw random numbers. The loop is
a node of the lazy graph like any operator: nothing here knows of gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm

from ..sharding.once import Tensors, Traced, placeholder, twin

# (carry, slices, constants) -> (carry, results)
Body = Callable[[Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]

# What the seeds of one iteration and the next differ by: 2**64 over the golden ratio, odd.
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
) -> tuple[Tensors, Tensors]:
    """Runs ``carry, results[i] = body(carry, [s[i] for s in stacked], constants)`` for every i.

    Args:
        body: traced once. Must return a carry of the shapes and dtypes it got. What it uses of
            tensors around it must be here, among the arguments: the whole computation of a pending
            tensor would become part of the body.
        carry: what iterations hand on.
        stacked: at least one tensor, ``(depth, ...)`` each.
        constants: the same in every iteration.
        device: the XLA device of all of them; autograd's threads have another default.
        seed: random numbers in iteration i start from a seed made of this one and i, whichever
            way the loop runs. Default: the device's random state, which moves on.
        reverse: from the last i to the first.

    Returns:
        The last carry, and the results stacked, ``(depth, ...)`` each.
    """
    depth = stacked[0].shape[0]
    with _fresh_trace(device, seed):
        arguments = [placeholder(t.shape, t.dtype) for t in carry]
        arguments += [placeholder(t.shape[1:], t.dtype) for t in stacked]
        arguments += [placeholder(t.shape, t.dtype) for t in constants]
        first, second = len(carry), len(carry) + len(stacked)
        given = [twin(argument) for argument in arguments]
        new_carry, results = body(given[:first], given[first:second], given[second:])
        traced = Traced("scan_body", arguments, [*new_carry, *results])
    operands = [*carry, *stacked, *constants, *traced.hoisted.values()]
    computation = _While(traced, depth, first, second, results, reverse).build(operands)
    outputs = torch_xla._XLAC._xla_user_computation("xla::scan_blocks", operands, computation)
    return outputs[: len(carry)], outputs[len(carry) :]


class _While:
    """The loop around a traced body.

    Args:
        traced: the body.
        depth: iterations.
        sliced: the first argument of the body that is a slice of an operand.
        constant: the first after those that is an operand again.
        results: what one iteration returns besides the carry.
        reverse: from the last iteration's slices to the first's.
    """

    def __init__(
        self,
        traced: Traced,
        depth: int,
        sliced: int,
        constant: int,
        results: Tensors,
        reverse: bool,
    ) -> None:
        self.traced = traced
        self.depth = depth
        self.sliced, self.constant = sliced, constant
        self.results = [(tuple(t.shape), xb.Op.from_torch_type(t.dtype)) for t in results]
        self.reverse = reverse

    def build(self, operands: Sequence[torch.Tensor]) -> object:
        """The loop as a computation of carry, stacked, constants and what the body hoisted."""
        builder = xb.create_builder("scan_blocks")
        given = [xb.mkparam(builder, number, _shape(t)) for number, t in enumerate(operands)]
        stacks = [
            xb.Op.scalar(builder, 0, dtype=dtype).broadcast((self.depth, *shape))
            for shape, dtype in self.results
        ]
        # The state of the loop: counter, results, operands.
        end = xb.Op.mkwhile([_integer(builder, 0), *stacks, *given], self._more, self._step)
        first = 1 + len(stacks)
        kept = [*range(first, first + self.sliced), *range(1, first)]
        return xb.Op.tuple([end.get_tuple_element(n) for n in kept]).build("scan_blocks")

    def _more(self, counter: xb.Op, *rest: xb.Op) -> xb.Op:
        return counter < _integer(counter.builder(), self.depth)

    def _step(self, counter: xb.Op, *rest: xb.Op) -> list[xb.Op]:
        builder = counter.builder()
        index = _integer(builder, self.depth - 1) - counter if self.reverse else counter
        stacks, operands = rest[: len(self.results)], rest[len(self.results) :]
        made = xb.Op.call(self.traced.computation, self._inputs(operands, index), builder=builder)
        carry = [made.get_tuple_element(number) for number in range(self.sliced)]
        rows = [made.get_tuple_element(self.sliced + n).broadcast([1]) for n in range(len(stacks))]
        filled = [
            stack.dynamic_update_slice(row, _start(stack, index))
            for stack, row in zip(stacks, rows, strict=True)
        ]
        return [counter + _integer(builder, 1), *filled, *carry, *operands[self.sliced :]]

    def _inputs(self, operands: Sequence[xb.Op], index: xb.Op) -> list[xb.Op]:
        """The parameters of the body, in order of their numbers."""
        inputs: dict[int, xb.Op] = {}
        for parameter, argument in self.traced.argument_of.items():
            value = operands[argument]
            is_slice = self.sliced <= argument < self.constant
            inputs[parameter] = _row(value, index) if is_slice else value
        hoisted = operands[len(operands) - len(self.traced.hoisted) :]
        for parameter, value in zip(self.traced.hoisted, hoisted, strict=True):
            if parameter == self.traced.seed:
                stride = xb.Op.scalar(index.builder(), _SEED_STRIDE, dtype=xb.Type.S64)
                value = value + index.cast(xb.Type.S64) * stride
            inputs[parameter] = value
        return [inputs[parameter] for parameter in range(len(inputs))]


def _integer(builder: Any, value: int) -> xb.Op:
    return xb.Op.scalar(builder, value, dtype=xb.Type.S32)


def _row(stack: xb.Op, index: xb.Op) -> xb.Op:
    sizes = list(stack.shape().sizes)
    return stack.dynamic_slice(_start(stack, index), [1, *sizes[1:]]).reshape(sizes[1:])


def _start(stack: xb.Op, index: xb.Op) -> list[xb.Op]:
    return [index, *(index.zeros_like() for _ in stack.shape().sizes[1:])]


def _shape(tensor: torch.Tensor) -> xb.Shape:
    return xb.mkshape(xb.Op.from_torch_type(tensor.dtype), tuple(tensor.shape))


@contextlib.contextmanager
def _fresh_trace(device: torch.device, seed: int | None) -> Iterator[None]:
    """Within, this thread traces for ``device``, and depends on nothing traced before.

    Random numbers and reduce-scatters would otherwise tie the body to the graph around it. With a
    ``seed`` the device's random state is afterwards what it was.
    """
    name, xlac = str(device), torch_xla._XLAC
    thread_device = xlac._xla_get_default_device()
    token = xlac._get_all_reduce_token(name)
    xlac._xla_set_default_device(name)
    xlac._set_all_reduce_token(name, None)
    state = xm.get_rng_state(name)
    # Setting the state makes the seed a value that is there; it may be one that is pending.
    xm.set_rng_state(state if seed is None else seed, name)
    try:
        yield
    finally:
        xm.set_rng_state(xm.get_rng_state(name) if seed is None else state, name)
        xlac._set_all_reduce_token(name, token)
        xlac._xla_set_default_device(thread_device)

"""The forward and the backward of scanned blocks: two while loops.

Forward: an iteration gathers one block's parameters, computes, and keeps nothing but its input.
Backward, in reverse: an iteration gathers again, computes the block once more, this time with a
graph, and reduce-scatters the gradients. Everything that an iteration makes is gone when it ends,
so there is nothing to free, and no barrier is needed to keep gathers in their place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch.autograd.function import once_differentiable

from ..collectives import host_memory
from ..sharding.block_memory import BlockMemory
from ..tree import map_tensors, tensors_in
from .loop import Tensors, loop
from .unit import ScanUnit


class Run:
    """One call of scanned blocks, until its backward.

    Args:
        inputs: what the blocks take besides the tensor that they hand on, ``(args, kwargs)``.
    """

    def __init__(self, unit: ScanUnit, x: torch.Tensor, inputs: tuple[tuple, dict]):
        self.unit = unit
        self.constants = tensors_in(inputs)
        numbers = {id(tensor): number for number, tensor in enumerate(self.constants)}
        self.inputs = map_tensors(lambda t: _Slot(numbers[id(t)]), inputs)
        self.sliced = [stack for stack in unit.buffers if not stack.shared]
        self.shared = [stack for stack in unit.buffers if stack.shared]
        # As they are now: a forward that updates them replaces them.
        self.buffers = [s.value for s in self.sliced], [s.value for s in self.shared]
        self.keeps_inputs = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (x, *self.constants, *unit.shards)
        )
        # Whether what the backward needs of the inputs waits in the host's memory.
        self.offloads = unit.offload and self.keeps_inputs and host_memory.can_wait_there(x)
        self.seed = xm.get_rng_state(str(unit.world.device))
        # Numbers of the parameters of which the forward keeps pieces, see sharding/secondary.py.
        self.pieces: list[int] = []
        self.autocast = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")

    def forward(self, x: torch.Tensor, stacks: Sequence[torch.Tensor]) -> Tensors:
        """The result of the last block, and what the backward needs of all.

        That is the last one's input, if inputs are offloaded; those of all, ``(depth, *x.shape)``;
        and the pieces of their parameters that stay here for the backward to gather from.
        """
        updated: list[int] = []  # numbers of sliced buffers

        def body(carry: Tensors, slices: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
            buffers = self._buffers(slices[len(stacks) :], constants)
            shards, secondary = slices[: len(stacks)], None
            if self.keeps_inputs:
                secondary = self.unit.secondary()
            full = self.unit.gather_block(shards, carry[0], False, secondary)
            y, after = self._compute(carry[0], full, buffers, constants)
            updated.extend(self._updated(buffers, after))
            kept = [carry[0]] if self.keeps_inputs else []
            if self.offloads:
                kept = [host_memory.to_host(carry[0])]
            if secondary is not None:
                kept += secondary.pieces.values()
                self.pieces = list(secondary.pieces)
            return [y, *carry[: len(last)]], [*kept, *(after[n] for n in updated)]

        sliced, shared = self.buffers
        # The backward starts with the last block, whose input need not travel: iterations hand it
        # on, and so it is there in the end.
        last = [x] if self.offloads else []
        (y, *last), results = loop(
            body,
            [x, *last],
            [*stacks, *sliced],
            [*(constant.detach() for constant in self.constants), *shared],
            self.unit.world.device,
        )
        number_kept = 1 + len(self.pieces) if self.keeps_inputs else 0
        kept, results = results[:number_kept], results[number_kept:]
        for number, value in zip(updated, results, strict=True):
            self.sliced[number].put(value)
        return [y, *last, *kept]

    def backward(
        self,
        grad: torch.Tensor,
        kept: Sequence[torch.Tensor],
        stacks: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
        needed: tuple[Sequence[bool], Sequence[bool]],
    ) -> tuple[torch.Tensor, list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of the first input, of the constants and of the stacked shards.

        ``kept``: what the forward returned besides the result. ``needed``: which constants and
        which shards need theirs.
        """
        count, pieces = len(stacks), len(self.pieces)
        which = [number for number, needs in enumerate(needed[0]) if needs]
        reduced: list[int] = []

        def body(carry: Tensors, slices: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
            x, *slices = slices
            following = []
            if self.offloads:  # this block's has come while the one after it was computed
                following, x = [host_memory.to_device(x)], carry.pop()
            secondary = self.unit.secondary(dict(zip(self.pieces, slices, strict=False)))
            slices = slices[pieces:]
            shards, buffers = slices[:count], self._buffers(slices[count:], constants)
            full = self.unit.gather_block(shards, carry[0], True, secondary)
            # What comes out of the collectives has no graph: these are its leaves.
            x = x.detach().requires_grad_()
            full = [f.detach().requires_grad_(n) for f, n in zip(full, needed[1], strict=True)]
            constants = [
                constant.detach().requires_grad_(number in which)
                for number, constant in enumerate(constants)
            ]
            leaves = [x, *(constants[n] for n in which), *(f for f in full if f.requires_grad)]
            with torch.enable_grad():
                y, _ = self._compute(x, full, buffers, constants)
            found = iter(torch.autograd.grad(y, leaves, carry[0], allow_unused=True))
            of_x = next(found)
            sums = [_sum(total, next(found)) for total in carry[1:]]
            of_full = [next(found) if needs else None for needs in needed[1]]
            shares = self.unit.reduce_block(shards, of_full, memory)
            reduced.extend(shares)
            return [_sum(torch.zeros_like(x), of_x), *sums, *following], list(shares.values())

        # Nothing is gathered early for what comes next: it would be there during the whole loop.
        self.unit.order.backward_over()
        memory = BlockMemory(self.unit.depth)
        sliced, shared = self.buffers
        zeros = [torch.zeros_like(constants[number]) for number in which]
        last, kept = kept[: self.offloads], kept[self.offloads :]
        (of_x, *of_constants), results = loop(
            body,
            [grad, *zeros, *last],
            [*kept, *stacks, *sliced],
            [*constants, *shared],
            self.unit.world.device,
            seed=self.seed,
            reverse=True,
            ahead=len(last),
            memory=memory,
        )
        unit = self.unit
        by_constant = dict(zip(which, of_constants, strict=False))
        by_stack = {
            number: share if unit.stored[number].widens else share.to(stacks[number].dtype)
            for number, share in zip(reduced, results, strict=True)
        }
        return (
            of_x,
            [by_constant.get(number) for number in range(len(constants))],
            [by_stack.get(number) for number in range(count)],
        )

    def _buffers(self, slices: Tensors, constants: Tensors) -> Tensors:
        """One block's buffers in the unit's order."""
        sliced, shared = iter(slices), iter(constants[len(self.constants) :])
        return [next(shared if stack.shared else sliced) for stack in self.unit.buffers]

    def _compute(
        self, x: torch.Tensor, full: Tensors, buffers: Tensors, constants: Tensors
    ) -> tuple[torch.Tensor, Tensors]:
        """One block, and its buffers afterwards."""
        args, kwargs = map_tensors(lambda slot: constants[slot.number], self.inputs, leaf=_Slot)
        enabled, dtype = self.autocast
        with contextlib.ExitStack() as stack:
            # Casts must not be kept from one trace to the next.
            stack.enter_context(torch.autocast("xla", dtype, enabled, cache_enabled=False))
            stack.enter_context(self.unit.installed(full, buffers))
            y = self.unit.template(x, *args, **kwargs)
            after = [buffer.value for buffer in self.unit.buffers]
        _require_like(y, x, self.unit.template)
        return y, after

    def _updated(self, before: Tensors, after: Tensors) -> list[int]:
        """Numbers among the sliced buffers of those that a forward has updated."""
        numbers = []
        pending = torch_xla._XLAC._check_tensor_need_materialization(after)
        sliced = 0
        for stack, old, new, changed in zip(self.unit.buffers, before, after, pending, strict=True):
            if (changed or new is not old) and stack.shared:
                raise ValueError(
                    f"the forward of a block updates its buffer {stack.name}, which all blocks "
                    "share; scanned blocks can only update buffers of their own"
                )
            if changed or new is not old:
                numbers.append(sliced)
            sliced += not stack.shared
        return numbers


class Scan(torch.autograd.Function):
    """``apply(run, x, number_of_constants, *constants, *stacked shards)``."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, x: torch.Tensor, number: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        y, *kept = run.forward(x, run.unit.sources)
        if kept:
            ctx.run, ctx.number, ctx.kept = run, number, len(kept)
            ctx.save_for_backward(*kept, *tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        kept, tensors = ctx.saved_tensors[: ctx.kept], ctx.saved_tensors[ctx.kept :]
        needs, number = ctx.needs_input_grad[3:], ctx.number
        of_x, of_constants, of_stacks = ctx.run.backward(
            grad,
            kept,
            ctx.run.unit.sources,
            tensors[:number],
            (needs[:number], needs[number:]),
        )
        # What autograd saved may be other objects with the same values.
        of_stacks = ctx.run.unit.gradients.given(ctx.run.unit.shards, of_stacks)
        return None, of_x, None, *of_constants, *of_stacks


class _Slot:
    """Stands for constant ``number`` in the arguments of a block."""

    def __init__(self, number: int):
        self.number = number


def _sum(total: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
    return total if part is None else total + part


def _require_like(y: Any, x: torch.Tensor, block: torch.nn.Module) -> None:
    if not isinstance(y, torch.Tensor):
        raise ValueError(
            f"scanned blocks must return one tensor, {type(block).__name__} returned a "
            f"{type(y).__name__}; have its forward return the tensor that the next block takes"
        )
    if y.shape != x.shape or y.dtype != x.dtype:
        raise ValueError(
            "scanned blocks must return a tensor like the one they take, since it is what the next "
            f"one takes: {type(block).__name__} made {tuple(y.shape)}, {y.dtype} of "
            f"{tuple(x.shape)}, {x.dtype}"
        )

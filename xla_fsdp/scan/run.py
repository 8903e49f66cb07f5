"""The forward and the backward of scanned blocks: two while loops.

Forward: an iteration gathers one block's parameters, computes, and stores only its input. Backward,
in reverse: an iteration gathers again, recomputes the block with a graph, and reduce-scatters the
gradients. All tensors of an iteration end with it, so there is nothing to free, and no barrier is
needed to keep gathers in their place.

With ``prefetch``, an iteration gathers the parameters of the next block and passes them on, so that
they are sent while this block computes. The other ties follow from how the TPU compiler behaves
(docs/design/communication.md). Gathers of one block come after those of the block before; otherwise
the compiler mixes them, and most gathers are not overlapped. In the backward, the gradient waits
for the gathers, and a block for the reductions of the block before. So gathers are overlapped with
the recomputation and not with the reductions, during which nothing else runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch_xla.core.xla_model as xm

from .. import xlac
from ..collectives import host_memory
from ..collectives.order import Event, Order, Wait
from ..layers.saved_activations import SavedActivations
from ..replaying import in_modes, without_checkpoints
from ..sharding.block_state import BlockState
from ..sharding.freeing import stamps
from ..sharding.gathering import raise_changed_before_backward
from ..tree import map_tensors, tensors_in
from . import checks
from .equality import require_like
from .loop import Tensors, loop
from .unit import ScanUnit


class Run:
    """One call of scanned blocks, until its backward.

    Args:
        inputs: the further arguments of the blocks besides the carried tensor, ``(args, kwargs)``.
    """

    def __init__(self, unit: ScanUnit, x: torch.Tensor, inputs: tuple[tuple, dict]):
        checks.require_unchanged_structure(unit)
        self.unit = unit
        self.constants = tensors_in(inputs)
        numbers = {id(tensor): number for number, tensor in enumerate(self.constants)}
        self.inputs = map_tensors(lambda t: _Slot(numbers[id(t)]), inputs)
        self.sliced = [stack for stack in unit.buffers if not stack.shared]
        self.shared = [stack for stack in unit.buffers if stack.shared]
        # The current buffers: a forward that updates them replaces the tensors.
        self.buffers = [s.value for s in self.sliced], [s.value for s in self.shared]
        self.needs_backward = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (x, *self.constants, *unit.shards)
        )
        # Whether the inputs are stored in host memory until the backward.
        self.offloads = unit.options.offload and self.needs_backward and host_memory.can_offload(x)
        self.seed = xm.get_rng_state(str(unit.world.device))
        self.modes = [(module, module.training) for module in unit.module.modules()]
        self._stamps = stamps(unit.shards)
        self.prefetch = unit.options.prefetch and bool(unit.parameters)
        # Numbers of the parameters of which the forward stores pieces, see SecondaryShards.
        self.pieces: list[int] = []
        self.recorded = 0  # how many values of a block the forward saves, besides its input
        self.autocast = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")

    def forward(self, x: torch.Tensor, stacks: Sequence[torch.Tensor]) -> Tensors:
        """The result of the last block, and what the backward needs from all blocks.

        These are: the last block's parameters, if parameters are prefetched, and its input, if
        inputs are offloaded; the inputs of all blocks, ``(depth, *x.shape)``; the pieces of their
        parameters from which the backward gathers; and the values that ``keep`` names.
        """
        updated: list[int] = []  # numbers of sliced buffers
        count, prefetch = len(stacks), self.prefetch

        def gathered(shards: Tensors, x: torch.Tensor, order: Order) -> tuple[Tensors, Tensors]:
            """One block's parameters, and the pieces of them that are stored."""
            secondary = self.unit.secondary() if self.needs_backward else None
            full = self.unit.gather_block(shards, x, order, secondary)
            if secondary is None:
                return full, []
            self.pieces = list(secondary.pieces)
            return full, list(secondary.pieces.values())

        def body(carry: Tensors, slices: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
            x, *carry = carry
            shards, buffers = slices[:count], self._buffers(slices[count:], constants)
            following: Tensors = []
            if prefetch:
                full, pieces = carry[:count], carry[count : len(first)]
                order = self.unit.order_after(full[self.unit.comms.last_gathered(self.unit.stored)])
                whole, parts = gathered(shards, x, order)
                following = [*whole, *parts]
            else:
                full, pieces = gathered(shards, x, Order())
            saved = SavedActivations(self.unit.options.keep if self.needs_backward else ())
            y, after = self._compute(x, full, buffers, constants, saved)
            saved.require_all_called()
            self.recorded = len(saved.values)
            updated.extend(self._updated(buffers, after))
            kept = [x] if self.needs_backward else []
            if self.offloads:
                kept, following = [host_memory.to_host(x)], [*following, x]
            values = saved.values
            return [y, *following], [*kept, *pieces, *values, *(after[n] for n in updated)]

        sliced, shared = self.buffers
        first: Tensors = []  # the parameters of the first block
        if prefetch:
            whole, parts = gathered([torch.select_copy(s, 0, 0) for s in stacks], x, Order())
            first = [*whole, *parts]
        # The backward starts with the last block. Its input need not go to the host: it is part of
        # the carry, so it is there at the end. So are its parameters, if they are prefetched: the
        # last iteration has no next block to gather.
        (y, *last), results = loop(
            body,
            [x, *first, *([x] if self.offloads else [])],
            [*stacks, *sliced],
            [*(constant.detach() for constant in self.constants), *shared],
            self.unit.world.device,
            ahead=range(len(stacks)) if prefetch else (),
            unroll=self.unroll,
        )
        if prefetch:
            del last[count : len(first)]
        number_kept = 1 + len(self.pieces) + self.recorded if self.needs_backward else 0
        kept, results = results[:number_kept], results[number_kept:]
        for number, value in zip(updated, results, strict=True):
            self.sliced[number].put(value)
        return [y, *last, *kept] if self.needs_backward else [y]

    def backward(
        self,
        grad: torch.Tensor,
        kept: Sequence[torch.Tensor],
        stacks: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
        needed: tuple[Sequence[bool], Sequence[bool]],
    ) -> tuple[torch.Tensor, list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of the first input, of the constants and of the stacked shards.

        ``kept``: the results of the forward except the first. ``needed``: which constants and which
        shards need gradients.
        """
        count, pieces, prefetch = len(stacks), len(self.pieces), self.prefetch
        which = [number for number, needs in enumerate(needed[0]) if needs]
        reduced: list[int] = []

        def body(carry: Tensors, slices: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
            x, *slices = slices
            following = []
            if self.offloads:  # this block's input was copied while the next block was computed
                following, x = [host_memory.to_device(x)], carry.pop()
            secondary = self.unit.secondary(dict(zip(self.pieces, slices, strict=False)))
            shards, slices = slices[pieces : pieces + count], slices[pieces + count :]
            saved = SavedActivations(self.unit.options.keep, slices[: self.recorded])
            buffers = self._buffers(slices[self.recorded :], constants)
            # In the order of the forward, because this starts with its recomputation.
            if prefetch:
                grad, *carry = carry
                full, carry = carry[-count:], carry[:-count]
                order = self.unit.order_after(grad)
                x = order.delay(x)
                whole = self.unit.gather_block(shards, grad, order, secondary)
                # All gathers but the last: no matmul of the recomputation remains to overlap it.
                grad = order.delay(grad, Wait(Event.GATHER, 1))
                carry, following = [grad, *carry], [*whole, *following]
            else:
                full = self.unit.gather_block(shards, carry[0], Order(), secondary)
            # The results of collectives have no graph: these are its leaves.
            x = x.detach().requires_grad_()
            full = [f.detach().requires_grad_(n) for f, n in zip(full, needed[1], strict=True)]
            constants = [
                constant.detach().requires_grad_(number in which)
                for number, constant in enumerate(constants)
            ]
            leaves = [x, *(constants[n] for n in which), *(f for f in full if f.requires_grad)]
            with torch.enable_grad(), in_modes(self.modes):
                y, after = self._compute(x, full, buffers, constants, saved)
            checks.require_known_graph(self.unit.module, y, leaves)
            for stack, buffer in zip(self.unit.buffers, after, strict=True):
                checks.require_no_graph(self.unit.module, stack.name, buffer)
            found = iter(torch.autograd.grad(y, leaves, carry[0], allow_unused=True))
            of_x = next(found)
            sums = [_sum(total, next(found)) for total in carry[1:]]
            of_full = [next(found) if needs else None for needs in needed[1]]
            shares = self.unit.reduce_block(shards, of_full, memory)
            reduced.extend(shares)
            of_x = _sum(torch.zeros_like(x), of_x)
            if prefetch:
                of_x = order.delay(self.unit.after_reductions(of_x, shares.values()))
            return [of_x, *sums, *following], list(shares.values())

        # Gather nothing early for the next unit: it would stay in memory during the loop.
        self.unit.order.end_backward()
        memory = BlockState(self.unit.depth)
        sliced, shared = self.buffers
        zeros = [torch.zeros_like(constants[number]) for number in which]
        size = len(kept) - 1 - pieces - self.recorded
        last, kept, recorded = kept[:size], kept[size:][: 1 + pieces], kept[size:][1 + pieces :]
        (of_x, *of_constants), results = loop(
            body,
            [grad, *zeros, *last],
            [*kept, *stacks, *recorded, *sliced],
            [*constants, *shared],
            self.unit.world.device,
            seed=self.seed,
            reverse=True,
            ahead=[*range(not self.offloads, 1 + pieces + count)] if prefetch else range(len(last)),
            memory=memory,
            unroll=self.unroll,
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

    def require_shards_unchanged(self) -> None:
        """Before the backward: raises RuntimeError if a parameter changed since the forward."""
        now = stamps(self.unit.shards)
        for stack, found, before in zip(self.unit.parameters, now, self._stamps, strict=True):
            if found != before:
                raise_changed_before_backward(self.unit.comms.label + stack.name)

    @property
    def unroll(self) -> int:
        """The number of blocks in one iteration of the compiled loop: two if parameters are
        prefetched, because these alternate between two places in memory. On CPU ranks always one
        (a program may use each collective's number only once), with a copy between the places."""
        return 2 if self.prefetch and self.unit.world.context is None else 1

    def _buffers(self, slices: Tensors, constants: Tensors) -> Tensors:
        """One block's buffers, in the unit's order."""
        sliced, shared = iter(slices), iter(constants[len(self.constants) :])
        return [next(shared if stack.shared else sliced) for stack in self.unit.buffers]

    def _compute(
        self,
        x: torch.Tensor,
        full: Tensors,
        buffers: Tensors,
        constants: Tensors,
        saved: SavedActivations,
    ) -> tuple[torch.Tensor, Tensors]:
        """Runs one block; returns its result and its updated buffers."""
        args, kwargs = map_tensors(lambda slot: constants[slot.number], self.inputs, leaf=_Slot)
        enabled, dtype = self.autocast
        with contextlib.ExitStack() as stack:
            # Casts must not be cached from one trace to the next.
            stack.enter_context(torch.autocast("xla", dtype, enabled, cache_enabled=False))
            stack.enter_context(self.unit.installed(full, buffers))
            stack.enter_context(saved.over(self.unit.module))
            # The backward recomputes the entire block anyway.
            stack.enter_context(without_checkpoints())
            stack.enter_context(checks.ForbidHostRandomNumbers(self.unit.module))
            given = checks.inputs_of([x, *full, *buffers, *constants])
            stack.enter_context(checks.forbid_lost_changes(self.unit, full, given))
            y = self.unit.module(x, *args, **kwargs)
            after = [buffer.value for buffer in self.unit.buffers]
        require_like(y, x, self.unit.module)
        return y, after

    def _updated(self, before: Tensors, after: Tensors) -> list[int]:
        """Numbers of the sliced buffers that a forward has updated."""
        numbers = []
        pending = xlac.are_pending(after)
        sliced = 0
        for stack, old, new, changed in zip(self.unit.buffers, before, after, pending, strict=True):
            if (changed or new is not old) and stack.shared:
                raise ValueError(
                    f"the forward of a block updates its buffer {stack.name}, which all blocks "
                    "share. Give each block a separate buffer"
                )
            if changed or new is not old:
                numbers.append(sliced)
            sliced += not stack.shared
        return numbers


class _Slot:
    """Placeholder for constant ``number`` in the arguments of a block."""

    def __init__(self, number: int):
        self.number = number


def _sum(total: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
    return total if part is None else total + part

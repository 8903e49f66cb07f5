"""``scan_blocks``: equal blocks, traced and compiled once for any number of them, as two loops.

Gathers, reductions and compute are tied because of the TPU compiler: docs/design/communication.md.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

import torch
import torch_xla.core.xla_model as xm
from torch import nn

from .. import compiler_options, xlac
from ..collectives import host_memory
from ..collectives.order import Event, Order, Wait
from ..layers.saved_activations import SavedActivations
from ..names import WRAPPED_PREFIX, dotted, names_hook
from ..remat import in_modes, without_checkpoints
from ..sharded_module import finish_unit
from ..sharding import metadata
from ..sharding.freeing import stamps
from ..sharding.gathering import raise_changed_before_backward, without_second_derivative
from ..sharding.layout import spec_of
from ..sharding.options import SCAN, FSDPOptions, takes_options
from ..sharding.sharded_parameter import as_sharded, local
from ..sharding.user_checks import raise_if_on_other_device, require_plain_call, require_values
from ..tree import separate_tensors, with_tensors
from ..wrapper import XlaFullyShardedDataParallel
from . import checks
from .loop import Tensors, loop
from .unit import ScanBuilder, ScanUnit, Stack


@takes_options(SCAN)
def scan_blocks(blocks: Iterable[nn.Module], **options: Any) -> ScannedBlocks:
    """Shards equal blocks and runs them one after the other, as a loop of the compiled program.

    Tracing and compiling take the same time for any number of blocks. Only the blocks' inputs are
    saved for the backward, as if every block were ``FSDP(checkpoint_module(block))``. Call the
    result as a block, ``blocks(x, mask)``; it is a wrapper like any other::

        model.blocks = scan_blocks((Block() for _ in range(32)), compute_dtype=torch.bfloat16)
        model = XlaFullyShardedDataParallel(model, compute_dtype=torch.bfloat16)

    State dicts and shard metadata name every block's parameters (``blocks.3.up.weight``). The
    parameters and optimizer state are stacked, ``(len(blocks), shard)``: ``blocks.up.weight``.

    Args:
        blocks: modules that take a tensor and return one of the same shape and dtype, equal in
            all but the values of their parameters and buffers. Of a generator only one full block
            exists at a time. May be on CPU, XLA or meta device.
        options: those of :class:`~xla_fsdp.FSDPOptions`, except ``reshard_after_forward=False`` and
            ``flatten_parameters=True``. Barriers, the wrapper's prefetching and ``no_sync()`` have
            no effect: a backward always reduces.

    Raises:
        ValueError: blocks differ (the message says where), share parameters, are wrapped, or
            contain hooks or recurrent modules; or an option is not supported. In the first forward:
            a block does not return a tensor like its input, or does not call a submodule named in
            ``keep``.
        TypeError: a block is not a module, an option has a wrong type or is unknown, or a
            submodule in ``keep`` returns no tensor.
        RuntimeError: on v5e and v6e, where the compiler would crash: the message says what to call
            before ``launch``.
    """
    return ScannedBlocks(blocks, FSDPOptions.of(SCAN, **options))


class ScannedBlocks(XlaFullyShardedDataParallel):
    """``module`` is the block that is traced for all blocks."""

    _unit: ScanUnit

    def __init__(self, blocks: Iterable[nn.Module], options: FSDPOptions) -> None:
        nn.Module.__init__(self)
        options = options.resolved()
        _require_scannable(options)
        world = options.world()
        compiler_options.require_loops_compile(world.device_kind)
        builder = ScanBuilder(options, world)
        self._unit = builder.build(blocks)
        self._fsdp_wrapped_module = self._unit.module
        finish_unit(self._unit, builder.on_device)
        self._register_state_dict_hook(_unstack_state)
        self.register_load_state_dict_pre_hook(_stack_state)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        require_plain_call(type(self).__name__, args, {"x": x})
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            raise TypeError(
                "scanned blocks need a floating-point tensor as first argument, got "
                f"{x.dtype if isinstance(x, torch.Tensor) else type(x).__name__}. Pass other "
                "inputs after it"
            )
        unit = self._unit
        inputs, kwargs = unit.cast_inputs((x, *args), kwargs)
        x, args = inputs[0], inputs[1:]
        require_values([("", unit)], "the first forward was called")
        try:
            run = _Run(unit, x, (args, kwargs))
            # Gather nothing early for the next unit: it would stay in memory during the loop.
            unit.order.end_forward()
            return _Scan.apply(run, x, *run.constants, *unit.shards)
        except RuntimeError as error:
            raise_if_on_other_device(
                type(self).__name__, (x, args, kwargs), unit.world.device, error
            )
            raise

    def __len__(self) -> int:
        return self._unit.depth

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError(
            "scanned blocks are one module and cannot be iterated or indexed. Call all of them, "
            "x = blocks(x)"
        )

    def __iter__(self) -> NoReturn:
        self.__getitem__(0)

    def extra_repr(self) -> str:
        return f"blocks={len(self)}, {super().extra_repr()}"


def _require_scannable(options: FSDPOptions) -> None:
    if not options.reshard_after_forward:
        raise ValueError(
            "reshard_after_forward=False is not supported in scan_blocks, because the loop of the "
            "forward would return the full parameters of all blocks. Wrap each block separately, "
            "or pass a number of ranks >= 2, which stores a part of them"
        )
    if options.flatten_parameters:
        raise ValueError(
            "flatten_parameters=True is not supported in scan_blocks. Leave it out; small "
            "parameters share a collective anyway"
        )
    if options.cpu_offload is not None and options.cpu_offload.stream:
        raise ValueError(
            "CPUOffload(stream=True) is not supported in scan_blocks, because a loop is one "
            "program that has all blocks' shards on the device. Wrap each block separately"
        )


@names_hook
def _unstack_state(
    module: ScannedBlocks,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
) -> None:
    """State-dict hook: splits stacked tensors into a tensor for each block."""
    by_name = _by_name(module)
    inside = prefix + WRAPPED_PREFIX
    rows: dict[str, list[torch.Tensor]] = {}
    for key in [key for key in state_dict if key.startswith(inside)]:
        name = key.removeprefix(inside)
        value = local(state_dict.pop(key))
        each = [value] * len(module) if by_name[name].shared else value.unbind(0)
        # No views: each would keep the entire stack in memory.
        rows[name] = [torch.view_copy(row, row.shape) for row in each]
    for number in range(len(module)):
        for name, own in rows.items():
            state_dict[prefix + dotted(str(number), name)] = own[number]
    # One program instead of one for each copy to the host.
    every = [row for own in rows.values() for row in own if row.device.type == "xla"]
    if every:
        xlac.start_tensors(every)


@names_hook
def _stack_state(
    module: ScannedBlocks,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load hook: the reverse of :func:`_unstack_state`."""
    metadata.rename_loaded(
        state_dict, prefix, local_metadata, "the stacked shards", lambda name: name
    )
    for name, stack in _by_name(module).items():
        path, _, attribute = name.rpartition(".")
        if attribute in module.module.get_submodule(path)._non_persistent_buffers_set:
            continue
        rows = []
        for number in range(len(module)):
            key = prefix + dotted(str(number), name)
            current = stack.value if stack.shared else local(stack.value)[number]
            row = state_dict.pop(key, None)
            if row is None:
                missing.append(key)
            elif row.shape != current.shape:
                errors.append(
                    f"size mismatch for {key}: copying a tensor of shape {tuple(row.shape)}, "
                    f"this rank's is {tuple(current.shape)}"
                )
                row = None
            rows.append(current if row is None else row.to(current.dtype))
        if not stack.shared:
            rows[0] = torch.stack([row.to(rows[0].device) for row in rows])
        spec = spec_of(stack.value)
        loaded = rows[0] if spec is None else as_sharded(rows[0], spec)
        state_dict[prefix + WRAPPED_PREFIX + name] = loaded


def _by_name(module: ScannedBlocks) -> dict[str, Stack]:
    unit = module._unit
    return {name: stack for stack in [*unit.parameters, *unit.buffers] for name in stack.names}


class _Scan(torch.autograd.Function):
    """``apply(run, x, *constants, *stacked shards)``."""

    @staticmethod
    def forward(ctx: Any, run: _Run, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        y, *kept = run.forward(x)
        if kept:
            ctx.run, ctx.kept = run, len(kept)
            # Not the shards: torch drops hooks of leaves that are saved within saved-tensor hooks.
            ctx.save_for_backward(*kept, *tensors[: len(run.constants)])
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved, (_, _, *needs) = ctx.saved_tensors, ctx.needs_input_grad
        kept, constants = saved[: ctx.kept], saved[ctx.kept :]
        needed = needs[: len(constants)], needs[len(constants) :]
        with torch.no_grad():
            of_x, of_constants, of_stacks = ctx.run.backward(grad, kept, constants, needed)
        found = [of_x, *of_constants, *of_stacks]
        return None, *without_second_derivative(
            found, ctx.run.unit.shards, ctx.run.about_second_derivatives
        )


class _Run:
    """One call of scanned blocks, until its backward. ``inputs``: further ``(args, kwargs)``."""

    def __init__(self, unit: ScanUnit, x: torch.Tensor, inputs: tuple[tuple, dict]):
        checks.require_unchanged_structure(unit)
        self.unit = unit
        self.constants, self.inputs = separate_tensors(inputs)
        # A forward that updates buffers replaces the tensors.
        self.sliced = [stack.value for stack in unit.buffers if not stack.shared]
        self.shared = [stack.value for stack in unit.buffers if stack.shared]
        self.needs_backward = torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (x, *self.constants, *unit.shards)
        )
        self.offloads = unit.options.offload and self.needs_backward and host_memory.can_offload(x)
        self.seed = xm.get_rng_state(str(unit.world.device))
        self.modes = [(module, module.training) for module in unit.module.modules()]
        self._stamps = stamps(unit.shards)
        self.prefetch = unit.options.prefetch and bool(unit.parameters)
        # Numbers of the parameters of which the forward stores pieces, see SecondaryShards.
        self.pieces: list[int] = []
        self.recorded = 0  # saved values of a block, besides its input
        self.autocast = torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")

    def about_second_derivatives(self) -> str:
        return (
            f"gradients of the scanned blocks {self.unit.comms.label.rstrip('.')!r}, computed with "
            "create_graph=True, were differentiated again. Scanned blocks have no second "
            "derivative. Wrap the blocks one by one, without scan_blocks: then gradients of inputs "
            "have one"
        )

    def forward(self, x: torch.Tensor) -> Tensors:
        """The result of the last block, and what the backward needs from all blocks.

        In this order: parameters and input of the last block (with prefetch, offload), all inputs
        ``(depth, *x.shape)``, stored pieces, values of ``keep``.
        """
        updated: list[int] = []  # numbers of buffers
        stacks = self.unit.sources
        count, prefetch = len(stacks), self.prefetch

        def gathered(shards: Tensors, x: torch.Tensor, order: Order) -> Tensors:
            """One block's parameters, then the pieces of them that are stored."""
            secondary = self.unit.secondary() if self.needs_backward else None
            full = self.unit.gather_block(shards, x, order, secondary)
            if secondary is None:
                return full
            self.pieces = list(secondary.pieces)
            return [*full, *secondary.pieces.values()]

        def body(carry: Tensors, slices: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
            x, *carry = carry
            shards, buffers = slices[:count], self._buffers(slices[count:], constants)
            following: Tensors = []
            if prefetch:
                here = carry[: len(first)]
                order = self.unit.order_after(here[self.unit.comms.last_gathered(self.unit.stored)])
                following = gathered(shards, x, order)
            else:
                here = gathered(shards, x, Order())
            full, pieces = here[:count], here[count:]
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

        first: Tensors = []
        if prefetch:
            first = gathered([torch.select_copy(s, 0, 0) for s in stacks], x, Order())
        # The backward starts with the last block: what it needs of that block stays in the carry.
        (y, *last), results = loop(
            body,
            [x, *first, *([x] if self.offloads else [])],
            [*stacks, *self.sliced],
            [*(constant.detach() for constant in self.constants), *self.shared],
            self.unit.world.device,
            ahead=range(len(stacks)) if prefetch else (),
            unroll=self.unroll,
        )
        if prefetch:
            del last[count : len(first)]
        number_kept = 1 + len(self.pieces) + self.recorded if self.needs_backward else 0
        kept, results = results[:number_kept], results[number_kept:]
        for number, value in zip(updated, results, strict=True):
            self.unit.buffers[number].put(value)
        return [y, *last, *kept] if self.needs_backward else [y]

    def backward(
        self,
        grad: torch.Tensor,
        kept: Sequence[torch.Tensor],
        constants: Sequence[torch.Tensor],
        needed: tuple[Sequence[bool], Sequence[bool]],
    ) -> tuple[torch.Tensor, list[torch.Tensor | None], list[torch.Tensor | None]]:
        """Gradients of the first input, of the constants and of the stacked shards.

        ``kept``: results of the forward without the first. ``needed``: which constants and shards
        need gradients. Raises RuntimeError if a parameter changed since.
        """
        stacks = self.unit.sources
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
            # In the order of the forward, which is recomputed.
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
            given = checks.inputs_of([*leaves, carry[0]])
            with checks.forbid_host_values(self.unit.module, given, "backward"):
                found = iter(torch.autograd.grad(y, leaves, carry[0], allow_unused=True))
            of_x = next(found)
            sums = [_sum(total, next(found)) for total in carry[1:]]
            of_full = [next(found) if needs else None for needs in needed[1]]
            with contextlib.ExitStack() as inside:
                if hook_tensors:
                    inside.enter_context(hook_tensors)
                    forbid = checks.forbid_host_values
                    inside.enter_context(forbid(self.unit.module, given, "communication hook"))
                shares = self.unit.reduce_block(shards, of_full)
            reduced.extend(shares)
            of_x = _sum(torch.zeros_like(x), of_x)
            if prefetch:
                of_x = order.delay(self.unit.after_reductions(of_x, shares.values()))
            return [of_x, *sums, *following], list(shares.values())

        now = stamps(self.unit.shards)
        for stack, found, before in zip(self.unit.parameters, now, self._stamps, strict=True):
            if found != before:
                raise_changed_before_backward(self.unit.comms.label + stack.name)
        # Gather nothing early for the next unit.
        self.unit.order.end_backward()
        hook_tensors = checks.HookTensors() if self.unit.comms.hook else None
        zeros = [torch.zeros_like(constants[number]) for number in which]
        size = len(kept) - 1 - pieces - self.recorded
        last, kept, recorded = kept[:size], kept[size:][: 1 + pieces], kept[size:][1 + pieces :]
        (of_x, *of_constants), results = loop(
            body,
            [grad, *zeros, *last],
            [*kept, *stacks, *recorded, *self.sliced],
            [*constants, *self.shared],
            self.unit.world.device,
            seed=self.seed,
            reverse=True,
            ahead=[*range(not self.offloads, 1 + pieces + count)] if prefetch else range(len(last)),
            traced=hook_tensors.require_none_left if hook_tensors else None,
            unroll=self.unroll,
        )
        by_constant = dict(zip(which, of_constants, strict=False))
        by_stack: list[torch.Tensor | None] = [None] * count
        for number, share in zip(reduced, results, strict=True):
            widens = self.unit.stored[number].widens
            by_stack[number] = share if widens else share.to(stacks[number].dtype)
        # Autograd may have saved other tensor objects with the same values.
        by_stack = self.unit.given_gradients(self.unit.shards, by_stack)
        return of_x, [by_constant.get(number) for number in range(len(constants))], by_stack

    @property
    def unroll(self) -> int:
        """Blocks in one iteration: two with ``prefetch``, which alternate between two buffers.

        On CPU ranks one, because a program may use a collective's number only once.
        """
        return 2 if self.prefetch and self.unit.world.context is None else 1

    def _buffers(self, slices: Tensors, constants: Tensors) -> Tensors:
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
        args, kwargs = with_tensors(self.inputs, constants)
        enabled, dtype = self.autocast
        with contextlib.ExitStack() as stack:
            # Casts must not be cached from one trace to the next.
            stack.enter_context(torch.autocast("xla", dtype, enabled, cache_enabled=False))
            stack.enter_context(self.unit.installed(full, buffers))
            stack.enter_context(saved.over(self.unit.module))
            # The backward recomputes the entire block anyway.
            stack.enter_context(without_checkpoints())
            given = checks.inputs_of([x, *full, *buffers, *constants])
            stack.enter_context(checks.forbid_host_values(self.unit.module, given))
            stack.enter_context(checks.forbid_lost_changes(self.unit, full, given, (args, kwargs)))
            y = self.unit.module(x, *args, **kwargs)
            after = [buffer.value for buffer in self.unit.buffers]
        checks.require_like(y, x, self.unit.module)
        return y, after

    def _updated(self, before: Tensors, after: Tensors) -> list[int]:
        """Numbers of the buffers that the block has changed or replaced."""
        numbers = []
        pending = xlac.are_pending(after)
        stacks = enumerate(self.unit.buffers)
        for (number, stack), old, new, changed in zip(stacks, before, after, pending, strict=True):
            if not changed and new is old:
                continue
            if stack.shared:
                raise ValueError(
                    f"the forward of a block updates its buffer {stack.name}, which all blocks "
                    "share. Give each block a separate buffer"
                )
            numbers.append(number)
        return numbers


def _sum(total: torch.Tensor, part: torch.Tensor | None) -> torch.Tensor:
    return total if part is None else total + part

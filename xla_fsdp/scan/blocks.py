"""``scan_blocks``: equal blocks, traced and compiled once for any number of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from .. import xlac
from ..names import WRAPPED_PREFIX, dotted, names_hook
from ..sharded_module import finish_unit
from ..sharding import metadata
from ..sharding.layout import spec_of
from ..sharding.options import SCAN, FSDPOptions, takes_options
from ..sharding.sharded_parameter import as_sharded, local
from ..sharding.user_checks import raise_if_on_other_device, require_plain_call, require_values
from ..tpu import compiler_options
from ..wrapper import XlaFullyShardedDataParallel
from .building import ScanBuilder
from .run import Run
from .unit import ScanUnit, Stack


class Scan(torch.autograd.Function):
    """``apply(run, x, number_of_constants, *constants, *stacked shards)``."""

    @staticmethod
    def forward(
        ctx: Any, run: Run, x: torch.Tensor, number: int, *tensors: torch.Tensor
    ) -> torch.Tensor:
        y, *kept = run.forward(x, run.unit.sources)
        if kept:
            ctx.run, ctx.number, ctx.kept = run, number, len(kept)
            # Not the shards: torch drops the hooks of a leaf that a custom function saves while
            # saved-tensor hooks are active, as they are within a wrapper.
            ctx.save_for_backward(*kept, *tensors[:number])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.run.require_shards_unchanged()
        kept, constants = ctx.saved_tensors[: ctx.kept], ctx.saved_tensors[ctx.kept :]
        needs, number = ctx.needs_input_grad[3:], ctx.number
        of_x, of_constants, of_stacks = ctx.run.backward(
            grad,
            kept,
            ctx.run.unit.sources,
            constants,
            (needs[:number], needs[number:]),
        )
        # Autograd may have saved other tensor objects with the same values.
        of_stacks = ctx.run.unit.gradients.given(ctx.run.unit.shards, of_stacks)
        return None, of_x, None, *of_constants, *of_stacks


@takes_options(SCAN)
def scan_blocks(blocks: Iterable[nn.Module], **options: Any) -> ScannedBlocks:
    """Shards equal blocks and runs them one after the other, as a loop of the compiled program.

    The program contains one block's forward and one block's backward for any number of blocks, so
    neither tracing nor compiling takes longer with depth. An iteration gathers a block's
    parameters, computes, and frees them. The backward does so again, recomputes the block and
    reduce-scatters its gradients. Of the activations only the blocks' inputs are stored, as if
    every block were ``FSDP(checkpoint_module(block))``.

    ``x = scan_blocks(...)(x)``. Further arguments are passed to every block: ``blocks(x, mask)``.
    Tensors among them may require gradients. Inside a wrapped model the result is a wrapper like
    any other::

        model.blocks = scan_blocks((Block() for _ in range(32)), compute_dtype=torch.bfloat16)
        model = XlaFullyShardedDataParallel(model, compute_dtype=torch.bfloat16)

    State dicts and shard metadata name every block's parameters (``blocks.3.up.weight``), as if
    each block were wrapped separately, and can be exchanged with those of such a model. The
    parameters themselves are stacked, ``(len(blocks), shard)``, and ``named_parameters()`` calls
    them ``blocks.up.weight``; optimizer state has their shape.

    Args:
        blocks: modules that take a tensor and return one of the same shape and dtype, equal in
            all but the values of their parameters and buffers. A generator is consumed one block
            at a time, so that only one full block exists. May be on CPU, XLA or meta device.
        options: those of :class:`~xla_fsdp.FSDPOptions`; ``ignore``, ``offload``, ``prefetch`` and
            ``keep`` exist only for this function. ``reshard_after_forward=False`` and
            ``flatten_parameters=True`` are not supported. Barriers and the wrapper's options for
            prefetching have no effect: see ``prefetch``. ``no_sync()`` has no effect either: a
            backward always reduces, which gives the same gradients.

    Raises:
        ValueError: blocks differ (the message says where), share parameters, are wrapped, or
            contain hooks or recurrent modules; or an option is not supported. In the first forward:
            a block does not return a tensor like its input, or does not call a submodule named in
            ``keep``.
        TypeError: a block is not a module; ``offload`` or ``prefetch`` is not a bool; ``ignore`` or
            ``keep`` is a string; a submodule in ``keep`` returns no tensor; an option is unknown.
        RuntimeError: on v5e and v6e, where the compiler would crash: the message says what to call
            before ``launch``.
    """
    return ScannedBlocks(blocks, FSDPOptions.of(SCAN, **options))


class ScannedBlocks(XlaFullyShardedDataParallel):
    """The result of :func:`scan_blocks`. ``module`` is the block that is traced for all blocks."""

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
        """Runs all blocks on ``x``; ``args`` and ``kwargs`` are passed to each."""
        require_plain_call(type(self).__name__)
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
            run = Run(unit, x, (args, kwargs))
            # Gather nothing early for the next unit: it would stay in memory during the loop.
            unit.order.end_forward()
            return Scan.apply(run, x, len(run.constants), *run.constants, *unit.shards)
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
    """Raises ValueError if ``options`` contain something that a wrapper supports but a loop does
    not."""
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
    """State-dict hook: splits stacked tensors into a tensor for each block, block by block."""
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
    if rows:
        # Compute all in one program, instead of one program for each copy to the host.
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

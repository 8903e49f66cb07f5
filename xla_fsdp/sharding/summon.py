"""Full parameters outside of a forward: to read them, to change them, to initialize them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import nn

from ..collectives.host_data import as_data
from ..collectives.random_state import synced_device
from ..ranks.autograd_thread import in_backward
from ..wording import flag
from .freeing import stamps
from .gathering import computing_passes
from .sharded_parameter import is_user_attribute, local, on_local_parts
from .sharded_tensor import ShardedTensor, raise_replaced
from .state import FSDPState, find_sharded_outside, unit_of


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within, the modules in ``module`` have full parameters. All ranks must enter the context.

    They are ``nn.Parameter`` in the dtype in which they are stored, under their names in the
    unwrapped module. Optimizers need the shards: make them outside of this context.

    Args:
        module: a wrapper, or a module with wrappers in it. Without any wrapper, nothing happens.
        recurse: summon the parameters of all wrappers in ``module``, not only of itself.
        writeback: copy each rank's changes into its shards at the end, so all ranks must make the
            same changes. After an exception nothing is copied.
        rank0_only: other ranks keep shards. Not with ``writeback``.
        offload_to_cpu: parameters are on the CPU.
        with_grads: ``.grad`` is the full gradient, and its changes are copied back too.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: arguments exclude each other, ``module`` contains scanned blocks, or a wrapper
            around ``module`` has parameters of it.
        RuntimeError: called in a forward or backward, or parameters are summoned already. At the
            end: a parameter was replaced, or its shape or dtype was changed.
    """
    given = locals()
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    for name, value in given.items():
        if name != "module":
            flag(name, value)
    if writeback and rank0_only:
        raise ValueError(
            "writeback=True and rank0_only=True exclude each other, because every rank copies its "
            "own changes into its shards. Pass writeback=False, or leave rank0_only out"
        )
    among = module.modules() if recurse else [module]
    wrappers = [(one, unit) for one in among if (unit := unit_of(one)) is not None]
    _require_possible(module, [unit for _, unit in wrappers], recurse, with_grads)
    if not wrappers:
        yield
        return
    how = _Arguments(writeback, rank0_only, offload_to_cpu, with_grads)
    # Without tied parameters that an outer context has already.
    summoned: dict[ShardedTensor, FullParameters] = {}
    try:
        with synced_device():
            for wrapper, unit in wrappers:
                _summon(wrapper, unit, how, summoned)
        yield
        if writeback:
            for _, unit in wrappers:
                _require_writable(unit)
    finally:
        for tensor in summoned:
            tensor.summoned = None
        for wrapper, unit in wrappers:
            unit.summoned = False
            for slot in unit.slots:
                slot.restore_sharded()
            for tensor in unit.flattened:
                wrapper._parameters[tensor.key] = tensor.shard
            unit.refresh_rnns()
    if writeback:
        with synced_device():
            _write_back(summoned, with_grads)


def full_params_of(unit: FSDPState) -> list[torch.Tensor]:
    """The full parameters of ``unit``: summoned, or in a forward or backward.

    Raises RuntimeError if the unit has none now.
    """
    # With rank0_only only rank 0 has them.
    if unit.summoned and all(tensor.summoned.parameters for tensor in unit.tensors):
        return [parameter for tensor in unit.tensors for parameter in tensor.summoned.parameters]
    held = unit.active
    if held is None and unit.tensors:
        raise RuntimeError(
            f"full_params of {unit.title} are not available: this rank has only its shards "
            "(sharded_params) now. Read full parameters within FSDP.summon_full_params(model), or "
            "in the forward. If torch.jit read them, give it a model that is not wrapped, with the "
            "values that xla_fsdp.full_state_dict(model) returns"
        )
    return [] if held is None else list(held.full)


def require_no_scanned(units: Sequence[FSDPState]) -> None:
    if any(unit.depth for unit in units):
        raise ValueError(
            "scanned blocks cannot be summoned: one traced module represents all of them, so there "
            "is no module for each block's full parameters. Read them with "
            "xla_fsdp.full_state_dict(model, rank0_only=False), change them with "
            "xla_fsdp.load_full_state_dict, or summon the other wrappers one by one with "
            "recurse=False"
        )


def _require_possible(
    module: nn.Module, units: Sequence[FSDPState], recurse: bool, with_grads: bool
) -> None:
    require_no_scanned(units)
    if computing_passes() or in_backward():
        raise RuntimeError(
            "parameters cannot be summoned in a forward or backward, which gathers and frees "
            "parameters itself. Summon them before or after it"
        )
    for unit in units:
        unit.reset_after_failure()
        if unit.summoned:
            raise RuntimeError(
                f"parameters of {unit.title} are summoned already. Leave that context first"
            )
        if with_grads and any(tensor.unreduced for tensor in unit.tensors):
            raise RuntimeError(
                f"with_grads=True, but gradients of {unit.title} are not reduced yet. Run a "
                "backward outside of no_sync first, or call zero_grad()"
            )
    outside = find_sharded_outside(module, units) if recurse else None
    if outside is not None:
        raise ValueError(
            f"parameters of {outside!r} belong to a wrapper around the given module. Summon "
            "the parameters of that wrapper (with recurse=False of no other wrapper)"
        )


def _summon(
    wrapper: nn.Module,
    unit: FSDPState,
    how: _Arguments,
    summoned: dict[ShardedTensor, FullParameters],
) -> None:
    """Gathers the parameters of ``unit``, puts them into its modules, and adds them to
    ``summoned``."""
    for tensor in unit.tensors:
        if tensor.summoned is not None and tensor.summoned.how != how:
            raise RuntimeError(
                "an outer context summoned a parameter that both wrappers use (tied weights) with "
                f"other arguments, {tensor.summoned.how} instead of {how}. Use the same arguments "
                "in both"
            )
    unit.summoned = True
    new = [tensor for tensor in unit.tensors if tensor.summoned is None]
    values = {tensor: _full_members(tensor, tensor.shard) for tensor in new}
    grads = {
        tensor: _full_members(tensor, grad)
        for tensor in new
        if how.with_grads and (grad := tensor.shard.grad) is not None
    }
    torch_xla.sync(wait=True)  # finish the common gathers before ranks act differently

    def moved(value: torch.Tensor) -> torch.Tensor:
        return value.cpu() if how.offload_to_cpu else value

    wanted = xr.global_ordinal() == 0 or not how.rank0_only
    for tensor, members in values.items():
        parameters = []
        for number, value in enumerate(members if wanted else ()):
            full = nn.Parameter(moved(value), tensor.shard.requires_grad)
            if tensor in grads:
                full.grad = moved(grads[tensor][number])
            for name, attribute in tensor.attributes_of(number).items():
                if is_user_attribute(name):
                    full.__dict__[name] = attribute
            parameters.append(full)
        tensor.summoned = FullParameters(how, parameters, *_marks(parameters))
        summoned[tensor] = tensor.summoned
    if not wanted:
        return
    for tensor in unit.flattened:
        del wrapper._parameters[tensor.key]
    for slot in unit.slots:
        slot.put(_parameter(unit, slot.index))
    unit.refresh_rnns()


def _require_writable(unit: FSDPState) -> None:
    for slot in unit.slots:
        own, name = _parameter(unit, slot.index), unit.name_of(slot.index)
        if slot.module._parameters.get(slot.name) is not own:
            raise_replaced(name)
        tensor, member = unit.members[slot.index]
        expected = tensor.layout.members[member].shape, tensor.shard.dtype
        if (tuple(own.shape), own.dtype) != expected:
            raise RuntimeError(
                f"parameter {name!r} was changed to shape {tuple(own.shape)} and dtype "
                f"{own.dtype}, but its shards have {expected[0]} and {expected[1]}. Change only "
                "its values"
            )
        if own.requires_grad != tensor.summoned.parameters[0].requires_grad:
            raise RuntimeError(
                f"{name!r} was frozen or unfrozen without the parameters in the same flattened "
                "vector. Do it for all of them, or wrap without flatten_parameters"
            )


@torch.no_grad()
def _write_back(summoned: dict[ShardedTensor, FullParameters], with_grads: bool) -> None:
    for tensor, full in summoned.items():
        values, grads = _marks(full.parameters)
        if values != full.values:
            with on_local_parts():
                tensor.shard.copy_(_cut(tensor, full.parameters))
        if with_grads and grads != full.grads:
            own = None
            if any(p.grad is not None for p in full.parameters):
                zeros_for_none = [
                    torch.zeros_like(p) if p.grad is None else p.grad for p in full.parameters
                ]
                own = _cut(tensor, zeros_for_none)
            with on_local_parts():
                tensor.shard.grad = own
        tensor.shard.requires_grad_(full.parameters[0].requires_grad)
    torch_xla.sync()  # run the update as a separate program


def _parameter(unit: FSDPState, index: int) -> nn.Parameter:
    tensor, member = unit.members[index]
    return tensor.summoned.parameters[member]


@dataclass(frozen=True)
class _Arguments:
    """Equal on all ranks."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


@dataclass(frozen=True, eq=False)
class FullParameters:
    """Of one sharded tensor, with :func:`_marks` of them when they were gathered."""

    how: _Arguments
    parameters: list[nn.Parameter]
    values: list[object]
    grads: list[object]


def _full_members(tensor: ShardedTensor, shard: torch.Tensor) -> list[torch.Tensor]:
    """The full members of ``tensor``, from its shard or that of its gradient."""
    spec = tensor.shard_spec()
    assert spec is not None
    own = local(shard)
    own = own if own.device.type == "xla" else as_data(own, spec.world.device)
    return tensor.layout.split(spec.gather(own))


def _cut(tensor: ShardedTensor, full: Sequence[torch.Tensor]) -> torch.Tensor:
    spec = tensor.shard_spec()
    assert spec is not None
    joined = torch.cat([one.reshape(-1) for one in full]) if tensor.flattened else full[0]
    return spec.cut(joined).to(tensor.shard.device)


def _marks(parameters: Sequence[nn.Parameter]) -> tuple[list[object], list[object]]:
    """Equal if neither values nor gradients of ``parameters`` changed in between."""
    return [_mark(one) for one in parameters], [_mark(one.grad) for one in parameters]


def _mark(tensor: torch.Tensor | None) -> object:
    if tensor is None:
        return None
    # Not all changes of a CPU tensor can be detected, so it never counts as unchanged.
    return stamps([tensor])[0] if tensor.device.type == "xla" else object()

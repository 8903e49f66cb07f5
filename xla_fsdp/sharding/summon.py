"""Full parameters outside of a forward: to look at them, to change them, to initialise them.

While parameters are summoned, the modules hold an ``nn.Parameter`` of the whole in the place of the
shard (and the wrapper no flattened vectors), so ``module.weight``, ``named_parameters()`` and
``state_dict()`` are those of the unwrapped module. The shards live on beside them, and get their
part of what was changed at the end.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import nn

from ..collectives.host_data import as_data
from ..collectives.order import Order
from ..collectives.random_state import at_rest
from ..collectives.world import World
from .around import name_held_outside
from .attributes import refuse_replacement
from .comms import Communicator
from .freeing import stamps
from .gathering import computing_passes
from .sharded_parameter import is_users, local, on_local_parts
from .sharded_tensor import ShardedTensor
from .state import FSDPState, unit_of


@contextlib.contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Within, the modules in ``module`` hold full parameters; must be entered on every rank.

    They are ``nn.Parameter`` in the dtype in which they are stored, under their names in the
    unwrapped module. Afterwards the modules hold the shards again, the same objects as before. An
    optimizer needs these, so make it outside.

    Args:
        module: a wrapper, or a module with wrappers in it; without any nothing happens.
        recurse: those of all wrappers in ``module``. ``False``: of ``module`` itself only.
        writeback: take what was changed over into the shards, every rank its own part; so ranks
            must change them alike. Not after an exception: shards are then as they were.
        rank0_only: only rank 0 gets full parameters, others keep shards; not with ``writeback``.
        offload_to_cpu: parameters are on the CPU, on every rank that gets them.
        with_grads: ``.grad`` is the full gradient, and is taken over alike.

    Raises:
        TypeError: an argument is of another type.
        ValueError: arguments that exclude each other, scanned blocks, or parameters in ``module``
            that a wrapper around it holds.
        RuntimeError: in a forward or backward, or where parameters are summoned already. On the
            way out: a parameter was replaced by another tensor, or got another shape or dtype.
    """
    given = locals()
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    for name, value in given.items():
        if name != "module" and not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {value!r}")
    if writeback and rank0_only:
        raise ValueError(
            "writeback=True and rank0_only=True exclude each other: every rank takes its part of "
            "what it changed itself; pass writeback=False, or leave rank0_only out"
        )
    among = module.modules() if recurse else [module]
    wrappers = [(one, unit) for one in among if (unit := unit_of(one)) is not None]
    _require_possible(module, [unit for _, unit in wrappers], recurse, with_grads)
    if not wrappers:
        yield
        return
    summoned = _Summoned(_Arguments(writeback, rank0_only, offload_to_cpu, with_grads))
    try:
        with at_rest():
            for wrapper, unit in wrappers:
                summoned.add(wrapper, unit)
        yield
        if writeback:
            summoned.require_writable()
    finally:
        summoned.restore()
    if writeback:
        with at_rest():
            summoned.write_back()


def full_params_of(unit: FSDPState) -> list[torch.Tensor]:
    """The full parameters of ``unit`` while it holds them: summoned, or in its forward or backward.

    Raises:
        RuntimeError: it holds none.
    """
    if unit.summoned:
        summoned = [_of(tensor) for tensor in unit.tensors]
        if all(full.parameters for full in summoned):  # with rank0_only: not on other ranks
            return [parameter for full in summoned for parameter in full.parameters]
    held = unit.active
    if held is None and unit.tensors:
        raise RuntimeError(
            f"full_params of {unit.title!r}: this rank has only its shards (sharded_params) now. "
            "Read full parameters within FSDP.summon_full_params(model), or in the forward"
        )
    return [] if held is None else list(held.full)


def require_no_scanned(units: Sequence[FSDPState]) -> None:
    """Raises ValueError if one of ``units`` is that of scanned blocks."""
    if any(unit.depth for unit in units):
        raise ValueError(
            "scanned blocks have no modules of their own to hold full parameters, only the one "
            "that is traced for all: read them with xla_fsdp.full_state_dict(model, "
            "rank0_only=False), change them with xla_fsdp.load_full_state_dict, or summon the "
            "wrappers beside them one by one with recurse=False"
        )


def _require_possible(
    module: nn.Module, units: Sequence[FSDPState], recurse: bool, with_grads: bool
) -> None:
    require_no_scanned(units)
    if computing_passes() or torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            "parameters can not be summoned in a forward or backward, which gathers and frees "
            "those of its own: do it before or after"
        )
    for unit in units:
        unit.settle()
        if unit.summoned:
            raise RuntimeError(
                f"parameters of {unit.title!r} are summoned already: leave that context before"
            )
        if with_grads and unit.gradients.are_held:
            raise RuntimeError(
                f"with_grads=True, but gradients of {unit.title!r} are not reduced yet: run the "
                "first backward outside of no_sync before, or zero_grad()"
            )
    outside = name_held_outside(module, units) if recurse else None
    if outside is not None:
        raise ValueError(
            f"parameters of {outside!r} belong to a wrapper around the given module: summon those "
            "of that wrapper (recurse=False: of no other)"
        )


class _Summoned:
    """What one context holds in full, and how to undo it."""

    def __init__(self, how: _Arguments) -> None:
        self.how = how
        # Other ranks only take part in the gathers.
        self.wanted = xr.global_ordinal() == 0 or not how.rank0_only
        # Without tied parameters that a context around this one holds.
        self.summoned: dict[ShardedTensor, FullParameters] = {}
        self.entered: list[tuple[nn.Module, FSDPState]] = []

    def add(self, wrapper: nn.Module, unit: FSDPState) -> None:
        """Has the modules of ``unit``, which is that of ``wrapper``, hold full parameters."""
        for tensor in unit.tensors:
            if tensor.summoned is not None and _of(tensor).how != self.how:
                raise RuntimeError(
                    "a context around this one holds a parameter that both use (tied weights), "
                    f"with other arguments: {_of(tensor).how} and {self.how}"
                )
        self.entered.append((wrapper, unit))
        unit.summoned = True
        new = [tensor for tensor in unit.tensors if tensor.summoned is None]
        graded = [t for t in new if self.how.with_grads and t.shard.grad is not None]
        device = unit.world.device
        values = _gather(unit, new, [_on_device(local(t.shard), device) for t in new])
        shares = [
            _on_device(local(t.shard.grad), device) for t in graded if t.shard.grad is not None
        ]
        grads = _gather(unit, graded, shares)
        torch_xla.sync(wait=True)  # before ranks do different things with what they all gathered
        for tensor, members in values.items():
            self.summoned[tensor] = tensor.summoned = FullParameters.of(
                self.how, unit.world, self._parameters(tensor, members, grads.get(tensor))
            )
        if not self.wanted:
            return
        for tensor in unit.flattened:
            del wrapper._parameters[tensor.key]
        for place in unit.places:
            place.put(_parameter(unit, place.index))
        unit.refresh_rnns()

    def _parameters(
        self,
        tensor: ShardedTensor,
        values: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor] | None,
    ) -> list[nn.Parameter]:
        if not self.wanted:
            return []
        trainable = tensor.shard.requires_grad
        parameters = [nn.Parameter(self._moved(value), trainable) for value in values]
        if grads is not None:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = self._moved(grad)
        for number, parameter in enumerate(parameters):
            for name, attribute in tensor.attributes_of(number).items():
                if is_users(name):
                    parameter.__dict__[name] = attribute
        return parameters

    def _moved(self, value: torch.Tensor) -> torch.Tensor:
        return value.cpu() if self.how.offload_to_cpu else value

    def require_writable(self) -> None:
        """Raises RuntimeError where what was changed can not be taken over."""
        for _, unit in self.entered:
            for place in unit.places:
                own = _parameter(unit, place.index)
                name = unit.name_of(place.index)
                if place.module._parameters.get(place.name) is not own:
                    refuse_replacement(name)
                tensor, member = unit.member_of(place.index)
                expected = tensor.layout.members[member].shape, tensor.shard.dtype
                if (tuple(own.shape), own.dtype) != expected:
                    raise RuntimeError(
                        f"parameter {name!r} was given shape {tuple(own.shape)} and dtype "
                        f"{own.dtype}; it is sharded as {expected[0]} and {expected[1]}, and stays "
                        "so: change its values only"
                    )
                if own.requires_grad != _of(tensor).parameters[0].requires_grad:
                    raise RuntimeError(
                        f"{name!r} was frozen or unfrozen without the parameters that it is "
                        "flattened with: do it for all of them, or wrap without flatten_parameters"
                    )

    def restore(self) -> None:
        """Puts the shards back where they were."""
        for wrapper, unit in self.entered:
            unit.summoned = False
            for tensor in unit.tensors:
                if tensor in self.summoned:
                    tensor.summoned = None
            for place in unit.places:
                place.rest()
            for tensor in unit.flattened:
                wrapper._parameters[tensor.key] = tensor.shard
            unit.refresh_rnns()

    @torch.no_grad()
    def write_back(self) -> None:
        """Takes what was changed over into the shards."""
        for tensor, full in self.summoned.items():
            values, grads = full.changed()
            if values:
                with on_local_parts():
                    tensor.shard.copy_(_cut(tensor, full.world, full.parameters))
            if self.how.with_grads and grads:
                found = [parameter.grad for parameter in full.parameters]
                own = None
                if any(grad is not None for grad in found):
                    pairs = zip(found, full.parameters, strict=True)
                    some = [torch.zeros_like(p) if grad is None else grad for grad, p in pairs]
                    own = _cut(tensor, full.world, some)
                with on_local_parts():
                    tensor.shard.grad = own
            tensor.shard.requires_grad_(full.parameters[0].requires_grad)
        torch_xla.sync()  # a program of its own


def _parameter(unit: FSDPState, index: int) -> nn.Parameter:
    tensor, member = unit.member_of(index)
    return _of(tensor).parameters[member]


def _of(tensor: ShardedTensor) -> FullParameters:
    assert isinstance(tensor.summoned, FullParameters)
    return tensor.summoned


@dataclass(frozen=True)
class _Arguments:
    """What is asked for, the same on every rank."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool


@dataclass(frozen=True, eq=False)
class FullParameters:
    """The full parameters in one sharded tensor, and what they were when they came."""

    how: _Arguments
    world: World
    parameters: list[nn.Parameter]
    values: list[object]
    grads: list[object]

    @classmethod
    def of(cls, how: _Arguments, world: World, parameters: list[nn.Parameter]) -> FullParameters:
        return cls(how, world, parameters, *_seen(parameters))

    def changed(self) -> tuple[bool, bool]:
        """Whether values, and whether gradients, may be others by now."""
        values, grads = _seen(self.parameters)
        return values != self.values, grads != self.grads


def _gather(
    unit: FSDPState, tensors: Sequence[ShardedTensor], shards: Sequence[torch.Tensor]
) -> dict[ShardedTensor, list[torch.Tensor]]:
    """The members of every one of ``tensors`` in full, in the dtype of their ``shards``."""
    exact = replace(unit.options, compute_dtype=None, mixed_precision=None)
    comms = Communicator(exact, unit.world)
    comms.label = unit.comms.label
    # What is sent need be no Parameter.
    sent = [
        replace(tensor, shard=shard, copy=None)  # type: ignore[arg-type]
        for tensor, shard in zip(tensors, shards, strict=True)
    ]
    full = iter(comms.trace_gathers(sent, Order(), (), backward=False))
    return {tensor: [next(full) for _ in tensor.layout.members] for tensor in tensors}


def _on_device(shard: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``shard``, or a copy of one that is on the host."""
    return shard if shard.device.type == "xla" else as_data(shard, device)


def _cut(tensor: ShardedTensor, world: World, full: Sequence[torch.Tensor]) -> torch.Tensor:
    """This rank's shard of the ``full`` members of ``tensor``, where the shard is."""
    layout, where = tensor.layout, tensor.shard.device
    if not layout.numel or full[0].device.type == "cpu":
        return layout.cut(full, world.rank).to(where)
    by_rank = layout.join(full).view(world.size, -1)
    own = torch.index_select(by_rank, 0, world.rank_on_device).view(layout.shard_shape)
    return own if where.type == "xla" else own.cpu()


def _seen(parameters: Sequence[nn.Parameter]) -> tuple[list[object], list[object]]:
    """Equal if neither the values nor the gradients of ``parameters`` were changed in between."""
    return [_mark(one) for one in parameters], [_mark(one.grad) for one in parameters]


def _mark(tensor: torch.Tensor | None) -> object:
    if tensor is None:
        return None
    # Changes of a tensor on the CPU cannot all be seen: never the same.
    return stamps([tensor])[0] if tensor.device.type == "xla" else object()

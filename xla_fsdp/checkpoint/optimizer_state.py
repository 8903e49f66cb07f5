"""Lists the optimizer state that this rank stores, by parameter of the unsharded model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError, UnsupportedValueError
from ..consolidate.format import values
from ..consolidate.format.digests import digest
from ..consolidate.format.dtypes import dtype_name
from ..consolidate.format.manifest import NOT_OPTIONS, Group, Optimizer, State
from ..consolidate.format.strict import write_json
from ..optim.saved import LazyState, StateConverter, state_converter_of
from ..sharding.sharded_parameter import local, on_local_parts
from .inventory import Inventory, ParameterShard
from .rank_exchange import RankExchange
from .readable_tensor import ReadableTensor

ParameterGroups = list[list[ParameterShard]]

# These are numbers in all optimizers of torch.
_NUMBERS = {"step", "mu", "eta", "mu_product"}


@dataclass(frozen=True, eq=False)
class OptimizerStateShard:
    key: str
    tensor: torch.Tensor | LazyState
    parameters: list[ParameterShard]


def describe_optimizer(
    optimizer: torch.optim.Optimizer, inventory: Inventory
) -> tuple[Optimizer, list[OptimizerStateShard]]:
    """Describes the optimizer for the manifest, and lists the state tensors of this rank.

    Raises as :func:`members_of_groups`, and UnsupportedValueError for state of other shapes.
    """
    members = members_of_groups(inventory, optimizer)
    groups = tuple(
        Group(
            tuple(shard.name for shard in own),
            {
                name: values.encode(value, f"option {name!r} of parameter group {number}")
                for name, value in options(group).items()
            },
        )
        for number, (group, own) in enumerate(zip(optimizer.param_groups, members, strict=True))
    )
    state, tensors = describe_state(optimizer, inventory)
    return Optimizer(type(optimizer).__name__, groups, state), tensors


def describe_state(
    optimizer: torch.optim.Optimizer, inventory: Inventory
) -> tuple[dict[str, State], list[OptimizerStateShard]]:
    """The state by parameter, and its tensors. Raises as :func:`describe_optimizer`."""
    elementwise = elementwise_keys(
        (key, value, local(parameter).shape)
        for parameter in optimizer.state
        for key, value in local_state(optimizer, parameter).items()
    )
    state: dict[str, State] = {}
    tensors: dict[tuple[str, int], OptimizerStateShard] = {}
    converts = state_converter_of(optimizer) is not None
    for shards, own in _state_of_members(optimizer, inventory):
        sharded: dict[str, str] = {}
        single: dict[str, Any] = {}
        shape = local(shards[0].holder).shape
        for key, value in own.items():
            where = f"optimizer state {key!r} of {shards[0].name!r}"
            if not isinstance(key, str) or not key or "/" in key:
                raise UnsupportedValueError(
                    f"{where}: keys of state must be non-empty strings without a slash"
                )
            is_tensor = isinstance(value, torch.Tensor)
            is_elementwise = is_tensor and value.shape == shape and key in elementwise
            if isinstance(value, LazyState) or (is_elementwise and not converts):
                sharded[key] = dtype_name(value.dtype, where)
                one = tensors.setdefault((key, id(value)), OptimizerStateShard(key, value, []))
                one.parameters.extend(shards)
                continue
            if is_tensor and value.numel() != 1 and not converts:
                raise UnsupportedValueError(
                    f"{where} has shape {list(value.shape)}, but the parameter's shard has "
                    f"{list(shape)}. State must have the parameter's shape, or be one value. "
                    "Optimizers whose state depends on the full matrix cannot be resharded: use "
                    "another one."
                )
            if not converts:
                _refuse_tensors_in(value, where)
            single[key] = {"value": values.encode(value, where)}
            if is_tensor:
                single[key]["on"] = "host" if value.device.type == "cpu" else "device"
        if own:
            state.update((shard.name, State(sharded, single)) for shard in shards)
    return state, list(tensors.values())


def agree_on_state(
    exchange: RankExchange, inventory: Inventory, optimizer: torch.optim.Optimizer
) -> tuple[ParameterGroups, dict[str, State], list[OptimizerStateShard]]:
    """The groups' parameters, and :func:`describe_state`.

    Raises MetadataMismatchError if two ranks have state for other parameters, keys or dtypes.
    """

    def describe() -> tuple[tuple, str]:
        groups = members_of_groups(inventory, optimizer)
        state, tensors = describe_state(optimizer, inventory)
        kinds = [
            [name, own.sharded, {key: _kind(one) for key, one in own.single.items()}]
            for name, own in state.items()
        ]
        return (groups, state, tensors), digest(write_json(kinds))

    return exchange.run_and_compare(
        "inspect the optimizer",
        describe,
        "the optimizer of rank {rank} has state for other parameters, or other keys or dtypes, "
        "than that of rank 0. Make the same optimizer steps on all ranks.",
    )


def _kind(single: Mapping[str, Any]) -> str:
    value = values.decode(single["value"], "optimizer state")
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def _state_of_members(
    optimizer: torch.optim.Optimizer, inventory: Inventory
) -> Iterator[tuple[list[ParameterShard], Mapping[str, Any]]]:
    """Yields state with its parameters: one if the optimizer converts state, else the holder's."""
    converter = state_converter_of(optimizer)
    for holder, shards in inventory.by_holder().items():
        if converter is None:
            yield shards, local_state(optimizer, holder)
        elif state := optimizer.state.get(holder):
            with on_local_parts():
                members = converter.saved_state(holder, state)
            yield from (([shard], members[number_in_holder(shard)]) for shard in shards)


def local_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """The state of ``parameter``, with this rank's plain part for sharded tensors."""
    own = optimizer.state.get(parameter, {})
    return {key: local(v) if isinstance(v, torch.Tensor) else v for key, v in own.items()}


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}


def members_of_groups(inventory: Inventory, optimizer: torch.optim.Optimizer) -> ParameterGroups:
    """The parameters of the unsharded model in each of the optimizer's groups.

    Raises TypeError, ModelMismatchError or UnsupportedValueError if ``optimizer`` cannot be saved.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    strays = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if strays:
        raise UnsupportedValueError(
            f"optimizer: {type(optimizer).__name__} has the state {strays[0]!r:.80}, which belongs "
            "to no parameter, so it cannot be saved or loaded. Keep it in an option of the "
            "parameter groups."
        )
    by_holder = inventory.by_holder()
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        strangers = [holder for holder in group["params"] if holder not in by_holder]
        if strangers:
            raise ModelMismatchError(
                f"optimizer: {len(strangers)} parameters of group {number} are not in the model, "
                f"the first of shape {list(strangers[0].shape)}. Create the optimizer after "
                "wrapping, from model.parameters(); if layers were removed from the model, remove "
                "their parameters from the optimizer's groups."
            )
        groups.append([shard for holder in group["params"] for shard in by_holder[holder]])
    return groups


def elementwise_keys(seen: Iterable[tuple[str, Any, Sequence[int]]]) -> set[str]:
    """Keys of state that has one element for each element of the parameter.

    For a 0-d parameter, other parameters with the same key decide. If there are none, all keys are
    elementwise except the counters of torch's optimizers. ``seen``: key, value, parameter's shape.
    """
    elementwise: set[str] = set()
    single: set[str] = set()
    unsure: set[str] = set()
    for key, value, shape in seen:
        own = getattr(value, "shape", None)
        if own is not None and tuple(own) == tuple(shape):
            (elementwise if shape else unsure).add(key)
        elif value is not None:
            single.add(key)
    return elementwise | (unsure - single - _NUMBERS)


def _refuse_tensors_in(value: Any, where: str) -> None:
    """Raises for a tensor in a container: it may belong to a shard or to the full parameter."""
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, list, tuple, set)):
        for each in inner:
            if isinstance(each, torch.Tensor) and each.numel() != 1:
                raise UnsupportedValueError(
                    f"{where} has a tensor of shape {list(each.shape)} inside a "
                    f"{type(value).__name__}. State must be a tensor of the parameter's shape, or "
                    "one value: use another optimizer."
                )
            _refuse_tensors_in(each, where)


def unsharded_placeholder(shard: ParameterShard) -> nn.Parameter:
    """A CPU tensor with the shape of the unsharded parameter that stores one element."""
    return nn.Parameter(
        torch.zeros((), dtype=shard.dtype, device="cpu").expand(shard.shape), requires_grad=False
    )


def convert_state_to_load(
    saver: StateConverter, state: Mapping[str, Mapping[str, Any]], inventory: Inventory, label: str
) -> dict[str, dict[str, Any]]:
    """Converts the ``state`` of an unsharded optimizer, by name. Raises ModelMismatchError."""
    known = {name: shard for shard in inventory.parameters for name in shard.names}
    found: dict[str, dict[str, Any]] = {}
    for name, own in state.items():
        if name not in known:
            found[name] = {}  # match_optimizer raises for it
            continue
        full = {
            k: v.read_full() if isinstance(v, ReadableTensor) and v.shape else v
            for k, v in own.items()
        }
        try:
            (converted,) = saver.saved_state(unsharded_placeholder(known[name]), full)
        except ValueError as error:
            raise ModelMismatchError(
                f"{label}: the state of {name!r} is not as this optimizer has it: {error}. Load "
                "it into the kind of optimizer that saved it."
            ) from error
        found[name] = {
            key: _readable(value, known[name].shape) if isinstance(value, LazyState) else value
            for key, value in converted.items()
        }
    return found


def _readable(made: LazyState, shape: tuple[int, ...]) -> ReadableTensor:
    def fill(out: torch.Tensor, begin: int) -> None:
        out.copy_(made.make().reshape(-1)[begin : begin + out.numel()])

    return ReadableTensor(shape, made.dtype, fill, in_memory=True)


def number_in_holder(shard: ParameterShard) -> int:
    """The number of the parameter in its holder. A stack is counted block by block."""
    if shard.layout is None:
        return 0
    block = shard.first // math.prod(shard.layout.shard_shape) if shard.first else 0
    return block * len(shard.layout.members) + shard.member

"""What this rank holds of an optimizer's state, in terms of the unsharded model.

A tensor of the shape of its parameter holds something for every element, and is cut like the
parameter. All else (``step``) is the same for the whole parameter, and on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..consolidate.errors import ModelMismatchError, UnsupportedValueError
from ..consolidate.format import values
from ..consolidate.format.dtypes import dtype_name
from ..consolidate.format.manifest import NOT_OPTIONS, Group, Optimizer, State
from ..sharding.sharded_parameter import local
from .inventory import Held, Inventory
from .optimizer_forms import Made, own_words

# Of each of the optimizer's groups, the parameters of the unsharded model.
Groups = list[list[Held]]

# State that is one number for a parameter in all of torch's optimizers.
_NUMBERS = {"step", "mu", "eta", "mu_product"}


@dataclass(frozen=True, eq=False)
class HeldState:
    """One tensor of an optimizer's state, and the parameters whose elements it is about."""

    key: str
    tensor: torch.Tensor | Made
    parameters: Sequence[Held]


def describe_optimizer(
    optimizer: torch.optim.Optimizer, inventory: Inventory
) -> tuple[Optimizer, list[HeldState]]:
    """The optimizer as the manifest describes it, and the tensors of this rank.

    Raises:
        TypeError: no optimizer.
        ModelMismatchError: it optimizes something that is not in the model.
        UnsupportedValueError: it keeps something else than tensors of the parameter's shape and
            plain values.
    """
    members = members_of_groups(inventory, optimizer)
    elementwise = elementwise_keys(
        (key, value, local(parameter).shape)
        for parameter in optimizer.state
        for key, value in local_state(optimizer, parameter).items()
    )
    groups = tuple(
        Group(
            tuple(held.name for held in own),
            {
                name: values.encode(value, f"option {name!r} of parameter group {number}")
                for name, value in options(group).items()
            },
        )
        for number, (group, own) in enumerate(zip(optimizer.param_groups, members, strict=True))
    )
    state: dict[str, State] = {}
    tensors: list[HeldState] = []
    for parameter, helds in inventory.by_holder().items():
        words = own_words(optimizer, parameter, helds)
        if words is not None:
            tensors += _describe_words(words, state)
            continue
        sharded: dict[str, str] = {}
        single: dict[str, Any] = {}
        for key, value in local_state(optimizer, parameter).items():
            where = f"optimizer state {key!r} of {helds[0].name!r}"
            if not isinstance(key, str) or not key or "/" in key:
                raise UnsupportedValueError(f"{where}: keys must be names without a slash")
            is_tensor = isinstance(value, torch.Tensor)
            if is_tensor and value.shape == local(parameter).shape and key in elementwise:
                sharded[key] = dtype_name(value.dtype, where)
                tensors.append(HeldState(key, value, helds))
            elif is_tensor and value.numel() != 1:
                shape = list(local(parameter).shape)
                raise UnsupportedValueError(
                    f"{where} has shape {list(value.shape)}, its parameter's shard "
                    f"{shape}: state must be of the parameter's shape, or one "
                    "value; optimizers whose state depends on the matrix cannot be resharded"
                )
            else:
                _refuse_tensors_in(value, where)
                single[key] = _encode_single(value, where)
        if sharded or single:
            for held in helds:
                state[held.name] = State(sharded, single)
    return Optimizer(type(optimizer).__name__, groups, state), tensors


def _describe_words(
    words: Sequence[tuple[Held, Mapping[str, Any]]], state: dict[str, State]
) -> list[HeldState]:
    """Adds to ``state``; returns the tensors of this rank."""
    made: dict[Made, tuple[str, list[Held]]] = {}
    for held, own in words:
        sharded: dict[str, str] = {}
        single: dict[str, Any] = {}
        for key, value in own.items():
            where = f"optimizer state {key!r} of {held.name!r}"
            if isinstance(value, Made):
                sharded[key] = dtype_name(value.dtype, where)
                made.setdefault(value, (key, []))[1].append(held)
            else:
                single[key] = _encode_single(value, where)
        state[held.name] = State(sharded, single)
    return [HeldState(key, value, helds) for value, (key, helds) in made.items()]


def local_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Any]:
    """The state of ``parameter``, of which tensors are this rank's plain parts."""
    own = optimizer.state.get(parameter, {})
    return {key: local(v) if isinstance(v, torch.Tensor) else v for key, v in own.items()}


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}


def members_of_groups(inventory: Inventory, optimizer: torch.optim.Optimizer) -> Groups:
    """The parameters of the unsharded model in each of the optimizer's groups.

    Raises:
        TypeError: ``optimizer`` is none.
        ModelMismatchError: the optimizer has a parameter that the model has not.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    by_holder = inventory.by_holder()
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        strangers = [holder for holder in group["params"] if holder not in by_holder]
        if strangers:
            raise ModelMismatchError(
                f"optimizer: {len(strangers)} parameters of group {number} are not the model's, "
                f"the first of shape {list(local(strangers[0]).shape)}; create the optimizer after "
                "wrapping, from model.parameters()"
            )
        groups.append([held for holder in group["params"] for held in by_holder[holder]])
    return groups


def elementwise_keys(seen: Iterable[tuple[str, Any, Sequence[int]]]) -> set[str]:
    """Keys of state that has an element for every one of the parameter's.

    Of a parameter that is a single number shapes do not tell, but others have the same keys. Where
    there are no others, all is elementwise but what torch's optimizers count with.

    Args:
        seen: keys, their values (tensors by their ``shape``), and the shapes of their parameters.
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
    """What they are about, a shard or all of a parameter, nobody knows."""
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, list, tuple, set)):
        for each in inner:
            if isinstance(each, torch.Tensor) and each.numel() != 1:
                raise UnsupportedValueError(
                    f"{where} holds a tensor of shape {list(each.shape)} inside a "
                    f"{type(value).__name__}; state must be of the parameter's shape, or one value"
                )
            _refuse_tensors_in(each, where)


def _encode_single(value: Any, where: str) -> dict[str, Any]:
    encoded = {"value": values.encode(value, where)}
    if isinstance(value, torch.Tensor):
        encoded["on"] = "host" if value.device.type == "cpu" else "device"
    return encoded

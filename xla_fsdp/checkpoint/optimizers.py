"""What this rank holds of an optimizer's state, in terms of the unsharded model.

A tensor of the shape of its parameter holds something for every element, and is cut like the
parameter. All else (``step``) is the same for the whole parameter, and on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError, UnsupportedValueError
from ..consolidate.format import values
from ..consolidate.format.dtypes import dtype_name
from ..consolidate.format.manifest import NOT_OPTIONS, Group, Optimizer, State
from .inventory import Held, Inventory


@dataclass(frozen=True, eq=False)
class HeldState:
    """One tensor of an optimizer's state, and the parameters whose elements it is about."""

    key: str
    tensor: torch.Tensor
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
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    owners = inventory.by_holder()
    require_parameters(optimizer, owners)
    elementwise = _elementwise_keys(optimizer)
    groups = tuple(
        Group(
            tuple(held.name for parameter in group["params"] for held in owners[parameter]),
            {
                name: values.encode(value, f"option {name!r} of parameter group {number}")
                for name, value in options(group).items()
            },
        )
        for number, group in enumerate(optimizer.param_groups)
    )
    state: dict[str, State] = {}
    tensors: list[HeldState] = []
    for parameter, helds in owners.items():
        sharded: dict[str, str] = {}
        single: dict[str, Any] = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            where = f"optimizer state {key!r} of {helds[0].name!r}"
            if not isinstance(key, str) or not key or "/" in key:
                raise UnsupportedValueError(f"{where}: keys must be names without a slash")
            if is_elementwise(value, key, parameter, elementwise):
                sharded[key] = dtype_name(value.dtype, where)
                tensors.append(HeldState(key, value, helds))
            elif isinstance(value, torch.Tensor) and value.numel() != 1:
                raise UnsupportedValueError(
                    f"{where} has shape {list(value.shape)}, its parameter's shard "
                    f"{list(parameter.shape)}: state must be of the parameter's shape, or one "
                    "value; optimizers whose state depends on the matrix cannot be resharded"
                )
            else:
                _refuse_tensors_in(value, where)
                single[key] = _encode_single(value, where)
        if sharded or single:
            for held in helds:
                state[held.name] = State(sharded, single)
    return Optimizer(type(optimizer).__name__, groups, state), tensors


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters."""
    return {name: value for name, value in group.items() if name not in NOT_OPTIONS}


def require_parameters(optimizer: torch.optim.Optimizer, owners: dict[nn.Parameter, Any]) -> None:
    """Raises ModelMismatchError unless the optimizer's parameters are keys of ``owners``."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter not in owners:
                raise ModelMismatchError(
                    f"parameter group {number} of the optimizer has a parameter of shape "
                    f"{list(parameter.shape)} that is not the model's; create the optimizer after "
                    "wrapping, from model.parameters()"
                )


def _elementwise_keys(optimizer: torch.optim.Optimizer) -> set[str]:
    """Keys of tensors that have their parameter's shape where that is not a single number."""
    return {
        key
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
        if parameter.dim() and isinstance(value, torch.Tensor) and value.shape == parameter.shape
    }


def is_elementwise(value: Any, key: str, parameter: nn.Parameter, elementwise: set[str]) -> bool:
    """Whether a state value has an element for every one of the parameter's.

    Of a parameter that is a single number shapes do not tell; other parameters' do.
    """
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return False
    return bool(parameter.dim()) or key in elementwise


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


def decode_single(encoded: Any, device: torch.device, label: str) -> Any:
    """The reverse; ``device`` is the parameter's."""
    if not isinstance(encoded, dict) or "value" not in encoded:
        raise ModelMismatchError(f"{label}: an optimizer value without a value")
    value = values.decode(encoded["value"], label)
    if isinstance(value, torch.Tensor) and encoded.get("on") == "device":
        return value.to(device)
    return value


def set_groups(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> None:
    """Gives every parameter group its options; tensors stay on the device they are on."""
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for name, value in options.items():
            current = group.get(name)
            if isinstance(value, torch.Tensor) and isinstance(current, torch.Tensor):
                value = value.to(current.device)
            group[name] = value

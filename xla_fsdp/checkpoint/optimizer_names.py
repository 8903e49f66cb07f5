"""Replaces parameter numbers in an optimizer's state dict by names of the unsharded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..consolidate.errors import ModelMismatchError
from ..names import dotted
from .inventory import Inventory, ParameterShard
from .matching import format_names
from .optimizer_matching import OptimizerState
from .optimizers import Groups, options


def convert_numbers_to_names(
    saved: Any, inventory: Inventory, groups: Groups, label: str
) -> OptimizerState:
    """Converts an optimizer's state dict to names. ``groups``: those of the optimizer to load into.

    Raises:
        ModelMismatchError: ``saved`` is not an optimizer's state dict, or it numbers parameters and
            matches neither the groups nor the model.
    """
    if not isinstance(saved, Mapping) or not saved.keys() >= {"state", "param_groups"}:
        raise ModelMismatchError(
            f"{label}: is {type(saved).__name__}, expected a dict with 'state' and 'param_groups'. "
            "Pass the state_dict() of an optimizer."
        )
    state, saved_groups = saved["state"], saved["param_groups"]
    if not (
        isinstance(state, Mapping)
        and all(isinstance(own, Mapping) for own in state.values())
        and isinstance(saved_groups, (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in saved_groups)
    ):
        raise ModelMismatchError(
            f"{label}: its 'state' and 'param_groups' are not those of an optimizer. Pass the "
            "state_dict() of an optimizer."
        )
    params = [list(group["params"]) for group in saved_groups]
    kinds = {type(one) for one in [*state, *(one for own in params for one in own)]}
    if kinds <= {str}:
        return OptimizerState(
            {name: dict(own) for name, own in state.items()},
            [(options(g), own) for g, own in zip(saved_groups, params, strict=True)],
        )
    if kinds != {int}:
        raise ModelMismatchError(
            f"{label}: parameters must be either all names or all numbers, got both or others"
        )
    names = _names_of_numbers(saved_groups, inventory, groups, label)
    unknown = [number for number in state if number not in names]
    if unknown:
        raise ModelMismatchError(
            f"{label}: has state of {format_names(unknown)}, which no group has. Pass an unchanged "
            "state_dict() of an optimizer."
        )
    return OptimizerState(
        {names[number]: dict(own) for number, own in state.items()},
        [
            (options(g), [names[number] for number in own])
            for g, own in zip(saved_groups, params, strict=True)
        ],
    )


def _names_of_numbers(
    saved_groups: Sequence[Mapping[str, Any]], inventory: Inventory, groups: Groups, label: str
) -> dict[int, str]:
    if all("param_names" in group for group in saved_groups):  # made from named_parameters()
        return {
            number: dotted("", name)  # removes the names of torch's wrappers
            for group in saved_groups
            for number, name in zip(group["params"], group["param_names"], strict=True)
        }
    place = {shard: number for number, shard in enumerate(inventory.parameters)}
    if [len(group["params"]) for group in saved_groups] == [len(own) for own in groups]:
        ordered = [sorted(own, key=place.__getitem__) for own in groups]
        for number, own in enumerate(groups):
            # The order inside flattened vectors and stacks is fixed. Only parameters that are
            # sharded separately show in which order the user put them into the group.
            single = [place[shard] for shard in own if shard.numel == _numel_of_holder(shard)]
            if single != sorted(single):
                raise ModelMismatchError(
                    f"{label}: has numbered parameters, but those of group {number} of the "
                    "optimizer are not in the order of the model. Use a state dict with names."
                )
    elif sum(len(group["params"]) for group in saved_groups) == len(place):
        every = iter(inventory.parameters)
        ordered = [[next(every) for _ in group["params"]] for group in saved_groups]
    else:
        raise ModelMismatchError(
            f"{label}: has groups of {[len(group['params']) for group in saved_groups]} numbered "
            f"parameters, but the optimizer has groups of {[len(own) for own in groups]}. Make the "
            "optimizer with the same groups, or use a state dict with names."
        )
    return {
        number: shard.name
        for group, own in zip(saved_groups, ordered, strict=True)
        for number, shard in zip(group["params"], own, strict=True)
    }


def _numel_of_holder(shard: ParameterShard) -> int:
    """Number of elements of all parameters that share the holder, without padding or stacking."""
    return shard.numel if shard.layout is None else shard.layout.numel

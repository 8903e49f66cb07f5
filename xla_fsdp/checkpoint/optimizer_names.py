"""Which parameters of the unsharded model a state dict of an optimizer is about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..consolidate.errors import ModelMismatchError
from ..names import dotted
from .inventory import Held, Inventory
from .matching import listed
from .optimizer_matching import OptimizerState
from .optimizers import Groups, options


def named(saved: Any, inventory: Inventory, groups: Groups, label: str) -> OptimizerState:
    """A state dict of an optimizer, by name; ``groups`` are the optimizer's to load it into.

    Raises:
        ModelMismatchError: it is none, or is by number and fits neither the groups nor the model.
    """
    if not isinstance(saved, Mapping) or not saved.keys() >= {"state", "param_groups"}:
        raise ModelMismatchError(f"{label}: expected a dict with 'state' and 'param_groups'")
    state, saved_groups = saved["state"], saved["param_groups"]
    if not (
        isinstance(state, Mapping)
        and all(isinstance(own, Mapping) for own in state.values())
        and isinstance(saved_groups, (list, tuple))
        and all(isinstance(group, Mapping) and "params" in group for group in saved_groups)
    ):
        raise ModelMismatchError(f"{label}: its 'state' and 'param_groups' are no optimizer's")
    params = [list(group["params"]) for group in saved_groups]
    kinds = {type(one) for one in [*state, *(one for own in params for one in own)]}
    if kinds <= {str}:
        return OptimizerState(
            {name: dict(own) for name, own in state.items()},
            [(options(g), own) for g, own in zip(saved_groups, params, strict=True)],
        )
    if kinds != {int}:
        raise ModelMismatchError(f"{label}: parameters must be named or numbered throughout")
    names = _names_of_numbers(saved_groups, inventory, groups, label)
    unknown = [number for number in state if number not in names]
    if unknown:
        raise ModelMismatchError(f"{label}: has state of {listed(unknown)}, which no group has")
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
            number: dotted("", name)  # of named_parameters(), which names wrappers of torch too
            for group in saved_groups
            for number, name in zip(group["params"], group["param_names"], strict=True)
        }
    place = {held: number for number, held in enumerate(inventory.parameters)}
    if [len(group["params"]) for group in saved_groups] == [len(own) for own in groups]:
        ordered = [sorted(own, key=place.__getitem__) for own in groups]
        for number, own in enumerate(groups):
            # Flattened vectors and stacks have an order of their own; single parameters show
            # in which the user put them into the group.
            single = [place[held] for held in own if held.numel == _whole(held)]
            if single != sorted(single):
                raise ModelMismatchError(
                    f"{label}: numbers its parameters, and group {number} of the optimizer does "
                    "not have them in the order of the model; use names instead of numbers"
                )
    elif sum(len(group["params"]) for group in saved_groups) == len(place):
        every = iter(inventory.parameters)
        ordered = [[next(every) for _ in group["params"]] for group in saved_groups]
    else:
        raise ModelMismatchError(
            f"{label}: has groups of {[len(group['params']) for group in saved_groups]} numbered "
            f"parameters, the optimizer's have {[len(own) for own in groups]}"
        )
    return {
        number: held.name
        for group, own in zip(saved_groups, ordered, strict=True)
        for number, held in zip(group["params"], own, strict=True)
    }


def _whole(held: Held) -> int:
    """Elements of all parameters that share the holder; padding and stacking not counted."""
    return held.numel if held.layout is None else held.layout.numel

"""Unsharded tensors, wherever they lie, into a model: every rank takes its own part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from .inventory import Held, HeldBuffer, Inventory
from .stored import Stored


class LoadedKeys(NamedTuple):
    """What loading left out, as of ``nn.Module.load_state_dict``; both empty if ``strict``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Match:
    """What goes where, all of it checked."""

    parameters: dict[Held, Stored]
    buffers: list[tuple[HeldBuffer, Stored]]
    extra_state: dict[nn.Module, Any]
    keys: LoadedKeys


def match_model(
    inventory: Inventory,
    tensors: Mapping[str, Stored],
    others: Mapping[str, Any],
    label: str,
    strict: bool = True,
    cast: bool = True,
) -> Match:
    """Finds a tensor for every parameter and buffer of the model.

    Args:
        tensors, others: what there is by name; ``others`` are no tensors (extra state).
        label: where that is, for messages.
        strict: every name of the model must be there, and no other. Of the names of a tied
            parameter one is enough.
        cast: floating-point tensors may have another floating-point dtype than the parameter.

    Raises:
        ModelMismatchError: names, shapes or dtypes do not fit, or names of one tied parameter have
            different values.
    """
    missing, used = [], set()

    def find(held: Held | HeldBuffer, dtype: torch.dtype) -> Stored | None:
        found = [name for name in held.names if name in tensors]
        used.update(found)
        for name in found:
            _require_fit(name, tensors[name], held.shape, dtype, label, cast)
        for name in found[1:]:
            _require_same(tensors, found[0], name, held, label)
        if not found:
            missing.append(held.name)
        return tensors[found[0]] if found else None

    parameters = {held: find(held, held.dtype) for held in inventory.parameters}
    buffers = [(b, find(b, b.restore or b.tensor.dtype)) for b in inventory.buffers]
    extra = {}
    for name, module in inventory.extra_state.items():
        if name in others:
            extra[module] = others[name]
        elif name in tensors:  # a state may well be a tensor
            used.add(name)
            stored = tensors[name]
            extra[module] = stored.read(0, stored.numel).reshape(stored.shape)
        else:
            missing.append(name)
    unexpected = [name for name in tensors if name not in used]
    unexpected += [name for name in others if name not in inventory.extra_state]
    if strict and (missing or unexpected):
        said = [f"lacks {listed(missing)}"] if missing else []
        said += [f"has {listed(unexpected)}, unknown to the model"] if unexpected else []
        raise ModelMismatchError(f"{label}: {' and '.join(said)}; strict=False takes what fits")
    return Match(
        {held: stored for held, stored in parameters.items() if stored is not None},
        [(buffer, stored) for buffer, stored in buffers if stored is not None],
        extra,
        LoadedKeys(missing, unexpected),
    )


def fill_model(inventory: Inventory, match: Match) -> None:
    """Puts the values in, one parameter after the other; parameters stay the same objects."""
    for holder, members in inventory.by_holder().items():
        found = {held: match.parameters.get(held) for held in members}
        if any(stored is not None for stored in found.values()):
            start = None if all(found.values()) else holder
            with torch.no_grad():
                holder.copy_(part_of(holder, found, holder.dtype, start))
    for buffer, stored in match.buffers:
        value = stored.read(0, stored.numel).reshape(stored.shape)
        with torch.no_grad():
            if buffer.row is not None:
                stack = buffer.tensor.cpu()
                stack[buffer.row] = value
                value = stack
            buffer.tensor.copy_(value)
    for module, state in match.extra_state.items():
        module.set_extra_state(state)


def part_of(
    holder: torch.Tensor,
    members: Mapping[Held, Stored | None],
    dtype: torch.dtype,
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's part of ``members``, on the CPU, in the shape of their ``holder``.

    ``start``: what is there where a member is ``None``; else, and in padding, it is zero.
    """
    if start is None:
        whole = torch.zeros(holder.shape, dtype=dtype)
    else:
        whole = start.detach().cpu().clone()
    flat = whole.view(-1)
    for held, stored in members.items():
        if stored is not None and (held.length or stored.collective):
            flat[held.at : held.at + held.length] = stored.read(held.begin, held.end)
    return whole


def listed(names: Iterable[str]) -> str:
    """The first of some names, for messages."""
    names = list(names)
    text = ", ".join(repr(name) for name in names[:6])
    return f"{text} and {len(names) - 6} more" if len(names) > 6 else text


def _require_fit(name, stored: Stored, shape, dtype: torch.dtype, label: str, cast: bool) -> None:
    if tuple(stored.shape) != tuple(shape):
        raise ModelMismatchError(
            f"{label}: {name!r} has shape {list(stored.shape)}, the model's has {list(shape)}"
        )
    floats = dtype.is_floating_point and stored.dtype.is_floating_point
    if stored.dtype is not dtype and not (cast and floats):
        raise ModelMismatchError(
            f"{label}: {name!r} is {stored.dtype}, the model's is {dtype}"
            + ("; cast=True converts it" if floats else "")
        )


def _require_same(tensors, first: str, other: str, held: Held | HeldBuffer, label: str) -> None:
    """Two names of one tied tensor must have the same bits; of a file, a rank looks at its part."""
    one, two = tensors[first], tensors[other]
    if one is two or one.collective:  # rank 0 has looked
        return
    begin, end = 0, one.numel
    if isinstance(held, Held) and not one.here:
        begin, end = held.begin, held.end
    a, b = one.read(begin, end), two.read(begin, end)
    if a.dtype is not b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        raise ModelMismatchError(
            f"{label}: {first!r} and {other!r} have different values, but are one parameter in "
            "the model"
        )

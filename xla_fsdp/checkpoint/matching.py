"""Which tensor, wherever it lies, fills which of a model: by name, all checked beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..wording import some_of
from .inventory import Held, HeldBuffer, Inventory
from .stored import Stored, same_bits


class LoadedKeys(NamedTuple):
    """What loading left out, as of ``nn.Module.load_state_dict``; both empty if ``strict``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Match:
    """What goes where, all of it checked."""

    parameters: dict[Held, Stored]
    buffers: dict[HeldBuffer, Stored]
    extra_state: dict[nn.Module, Any]
    keys: LoadedKeys


def match_model(
    inventory: Inventory,
    offered: Mapping[str, Any],
    label: str,
    strict: bool = True,
    cast: bool = True,
    same_run: bool = False,
    reported: LoadedKeys | None = None,
) -> Match:
    """Finds a tensor for every parameter and buffer of the model.

    Args:
        offered: what there is by name: tensors as :class:`Stored`, the same one for the names of a
            tied tensor; and what is none (extra state).
        label: where that is, for messages.
        strict: every name of the model must be there, and no other. Of the names of a tied
            parameter one is enough.
        cast: floating-point tensors may have another floating-point dtype than the parameter.
        same_run: it was saved from a sharded model to go on with. Parameters must have the dtype
            in which the model stores them, while buffers may have been saved as they were cast for
            computing; and what is one tied parameter here must have been one there. Elsewhere
            (files of weights cannot say what is tied) equal values are enough.
        reported: what ``load_state_dict`` of the module said of names; by default, the names
            themselves say it.

    Raises:
        ModelMismatchError: names, kinds, shapes or dtypes do not fit, or names of one tied
            parameter have different values; it tells of all, the first few in full.
    """
    problems: list[str] = []
    missing: list[str] = []
    used: set[str] = set()
    tensors = {name: each for name, each in offered.items() if isinstance(each, Stored)}
    remedy = "consolidate it, and load_weights converts it" if same_run else "cast=True converts it"

    def find(
        held: Held | HeldBuffer,
        kind: str,
        dtype: torch.dtype,
        cast: bool,
    ) -> Stored | None:
        found: dict[Stored, str] = {}
        for name in held.names:
            if name not in tensors:
                continue
            if tensors[name].kind in (None, kind):
                found.setdefault(tensors[name], name)
                used.add(name)
            elif strict:
                used.add(name)
                problems.append(f"{name!r} was a {tensors[name].kind}, the model's is a {kind}")
                return None
        misfits = [
            _misfit(name, each, held.shape, dtype, cast, remedy) for each, name in found.items()
        ]
        problems.extend(filter(None, misfits))
        if not any(misfits):
            problems.extend(_untied(found, held, same_run))
        if not found:
            missing.append(held.name)
        return next(iter(found), None)

    parameters = {
        held: find(held, "parameter", held.dtype, cast and not same_run)
        for held in inventory.parameters
    }
    buffers = {buffer: find(buffer, "buffer", buffer.dtype, cast) for buffer in inventory.buffers}
    extra: dict[nn.Module, Any] = {}
    for name, module in inventory.extra_state.items():
        if name not in offered:
            missing.append(name)
            continue
        used.add(name)  # a state may well be a tensor
        extra[module] = tensors[name].whole() if name in tensors else offered[name]
    unexpected = [name for name in offered if name not in used]
    if reported is not None:
        missing, unexpected = reported
    if strict:
        odd = [f"lacks {listed(missing)}"] if missing else []
        odd += [f"has {listed(unexpected)}, unknown to the model"] if unexpected else []
        if odd and not problems:
            odd[-1] += "; strict=False takes what fits"
        problems += odd
    raise_if_any(problems, label)
    return Match(
        {held: stored for held, stored in parameters.items() if stored is not None},
        {buffer: stored for buffer, stored in buffers.items() if stored is not None},
        extra,
        LoadedKeys(missing, unexpected),
    )


def raise_if_any(problems: Sequence[str], label: str) -> None:
    """One :class:`ModelMismatchError` for all of them, the first few in full."""
    if problems:
        raise ModelMismatchError(f"{label}: {some_of(problems, 5, '; ')}")


def listed(names: Iterable[Any]) -> str:
    """The first of some names, for messages."""
    return some_of([repr(name) for name in names], 6)


def _misfit(
    name: str,
    stored: Stored,
    shape: Sequence[int],
    dtype: torch.dtype,
    cast: bool,
    remedy: str,
) -> str | None:
    if tuple(stored.shape) != tuple(shape):
        return f"{name!r} has shape {list(stored.shape)}, the model's has {list(shape)}"
    floats = dtype.is_floating_point and stored.dtype.is_floating_point
    if stored.dtype is dtype or (cast and floats):
        return None
    more = f"; {remedy}" if floats else ""
    return f"{name!r} is {stored.dtype}, the model's is {dtype}{more}"


def _untied(found: Mapping[Stored, str], held: Held | HeldBuffer, same_run: bool) -> Iterable[str]:
    """Several tensors for one must have the same bits; of a file, a rank looks at its part."""
    if not found:
        return
    first, *rest = found
    for other in rest:
        names = f"{found[first]!r} and {found[other]!r}"
        if same_run:
            yield f"{names} were two parameters, but are one in the model"
        elif not first.collective:  # else rank 0 has looked
            begin, end = 0, first.numel
            if isinstance(held, Held) and not first.here:
                begin, end = held.begin, held.end
            if not same_bits(first.read(begin, end), other.read(begin, end)):
                yield f"{names} have different values, but are one parameter in the model"

"""Matches stored tensors with the parameters and buffers of a model by name, and checks them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..wording import join_some
from .inventory import Inventory, ParameterShard, ReplicatedBuffer
from .readable_tensor import ReadableTensor, same_bits


class LoadedKeys(NamedTuple):
    """Names that were not loaded, as ``nn.Module.load_state_dict`` returns them.

    Attributes:
        missing_keys: names of the model that were not found. Empty if ``strict``.
        unexpected_keys: names that the model does not have. Empty if ``strict``.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True)
class Match:
    """The stored value for each parameter, buffer and module. All of it is checked."""

    parameters: dict[ParameterShard, ReadableTensor]
    buffers: dict[ReplicatedBuffer, ReadableTensor]
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
        offered: the available values by name: tensors as :class:`ReadableTensor` (the same object
            for all names of a tied tensor), and extra state.
        label: where the values come from, for messages.
        strict: every name of the model must be available, and no other. For a tied parameter, one
            of its names is enough.
        cast: floating-point tensors may have another floating-point dtype than the parameter.
        same_run: the values are from a checkpoint of a sharded model, to resume training.
            Parameters must then have the dtype in which the model stores them, and parameters that
            are tied in the model must have been tied when they were saved. Buffers may have the
            dtype for computing. Without ``same_run`` (weight files do not record tied parameters)
            equal values are enough.
        reported: missing and unexpected names that ``load_state_dict`` of the module reported. By
            default they are derived from the names in ``offered``.

    Raises:
        ModelMismatchError: names, kinds, shapes or dtypes do not match, or the names of a tied
            parameter have different values. The message lists the first few problems and counts
            the others.
    """
    problems: list[str] = []
    missing: list[str] = []
    used: set[str] = set()
    tensors = {name: each for name, each in offered.items() if isinstance(each, ReadableTensor)}
    remedy = "consolidate it and load_weights converts it" if same_run else "cast=True converts it"

    def find(
        shard: ParameterShard | ReplicatedBuffer,
        kind: str,
        dtype: torch.dtype,
        cast: bool,
    ) -> ReadableTensor | None:
        found: dict[ReadableTensor, str] = {}
        for name in shard.names:
            if name not in tensors:
                continue
            if tensors[name].kind in (None, kind):
                found.setdefault(tensors[name], name)
                used.add(name)
            elif strict:
                used.add(name)
                problems.append(
                    f"{name!r} was saved as a {tensors[name].kind}, but is a {kind} of the model"
                )
                return None
        misfits = [
            _misfit(name, each, shard.shape, dtype, cast, remedy) for each, name in found.items()
        ]
        problems.extend(filter(None, misfits))
        if not any(misfits):
            problems.extend(_untied(found, shard, same_run))
        if not found:
            missing.append(shard.name)
        return next(iter(found), None)

    parameters = {
        shard: find(shard, "parameter", shard.dtype, cast and not same_run)
        for shard in inventory.parameters
    }
    buffers = {buffer: find(buffer, "buffer", buffer.dtype, cast) for buffer in inventory.buffers}
    extra: dict[nn.Module, Any] = {}
    for name, module in inventory.extra_state.items():
        if name not in offered:
            missing.append(name)
            continue
        used.add(name)  # an extra state may be a tensor
        extra[module] = tensors[name].read_full() if name in tensors else offered[name]
    unexpected = [name for name in offered if name not in used]
    if reported is not None:
        missing, unexpected = reported
    if strict:
        odd = [f"lacks {format_names(missing)}"] if missing else []
        odd += [f"has {format_names(unexpected)}, unknown to the model"] if unexpected else []
        if odd and not problems:
            odd[-1] += "; strict=False takes what fits"
        problems += odd
    raise_if_any(problems, label)
    return Match(
        {shard: stored for shard, stored in parameters.items() if stored is not None},
        {buffer: stored for buffer, stored in buffers.items() if stored is not None},
        extra,
        LoadedKeys(missing, unexpected),
    )


def raise_if_any(problems: Sequence[str], label: str) -> None:
    """Raises one :class:`ModelMismatchError` that lists the first few problems."""
    if problems:
        raise ModelMismatchError(f"{label}: {join_some(problems, 5, '; ')}")


def format_names(names: Iterable[Any]) -> str:
    """The first six of ``names`` and the number of the others, for messages."""
    return join_some([repr(name) for name in names], 6)


def _misfit(
    name: str,
    stored: ReadableTensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    cast: bool,
    remedy: str,
) -> str | None:
    if tuple(stored.shape) != tuple(shape):
        return f"{name!r} has shape {list(stored.shape)}, but {list(shape)} in the model"
    floats = dtype.is_floating_point and stored.dtype.is_floating_point
    if stored.dtype is dtype or (cast and floats):
        return None
    more = f"; {remedy}" if floats else ""
    return f"{name!r} is {stored.dtype}, but {dtype} in the model{more}"


def _untied(
    found: Mapping[ReadableTensor, str], shard: ParameterShard | ReplicatedBuffer, same_run: bool
) -> Iterable[str]:
    """Problems if the tensors for one parameter have different bits.

    If they are in files, each rank compares only its part.
    """
    if not found:
        return
    first, *rest = found
    for other in rest:
        names = f"{found[first]!r} and {found[other]!r}"
        if same_run:
            yield f"{names} were saved as two parameters, but are one in the model"
        elif not first.collective:  # rank 0 has compared values that it sends
            begin, end = 0, first.numel
            if isinstance(shard, ParameterShard) and not first.in_memory:
                begin, end = shard.begin, shard.end
            if not same_bits(first.read(begin, end), other.read(begin, end)):
                yield f"{names} have different values, but are one parameter in the model"

"""Metadata as this package writes it::

    {"format": "xla_fsdp", "version": 1, "world_size": 4, "rank": 0,
     "parameters": {"fc.weight": {"layout": "flat", "numel": 12, "members": [
         {"names": ["fc.weight", "head.weight"], "shape": [3, 4], "offset": 0}]}},
     "buffers": {"bn.running_mean": "float32"}}

`parameters` is keyed as the rank's state_dict; `buffers` holds the original dtype of the buffers
that were cast. Whatever `parameters` does not describe is a buffer.
"""

from collections.abc import Mapping
from typing import Any

import torch

from ..format.fields import Fields
from .layout import Buffer, Member, RankLayout, ShardedParameter, require_keys

FORMAT = "xla_fsdp"
VERSION = 1


def read_native(found: Fields, state_dict: Mapping[str, Any], label: str) -> RankLayout:
    """Translate the metadata of one rank.

    Raises:
        InvalidMetadataError: unknown version, missing or ill-typed fields, members that do not fit.
        ShardMismatchError: a described parameter is not in `state_dict`.
    """
    found.require_format(FORMAT, VERSION)
    described = found.child("parameters").children()
    parameters = {key: _read_parameter(each) for key, each in described.items()}
    require_keys(parameters, state_dict, label)

    owner = {name: key for key, parameter in parameters.items() for name in parameter.names}
    dtypes = found.child("buffers")
    aliases, buffers = {}, {}
    for key in state_dict:
        if key in parameters:
            continue
        tied_to = owner.get(key) or _same_flat_parameter(key, parameters)
        if tied_to is not None:
            aliases[key] = tied_to
        else:
            buffers[key] = Buffer(key, _read_dtype(dtypes, key) if key in dtypes else None)
    world_size, rank = found.whole("world_size", 1), found.whole("rank")
    return RankLayout(world_size, rank, parameters, buffers, aliases).validate(label)


def _same_flat_parameter(key: str, parameters: Mapping[str, ShardedParameter]) -> str | None:
    """Key of the flat parameter that `key` lists once more, because its module has two names.

    Example: ``b.flat_param_0`` is ``a.flat_param_0`` if each of its members has a name in ``b.``.
    """
    path, _, last = key.rpartition(".")
    for other, parameter in parameters.items():
        if other.rpartition(".")[2] == last and all(
            any(name.startswith(f"{path}.") for name in member.names)
            for member in parameter.members
        ):
            return other
    return None


def _read_parameter(found: Fields) -> ShardedParameter:
    members = tuple(
        Member(each.names("names"), each.shape("shape"), each.whole("offset"))
        for each in found.objects("members")
    )
    return ShardedParameter(found.text("layout"), found.whole("numel"), members)


def _read_dtype(found: Fields, key: str) -> torch.dtype:
    dtype = getattr(torch, found.text(key), None)
    if not isinstance(dtype, torch.dtype):
        found.fail(f"dtype of {key!r} is {found.text(key)!r:.80}, not like 'float32'")
    return dtype

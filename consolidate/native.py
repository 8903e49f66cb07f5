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

from .errors import InvalidMetadataError
from .layout import (
    Buffer,
    Member,
    RankLayout,
    ShardedParameter,
    read_int,
    read_mapping,
    read_names,
    read_shape,
    require_keys,
)

FORMAT = "xla_fsdp"
VERSION = 1


def read_native(
    metadata: Mapping[str, Any], state_dict: Mapping[str, Any], label: str
) -> RankLayout:
    """Translate the metadata of one rank.

    Raises:
        InvalidMetadataError: unknown version, missing or ill-typed fields, members that do not fit.
        ShardMismatchError: a described parameter is not in `state_dict`.
    """
    if metadata.get("format") != FORMAT or metadata.get("version") != VERSION:
        found = f"{metadata.get('format')!r:.40} version {metadata.get('version')!r:.40}"
        raise InvalidMetadataError(
            f"{label}: metadata format is {found}, this reader knows {FORMAT!r} version {VERSION}"
        )
    for field in ("world_size", "rank", "parameters", "buffers"):
        if field not in metadata:
            raise InvalidMetadataError(f"{label}: shard_metadata has no {field!r}")
    described = read_mapping(metadata["parameters"], "parameters", label)
    parameters = {key: _read_parameter(key, value, label) for key, value in described.items()}
    require_keys(parameters, state_dict, label)

    owner = {name: key for key, parameter in parameters.items() for name in parameter.names}
    dtypes = read_mapping(metadata["buffers"], "buffers", label)
    aliases, buffers = {}, {}
    for key in state_dict:
        if key in parameters:
            continue
        tied_to = owner.get(key) or _same_flat_parameter(key, parameters)
        if tied_to is not None:
            aliases[key] = tied_to
        else:
            buffers[key] = Buffer(key, _read_dtype(dtypes[key], label) if key in dtypes else None)
    return RankLayout(
        world_size=read_int(metadata["world_size"], "world_size", label, least=1),
        rank=read_int(metadata["rank"], "rank", label),
        parameters=parameters,
        buffers=buffers,
        aliases=aliases,
    ).validate(label)


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


def _read_parameter(key: str, value: Any, label: str) -> ShardedParameter:
    what = f"parameter {key!r}"
    value = read_mapping(value, what, label)
    members = value.get("members")
    if not isinstance(members, (list, tuple)):
        raise InvalidMetadataError(f"{label}: {what} has no list of members")
    return ShardedParameter(
        layout=value.get("layout"),
        numel=read_int(value.get("numel"), f"numel of {what}", label),
        members=tuple(_read_member(what, member, label) for member in members),
    )


def _read_member(what: str, value: Any, label: str) -> Member:
    value = read_mapping(value, f"a member of {what}", label)
    return Member(
        names=read_names(value.get("names"), f"names in {what}", label),
        shape=read_shape(value.get("shape"), f"shape in {what}", label),
        offset=read_int(value.get("offset"), f"offset in {what}", label),
    )


def _read_dtype(value: Any, label: str) -> torch.dtype:
    dtype = getattr(torch, value, None) if isinstance(value, str) else None
    if not isinstance(dtype, torch.dtype):
        raise InvalidMetadataError(f"{label}: buffer dtype is {value!r:.80}, not like 'float32'")
    return dtype

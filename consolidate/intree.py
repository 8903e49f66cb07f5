"""Metadata as torch_xla's own ``XlaFullyShardedDataParallel.get_shard_metadata()`` gives it.

What it records, and what follows from that:

- ``shard_info[module][shard name]``: original name and size of each sharded tensor.
- ``flatten_info[flat parameter]``: names, shapes and element counts of what was flattened into it.
- ``buffer_info[buffer]``: the original dtype of a cast buffer. Its keys carry one more wrapper
  prefix than the keys of the state_dict, so both are compared without prefixes. It is empty when
  the module was wrapped while on the CPU: such buffers can only be returned as they were stored.
- Whether a tensor was sharded by rows is not recorded: a shard with more than one dimension was.
- The second name of a tied weight is not recorded. It is lost unless the shared module is itself
  wrapped (then both names are stored); the `tied` argument of the public functions restores it.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .errors import InvalidMetadataError, ShardMismatchError
from .layout import (
    DIM0,
    FLAT,
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

_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module")
_SHARD = "_fsdp_shard"
_FLAT_PARAMETER = "flat_param_"


def clean_name(name: str) -> str:
    """Dotted name without the components that the wrappers add.

    >>> clean_name("_fsdp_wrapped_module.block._fpw_module.0.weight")
    'block.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def read_intree(
    metadata: Mapping[str, Any], state_dict: Mapping[str, Any], label: str
) -> RankLayout:
    """Translate the metadata of one rank.

    Raises:
        InvalidMetadataError: missing or ill-typed fields, members that do not fit.
        ShardMismatchError: `state_dict` holds other shards than the metadata describes.
    """
    for field in ("world_size", "rank", "shard_info", "flatten_info"):
        if field not in metadata:
            raise InvalidMetadataError(f"{label}: shard_metadata has no {field!r}")
    flattened = read_mapping(metadata["flatten_info"], "flatten_info", label)
    infos = {}
    for module, shards in read_mapping(metadata["shard_info"], "shard_info", label).items():
        for name, info in read_mapping(shards, f"shard_info[{module!r}]", label).items():
            infos[_join(module, name)] = module, read_mapping(info, f"info of {name!r}", label)
    require_keys(infos, state_dict, label)
    parameters = {
        key: _read_parameter(key, module, info, flattened, state_dict[key], label)
        for key, (module, info) in infos.items()
    }

    # Written by old versions without the entry at all.
    described = read_mapping(metadata.get("buffer_info", {}), "buffer_info", label)
    dtypes = {clean_name(name): value for name, value in described.items()}
    buffers = {}
    for key in state_dict:
        if key in parameters:
            continue
        if any(part.startswith(_SHARD) for part in key.split(".")):
            raise ShardMismatchError(f"{label}: shard {key!r} is stored but not described")
        name = clean_name(key)
        buffers[key] = Buffer(name, _read_dtype(dtypes[name], label) if name in dtypes else None)
    return RankLayout(
        world_size=read_int(metadata["world_size"], "world_size", label, least=1),
        rank=read_int(metadata["rank"], "rank", label),
        parameters=parameters,
        buffers=buffers,
        aliases={},
    ).validate(label)


def _read_parameter(
    key: str,
    module: str,
    info: Mapping[str, Any],
    flattened: Mapping[str, Any],
    shard: torch.Tensor,
    label: str,
) -> ShardedParameter:
    what = f"parameter {key!r}"
    (name,) = read_names([info.get("_orig_name")], f"_orig_name of {what}", label)
    shape = read_shape(info.get("_orig_size"), f"_orig_size of {what}", label)
    # A flat parameter sits directly on the wrapper, a parameter of the model below one more prefix;
    # so one that the model itself calls flat_param_0 is not mistaken.
    is_flattened = name.startswith(f"{_WRAPPERS[0]}.{_FLAT_PARAMETER}")
    name = _join(module, name)
    if is_flattened:
        if name not in flattened:
            raise InvalidMetadataError(f"{label}: flatten_info has no {name!r}")
        members = _read_flattened(name, flattened[name], label)
        numel = Member((), shape, 0).numel
    else:
        members = (Member((clean_name(name),), shape, 0),)
        numel = members[0].numel
    by_rows = shard.dim() > 1
    return ShardedParameter(layout=DIM0 if by_rows else FLAT, numel=numel, members=members)


def _read_flattened(name: str, value: Any, label: str) -> tuple[Member, ...]:
    """Members of a flat parameter from its ``(names, shapes, element counts)``."""
    what = f"flatten_info of {name!r}"
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise InvalidMetadataError(f"{label}: {what} is not (names, shapes, numels)")
    names = read_names(value[0], what, label)
    shapes, numels = value[1], value[2]
    for column in (shapes, numels):
        if not isinstance(column, (list, tuple)) or len(column) != len(names):
            raise InvalidMetadataError(f"{label}: {what} has {len(names)} names but other counts")
    owner = name.rpartition(".")[0]
    members, offset = [], 0
    for relative, shape, numel in zip(names, shapes, numels, strict=True):
        shape = read_shape(shape, what, label)
        member = Member((clean_name(_join(owner, relative)),), shape, offset)
        if member.numel != numel:
            raise InvalidMetadataError(
                f"{label}: {what} gives {relative!r} {numel!r:.40} elements, its shape"
                f" {member.shape} has {member.numel}"
            )
        members.append(member)
        offset += member.numel
    return tuple(members)


def _read_dtype(value: Any, label: str) -> torch.dtype:
    dtype = value.get("_orig_dtype") if isinstance(value, Mapping) else None
    if not isinstance(dtype, torch.dtype):
        raise InvalidMetadataError(f"{label}: buffer_info holds {value!r:.80}, expected a dtype")
    return dtype


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name

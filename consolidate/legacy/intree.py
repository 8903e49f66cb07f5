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

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..errors import ShardMismatchError
from ..format.fields import Fields
from .layout import DIM0, FLAT, Buffer, Member, RankLayout, ShardedParameter, require_keys

_WRAPPERS = ("_fsdp_wrapped_module", "_fpw_module")
_SHARD = "_fsdp_shard"
_FLAT_PARAMETER = "flat_param_"


def clean_name(name: str) -> str:
    """Dotted name without the components that the wrappers add.

    >>> clean_name("_fsdp_wrapped_module.block._fpw_module.0.weight")
    'block.0.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def read_intree(found: Fields, state_dict: Mapping[str, Any], label: str) -> RankLayout:
    """Translate the metadata of one rank.

    Raises:
        InvalidMetadataError: missing or ill-typed fields, members that do not fit.
        ShardMismatchError: `state_dict` holds other shards than the metadata describes.
    """
    flattened = found.child("flatten_info")
    infos = {
        _join(module, name): (module, info)
        for module, shards in found.child("shard_info").children().items()
        for name, info in shards.children().items()
    }
    require_keys(infos, state_dict, label)
    parameters = {
        key: _read_parameter(module, info, flattened, state_dict[key])
        for key, (module, info) in infos.items()
    }

    # Written by old versions without the entry at all.
    cast = found.child("buffer_info") if "buffer_info" in found else Fields({}, label)
    described = {clean_name(name): name for name in cast}
    buffers = {}
    for key in state_dict:
        if key in parameters:
            continue
        if any(part.startswith(_SHARD) for part in key.split(".")):
            raise ShardMismatchError(f"{label}: shard {key!r} is stored but not described")
        name = clean_name(key)
        dtype = _read_dtype(cast.child(described[name])) if name in described else None
        buffers[key] = Buffer(name, dtype)
    world_size, rank = found.whole("world_size", 1), found.whole("rank")
    return RankLayout(world_size, rank, parameters, buffers, aliases={}).validate(label)


def _read_parameter(
    module: str, info: Fields, flattened: Fields, shard: torch.Tensor
) -> ShardedParameter:
    name, shape = info.text("_orig_name"), info.shape("_orig_size")
    # A flat parameter sits directly on the wrapper, a parameter of the model below one more prefix;
    # so one that the model itself calls flat_param_0 is not mistaken.
    is_flattened = name.startswith(f"{_WRAPPERS[0]}.{_FLAT_PARAMETER}")
    name = _join(module, name)
    if is_flattened:
        members = _read_flattened(name, flattened)
    else:
        members = (Member((clean_name(name),), shape, 0),)
    by_rows = shard.dim() > 1
    return ShardedParameter(DIM0 if by_rows else FLAT, math.prod(shape), members)


def _read_flattened(name: str, flattened: Fields) -> tuple[Member, ...]:
    """Members of a flat parameter from its ``(names, shapes, element counts)``."""
    value = flattened.list(name)
    if len(value) != 3 or any(not isinstance(column, (list, tuple)) for column in value):
        flattened.fail(f"{name!r:.80} is not (names, shapes, numels)")
    if not len(value[0]) == len(value[1]) == len(value[2]):
        flattened.fail(f"{name!r:.80} has {len(value[0])} names but other counts")
    owner = name.rpartition(".")[0]
    members, offset = [], 0
    for row in zip(*value, strict=True):
        each = Fields(dict(zip(("name", "shape", "numel"), row, strict=True)), flattened.label)
        full = clean_name(_join(owner, each.text("name")))
        member = Member((full,), each.shape("shape"), offset)
        if member.numel != each.whole("numel"):
            each.fail(f"{full!r} of shape {member.shape} has not {each.whole('numel')} elements")
        members.append(member)
        offset += member.numel
    return tuple(members)


def _read_dtype(found: Fields) -> torch.dtype:
    dtype = found.json("_orig_dtype")
    if not isinstance(dtype, torch.dtype):
        found.fail(f"_orig_dtype is {dtype!r:.80}, expected a dtype")
    return dtype


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name

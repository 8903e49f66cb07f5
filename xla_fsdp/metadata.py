"""Names in state dicts, and the metadata that says how the ranks' shards belong together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from .names import dotted
from .shard import Layout
from .unit import ShardedTensor

if TYPE_CHECKING:
    from .wrapper import XlaFullyShardedDataParallel

FORMAT, VERSION = "xla_fsdp", 1

_WRAPPED = "_fsdp_wrapped_module."
# Parts of the names in state dicts of torch_xla.distributed.fsdp.
_INTREE_SHARD = "_fsdp_shard"
_INTREE_SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
_INTREE_FLATTENED = "_fpw_module."


def shard_metadata(wrapper: XlaFullyShardedDataParallel) -> dict[str, Any]:
    """What ``get_shard_metadata`` returns; the format is described in the README of consolidate.

    Names are as seen from ``wrapper``; a parameter used under several names lists all of them.
    """
    names = sharded_names(wrapper)
    keys: dict[ShardedTensor, str] = {}
    buffers: dict[str, str] = {}
    for path, module in _wrappers(wrapper):
        unit = module._unit
        for tensor in unit.tensors:
            if tensor.flattened and module._parameters.get(tensor.key) is tensor.shard:
                keys.setdefault(tensor, dotted(path, tensor.key))
        for name, dtype in unit.buffer_dtypes.items():
            buffers[dotted(path, name)] = str(dtype).removeprefix("torch.")
    parameters = {
        # A flattened vector is stored under its own name, a parameter under its first.
        keys.get(tensor, members[0][0]): _described(tensor.layout, members)
        for tensor, members in names.items()
    }
    world = wrapper._unit.world
    return {
        "format": FORMAT,
        "version": VERSION,
        "world_size": world.size,
        "rank": world.rank,
        "parameters": parameters,
        "buffers": buffers,
    }


def sharded_names(root: nn.Module) -> dict[ShardedTensor, list[list[str]]]:
    """The names of every member of every sharded tensor in ``root``, as seen from there."""
    names: dict[ShardedTensor, list[list[str]]] = {}
    for path, module in _wrappers(root):
        unit = module._unit
        first_number = {}
        number = 0
        for tensor in unit.tensors:
            first_number[tensor] = number
            number += len(tensor.layout.members)
            names.setdefault(tensor, [[] for _ in tensor.layout.members])
        for place in unit.places:
            tensor, member = _member_at(unit, place.index, first_number)
            known = names[tensor][member]
            for inside in place.paths:
                name = dotted(path, dotted(inside, place.name))
                if name not in known:
                    known.append(name)
    return names


def _wrappers(wrapper: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    # Also a wrapper's second name: the parameters in it have one more each.
    for name, module in wrapper.named_modules(remove_duplicate=False):
        if "_unit" in module.__dict__:
            yield clean_name(name), module


def _member_at(unit, index: int, first_number: dict) -> tuple[ShardedTensor, int]:
    for tensor in reversed(unit.tensors):
        if index >= first_number[tensor]:
            return tensor, index - first_number[tensor]
    raise AssertionError(f"no tensor of the unit has full parameter {index}")


def _described(layout: Layout, names: list[list[str]]) -> dict[str, Any]:
    return {
        "layout": layout.kind,
        "numel": layout.numel,
        "members": [
            {"names": aliases, "shape": list(member.shape), "offset": member.offset}
            for aliases, member in zip(names, layout.members, strict=True)
        ],
    }


def clean_name(name: str) -> str:
    """A dotted name without the wrappers in it."""
    return f"{name}.".replace(_WRAPPED, "").removesuffix(".")


def clean_state_dict_keys(module, state_dict, prefix: str, local_metadata) -> None:
    """State-dict hook: ``prefix + "_fsdp_wrapped_module.x"`` becomes ``prefix + "x"``."""
    _rename(state_dict, prefix + _WRAPPED, prefix)


def restore_state_dict_keys(
    module, state_dict, prefix: str, local_metadata, strict, missing, unexpected, errors
) -> None:
    """Load hook: the reverse, for own keys and for those of ``torch_xla.distributed.fsdp``."""
    if local_metadata.get("assign_to_params_buffers"):
        raise ValueError(
            "load_state_dict(assign=True) would put other tensors in the place of the shards that "
            "the wrapper gathers; leave assign out, values are copied into the shards"
        )
    own = {tensor.key for tensor in module._unit.tensors if tensor.flattened}
    for key in list(state_dict):
        if key.startswith(prefix):
            name = intree_name(key[len(prefix) :])
            value = state_dict.pop(key)
            state_dict[prefix + name if name in own else prefix + _WRAPPED + name] = value


def intree_name(key: str) -> str:
    """The dotted parameter name of a state-dict key of ``torch_xla.distributed.fsdp``.

    ``_fsdp_wrapped_module.0._fsdp_shard<S>_fsdp_wrapped_module<S>_fpw_module<S>fc<S>weight``,
    ``<S>`` being a separator, is ``0.fc.weight``. Clean names are returned as they are.
    """
    key = key.replace(_INTREE_SEPARATOR, ".").replace(f"{_INTREE_SHARD}.", "")
    return key.replace(_WRAPPED, "").replace(_INTREE_FLATTENED, "")


def _rename(state_dict: dict, old: str, new: str) -> None:
    for key in list(state_dict):
        # Every key is taken out and put back, so that the order stays.
        value = state_dict.pop(key)
        state_dict[new + key[len(old) :] if key.startswith(old) else key] = value

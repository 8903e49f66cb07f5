"""Names in state dicts, and the metadata that says how the ranks' shards belong together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

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
    names: dict[ShardedTensor, list[list[str]]] = {}
    keys: dict[ShardedTensor, str] = {}
    buffers: dict[str, str] = {}
    for path, unit in _units(wrapper):
        first_number = {}
        number = 0
        for tensor in unit.tensors:
            first_number[tensor] = number
            number += len(tensor.layout.members)
            names.setdefault(tensor, [[] for _ in tensor.layout.members])
            keys.setdefault(tensor, _join(path, tensor.key))
        for place in unit.places:
            tensor, member = _member_at(unit, place.index, first_number)
            known = names[tensor][member]
            name = _join(path, _join(place.path, place.name))
            if name not in known:
                known.append(name)
        for name, dtype in unit.buffer_dtypes.items():
            buffers[_join(path, name)] = str(dtype).removeprefix("torch.")
    parameters = {
        keys[tensor]: _described(tensor.layout, members) for tensor, members in names.items()
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


def _units(wrapper: nn.Module):
    # Also a wrapper's second name: the parameters in it have one more each.
    for name, module in wrapper.named_modules(remove_duplicate=False):
        unit = module.__dict__.get("_unit")
        if unit is not None:
            yield clean_name(name), unit


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


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


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
    own = {_join(prefix.removesuffix("."), tensor.key) for tensor in module._unit.tensors}
    for key in list(state_dict):
        if key.startswith(prefix) and not key.startswith(prefix + _WRAPPED):
            clean = intree_name(key)
            if "flat_param_" in clean and clean in own:
                state_dict[clean] = state_dict.pop(key)
            else:
                state_dict[prefix + _WRAPPED + clean[len(prefix) :]] = state_dict.pop(key)


def intree_name(key: str) -> str:
    """The dotted parameter name of a state-dict key of ``torch_xla.distributed.fsdp``.

    ``blocks.0._fsdp_shard<S>_fsdp_wrapped_module<S>_fpw_module<S>fc<S>weight``, ``<S>`` being a
    separator, is ``blocks.0.fc.weight``. Other keys are returned as they are, without wrappers.
    """
    if _INTREE_SHARD in key or _INTREE_FLATTENED in key:
        key = key.replace(_INTREE_SEPARATOR, ".").replace(f"{_INTREE_SHARD}.", "")
        key = key.replace(_WRAPPED, "").replace(_INTREE_FLATTENED, "")
    return key


def _rename(state_dict: dict, old: str, new: str) -> None:
    for key in list(state_dict):
        # Every key is taken out and put back, so that the order stays.
        value = state_dict.pop(key)
        state_dict[new + key[len(old) :] if key.startswith(old) else key] = value

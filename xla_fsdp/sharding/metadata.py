"""Names in state dicts, and the metadata that describes how the ranks' shards fit together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..names import WRAPPED_PREFIX, dotted, names_hook
from .layout import Layout, spec_of
from .sharded_parameter import ShardedValue, as_sharded
from .sharded_tensor import ShardedTensor, sharded_tensor_of
from .unit import NamedUnits, paths_of

# On a wrapper while it loads.
_ERRORS = "_xla_fsdp_load_errors"

FORMAT, VERSION = "xla_fsdp", 1

# In state dicts of torch_xla.distributed.fsdp.
_INTREE_SHARD = "_fsdp_shard"
_INTREE_SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
_INTREE_FLATTENED = "_fpw_module."


def shard_metadata(units: NamedUnits) -> dict[str, Any]:
    """The result of ``get_shard_metadata``; the README of ``consolidate`` describes the format.

    Names are relative to the first of ``units``, the outermost.
    """
    keys: dict[ShardedTensor, str] = {}
    buffers: dict[str, str] = {}
    for path, unit in units:
        for tensor in unit.flattened:
            keys.setdefault(tensor, dotted(path, tensor.key))
        for stack in unit.buffers:
            if stack.former_dtype is not None:
                for name in chain(*stack.names_in_blocks(path, unit.depth or 1)):
                    buffers[name] = _dtype_name(stack.former_dtype)
    paths = paths_of(units[0][1].module)
    for _, unit in units:
        for (module, name), dtype in unit.buffer_dtypes.items():
            if name in module._buffers:
                for path in paths.get(module, ()):
                    buffers[dotted(path, name)] = _dtype_name(dtype)
    names = sharded_names(paths, units)
    parameters = {
        keys.get(tensor, members[0][0]): _described(tensor.layout, members)
        for tensor, members in names.items()
        if any(members)  # otherwise the module has been removed since
    }
    # An optimizer of all that are trained may have ignored parameters in place of frozen ones.
    frozen = any(not tensor.shard.requires_grad for tensor in names)
    world, ignored = units[0][1].world, _ignored_names(units) if frozen else []
    return {
        "format": FORMAT,
        "version": VERSION,
        "world_size": world.size,
        "rank": world.rank,
        "parameters": parameters,
        "buffers": buffers,
        **({"ignored": ignored} if ignored else {}),
    }


def _ignored_names(units: NamedUnits) -> list[str]:
    ignored = {parameter for _, unit in units for parameter in unit.ignored}
    names = (
        dotted(path, name).replace(WRAPPED_PREFIX, "")
        for path, module in units[0][1].module.named_modules(remove_duplicate=False)
        for name, parameter in module._parameters.items()
        if parameter in ignored
    )
    return list(dict.fromkeys(names))


def sharded_names(
    paths: Mapping[nn.Module, list[str]], units: NamedUnits
) -> dict[ShardedTensor, list[list[str]]]:
    """All names of the members of every sharded tensor of ``units``.

    ``paths``: of the modules in the root, see :func:`~xla_fsdp.sharding.unit.paths_of`.
    """
    names: dict[ShardedTensor, list[list[str]]] = {}
    for path, unit in units:
        for tensor in unit.tensors:
            names.setdefault(tensor, [[] for _ in tensor.layout.members])
        # A module may have names outside of its unit; the template of a scan has its own ones.
        scanned = unit.depth is not None
        for slot, found in unit.named_slots(None if scanned else paths):
            tensor, member = unit.members[slot.index]
            known = names[tensor][member]
            for own in found:
                name = dotted(path, own) if scanned else own
                if name not in known:
                    known.append(name)
    return names


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _described(layout: Layout, names: list[list[str]]) -> dict[str, Any]:
    return {
        "layout": layout.kind,
        "numel": layout.numel,
        "members": [
            {"names": aliases, "shape": list(member.shape), "offset": member.offset}
            for aliases, member in zip(names, layout.members, strict=True)
        ],
    }


@names_hook
def clean_state_dict_keys(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """State-dict hook: removes ``_fsdp_wrapped_module.`` after ``prefix``."""
    export_local_tensors(module, state_dict, prefix, local_metadata)
    inside = prefix + WRAPPED_PREFIX
    for key in list(state_dict):
        # Every key is inserted again, so that the order stays the same.
        value = state_dict.pop(key)
        state_dict[prefix + key[len(inside) :] if key.startswith(inside) else key] = value


@names_hook
def export_local_tensors(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """State-dict hook: shards become plain tensors, but stay parameters with ``keep_vars``."""
    for key, value in state_dict.items():
        if key.startswith(prefix) and isinstance(value, ShardedValue):
            state_dict[key] = value.to_local()


@names_hook
def import_local_tensors(module: Any, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Load hook of each module with shards: accepts plain tensors of a shard's shape."""
    for name, shard in module._parameters.items():
        value, spec = state_dict.get(prefix + name), spec_of(shard)
        if spec is None or not isinstance(value, torch.Tensor):
            continue
        if type(value) in (torch.Tensor, nn.Parameter) and value.shape == spec.local_shape:
            state_dict[prefix + name] = as_sharded(value.detach(), spec)


@names_hook
def restore_state_dict_keys(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load hook: the reverse, for our keys and for those of ``torch_xla.distributed.fsdp``."""
    module._unit.install_shards()
    _note_order(module, [key[len(prefix) :] for key in state_dict if key.startswith(prefix)])
    own = {tensor.key for tensor in module._unit.flattened}
    rename_loaded(
        state_dict,
        prefix,
        local_metadata,
        "the shards that the wrapper gathers",
        lambda name: name if name in own else WRAPPED_PREFIX + name,
    )
    import_local_tensors(module, state_dict, prefix)
    module.__dict__[_ERRORS] = errors


def _note_order(module: nn.Module, keys: list[str]) -> None:
    """Marks parameters that torch_xla's class, and its optimizer states, have in another order."""
    theirs = dict.fromkeys(intree_name(key) for key in keys if _INTREE_SHARD in key)
    if not theirs:
        return
    here = [name for name, _ in module.named_parameters() if name in theirs]
    known = set(here)
    if here == [name for name in theirs if name in known]:
        return
    for _, parameter in module.named_parameters():
        sharded = sharded_tensor_of(parameter)
        if sharded is not None:
            sharded.reordered = True


def require_no_new_parameters(
    what: str, holders: str, flags: Iterable[str] = ("swap", "overwrite")
) -> None:
    """Raises RuntimeError if a flag of torch makes ``what`` replace ``holders``."""
    for flag in flags:
        flag += "_module_params_on_conversion"
        if getattr(torch.__future__, f"get_{flag}")():
            raise RuntimeError(
                f"{what} would replace {holders} by other tensors, because "
                f"torch.__future__.set_{flag}(True) was called. Call torch.__future__.set_{flag}"
                "(False): then values are changed in the existing tensors"
            )


def require_copying(
    state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], holders: str
) -> None:
    # The next load may receive the same metadata again.
    assigns = local_metadata.pop("assign_to_params_buffers", False)
    if not any(key.startswith(prefix) for key in state_dict):
        return
    require_no_new_parameters("load_state_dict", holders, ["swap"])
    if assigns:
        raise ValueError(
            f"load_state_dict(assign=True) would replace {holders} by other tensors, which is not "
            "supported. Leave assign out: values are copied into the existing tensors"
        )


def rename_loaded(
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    holders: str,
    renamed: Callable[[str], str],
) -> None:
    """For load hooks: replaces each key with ``prefix`` by ``renamed`` of its clean name."""
    require_copying(state_dict, prefix, local_metadata, holders)
    for key in list(state_dict):
        if key.startswith(prefix):
            value = state_dict.pop(key)
            state_dict[prefix + renamed(intree_name(key[len(prefix) :]))] = value


@names_hook
def clean_reported_keys(module: nn.Module, incompatible: tuple[list[str], list[str]]) -> None:
    """Load hook: reports missing, unexpected and mismatched keys under clean names."""
    for names in (*incompatible, module.__dict__.pop(_ERRORS, [])):
        names[:] = [name.replace(WRAPPED_PREFIX, "") for name in names]


def intree_name(key: str) -> str:
    """The parameter name of a state-dict key of ``torch_xla.distributed.fsdp``.

    ``_fsdp_wrapped_module.0._fsdp_shard<S>_fsdp_wrapped_module<S>_fpw_module<S>fc<S>weight``,
    ``<S>`` being a separator, is ``0.fc.weight``.
    """
    key = key.replace(_INTREE_SEPARATOR, ".").replace(f"{_INTREE_SHARD}.", "")
    return key.replace(WRAPPED_PREFIX, "").replace(_INTREE_FLATTENED, "")

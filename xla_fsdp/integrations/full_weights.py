"""``save_pretrained`` of sharded models: rank 0 writes the full weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_xla.runtime as xr
from torch import nn

from ..checkpoint.full_state import gather_state
from ..checkpoint.inventory import ParameterShard, make_inventory
from ..checkpoint.rank_exchange import RankExchange
from ..collectives.random_state import synced_device
from ..names import dotted
from ..sharding.sharded_parameter import ShardedParameter, ShardedValue
from ..sharding.state import find_outer_wrappers
from ..tree import map_tensors


@synced_device()
def save_whole(
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    wanted: Callable[[str], bool] = lambda name: True,
    **kwargs: Any,
) -> Any:
    """Calls ``original``, a ``save_pretrained``, on rank 0 with all full weights that are
    ``wanted``. Every rank must call it. The files are complete when it returns.

    With a ``state_dict`` nothing is gathered, and a single rank may call it. Raises ValueError if
    that has shards, or ``is_main_process`` is false on rank 0.
    """
    given = inspect.signature(original).bind(model, *args, **kwargs)
    named = {**given.arguments, **given.arguments.get("kwargs", {})}
    state = named.get("state_dict")
    main = bool(named.get("is_main_process", True))
    if state is not None:
        _require_whole(model, state)
        # Ranks that gathered nothing have an empty state_dict.
        return original(model, *args, **kwargs) if state and main else None
    exchange = RankExchange()
    if not exchange.gather_values("who writes the model", main)[0]:
        raise ValueError(
            "is_main_process is false on rank 0, which gathers and writes the full weights: "
            "leave it out, or pass is_main_process=rank == 0; call save_pretrained on every rank"
        )
    root, path = outermost_wrapper(model)
    own = gather_state(root, wanted, rank0_only=True, offload_to_cpu=True, path=path)

    def write() -> None:
        given.arguments.pop("state_dict", None)  # None, perhaps positional
        original(*given.args, **{**given.kwargs, "state_dict": own})

    exchange.run_on_first_rank(f"write {named.get('save_directory')}", write)
    return None


def with_full_tensors(content: Any) -> Any:
    """``content`` with full tensors on the host in place of shards, such as averages, on rank 0,
    and None on the others; every rank calls it. Pickling would save the part of one rank only."""

    def full(shard: Any) -> torch.Tensor | None:
        value: torch.Tensor = shard.detach().full_tensor().cpu()
        return value if xr.global_ordinal() == 0 else None

    return map_tensors(full, content, (ShardedParameter, ShardedValue))


def outermost_wrapper(model: nn.Module) -> tuple[nn.Module, str]:
    """The outermost wrapper with parameters of ``model`` (or ``model`` itself), and the name of
    ``model`` in it."""
    outside = find_outer_wrappers(model)
    if not outside:
        return model, ""
    root = outside[0]
    return root, next(name for name, module in root.named_modules() if module is model)


def owned(model: nn.Module, buffers: bool = False) -> list[tuple[str, Any]]:
    """The parameters of ``model`` with their names in it, and its persistent buffers."""
    root, path = outermost_wrapper(model)
    prefix = dotted(path, "x")[:-1]
    found = make_inventory(root)
    return [
        (name[len(prefix) :], shard)
        for shard in (found.entries() if buffers else found.parameters)
        for name in shard.names
        if name.startswith(prefix)
    ]


def count_full_parameters(
    model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    embeddings = {
        dotted(name, "weight")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    counted: dict[ParameterShard, str] = {}
    for name, shard in owned(model):  # tied parameters count once, under their first name
        counted.setdefault(shard, name)
    return sum(
        shard.numel
        for shard, name in counted.items()
        if not (exclude_embeddings and name in embeddings)
        and not (only_trainable and not shard.holder.requires_grad)
    )


def _require_whole(model: nn.Module, state: Any) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state).__name__}")
    for name, shard in owned(model):
        value = state.get(name)
        if isinstance(value, torch.Tensor) and tuple(value.shape) != shard.shape:
            raise ValueError(
                f"state_dict has {name!r} with shape {tuple(value.shape)}, the whole parameter "
                f"has {shard.shape}: these are shards of rank {xr.global_ordinal()}. Leave "
                "state_dict out and call save_pretrained on every rank, or give it what "
                "xla_fsdp.full_state_dict(model) returned"
            )

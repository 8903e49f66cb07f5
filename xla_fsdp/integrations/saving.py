"""``save_pretrained`` of sharded models: whole weights, written once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch_xla.runtime as xr
from torch import nn

from ..checkpoint.full_state import gather_state
from ..checkpoint.inventory import Held, take_inventory
from ..checkpoint.meeting import Meeting
from ..collectives.random_state import at_rest
from ..names import dotted
from ..sharding.around import holders_outside


@at_rest()
def save_whole(
    original: Callable[..., Any],
    model: Any,
    *args: Any,
    wanted: Callable[[str], bool] = lambda name: True,
    **kwargs: Any,
) -> Any:
    """``original(model, *args, **kwargs)``, a ``save_pretrained``, with whole weights; every rank
    must call it, and the files are complete when it returns.

    Rank 0 gets the weights on the host, all of them (of what is ``wanted``) at once, and writes;
    ``is_main_process`` may say of every other rank what it likes. With a ``state_dict`` nothing is
    gathered and ranks do not meet, so that one may call it alone, as on an unsharded model.

    Raises:
        ValueError: ``state_dict`` has shards; or ``is_main_process`` is false on rank 0.
        OtherRankError: rank 0 could not write.
    """
    given = inspect.signature(original).bind(model, *args, **kwargs)
    named = {**given.arguments, **given.arguments.get("kwargs", {})}
    state = named.get("state_dict")
    main = bool(named.get("is_main_process", True))
    if state is not None:
        _require_whole(model, state)
        # Ranks that gathered nothing were given nothing.
        return original(model, *args, **kwargs) if state and main else None
    meeting = Meeting()
    if not meeting.gather("who writes the model", main)[0]:
        raise ValueError(
            "is_main_process is false on rank 0, which is the one that gets the whole weights: "
            "leave it out, or pass is_main_process=rank == 0; call save_pretrained on every rank"
        )
    root, path = outermost(model)
    own = gather_state(root, wanted, rank0_only=True, offload_to_cpu=True, path=path)

    def write() -> None:
        _call(original, given, own)

    meeting.first(f"write {named.get('save_directory')}", write)
    return None


def _call(
    original: Callable[..., Any], given: inspect.BoundArguments, state: dict[str, Any]
) -> None:
    """``original`` with ``state``, which it may take as one of its ``**kwargs``."""
    arguments = inspect.signature(original).bind(*given.args, **given.kwargs)
    if "state_dict" in inspect.signature(original).parameters:
        arguments.arguments["state_dict"] = state
        original(*arguments.args, **arguments.kwargs)
    else:
        original(*given.args, **{**given.kwargs, "state_dict": state})


def outermost(model: nn.Module) -> tuple[nn.Module, str]:
    """The outermost wrapper that holds parameters of ``model``, or ``model`` itself, and the name
    of ``model`` in it."""
    outside = holders_outside(model)
    if not outside:
        return model, ""
    root = outside[0]
    return root, next(name for name, module in root.named_modules() if module is model)


def owned(model: nn.Module) -> list[tuple[str, Held]]:
    """The parameters of ``model`` with their names in it, whoever holds them."""
    root, path = outermost(model)
    prefix = dotted(path, "x")[:-1]
    return [
        (name[len(prefix) :], held)
        for held in take_inventory(root).parameters
        for name in held.names
        if name.startswith(prefix)
    ]


def count_whole(
    model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False
) -> int:
    """``model.num_parameters(...)`` as it was before wrapping: of whole parameters."""
    embeddings = {
        dotted(name, "weight")
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    }
    counted: dict[Held, str] = {}
    for name, held in owned(model):  # tied parameters count once, under their first name
        counted.setdefault(held, name)
    return sum(
        held.numel
        for held, name in counted.items()
        if not (exclude_embeddings and name in embeddings)
        and not (only_trainable and not held.holder.requires_grad)
    )


def _require_whole(model: nn.Module, state: Any) -> None:
    """Raises ValueError if ``state`` has something else than the whole parameters of ``model``."""
    if not isinstance(state, Mapping):
        raise TypeError(f"state_dict must be a dict, got {type(state).__name__}")
    for name, held in owned(model):
        value = state.get(name)
        if isinstance(value, torch.Tensor) and tuple(value.shape) != held.shape:
            raise ValueError(
                f"state_dict has {name!r} with shape {tuple(value.shape)}, the whole parameter "
                f"has {held.shape}: these are shards of rank {xr.global_ordinal()}. Leave "
                "state_dict out and call save_pretrained on every rank, or give it what "
                "xla_fsdp.full_state_dict(model) returned"
            )

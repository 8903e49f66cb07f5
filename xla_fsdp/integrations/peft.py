"""Adapters of peft on sharded models: full adapters are saved, loaded and merged.

The first wrapper in a process that uses peft imports this module. Call ``get_peft_model`` before
wrapping. Then training needs nothing else, and ``save_pretrained`` of the wrapper writes adapters
that ``PeftModel.from_pretrained`` loads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from peft.config import PeftConfig
from peft.peft_model import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import save_and_load
from peft.utils.other import AuxiliaryTrainingWrapper
from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights
from torch import nn

from ..checkpoint.full_state import load_full_state_dict
from ..checkpoint.rank_exchange import RankExchange
from ..names import dotted
from ..sharding.state import is_sharded
from ..sharding.summon import summon_full_params
from .changes import Changes
from .saving import outermost, owned, save_whole

__all__ = ["adapt", "save_merged"]

changes = Changes("peft")

changes.require(
    PeftModel,
    *("peft_config", "get_base_model", "save_pretrained(save_directory)"),
    *("load_adapter(adapter_name)", "active_adapters"),
)
changes.require(save_and_load, "get_peft_model_state_dict(save_embedding_layers)")
changes.require(PeftConfig, "is_prompt_learning")
changes.require(BaseTunerLayer, "merge", "merged_adapters", "active_adapters")


def adapt(module: nn.Module) -> None:
    """Called with a module that is being wrapped. The import has made all changes already."""


@changes.around(PeftModel, "save_pretrained", is_sharded)
def _save(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs.get("state_dict") == {}:  # as on ranks that gathered nothing
        return None
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        # Prompts are computed from full parameters when they are saved.
        root, _ = outermost(model)
        with summon_full_params(root, writeback=False, rank0_only=True, offload_to_cpu=True):
            RankExchange().run_on_first_rank(
                "write the adapters", lambda: original(model, *args, **kwargs)
            )
        return None
    names: set[str | None] = set()
    for adapter in model.peft_config:
        found = _names_in_file(model, adapter)
        if not found:
            raise RuntimeError(
                f"peft found no tensors of adapter {adapter!r} in the wrapped model. Please report "
                "the model and how it was wrapped. xla_fsdp.full_state_dict(model) returns the "
                "weights"
            )
        names.update(found.values())
    wanted = (lambda name: True) if None in names else names.__contains__
    return save_whole(original, model, *args, wanted=wanted, **kwargs)


@changes.around(PeftModel, "load_adapter", is_sharded)
def _load(
    original: Callable[..., Any],
    model: Any,
    model_id: Any,
    adapter_name: str,
    is_trainable: bool = False,
    **kwargs: Any,
) -> Any:
    if adapter_name not in model.peft_config:
        raise RuntimeError(
            f"adapter {adapter_name!r} cannot be added to a wrapped model, whose parameters are "
            f"sharded: add it before wrapping. The model has {sorted(model.peft_config)}"
        )
    if model.peft_config[adapter_name].is_prompt_learning:
        holder, _ = outermost(model.prompt_encoder)
        with summon_full_params(holder, recurse=False):
            return original(model, model_id, adapter_name, is_trainable=is_trainable, **kwargs)
    return load_adapter_weights(model, model_id, adapter_name)


@changes.around(BaseTuner, "inject_adapter")
def _inject(original: Callable[..., Any], tuner: Any, model: Any, *args: Any, **kw: Any) -> Any:
    if is_sharded(model):
        raise RuntimeError(
            f"adapters cannot be added to {type(model).__name__}, which is already wrapped: they "
            "would not be sharded, and their gradients not averaged over the ranks. Call "
            "get_peft_model first, and wrap the model that it returns"
        )
    return original(tuner, model, *args, **kw)


@changes.around(BaseTuner, "_unload_and_optionally_merge", is_sharded)
@changes.around(BaseTuner, "merge_adapter", is_sharded)
def _merge(original: Callable[..., Any], tuner: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "adapters cannot be merged into a wrapped model, whose weights are shards: call "
        "xla_fsdp.integrations.peft.save_merged(model, folder), which writes the merged model "
        "and does not change this one"
    )


def load_adapter_weights(model: Any, folder: str | os.PathLike, adapter: str) -> None:
    """Loads a folder of ``save_pretrained`` into ``adapter`` of a sharded ``PeftModel``. Every rank
    must call it and have access to the folder.

    Raises:
        ValueError: the folder has other tensors than the adapter.
    """
    found = load_peft_weights(os.fspath(folder), device="cpu")
    root, path = outermost(model)
    names = _names_in_file(model, adapter)
    unknown = [name for name in found if names.get(name) is None]
    missing = [n for n, own in names.items() if n not in found and f".{adapter}" in (own or "")]
    if unknown or missing or not found:
        raise ValueError(
            f"{folder} does not fit adapter {adapter!r}: the adapter has no {unknown[:3]}, and the "
            f"folder has no {missing[:3]}. Load a folder that was saved with the same configuration"
        )
    state = {dotted(path, str(names[name])): value for name, value in found.items()}
    load_full_state_dict(root, state, strict=False)


def save_merged(model: nn.Module, folder: str | os.PathLike, **kwargs: Any) -> None:
    """Saves the base model with the active adapters merged into it, like ``merge_and_unload()`` and
    ``save_pretrained(folder, **kwargs)``. Every rank must call it. The model does not change.

    During the call rank 0 has the full model on the host.

    Raises:
        TypeError: ``model`` is not a wrapped ``PeftModel``.
    """
    peft_model: Any = getattr(model, "module", model)
    if not isinstance(peft_model, PeftModel) or not is_sharded(model):
        raise TypeError(
            f"model must be a wrapper around a PeftModel, got {type(peft_model).__name__}; "
            "without a wrapper: model.merge_and_unload().save_pretrained(folder)"
        )
    root, _ = outermost(peft_model)
    base: Any = peft_model.get_base_model()
    exchange = RankExchange()
    state: dict[str, Any] = {}

    def merge() -> None:
        layers: list[Any] = [m for m in base.modules() if isinstance(m, BaseTunerLayer)]
        try:
            for layer in layers:
                layer.merge()
            state.update(_as_without_adapters(base, peft_model.active_adapters[0]))
        finally:
            for layer in layers:  # the merged weights are summoned, and are discarded with these
                layer.merged_adapters.clear()

    with summon_full_params(root, writeback=False, rank0_only=True, offload_to_cpu=True):
        exchange.run_on_first_rank("merge the adapters", merge)
    exchange.run_on_first_rank(
        f"write {folder}", lambda: base.save_pretrained(folder, state_dict=state, **kwargs)
    )


def _as_without_adapters(base: nn.Module, adapter: str) -> dict[str, Any]:
    """Returns the state dict of ``base`` with the names from before adapters were added, and the
    further trained modules of ``adapter``."""
    adapted = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    inside = tuple(f"{name}." for name, one in base.named_modules() if isinstance(one, adapted))
    added = (".token_adapter.base_layer.", ".base_layer.", f".modules_to_save.{adapter}.")
    found = {}
    for name, value in base.state_dict().items():
        part = next((part for part in added if part in name), None)
        if part is not None:
            found[name.replace(part, ".")] = value
        elif not name.startswith(inside):
            found[name] = value
    return found


def _names_in_file(model: Any, adapter: str) -> dict[str, str | None]:
    """Maps the names in a file of ``adapter`` to names in ``model``, as peft chooses them.

    ``None``: peft computes this tensor from others. Embeddings, which peft saves if they were
    changed, are included.
    """
    state = {name: torch.empty(entry.shape, device="meta") for name, entry in owned(model)}
    names = {id(value): name for name, value in state.items()}
    try:
        embeddings = model.get_input_embeddings() is not None
    except (AttributeError, NotImplementedError):
        embeddings = False
    saved = get_peft_model_state_dict(model, state, adapter, save_embedding_layers=embeddings)
    return {name: names.get(id(value)) for name, value in saved.items()}


changes.apply()

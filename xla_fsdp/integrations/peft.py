"""Adapters of peft on sharded models: full adapters are saved, loaded and merged.

The first wrapper in a process that uses peft imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from peft.config import PeftConfig
from peft.peft_model import PeftModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.constants import SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import AuxiliaryTrainingWrapper
from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights
from safetensors import safe_open
from torch import nn

from ..checkpoint.full_state import load_full_state_dict
from ..checkpoint.rank_exchange import RankExchange
from ..names import dotted
from ..sharding.state import is_sharded
from ..sharding.summon import summon_full_params
from .changes import LibraryChanges
from .full_weights import outermost_wrapper, owned, save_whole

__all__ = ["adapt", "save_merged"]

changes = LibraryChanges("peft")

changes.require(
    PeftModel,
    *("peft_config", "get_base_model", "save_pretrained(selected_adapters)"),
    *("save_pretrained(save_directory)", "load_adapter(adapter_name)"),
)
changes.require(PeftConfig, "is_prompt_learning")
changes.require(BaseTunerLayer, "merge", "merged_adapters", "active_adapters")
changes.require(AuxiliaryTrainingWrapper, "active_adapters")


def adapt(module: nn.Module) -> None:
    """Called with a module that is being wrapped; the import has made all changes."""


@changes.around(PeftModel, "save_pretrained", is_sharded)
def _save(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        # Prompts are computed from full parameters when they are saved.
        root, _ = outermost_wrapper(model)
        with summon_full_params(root, writeback=False, rank0_only=True, offload_to_cpu=True):
            RankExchange().run_on_first_rank(
                "write the adapters", lambda: original(model, *args, **kwargs)
            )
        return None
    result = save_whole(original, model, *args, wanted=_adapter_names(model), **kwargs)
    folder = args[0] if args else kwargs["save_directory"]

    def check() -> None:
        for name in kwargs.get("selected_adapters") or list(model.peft_config):
            part = "" if name == "default" else name
            path = os.path.join(folder, part, SAFETENSORS_WEIGHTS_NAME)
            if not os.path.exists(path):  # the adapter is in a torch file
                continue
            with safe_open(path, framework="pt") as file:
                empty = not file.keys()
            if empty:
                os.remove(path)
                raise RuntimeError(
                    f"peft found no tensors of adapter {name!r} in the wrapped model, so {path} "
                    "was empty and has been removed. Please report the model and how it was "
                    "wrapped. xla_fsdp.full_state_dict(model) returns the weights"
                )

    if kwargs.get("state_dict") is None:
        RankExchange().run_on_first_rank("check the adapters that it wrote", check)
    return result


@changes.around(PeftModel, "load_adapter", is_sharded)
def _load_adapter(
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
        holder, _ = outermost_wrapper(model.prompt_encoder)
        with summon_full_params(holder, recurse=False):
            return original(model, model_id, adapter_name, is_trainable=is_trainable, **kwargs)
    found = load_peft_weights(os.fspath(model_id), device="cpu")
    root, path = outermost_wrapper(model)
    wanted = _adapter_names(model)
    entries = {
        _name_in_file(adapter_name, name): (name, entry)
        for name, entry in owned(model, buffers=True)
        if wanted(name)
    }
    unknown = [name for name in found if name not in entries]
    given = {entries[name][1] for name in found if name in entries}  # layers may share buffers
    shapes = {own: torch.empty(entry.shape, device="cpu") for own, entry in entries.values()}
    saved = get_peft_model_state_dict(model, shapes, adapter_name, save_embedding_layers=False)
    missing = [name for name in saved if name in entries and entries[name][1] not in given]
    if unknown or missing or not found:
        raise ValueError(
            f"{model_id} does not fit adapter {adapter_name!r}: the adapter has no {unknown[:3]}, "
            f"and the folder has no {missing[:3]}. Load a folder that was saved with the same "
            "configuration"
        )
    state = {dotted(path, entries[name][0]): value for name, value in found.items()}
    load_full_state_dict(root, state, strict=False)
    return None


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


def save_merged(model: nn.Module, folder: str | os.PathLike, **kwargs: Any) -> None:
    """Saves the base model with the active adapters merged into it, with ``save_pretrained(folder,
    **kwargs)``. The model does not change. Every rank must call it. Rank 0 has the full model on
    the host meanwhile.

    Raises:
        TypeError: ``model`` is not a wrapped ``PeftModel``, or its adapters change no weights.
    """
    peft_model: Any = getattr(model, "module", model)
    if not isinstance(peft_model, PeftModel) or not is_sharded(model):
        raise TypeError(
            f"model must be a wrapper around a PeftModel, got {type(peft_model).__name__}; "
            "without a wrapper: model.merge_and_unload().save_pretrained(folder)"
        )
    if not isinstance(peft_model.base_model, BaseTuner):
        kinds = ", ".join(config.peft_type.value for config in peft_model.peft_config.values())
        raise TypeError(
            f"adapters of type {kinds} change no weights, so they cannot be merged: "
            "model.save_pretrained(folder) writes them"
        )
    root, _ = outermost_wrapper(peft_model)
    base: Any = peft_model.get_base_model()
    exchange = RankExchange()
    state: dict[str, Any] = {}

    def merge() -> None:
        layers: list[Any] = [m for m in base.modules() if isinstance(m, BaseTunerLayer)]
        buffers = [(m, dict(m._buffers)) for m in base.modules()]
        try:
            for module, given in buffers:  # where the summoned parameters are
                module._buffers.update(
                    (name, None if b is None else b.cpu()) for name, b in given.items()
                )
            for layer in layers:
                layer.merge()
            state.update(_as_without_adapters(base))
        finally:
            for layer in layers:  # the merged weights are summoned, and are discarded with these
                layer.merged_adapters.clear()
            for module, given in buffers:
                module._buffers.update(given)

    with summon_full_params(root, writeback=False, rank0_only=True, offload_to_cpu=True):
        exchange.run_on_first_rank("merge the adapters", merge)
    exchange.run_on_first_rank(
        f"write {folder}", lambda: base.save_pretrained(folder, state_dict=state, **kwargs)
    )


def _as_without_adapters(base: nn.Module) -> dict[str, Any]:
    """The state dict of ``base`` with the names from before adapters were added."""
    # Of the names below a key, only those below its value exist without adapters.
    tuned, trained = {}, {}
    for name, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            tuned[f"{name}."] = f"{name}.base_layer."
        elif isinstance(module, AuxiliaryTrainingWrapper):
            if hasattr(module, "token_adapter"):
                own = "token_adapter.base_layer"
            elif module.active_adapters:
                own = f"modules_to_save.{module.active_adapters[0]}"
            else:  # only adapters that are not active have a copy
                own = "original_module"
            trained[f"{name}."] = f"{name}.{own}."
    kept, found = {**trained, **tuned}, {}
    for name, value in base.state_dict().items():
        outside = next((one for one in kept if name.startswith(one)), "")
        inside = kept.get(outside, "")
        if name.startswith(inside):
            found[outside + name[len(inside) :]] = value
    return found


def _adapter_names(model: Any) -> Callable[[str], bool]:
    """Selects the parameters that may be saved with adapters: their own, other trainable ones, and
    embeddings, of inputs and outputs, which peft saves if they were changed."""
    names, bases, tuners, others = [], [], [], set()
    find_head = getattr(model.get_base_model(), "get_output_embeddings", None)
    head = None if find_head is None else find_head()
    heads = (head, getattr(head, "base_layer", head))
    for name, module in model.named_modules():
        if isinstance(module, BaseTuner):
            tuners.append((f"{name}.", f"{name}.model."))
        elif isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            names.append(f"{name}.")
            if isinstance(module, BaseTunerLayer):
                bases.append(f"{name}.base_layer.")
        elif isinstance(module, nn.Embedding) or module in heads:
            others.add(dotted(name, "weight"))
    others |= {name for name, shard in owned(model) if shard.holder.requires_grad}

    def wanted(name: str) -> bool:
        if name in others:
            return True
        if any(name.startswith(own) and not name.startswith(model) for own, model in tuners):
            return True  # shared by all layers
        return name.startswith(tuple(names)) and not name.startswith(tuple(bases))

    return wanted


def _name_in_file(adapter: str, name: str) -> str:
    """The name of the parameter ``name`` in a file, which lacks the adapter's name."""
    name = name.replace(f".modules_to_save.{adapter}.", ".")
    if name.endswith(f".lora_magnitude_vector.{adapter}.weight"):
        return name.removesuffix(f".{adapter}.weight")  # the format of before it was a module
    parts = name.split(".")  # the adapter's name is the last part, or the last but one
    return ".".join(parts[:-2] + [part for part in parts[-2:] if part != adapter])


changes.apply()

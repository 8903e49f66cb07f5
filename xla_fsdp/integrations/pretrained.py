"""Loads a folder of the hub into a sharded model, without the full model in memory."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..checkpoint.weights import load_weights

__all__ = ["load_pretrained"]


def load_pretrained(
    model_class: Any, folder: str | os.PathLike, wrap: Callable[[Any], nn.Module], **config: Any
) -> Any:
    """``model_class.from_pretrained(folder)``, sharded: each rank reads only its own part of each
    parameter. Every rank must call it.

    Args:
        model_class: a class of transformers such as ``LlamaForCausalLM``, no ``Auto`` class.
        folder: a local folder with ``config.json`` and safetensors.
        wrap: receives the model on the meta device, and returns it wrapped, with
            ``param_init_fn=xla_fsdp.defer_init``.
        config: entries of the configuration to set, e.g. ``attn_implementation="eager"``.

    Returns:
        The model that ``wrap`` returned, in evaluation mode, with the dtype of the configuration.

    Raises:
        ModelMismatchError: names or shapes do not fit, or some are missing.
        TypeError, ValueError: an argument is not valid.
    """
    if not inspect.isclass(model_class) or not hasattr(model_class, "config_class"):
        raise TypeError(f"model_class must be a model of transformers, got {model_class!r}")
    settings = model_class.config_class.from_pretrained(folder, **config)
    with torch.device("meta"):
        model = model_class._from_config(settings, dtype=settings.dtype)
    _compute_buffers(model)
    own = set(model.state_dict())
    ignored = list(model._keys_to_ignore_on_load_unexpected or ())
    prefix = f"{model.base_model_prefix}."
    wrapped = wrap(model)

    def rename(name: str) -> str | None:
        """Adds or removes the prefix that only models with a head have."""
        if name in own:
            return name
        if prefix + name in own:
            return prefix + name
        if name.startswith(prefix) and name[len(prefix) :] in own:
            return name[len(prefix) :]
        return None if any(re.search(pattern, name) for pattern in ignored) else name

    load_weights(wrapped, folder, rename=rename)
    return wrapped.eval()


def _compute_buffers(model: Any) -> None:
    """Gives values to buffers, which only a constructor computes: modules with buffers are built
    again on the CPU."""
    built: dict[tuple, nn.Module] = {}
    for name, module in model.named_modules():
        lacking = [key for key, b in module._buffers.items() if b is not None and b.is_meta]
        if not lacking:
            continue
        config = getattr(module, "config", None) or model.config
        kind = type(module), id(config)
        if kind not in built:
            parameters = inspect.signature(type(module)).parameters.values()
            named = [one for one in parameters if one.kind < one.VAR_POSITIONAL]
            needed = [one.name for one in named if one.default is one.empty]
            if needed[1:] or needed[:1] != ["config"]:
                raise ValueError(
                    f"{name!r} ({type(module).__name__}) has buffers {lacking} whose values are "
                    f"not in the file, and its constructor takes {needed}, not a configuration: "
                    "build the model on the CPU (without torch.device('meta')), wrap it and call "
                    "load_weights"
                )
            built[kind] = type(module)(config)
        for key in lacking:
            value = built[kind]._buffers[key]
            assert value is not None
            module._buffers[key] = value.clone()
            # Rotary embeddings have the same tensor as an attribute.
            for attribute, other in list(vars(module).items()):
                if isinstance(other, torch.Tensor) and other.is_meta:
                    setattr(module, attribute, getattr(built[kind], attribute).clone())

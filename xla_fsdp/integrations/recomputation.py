"""``gradient_checkpointing_enable()``: recomputed as ``checkpoint_module`` does.

torch's ``utils.checkpoint`` asks for a module ``torch.xla`` (utils/checkpoint.py, line 93 in torch
2.9), which there is none of, and knows nothing of gathered parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint
from torch import nn

from ..remat import recomputed

# Options of torch.utils.checkpoint.checkpoint that change nothing here: neither of its two ways is
# used, and random numbers are always restored.
_WITHOUT_EFFECT = {"use_reentrant": (True, False, None), "preserve_rng_state": (True,)}
# What layers call, see transformers.modeling_layers.GradientCheckpointingLayer.
_FUNCTION = "_gradient_checkpointing_func"


def recompute_through_checkpoint_module(model: nn.Module) -> None:
    """Has the layers in ``model`` that were told to recompute do it like ``checkpoint_module``.

    Raises:
        ValueError: they were given options of ``torch.utils.checkpoint`` that it does not have.
    """
    for module in model.modules():
        function = vars(module).get(_FUNCTION)
        if isinstance(function, functools.partial) and (
            function.func is torch.utils.checkpoint.checkpoint
        ):
            _require_known(function.keywords)
            setattr(module, _FUNCTION, _checkpoint)


def _checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, computed again in the backward.

    Layers pass a method of theirs, in which some give the keyword arguments already.
    """
    if isinstance(function, functools.partial):
        args, kwargs = (*function.args, *args), {**function.keywords, **kwargs}
        function = function.func
    owner = getattr(function, "__self__", function)
    module = owner if isinstance(owner, nn.Module) else nn.Module()
    return recomputed(module, function, args, kwargs)


def _require_known(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if value not in _WITHOUT_EFFECT.get(name, ()):
            raise ValueError(
                f"gradient_checkpointing_kwargs has {name}={value!r}: sharded models recompute as "
                "xla_fsdp.checkpoint_module does; only use_reentrant (either, without effect) and "
                "preserve_rng_state=True are taken"
            )

"""Dotted names of modules, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

_Hook = TypeVar("_Hook", bound=Callable[..., Any])

WRAPPED = "_fsdp_wrapped_module"
WRAPPED_PREFIX = f"{WRAPPED}."


def dotted(path: str, name: str) -> str:
    """Joins two names, of which either may be empty, without torch's checkpoint wrappers."""
    found = f"{path}.{name}" if path and name else path or name
    return found.replace(_CHECKPOINT_PREFIX, "")


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a complete wrapper, or is sharded in place."""
    return getattr(type(module), "_is_fsdp_wrapper", False) and "_unit" in vars(module)


def names_hook(hook: _Hook) -> _Hook:
    vars(hook)["_is_names_hook"] = True
    return hook


def is_names_hook(hook: Any) -> bool:
    return getattr(getattr(hook, "hook", hook), "_is_names_hook", False)

"""Dotted names of modules, parameters and buffers, and of wrappers among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

_Hook = TypeVar("_Hook", bound=Callable[..., Any])

# The attribute of a wrapper that holds the wrapped module.
WRAPPED = "_fsdp_wrapped_module"
# The part of a dotted name that it adds.
WRAPPED_PREFIX = f"{WRAPPED}."


def dotted(path: str, name: str) -> str:
    """``name`` inside ``path``; either may be empty. As in state dicts, torch's wrappers for
    activation checkpointing do not appear in names."""
    found = f"{path}.{name}" if path and name else path or name
    return found.replace(_CHECKPOINT_PREFIX, "")


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` has an FSDP unit: it is a wrapper of this package whose construction is
    complete, or is sharded in place."""
    return getattr(type(module), "_is_fsdp_wrapper", False) and "_unit" in vars(module)


def names_hook(hook: _Hook) -> _Hook:
    """Marks a state-dict hook of wrappers, which the unwrapped module does not have."""
    vars(hook)["_is_names_hook"] = True
    return hook


def is_names_hook(hook: Any) -> bool:
    """Whether :func:`names_hook` marked ``hook``, or the function inside torch's hook object."""
    return getattr(getattr(hook, "hook", hook), "_is_names_hook", False)

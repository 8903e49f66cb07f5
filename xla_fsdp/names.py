"""Dotted names of modules, parameters and buffers, and the wrappers in them."""

from __future__ import annotations

from torch import nn

# The attribute of a wrapper that holds the wrapped module.
WRAPPED = "_fsdp_wrapped_module"
# How names go through it.
WRAPPED_PREFIX = f"{WRAPPED}."


def dotted(path: str, name: str) -> str:
    """``name`` inside ``path``; either may be empty."""
    return f"{path}.{name}" if path and name else path or name


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` is a wrapper of this project, and built: it has a unit."""
    return getattr(type(module), "_is_fsdp_wrapper", False) and "_unit" in vars(module)

"""Dotted names of modules, parameters and buffers, and the wrappers in them."""

from __future__ import annotations

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

# The attribute of a wrapper that holds the wrapped module.
WRAPPED = "_fsdp_wrapped_module"
# How names go through it.
WRAPPED_PREFIX = f"{WRAPPED}."
# In the ``__dict__`` of a module that is sharded in place: the wrapper that runs its forward.
SHELL = "_fsdp_shell"


def dotted(path: str, name: str) -> str:
    """``name`` inside ``path``; either may be empty. As in state dicts, names go through torch's
    wrappers for activation checkpointing."""
    found = f"{path}.{name}" if path and name else path or name
    return found.replace(_CHECKPOINT_PREFIX, "")


def is_wrapper(module: nn.Module) -> bool:
    """Whether ``module`` has a unit: it is a wrapper of this project, and built, or is sharded in
    place."""
    return getattr(type(module), "_is_fsdp_wrapper", False) and "_unit" in vars(module)


def shell_of(module: nn.Module) -> nn.Module | None:
    """The wrapper that runs the forward of ``module`` if that is sharded in place. No child of it,
    so that names stay as they are."""
    return vars(module).get(SHELL)

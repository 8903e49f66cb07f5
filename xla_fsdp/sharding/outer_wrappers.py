"""Finds the wrappers outside a module that shard its parameters.

A wrapper knows the modules inside it, but these modules do not know the wrapper. A call that starts
inside (a method of the wrapped module that saves it, or computes with it) must find the wrapper, or
at least detect that one exists, because the module has only this rank's shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from ..names import is_wrapper
from .unit import Unit

# Set on a module: references to the wrappers whose FSDP units shard its parameters.
_WRAPPERS = "_xla_fsdp_wrappers"


class WrapperReference:
    """A weak reference from a module to the wrapper that shards its parameters."""

    def __init__(self, wrapper: nn.Module | None) -> None:
        self._known = None if wrapper is None else weakref.ref(wrapper)

    @property
    def wrapper(self) -> nn.Module | None:
        """``None`` if the wrapper is gone, or if the module was copied without it."""
        return None if self._known is None else self._known()

    def __deepcopy__(self, memo: dict) -> WrapperReference:
        return WrapperReference(memo.get(id(self.wrapper)))


def register_outer_wrapper(wrapper: nn.Module, unit: Unit) -> None:
    """Stores a reference to ``wrapper``, which owns ``unit``, on the modules that it shards."""
    reference = WrapperReference(wrapper)
    for module in {slot.module: None for slot in unit.slots}:
        mark_sharded(module)
        vars(module)[_WRAPPERS].append(reference)


def mark_sharded(module: nn.Module) -> None:
    """Marks ``module``: an FSDP unit shards parameters of it."""
    vars(module).setdefault(_WRAPPERS, [])


def has_sharded_parameters(module: nn.Module) -> bool:
    """Whether an FSDP unit shards parameters of ``module`` itself (not of its children)."""
    return _WRAPPERS in vars(module)


def find_outer_wrappers(module: nn.Module) -> list[nn.Module]:
    """The wrappers around ``module`` that shard parameters in it, the outermost first. ``module``
    itself is included if it shards some."""
    inside = set(module.modules()) - {module}
    found: dict[nn.Module, None] = {}
    for inner in module.modules():
        for reference in vars(inner).get(_WRAPPERS, ()):
            wrapper = reference.wrapper
            if wrapper is not None and wrapper not in inside:
                found[wrapper] = None
    # All of these contain the module, so each contains the next: the outermost has most modules.
    return sorted(found, key=lambda wrapper: -sum(1 for _ in wrapper.modules()))


def find_sharded_outside(module: nn.Module, units: Iterable[Unit]) -> str | None:
    """The name of a submodule of ``module`` whose parameters belong to a wrapper around ``module``,
    that is to none of ``units`` (the FSDP units inside). ``None`` if there is none."""
    held = {slot.module for unit in units for slot in unit.slots}
    for name, inner in module.named_modules():
        if has_sharded_parameters(inner) and inner not in held:
            return name or type(inner).__name__
    return None


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` contains wrappers, or a wrapper around it shards its parameters."""
    return any(is_wrapper(inner) or has_sharded_parameters(inner) for inner in module.modules())

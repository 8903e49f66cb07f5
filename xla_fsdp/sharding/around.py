"""Which wrappers hold the parameters of a module from outside of it.

A wrapper knows the modules in it, and these do not know the wrapper. What starts from inside (a
method of the wrapped module that saves it, or computes with it) has to find the wrapper, or at
least to see that there is one: the module has only this rank's shards.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import nn

from ..names import is_wrapper
from .unit import Unit

# On a module: references to the wrappers of the units that shard parameters of it.
_WRAPPERS = "_xla_fsdp_wrappers"


class WrapperReference:
    """A wrapper as the modules whose parameters it holds know it: weakly, since it holds them."""

    def __init__(self, wrapper: nn.Module | None) -> None:
        self._known = None if wrapper is None else weakref.ref(wrapper)

    @property
    def wrapper(self) -> nn.Module | None:
        """``None`` if it is gone, or if the module was copied without it."""
        return None if self._known is None else self._known()

    def __deepcopy__(self, memo: dict) -> WrapperReference:
        return WrapperReference(memo.get(id(self.wrapper)))


def refer_to(wrapper: nn.Module, unit: Unit) -> None:
    """Has the modules whose parameters ``unit`` shards know ``wrapper``, which has the unit."""
    reference = WrapperReference(wrapper)
    for module in {place.module: None for place in unit.places}:
        note_sharded(module)
        vars(module)[_WRAPPERS].append(reference)


def note_sharded(module: nn.Module) -> None:
    """Notes on ``module`` that a unit shards parameters of it."""
    vars(module).setdefault(_WRAPPERS, [])


def has_shards(module: nn.Module) -> bool:
    """Whether a unit shards parameters of ``module`` itself."""
    return _WRAPPERS in vars(module)


def holders_outside(module: nn.Module) -> list[nn.Module]:
    """The wrappers around ``module`` that hold parameters in it, the outermost first; ``module``
    itself counts as one if it holds some."""
    inside = set(module.modules()) - {module}
    found: dict[nn.Module, None] = {}
    for inner in module.modules():
        for reference in vars(inner).get(_WRAPPERS, ()):
            wrapper = reference.wrapper
            if wrapper is not None and wrapper not in inside:
                found[wrapper] = None
    # Of two that are around one module, one is in the other.
    return sorted(found, key=lambda wrapper: -sum(1 for _ in wrapper.modules()))


def name_held_outside(module: nn.Module, units: Iterable[Unit]) -> str | None:
    """The name of a submodule of ``module`` whose parameters none of ``units``, those in it, has:
    they belong to a wrapper around it. ``None`` if there is none."""
    held = {place.module for unit in units for place in unit.places}
    for name, inner in module.named_modules():
        if has_shards(inner) and inner not in held:
            return name or type(inner).__name__
    return None


def is_sharded(module: nn.Module) -> bool:
    """Whether wrappers are in ``module``, or around it and hold parameters of it."""
    return any(is_wrapper(inner) or has_shards(inner) for inner in module.modules())

"""Replaces attributes of other modules, and restores them: for a launch, a plan, a library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...xlac import PrivateAttribute

_MISSING = object()


class Patches:
    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        original = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self._undo.append((owner, name, original))

    def replace(self, attribute: PrivateAttribute, value: Any) -> None:
        self.set(attribute.owner, attribute.name, value)

    def set_everywhere(self, replacements: dict[Callable, Callable]) -> None:
        """Replaces functions in every module that imported them by name."""
        by_id = {id(old): new for old, new in replacements.items()}
        for module in list(sys.modules.values()):
            names = getattr(module, "__dict__", None)
            if not names or module.__name__.startswith(("torch.", "jax", "numpy", "sympy")):
                continue
            if by_id.keys().isdisjoint(map(id, list(names.values()))):
                continue
            for name, value in list(names.items()):
                if id(value) in by_id:
                    self.set(module, name, by_id[id(value)])

    def undo(self) -> None:
        while self._undo:
            owner, name, value = self._undo.pop()
            if value is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

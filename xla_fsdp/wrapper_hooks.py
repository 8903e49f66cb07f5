"""Hooks on a wrapper, called in the order in which the module alone would call them.

What is registered on a module before it is wrapped stays there, and a wrapper's own hooks are
around it: before the module's where something goes in, after them where something comes out. Where
the module alone would call a new hook on the other side of one of the former, it goes to the module
as well.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from .sharding.unit import Unit


class HookMethods(nn.Module):
    """A module around ``_fsdp_wrapped_module``."""

    _unit: Unit
    _fsdp_wrapped_module: Any

    def register_forward_pre_hook(
        self, hook: Any, *, prepend: bool = False, **options: Any
    ) -> RemovableHandle:
        """As on the wrapped module."""
        home = None if prepend else self._with_hooks("_forward_pre_hooks")
        return (home or self._around()).register_forward_pre_hook(hook, prepend=prepend, **options)

    def register_forward_hook(
        self, hook: Any, *, prepend: bool = False, **options: Any
    ) -> RemovableHandle:
        """As on the wrapped module."""
        home = self._with_hooks("_forward_hooks") if prepend else None
        return (home or self._around()).register_forward_hook(hook, prepend=prepend, **options)

    def register_full_backward_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As on the wrapped module."""
        home = None if prepend else self._with_hooks("_backward_pre_hooks")
        return (home or self._around()).register_full_backward_pre_hook(hook, prepend)

    def register_full_backward_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As on the wrapped module."""
        home = self._with_hooks("_backward_hooks") if prepend else None
        return (home or self._around()).register_full_backward_hook(hook, prepend)

    def _around(self) -> Any:
        """The wrapper itself, with the methods of any module."""
        return super()

    def _with_hooks(self, kind: str) -> Any:
        """The wrapped module, if it has hooks of this kind, and a forward of its own."""
        if hasattr(self._unit, "template"):  # of scanned blocks
            return None
        return self._fsdp_wrapped_module if getattr(self._fsdp_wrapped_module, kind) else None

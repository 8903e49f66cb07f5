"""Preserves shared parameters, hooks and attributes when ``module.to(device)`` moves to XLA.

For XLA, ``to`` makes a new parameter for each module attribute, silently.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

_WATCHES = "_xla_fsdp_watches"
# Set on a parameter that was replaced by another.
REPLACED = "_xla_fsdp_left"


def watch_moves() -> None:
    """Replaces ``nn.Module.to``, once."""
    original = nn.Module.to
    if hasattr(original, _WATCHES):
        return

    @functools.wraps(original)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        places = _places(self)
        moved = original(self, *args, **kwargs)
        for parameter, ((first, name), *others) in places.items():
            now = first._parameters[name]
            if now is not parameter and now is not None:
                vars(now).update({**vars(parameter), **vars(now)})
                for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
                    if getattr(parameter, hooks):
                        setattr(now, hooks, getattr(parameter, hooks))
                setattr(parameter, REPLACED, True)
            for module, other in others:
                if module._parameters[other] is not now:
                    setattr(module, other, now)  # also updates the list of recurrent layers
        return moved

    setattr(to, _WATCHES, True)
    nn.Module.to = to  # type: ignore[assignment, method-assign]


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        if isinstance(module._parameters, dict):  # TorchScript modules differ
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((module, name))
    return places

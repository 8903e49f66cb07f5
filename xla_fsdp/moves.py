"""Preserves shared parameters, hooks and attributes when ``module.to(device)`` moves to XLA.

Between some devices, as from CPU to GPU, ``to`` exchanges the data of a parameter. For XLA it makes
a new parameter for each module attribute. Without this module, an embedding and the head that
shares its weight would then be trained separately, an optimizer with the old parameters would train
nothing, and hooks and attributes of parameters would be lost, all silently.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

# Set on the function that replaces ``nn.Module.to``.
_WATCHES = "_xla_fsdp_watches"
# Set on a parameter that was replaced by another.
REPLACED = "_xla_fsdp_left"


def watch_moves() -> None:
    """Replaces ``nn.Module.to`` by a function that keeps shared parameters shared, keeps hooks and
    attributes, and marks parameters that were replaced. A second call does nothing."""
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
                _copy_attributes(parameter, now)
            for module, other in others:
                if module._parameters[other] is not now:
                    setattr(module, other, now)  # also updates the list of recurrent layers
        return moved

    setattr(to, _WATCHES, True)
    nn.Module.to = to  # type: ignore[assignment, method-assign]


def _copy_attributes(parameter: nn.Parameter, now: nn.Parameter) -> None:
    """Copies what users set on the old parameter (hooks, attributes) to the new one."""
    vars(now).update({**vars(parameter), **vars(now)})
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks):
            setattr(now, hooks, getattr(parameter, hooks))
    setattr(parameter, REPLACED, True)


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """The modules and attribute names of each parameter."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        if isinstance(module._parameters, dict):  # TorchScript modules store them differently
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((module, name))
    return places

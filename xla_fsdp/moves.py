"""What of a model must not be lost when ``module.to(device)`` moves it to a device of XLA.

Where that can exchange what is in a parameter, as from a CPU to a GPU, it does. For XLA it makes
new parameters, another in each place. An embedding and the head that shares its weight would be
trained apart from then on, an optimizer that has the old parameters would train nothing, and hooks
and attributes of parameters would be gone, all without a word.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

# On the function in the place of ``nn.Module.to``.
_WATCHES = "_xla_fsdp_watches"
# On a parameter that was replaced by another.
_LEFT = "_xla_fsdp_left"


def watch_moves() -> None:
    """Has ``nn.Module.to`` keep shared parameters shared and their hooks and attributes, as it does
    elsewhere, and note on parameters that they were replaced. A second call changes nothing."""
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
                _hand_over(parameter, now)
            for module, other in others:
                if module._parameters[other] is not now:
                    setattr(module, other, now)  # recurrent layers have it in a list, too
        return moved

    setattr(to, _WATCHES, True)
    nn.Module.to = to  # type: ignore[assignment, method-assign]


def _hand_over(parameter: nn.Parameter, now: nn.Parameter) -> None:
    """Gives the one that is there now what users hung on the one that was."""
    vars(now).update({**vars(parameter), **vars(now)})
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks):
            setattr(now, hooks, getattr(parameter, hooks))
    setattr(parameter, _LEFT, True)


def was_left(parameter: object) -> bool:
    """Whether a model that was moved has another parameter in the place of this one."""
    return hasattr(parameter, _LEFT)


def _places(model: nn.Module) -> dict[nn.Parameter, list[tuple[nn.Module, str]]]:
    """Where each parameter is, by module and attribute."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        if isinstance(module._parameters, dict):  # those of TorchScript are elsewhere
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((module, name))
    return places

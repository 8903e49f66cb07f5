"""Parameters that are one in two places of a model stay one when it moves to a device of XLA.

Where ``module.to(device)`` can exchange what is in a parameter, as from a CPU to a GPU, it does.
For XLA it makes new parameters, another in each place: an embedding and the head that shares its
weight would be trained apart from then on, without a word.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

_KEEPS = "_xla_fsdp_keeps_ties"


def keep_ties() -> None:
    """Has ``nn.Module.to`` keep them, as it does elsewhere. A second call changes nothing."""
    original = nn.Module.to
    if hasattr(original, _KEEPS):
        return

    @functools.wraps(original)
    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        tied = _tied(self)
        moved = original(self, *args, **kwargs)
        for (first, name), *others in tied:
            parameter = first._parameters[name]
            for module, other in others:
                if module._parameters[other] is not parameter:
                    setattr(module, other, parameter)  # recurrent layers have it in a list, too
        return moved

    setattr(to, _KEEPS, True)
    nn.Module.to = to  # type: ignore[assignment, method-assign]


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Places of the parameters that have more than one."""
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        if isinstance(module._parameters, dict):  # those of TorchScript are elsewhere
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    places.setdefault(parameter, []).append((module, name))
    return [found for found in places.values() if len(found) > 1]

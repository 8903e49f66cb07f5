"""State of optimizers in checkpoints, where what is kept depends on matrices, blocks or ranks.

Checkpoints know what has a value for each element of a parameter of the unsharded model, which any
ranks cut anew, and what is a plain value of such a parameter. An optimizer whose state is something
else says it in these words (:class:`SavesItself`), and takes it back from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

# Elements of float32 in one value of a checkpoint's manifest, which takes 1 MiB.
_CHUNK = 1 << 17


@dataclass(frozen=True, eq=False)
class Made:
    """A value for each element of an optimizer's tensor, computed when it is asked for.

    ``make()`` gives it on the CPU, of the tensor's shape, in ``dtype``.
    """

    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


@runtime_checkable
class SavesItself(Protocol):
    """An optimizer with state of its own kind.

    Attributes:
        member_state: keys of plain values that each parameter of the unsharded model has of its
            own; others are the same for all that are in one tensor.
    """

    member_state: frozenset[str]

    def saved_state(self, parameter: torch.nn.Parameter) -> Sequence[Mapping[str, Any]]:
        """For each parameter of the unsharded model in ``parameter`` (``Parts.count``; of a stack
        block by block): :class:`Made` or plain values, by key."""

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state of ``parameter`` from that: tensors of its shape on the CPU (0 where nothing
        was saved), plain values, and for ``member_state`` lists of them with ``None``."""


def chunks(value: torch.Tensor) -> list[torch.Tensor]:
    """A vector in pieces that fit into a manifest, on the CPU."""
    return [piece.clone() for piece in value.detach().cpu().split(_CHUNK)]

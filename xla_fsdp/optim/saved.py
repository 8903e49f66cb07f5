"""Optimizer state in checkpoints, for state that depends on matrices, blocks or ranks.

Checkpoints support elementwise state of a parameter of the unsharded model, which can be cut for
any number of ranks, and plain values of such a parameter. An optimizer with other state converts it
to this form (:class:`StateConverter`) and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# The number of float32 elements in one value of a checkpoint's manifest, which takes 1 MiB.
_CHUNK = 1 << 17


@dataclass(frozen=True, eq=False)
class LazyState:
    """Elementwise state of an optimizer's tensor, computed when it is needed.

    ``make()`` returns it on the CPU, in the tensor's shape and ``dtype``.
    """

    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


class StateConverter(Protocol):
    """An optimizer that converts its state for checkpoints.

    The methods use only shape, device and sharded tensor of ``parameter``. It may represent a
    parameter of the unsharded model; then the state is the one that this optimizer has there.

    Attributes:
        member_state: keys of plain values that are separate for each parameter of the unsharded
            model; other values are the same for all parameters in one tensor.
    """

    @property
    def member_state(self) -> frozenset[str]: ...

    def saved_state(
        self, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        """For each parameter of the unsharded model in ``parameter`` (``Parts.count``; for a stack
        block by block): :class:`LazyState` or plain values, by key.

        Raises:
            ValueError: ``state`` is not the state of such a parameter.
        """

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state of ``parameter`` from saved values: tensors of its shape on the CPU (0 where
        nothing was saved), plain values, and for ``member_state`` lists of these with ``None``.
        ``group``: its options."""


def state_converter_of(optimizer: object) -> StateConverter | None:
    """The object that converts the state of ``optimizer``: itself or its attribute
    ``state_converter``. ``None`` if the state consists of tensors of the parameters' shapes and of
    plain values."""
    converter: Any = getattr(optimizer, "state_converter", optimizer)
    return converter if hasattr(converter, "saved_state") else None


def require_shape(key: str, value: Any, shape: Sequence[int]) -> None:
    """Raises ValueError unless ``value`` is a tensor of that shape."""
    found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if found != list(shape):
        raise ValueError(f"{key!r} is {found}, expected a tensor of shape {list(shape)}")


def require_keys(state: Mapping[str, Any], expected: Sequence[str]) -> None:
    """Raises ValueError unless ``state`` has exactly these keys."""
    if state.keys() != set(expected):
        raise ValueError(f"the state has keys {sorted(state)}, expected {sorted(expected)}")


def chunks(value: torch.Tensor) -> list[torch.Tensor]:
    """Splits a vector into pieces, on the CPU, that fit into a manifest."""
    return [piece.clone() for piece in value.detach().cpu().split(_CHUNK)]

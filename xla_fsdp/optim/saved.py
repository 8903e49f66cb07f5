"""Optimizer state in checkpoints that is neither elementwise nor a plain value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# float32 elements in one value of a manifest: 1 MiB.
_CHUNK = 1 << 17


@dataclass(frozen=True, eq=False)
class LazyState:
    """Elementwise state: ``make()`` returns it on the CPU, in the tensor's shape and ``dtype``."""

    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


class StateConverter(Protocol):
    """An optimizer that converts its state for checkpoints.

    The methods use only shape, device and sharded tensor of ``parameter``. ``member_state``: keys
    of plain values that differ between the unsharded parameters in one tensor.
    """

    @property
    def member_state(self) -> frozenset[str]: ...

    def saved_state(
        self, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        """:class:`LazyState` or plain values by key, for each of ``Parts.count`` parameters.

        Raises ValueError if ``state`` is not the state of such a parameter.
        """

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state of ``parameter`` from saved values, with the options ``group``.

        ``saved``: tensors of its shape on the CPU (0 where nothing was saved), plain values, and
        for ``member_state`` lists of these with ``None``.
        """


def state_converter_of(optimizer: object) -> StateConverter | None:
    """``optimizer`` or its attribute ``state_converter``, or None."""
    converter: Any = getattr(optimizer, "state_converter", optimizer)
    return converter if hasattr(converter, "saved_state") else None


def require_shape(key: str, value: Any, shape: Sequence[int]) -> None:
    found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if found != list(shape):
        raise ValueError(f"{key!r} is {found}, expected a tensor of shape {list(shape)}")


def require_keys(state: Mapping[str, Any], expected: Sequence[str]) -> None:
    if state.keys() != set(expected):
        raise ValueError(f"the state has keys {sorted(state)}, expected {sorted(expected)}")


def chunks(value: torch.Tensor) -> list[torch.Tensor]:
    """Pieces of a vector, on the CPU, that fit into a manifest."""
    return [piece.clone() for piece in value.detach().cpu().split(_CHUNK)]

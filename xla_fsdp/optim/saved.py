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

from ..sharding.sharded_parameter import local

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

    Of ``parameter`` these ask shape, device and what it is a shard of: it may stand for the
    parameter of the unsharded model, whose state is then the one of this optimizer there.

    Attributes:
        member_state: keys of plain values that each parameter of the unsharded model has of its
            own; others are the same for all that are in one tensor.
    """

    member_state: frozenset[str]

    def saved_state(
        self, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        """For each parameter of the unsharded model in ``parameter`` (``Parts.count``; of a stack
        block by block): :class:`Made` or plain values, by key.

        Raises:
            ValueError: ``state`` is none of such a parameter.
        """

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The state of ``parameter`` from that: tensors of its shape on the CPU (0 where nothing
        was saved), plain values, and for ``member_state`` lists of them with ``None``; ``group``:
        the options it is trained with."""


def saver_of(optimizer: object) -> SavesItself | None:
    """Who puts the state of ``optimizer`` into words, itself or what it has for that (``saver``);
    ``None`` if its state is of the parameters' shapes, and plain values."""
    saver = getattr(optimizer, "saver", optimizer)
    return saver if isinstance(saver, SavesItself) else None


class SavesMore:
    """Words of an optimizer around another.

    Args:
        inner: says what the state of the other one is.
        elements: keys of further state that has a value for each element.
        singles: keys of further state that is one value.
    """

    def __init__(self, inner: SavesItself, elements: Sequence[str], singles: Sequence[str]):
        self._inner, self._elements, self._singles = inner, elements, singles
        self.member_state = inner.member_state

    def saved_state(
        self, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """See :class:`SavesItself`."""
        rest, more = dict(state), {}
        for key in self._elements:
            if key in rest:
                value = local(rest.pop(key))
                require_shape(key, value, local(parameter).shape)
                more[key] = Made(value.dtype, value.detach().cpu)
        for key in self._singles:
            if key in rest:
                more[key] = rest.pop(key)
        return [{**own, **more} for own in self._inner.saved_state(parameter, rest)]

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """See :class:`SavesItself`."""
        further = {*self._elements, *self._singles}
        rest = {key: value for key, value in saved.items() if key not in further}
        state = self._inner.load_saved_state(parameter, rest, group)
        more = {key: value for key, value in saved.items() if key in further}
        return state | {key: value.to(parameter.device) for key, value in more.items()}


def require_shape(key: str, value: Any, shape: Sequence[int]) -> None:
    """Raises ValueError unless ``value`` is a tensor of that shape."""
    found = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
    if found != list(shape):
        raise ValueError(f"{key!r} is {found}, expected a tensor of shape {list(shape)}")


def require_keys(state: Mapping[str, Any], expected: Sequence[str]) -> None:
    """Raises ValueError unless ``state`` has just these keys."""
    if state.keys() != set(expected):
        raise ValueError(f"there are {sorted(state)}, expected {sorted(expected)}")


def chunks(value: torch.Tensor) -> list[torch.Tensor]:
    """A vector in pieces that fit into a manifest, on the CPU."""
    return [piece.clone() for piece in value.detach().cpu().split(_CHUNK)]

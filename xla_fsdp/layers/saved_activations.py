"""Values of a block that are saved in the forward, so that the backward need not recompute them.

A recomputation still traces the operations before them, for gradients; the compiler removes these.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

ATTENTION = "attention"


class SavedActivations:
    """A forward of a block, which records values, or the recomputation, which reuses them.

    ``names``: submodules whose outputs are saved, and :data:`ATTENTION`. ``recorded``: in a
    recomputation, the values in order.
    """

    def __init__(self, names: Iterable[str], recorded: Sequence[torch.Tensor] | None = None):
        self.names = frozenset(names)
        self.values: list[torch.Tensor] = []
        self.met: set[str] = set()
        self._recorded = None if recorded is None else iter(recorded)

    @contextlib.contextmanager
    def over(self, block: nn.Module) -> Iterator[None]:
        """Within, calls of ``block`` in this thread record or reuse values."""
        named = [name for name in self.names if name != ATTENTION]
        handles = [
            block.get_submodule(name).register_forward_hook(partial(self._of_module, name))
            for name in named
        ]
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)
            for handle in handles:
                handle.remove()

    def require_all_called(self) -> None:
        """Raises ValueError for a name that did not occur, which would silently be recomputed."""
        for name in sorted(self.names - self.met):
            what = "scaled_dot_product_attention of xla_fsdp.layers" if name == ATTENTION else name
            raise ValueError(
                f"keep={name!r}, but the forward of a block does not call {what}. Name submodules "
                "that it calls"
            )

    def computed(
        self, name: str, compute: Callable[[], Sequence[torch.Tensor]], count: int
    ) -> list[torch.Tensor]:
        """The ``count`` tensors of ``compute``, without graph; a recomputation does not call it."""
        self.met.add(name)
        if self._recorded is not None:
            return [next(self._recorded) for _ in range(count)]
        made = list(compute())
        self.values += made
        return made

    def of_tensor(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """``value``; in a recomputation the recorded value with its graph."""
        self.met.add(name)
        if self._recorded is not None:
            return _Recorded.apply(value, next(self._recorded))
        self.values.append(value.clone())  # ``value`` may change in place later
        return value

    def _of_module(self, name: str, module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            raise TypeError(
                f"keep={name!r}, but {type(module).__name__} returns {type(output).__name__} "
                "instead of a tensor. Name submodules that return a tensor"
            )
        return self.of_tensor(name, output)


_current: ContextVar[SavedActivations | None] = ContextVar(
    "xla_fsdp_saved_activations", default=None
)


def current_saved_activations(name: str) -> SavedActivations | None:
    current = _current.get()
    return current if current is not None and name in current.names else None


class _Recorded(torch.autograd.Function):
    """``apply(computed, recorded)``: the recorded value, the gradient of the computed one."""

    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
        return recorded.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None

"""A random state for each rank, in the one CPU generator that all threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..rank import RankContext, current_rank


class RankGenerators:
    """Every rank starts with the caller's current state."""

    def __init__(self, contexts: list[RankContext]) -> None:
        self._generator = torch.default_generator
        self._lock = threading.RLock()
        self._owner: RankContext | None = None  # None: a thread of no rank
        start = self._generator.get_state()
        self._states: dict[RankContext | None, torch.Tensor] = {c: start for c in contexts}

    def run(self, context: RankContext | None, fn: Callable, /, *args: Any, **kwargs: Any) -> Any:
        """Calls ``fn(*args, **kwargs)`` with ``context``'s state in the generator."""
        with self._lock:
            if self._owner is not context:
                self._swap(context)
            return fn(*args, **kwargs)

    def _swap(self, context: RankContext | None) -> None:
        # No mode may intercept these.
        with torch._C.DisableTorchFunction():
            self._states[self._owner] = self._generator.get_state()
            self._generator.set_state(self._states[context])
        self._owner = context


class GeneratorOfThisRank:
    """Replaces ``torch.random.default_generator``, for ``torch.manual_seed`` and the like."""

    def __init__(self, generators: RankGenerators, generator: torch.Generator) -> None:
        self._generators = generators
        self._generator = generator

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._generator, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._generators.run(current_rank(), value, *args, **kwargs)

        return call

"""Programs of ranks do not depend on when Python's garbage collector comes by.

A cut makes one program of all tensors that are alive. In a cycle of references (a model and a
trainer that know each other, an exception and its frames) tensors are alive until a collection. One
that comes when rank 0 has let go of such a cycle and rank 1 has not yet, leaves it to rank 1 alone,
whose program then has collectives that no other rank has: XLA waits for them, and ends the process.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch_xla


class Garbage:
    """The collector, watched for the length of a launch.

    A collection takes a tenth of a second where much is imported. So only after one that came by
    itself and found tensors is everything collected before a program, once all ranks have met.
    """

    def __init__(self) -> None:
        self._destroyed = 0
        self._found_tensors = False

    def watch(self) -> None:
        """Looks at each collection from now on."""
        gc.callbacks.append(self._at_collection)

    def unwatch(self) -> None:
        """The launch is over."""
        gc.callbacks.remove(self._at_collection)

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """In here all ranks have the same garbage, if they do the same: for rank 0, while the
        others have met it and wait or dispatch."""
        enabled = gc.isenabled()
        gc.disable()
        try:
            if self._found_tensors:
                gc.collect()
                self._found_tensors = False
            yield
        finally:
            if enabled:
                gc.enable()

    def _at_collection(self, phase: str, info: dict) -> None:
        destroyed = torch_xla._XLAC._xla_counter_value("DestroyXlaTensor") or 0
        if phase == "start":
            self._destroyed = destroyed
        elif destroyed != self._destroyed:
            self._found_tensors = True

"""Where an accelerator is in a loader that reads ahead.

On XLA a thread reads batches ahead of the loop, and notes "this was the last one" when it has read
it, several batches before the loop has: ``gather_for_metrics`` would cut a batch in the middle, or
not the last one, and ``accumulate`` would step at another batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from accelerate.state import GradientState


class _Place:
    """What ``GradientState`` wants to know of the loader that the loop is in."""

    end_of_dataloader = False
    remainder = -1


class _Nobody:
    """Takes the notes of the thread that reads ahead."""

    def _add_dataloader(self, loader: object) -> None:
        pass

    def _remove_dataloader(self, loader: object) -> None:
        pass


def batches_of(original: Callable[[Any], Iterator[Any]], loader: Any) -> Iterator[Any]:
    """The batches of an ``MpDeviceLoaderWrapper``, the last of which is known as such in its turn.

    Args:
        original: its ``__iter__``.
        loader: the wrapper, around a loader of Accelerate on the host.
    """
    loader.dataloader.gradient_state = _Nobody()
    batches = iter(original(loader))
    state, place, none = GradientState(), _Place(), object()
    state._add_dataloader(place)
    try:
        batch = next(batches, none)
        while batch is not none:
            following = next(batches, none)
            place.remainder = loader.dataloader.remainder
            place.end_of_dataloader = following is none
            yield batch
            batch = following
    finally:
        state._remove_dataloader(place)

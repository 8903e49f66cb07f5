"""Full parameters that stay between forwards because the user said so.

``unshard()`` asks for what the next forward needs anyway, ``set_reshard_after_backward(False)`` for
what the next micro-batch needs again. Each pass has tensors of its own, which it frees as ever:
they are copies of what is kept here, which the compiler removes. Nothing that is kept is used once
a shard has another value, so that a forgotten ``reshard()`` costs memory and is never wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..collectives.world import World
from .comms import Communicator
from .freeing import Stamp, stamps
from .options import FSDPOptions
from .sharded_tensor import ShardedTensor
from .trace_cache import Tensors


class Keeping(Communicator):
    """A communicator that may keep what it gathered last.

    Attributes:
        by_hand: keep until :meth:`drop`.
        after_backward: keep what was gathered for a backward, too.
    """

    def __init__(self, options: FSDPOptions, world: World) -> None:
        super().__init__(options, world)
        self.by_hand = False
        self.after_backward = False
        self._kept: Tensors | None = None
        self._made_of: list[Stamp] = []

    def gather(self, tensors: Sequence[ShardedTensor], *args: Any, **kwargs: Any) -> Tensors:
        """As :meth:`Communicator.gather`, or copies of what is kept and still right."""
        if not (self.by_hand or self.after_backward):
            return super().gather(tensors, *args, **kwargs)
        if self._kept is None or self.is_stale(tensors):
            self._kept = super().gather(tensors, *args, **kwargs)
            self._made_of = _stamped(tensors)
        return [torch.view_copy(full, full.shape) for full in self._kept]

    def is_stale(self, tensors: Sequence[ShardedTensor]) -> bool:
        """Whether shards have other values than those that were gathered last."""
        return self._made_of != _stamped(tensors)

    def end_backward(self) -> None:
        """Forgets what is kept, unless it is to last beyond a backward."""
        if not self.after_backward:
            self.drop()

    def drop(self) -> None:
        """Forgets what is kept."""
        self.by_hand, self._kept = False, None


def _stamped(tensors: Sequence[ShardedTensor]) -> list[Stamp]:
    return stamps(tensor.shard for tensor in tensors)

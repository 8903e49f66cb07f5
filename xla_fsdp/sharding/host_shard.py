"""A shard in the host's memory, and how to see that it was changed."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from ..ranks.rank import is_pretending
from .freeing import Stamp, stamps
from .sharded_parameter import ShardedParameter


class HostShard(ShardedParameter):
    """A parameter on the CPU of which there is a copy on the device, which must not grow stale.

    torch counts changes in place, but not those through ``.data``, which has a counter of its own.
    So what ``.data`` gave is remembered.
    """

    @property
    def data(self) -> torch.Tensor:
        """As of any tensor: its values, of which autograd and counters know nothing."""
        alias: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        given, times = vars(self).get(ALIASES, ((), 0))
        alive = [one for one in given if one() is not None]
        vars(self)[ALIASES] = ([*alive, weakref.ref(alias)], times + 1)
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        # The address may be the one of values that are gone.
        given, times = vars(self).get(ALIASES, ((), 0))
        vars(self)[ALIASES] = (given, times + 1)

    def state(self) -> object:
        """Equal to an earlier one only if the values are what they were then."""
        given, times = vars(self).get(ALIASES, ((), 0))
        if any(one() is not None for one in given):
            return object()  # who has it may change it now
        stamp: Stamp = stamps([self])[0]
        return stamp, self.dtype, times


def on_host(value: torch.Tensor) -> torch.Tensor:
    """``value`` on the CPU, in memory of its own: what it was cut from is to be freed."""
    if is_pretending():
        return unwritten(value.shape, value.dtype)
    value = value.detach().cpu().contiguous()
    shares = value.untyped_storage().nbytes() > value.numel() * value.dtype.itemsize
    return value.clone() if shares else value


def unwritten(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the CPU for a plan, which has no use for its values.

    It takes up no memory as long as nobody writes it, as ``torch.zeros`` does: the system gives it
    pages, of zeros, at the first write.
    """
    size = math.prod(shape) * dtype.itemsize
    if not size:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # of this process
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)


def staying(
    fn: Callable[[torch.Tensor], torch.Tensor], shards: Iterable[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``fn``, which may move tensors, but those of ``shards`` that are on the host stay there, and
    so do their gradients."""
    stay = {id(one) for s in shards if isinstance(s, HostShard) for one in (s, s.grad)}
    return lambda tensor: fn(tensor).cpu() if id(tensor) in stay else fn(tensor)


# On a shard: what `.data` gave, weakly, and how often.
ALIASES = "_xla_fsdp_aliases"

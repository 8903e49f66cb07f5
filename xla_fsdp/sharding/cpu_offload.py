"""``cpu_offload``: the option, and the shards that are in the host's memory."""

from __future__ import annotations

import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import torch

from ..ranks.rank import is_pretending
from .freeing import Stamp, stamps
from .sharded_parameter import ShardedParameter


@dataclass(frozen=True)
class CPUOffload:
    """What is kept in the host's memory, and computed there: docs/how-to/cpu-offload.md.

    The shards that an optimizer sees, their gradients and its state are tensors on the CPU, and the
    update runs there. The device has a copy of the shards in the dtype in which they are gathered.
    These go together: an update needs all three in one place.

    Attributes:
        parameters: the shards, in the dtype in which they are stored.
        gradients: of the shards.
        optimizer: its state, and the update.
        stream: the copy is there only while the wrapper computes, forward and again backward. For
            models of which not even that much fits; each wrapper's forward and backward becomes a
            program of its own. Without effect on the outermost wrapper, whose copy stays. Not with
            ``reshard_after_forward=False`` or a number, and not in ``scan_blocks``.

    Raises:
        TypeError: an attribute is no bool.
        ValueError: some are True and others False.
    """

    parameters: bool = True
    gradients: bool = True
    optimizer: bool = True
    stream: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(f"CPUOffload.{field.name} must be True or False, got {value!r}")
        if self.stream and not self.parameters:
            raise ValueError("CPUOffload(stream=True) streams what is on the host: leave it out")
        if len({self.parameters, self.gradients, self.optimizer}) > 1:
            raise ValueError(
                f"{self} is not possible: an optimizer needs parameters, gradients and state in "
                "one place, and torch has no gradient on another device than its parameter. Pass "
                "CPUOffload(), which is all three on the host, or None"
            )


def require_streamable(offload: CPUOffload | None, reshard: bool | int) -> None:
    """Raises ValueError if ``offload`` streams what is to stay on the device after a forward, by
    ``reshard_after_forward=reshard``."""
    if offload is not None and offload.stream and reshard is not True:
        raise ValueError(
            "CPUOffload(stream=True) leaves nothing of a wrapper on the device after its forward, "
            f"and reshard_after_forward={reshard} keeps parameters there, as do SHARD_GRAD_OP and "
            "NO_SHARD of sharding_strategy: leave one of the two out"
        )


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

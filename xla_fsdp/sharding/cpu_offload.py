"""``cpu_offload``: the option, and the shards that are in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch

from ..wording import flag
from .freeing import Stamp, stamps
from .sharded_parameter import ShardedParameter, on_local_parts


@dataclass(frozen=True)
class CPUOffload:
    """Stores shards in host memory and updates them there: see docs/how-to/cpu-offload.md.

    ``parameters``, ``gradients`` and ``optimizer`` (offload the shards, their gradients, the
    optimizer state and update) must be equal, because an update needs all three in one place.

    Attributes:
        stream: store the device copy of a wrapper's shards only during its forward and backward,
            which become separate programs. No effect on the outermost wrapper. Not supported with
            ``reshard_after_forward=False`` or a number, nor in ``scan_blocks``.

    Raises:
        TypeError: an attribute is not a bool.
        ValueError: some attributes are True and others False.
    """

    parameters: bool = True
    gradients: bool = True
    optimizer: bool = True
    stream: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            flag(f"CPUOffload.{field.name}", getattr(self, field.name))
        if self.stream and not self.parameters:
            raise ValueError(
                "CPUOffload(stream=True) streams shards that are on the host, but nothing is "
                "offloaded. Leave stream out"
            )
        if len({self.parameters, self.gradients, self.optimizer}) > 1:
            raise ValueError(
                f"{self} is not supported: an optimizer needs parameters, gradients and state in "
                "one place, and torch allows no gradient on another device than its parameter. "
                "Pass CPUOffload(), which offloads all three, or None"
            )

    def require_streamable(self, reshard: bool | int) -> None:
        """Raises ValueError if ``reshard_after_forward=reshard`` would keep streamed parameters."""
        if self.stream and reshard is not True:
            raise ValueError(
                "CPUOffload(stream=True) keeps nothing of a wrapper on the device after its "
                f"forward, but reshard_after_forward={reshard} keeps parameters there (as "
                "SHARD_GRAD_OP of sharding_strategy does). Leave one of the two options out"
            )


class HostShard(ShardedParameter):
    """A parameter on the CPU with a copy on the device, which must be updated after changes.

    torch does not count changes through the results of ``.data``, so this class counts these.
    """

    @property
    def data(self) -> torch.Tensor:
        self._count()
        alias: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return alias

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self._count()  # the new address may equal the address of values that are freed
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]

    def _count(self) -> None:
        vars(self)[_ALIASES] = vars(self).get(_ALIASES, 0) + 1

    def state(self) -> object:
        """Equals an earlier value only if the parameter has not changed in between."""
        aliases = vars(self).get(_ALIASES, 0)
        if aliases and _is_storage_shared(self):
            return object()  # an alias, or one of it, may change the values at any time
        stamp: Stamp = stamps([self])[0]
        return stamp, self.dtype, aliases


# On a shard: how often `.data` was read or assigned.
_ALIASES = "_xla_fsdp_aliases"


def _is_storage_shared(tensor: torch.Tensor) -> bool:
    with on_local_parts():
        return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 1


def state_of(shard: torch.Tensor) -> object:
    """Equals an earlier value only if ``shard`` has not changed in between."""
    return shard.state() if isinstance(shard, HostShard) else stamps([shard])[0]


def on_host(value: torch.Tensor) -> torch.Tensor:
    """``value`` on the CPU, in separate memory: what it was cut from is to be freed."""
    value = value.detach().cpu().contiguous()
    shares = value.untyped_storage().nbytes() > value.numel() * value.dtype.itemsize
    return value.clone() if shares else value


def stay_on_host(
    fn: Callable[[torch.Tensor], torch.Tensor], shards: Iterable[torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """``fn``, but ``shards`` on the host stay there, with their gradients."""
    stay = {id(one) for s in shards if isinstance(s, HostShard) for one in (s, s.grad)}
    return lambda tensor: fn(tensor).cpu() if id(tensor) in stay else fn(tensor)

"""What the device has of shards that lie on the host: copies, sent when they are needed.

A copy is made anew when its shard has changed, by an optimizer, a load or a hand. Nothing is
computed on the device for it: a transfer is no program, so none is compiled.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import xlac
from ..collectives.host_data import as_data
from ..ranks.rank import is_pretending
from ..sharding.cpu_offload import HostShard, unwritten
from ..sharding.layout import computed_in
from ..sharding.sharded_parameter import local

# Bytes that may be on their way to the device before somebody waits for them, unless one tensor
# has more. Until then there is a copy of them on the host.
STAGED_BYTES = 1 << 28


class Uploads:
    """Sends to ``device``, at most ``most`` bytes at a time.

    Attributes:
        sent: bytes so far.
    """

    def __init__(self, device: torch.device, most: int = STAGED_BYTES) -> None:
        self.device = device
        self.most = most
        self.sent = 0
        self._under_way = 0

    def send(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``value``, which is on the CPU, as ``dtype`` on the device.

        Returns while it is under way; ``value`` may be changed at once.
        """
        size = value.numel() * dtype.itemsize
        if self._under_way and self._under_way + size > self.most:
            self._wait()
        self._under_way += size
        self.sent += size
        if is_pretending():
            return as_data(unwritten(value.shape, dtype), self.device)
        return as_data(value.to(dtype), self.device)

    def _wait(self) -> None:
        """Until all that was sent is there: what is sent after it is, and comes back."""
        self._under_way = 0
        if not is_pretending():
            last = as_data(torch.zeros(1, device="cpu"), self.device)
            xlac.copy_to_host([last])


class ShardCopy:
    """The copy of one shard.

    Args:
        dtype: what is asked for, see :func:`computed_in`.
        uploads: what sends it.
    """

    def __init__(self, shard: HostShard, dtype: torch.dtype | None, uploads: Uploads) -> None:
        self._shard = shard
        self._dtype = dtype
        self.uploads = uploads
        self._value: torch.Tensor | None = None
        self._made_of: object = None

    @property
    def dtype(self) -> torch.dtype:
        """In which it is gathered."""
        return computed_in(self._shard.dtype, self._dtype)

    @property
    def value(self) -> torch.Tensor:
        """On the device, of the shape of the shard."""
        return self.send()

    @property
    def held(self) -> torch.Tensor | None:
        """What is on the device, whether or not the shard has changed since."""
        return self._value

    def drop(self) -> None:
        """Lets go of what is on the device: the next use sends anew."""
        self._value = self._made_of = None

    def send(self) -> torch.Tensor:
        """Starts the transfer, if the shard has changed since the last one."""
        state = self._shard.state()
        if self._value is None or state != self._made_of:
            self._value = None  # before the next one is there: one of them in device memory
            self._value = self.uploads.send(local(self._shard), self.dtype)
            self._made_of = state
        return self._value

    def __getstate__(self) -> dict[str, Any]:
        """What a deep copy has: not the tensor, which is made of another shard."""
        return {**vars(self), "_value": None, "_made_of": None}

"""Copies on the device of shards that are on the host, sent when they are needed.

A copy is sent again after its shard has changed, by an optimizer, a load or the user. This needs no
computation on the device: a transfer is no program, so nothing is compiled.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import xlac
from ..collectives.host_data import as_data, fake_cpu_tensor
from ..ranks.rank import is_simulated_rank
from ..sharding.cpu_offload import HostShard
from ..sharding.layout import computed_in
from ..sharding.sharded_parameter import local

# Bytes that may be in transfer to the device before the next send waits, unless one tensor has
# more. During a transfer there is a second copy of them on the host.
STAGED_BYTES = 1 << 28


class Uploads:
    """Sends tensors to ``device``, at most ``most`` bytes at a time.

    Attributes:
        sent: bytes sent so far.
    """

    def __init__(self, device: torch.device, most: int = STAGED_BYTES) -> None:
        self.device = device
        self.most = most
        self.sent = 0
        self._under_way = 0

    def send(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``value``, which is on the CPU, as ``dtype`` on the device.

        Returns during the transfer; ``value`` may be changed immediately.
        """
        size = value.numel() * dtype.itemsize
        if self._under_way and self._under_way + size > self.most:
            self._wait()
        self._under_way += size
        self.sent += size
        if is_simulated_rank():
            return as_data(fake_cpu_tensor(value.shape, dtype), self.device)
        return as_data(value.to(dtype), self.device)

    def _wait(self) -> None:
        """Waits for all earlier transfers: sends one more value, and fetches it."""
        self._under_way = 0
        if not is_simulated_rank():
            last = as_data(torch.zeros(1, device="cpu"), self.device)
            xlac.copy_to_host([last])


class ShardCopy:
    """The device copy of one shard.

    Args:
        dtype: the compute dtype, see :func:`computed_in`.
        uploads: sends the copy.
    """

    def __init__(self, shard: HostShard, dtype: torch.dtype | None, uploads: Uploads) -> None:
        self._shard = shard
        self._dtype = dtype
        self.uploads = uploads
        self._value: torch.Tensor | None = None
        self._made_of: object = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the shard is gathered."""
        return computed_in(self._shard.dtype, self._dtype)

    @property
    def value(self) -> torch.Tensor:
        """The copy on the device, in the shape of the shard."""
        return self.send()

    @property
    def held(self) -> torch.Tensor | None:
        """The copy on the device, even if the shard has changed since; ``None`` if dropped."""
        return self._value

    def drop(self) -> None:
        """Frees the copy; the next use sends it again."""
        self._value = self._made_of = None

    def send(self) -> torch.Tensor:
        """Starts the transfer, if the shard has changed since the last one."""
        state = self._shard.state()
        if self._value is None or state != self._made_of:
            self._value = None  # free it before the next one, so only one is in device memory
            self._value = self.uploads.send(local(self._shard), self.dtype)
            self._made_of = state
        return self._value

    def __getstate__(self) -> dict[str, Any]:
        """State for deep copies: without the tensor, which belongs to another shard."""
        return {**vars(self), "_value": None, "_made_of": None}

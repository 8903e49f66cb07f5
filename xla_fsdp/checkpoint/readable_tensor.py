"""Tensors in files, in memory or on rank 0, of which any range can be read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..collectives.world import World, broadcast_from_first
from ..consolidate.format.dtypes import DTYPES, dtype_name
from ..consolidate.format.values import decode, encode
from ..sharding.sharded_parameter import local
from .inventory import ParameterShard

# Words of 4 bytes: powers of two, so that few programs are compiled.
_MOST_WORDS = 1 << 22
_FEWEST_WORDS = 1 << 8


@dataclass(frozen=True, eq=False)
class ReadableTensor:
    """One tensor whose values can be read.

    Attributes:
        fill: ``fill(out, begin)`` fills ``out``, a contiguous one-dimensional CPU tensor of this
            dtype, with the elements of the flattened tensor from ``begin``.
        collective: every rank must read, in the same order, even an empty range.
        in_memory: all values are in this rank's memory.
        kind: what it was in the saved model, ``None`` if not known.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: Callable[[torch.Tensor, int], None]
    collective: bool = False
    in_memory: bool = False
    kind: Literal["parameter", "buffer"] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def read(self, begin: int, end: int) -> torch.Tensor:
        out = torch.empty(end - begin, dtype=self.dtype, device="cpu")
        self.fill(out, begin)
        return out

    def read_full(self) -> torch.Tensor:
        return self.read(0, self.numel).reshape(self.shape)

    def read_to(self, out: torch.Tensor, begin: int) -> None:
        """Fills ``out``, a one-dimensional CPU tensor of any dtype, from element ``begin``."""
        if out.dtype is self.dtype:
            self.fill(out, begin)
        else:
            out.copy_(self.read(begin, begin + out.numel()))

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor) -> ReadableTensor:
        def fill(out: torch.Tensor, begin: int) -> None:
            out.copy_(tensor.detach().reshape(-1)[begin : begin + out.numel()].cpu())

        return cls(tuple(tensor.shape), tensor.dtype, fill, in_memory=True)


def as_readable(value: torch.Tensor | ReadableTensor) -> ReadableTensor:
    return value if isinstance(value, ReadableTensor) else ReadableTensor.from_tensor(value)


def read_holder_values(
    shape: torch.Size,
    dtype: torch.dtype,
    members: Mapping[ParameterShard, ReadableTensor | None],
    start: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's part of ``members``, on the CPU, in the ``shape`` of their holder.

    Members that are ``None`` have the values of ``start``, or zeros without it.
    """
    if start is not None:
        flat = local(start).cpu().reshape(-1).clone()
    else:
        covered = sum(shard.length for shard, stored in members.items() if stored is not None)
        make = torch.empty if covered == shape.numel() else torch.zeros
        flat = make(shape.numel(), dtype=dtype, device="cpu")
    for shard, stored in members.items():
        if stored is not None and (shard.length or stored.collective):
            stored.read_to(flat[shard.at : shard.at + shard.length], shard.begin)
    return flat.view(shape)


def same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether dtypes, shapes and bits are equal (NaN equals NaN, 0.0 is not -0.0)."""
    if one.dtype is not two.dtype or one.shape != two.shape:
        return False
    a, b = (each.detach().cpu().reshape(-1).view(torch.uint8) for each in (one, two))
    return torch.equal(a, b)


def describe_value(value: Any, where: str) -> Any:
    """Describes a value as JSON, so that rank 0 can send it. ``where`` names it in messages.

    Raises UnsupportedValueError if it cannot be sent.
    """
    if isinstance(value, ReadableTensor):
        return {"shape": list(value.shape), "dtype": dtype_name(value.dtype, where)}
    if _has_stored(value):
        return {
            "each": {name: describe_value(one, f"{where}[{name!r}]") for name, one in value.items()}
        }
    return {"value": encode(value, where)}


def sent_by_first_rank(world: World, described: Any, value_on_first_rank: Any, where: str) -> Any:
    """Returns the value of rank 0 on every rank. Its tensors are sent when they are read.

    ``described``: the result of :func:`describe_value` on rank 0. ``value_on_first_rank``: else
    ``None``.
    """
    if "value" in described:
        return decode(described["value"], where)
    if "each" in described:
        return {
            name: sent_by_first_rank(
                world, one, value_on_first_rank and value_on_first_rank[name], where
            )
            for name, one in described["each"].items()
        }
    shape, dtype = tuple(described["shape"]), DTYPES[described["dtype"]]

    def fill(out: torch.Tensor, begin: int) -> None:
        value = value_on_first_rank
        own = None if value is None else value.read(0, value.numel)
        size, end = dtype.itemsize, begin + out.numel()
        data = _send(world, own, math.prod(shape) * size, begin * size, end * size)
        out.copy_(data.view(dtype))

    return ReadableTensor(shape, dtype, fill, collective=True)


def _has_stored(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_stored, value.values()))
    return isinstance(value, ReadableTensor)


def _send(world: World, own: torch.Tensor | None, size: int, begin: int, end: int) -> torch.Tensor:
    """Sends ``own``, ``size`` bytes of rank 0. Every rank returns the bytes ``begin .. end``."""
    kept = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
    for low in range(0, size, 4 * _MOST_WORDS):
        high = min(low + 4 * _MOST_WORDS, size)
        words = _FEWEST_WORDS
        while 4 * words < high - low:
            words *= 2
        block = torch.zeros(words, dtype=torch.int32, device="cpu")
        if own is not None:
            block.view(torch.uint8)[: high - low] = own.view(torch.uint8)[low:high]
        # Waits for the block, so that the device has one at a time.
        data = broadcast_from_first(world, block).cpu().view(torch.uint8)
        first, last = max(low, begin), min(high, end)
        if first < last:
            kept[first - begin : last - begin] = data[first - low : last - low]
    return kept

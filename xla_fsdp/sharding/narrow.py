"""``gather_dtype``: full parameters out of 8 bits an element, and a scale for each block of them.

A rank divides every block of its shard by a scale, so that the largest magnitude in it is the
largest of the narrow dtype, rounds, and sends payload and scales. What arrives is multiplied by
these again::

    shard   [0.10  -0.50 | 2.0  1.0]     blocks of two, int8: scale = largest / 127
    scales  [0.50 / 127  | 2.0 / 127]    small, travel with the small parameters
    payload [25    -127  | 127  64 ]     one byte an element, travels alone
    full    [0.0984 -0.50 | 2.0 1.0079]

Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model Training", 2023
(arXiv 2306.10209), call it qwZ. What is stored stays as exact as it was: only the copies that a
forward and a backward compute with are rounded, both to the same values, and gradients are those
with respect to these copies.

A block is up to 256 elements of one *column* of the shard as it travels, not of a row: tiles of a
TPU hold whole rows of 128 lanes, so the largest of a column, and a scale for each of its elements,
need nothing to move from lane to lane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .layout import LANES, Layout

# The largest magnitude of each.
_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
NARROW_DTYPES = tuple(_LARGEST)

# Elements of a block: at most, in whole tiles of bytes (32 rows) where these divide the shard.
BLOCK = 256
_TILE = 32

# Stored in another dtype, a parameter is meant to be exact, or is no number to be rounded.
_FROM = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Blocks:
    """How one shard is cut into blocks.

    Attributes:
        rows, columns: shape of the payload, one byte an element.
        length: rows of a block; the last blocks may have fewer.
        dtype: that of the payload.
        scale_dtype: that of the scales, ``(count, columns)``.
    """

    rows: int
    columns: int
    length: int
    dtype: torch.dtype
    scale_dtype: torch.dtype

    @classmethod
    def of(cls, layout: Layout, dtype: torch.dtype, scale_dtype: torch.dtype) -> Blocks | None:
        """Those of a shard of ``layout``, or ``None`` where scales would outweigh what is saved.

        That is where a column has fewer than 32 elements: scales are 1/16 of the payload then.
        """
        elements = math.prod(layout.shard_shape)
        shape = layout.wire_shape
        if len(shape) != 2 or shape[0] < _TILE:  # the latter: few rows of a wide matrix
            if elements % LANES:
                return None
            shape = (elements // LANES, LANES)
        rows, columns = shape
        if rows < _TILE:
            return None
        whole = [length for length in range(BLOCK, 0, -_TILE) if rows % length == 0]
        return cls(rows, columns, (whole or [min(BLOCK, rows)])[0], dtype, scale_dtype)

    @property
    def count(self) -> int:
        """Blocks of a column."""
        return math.ceil(self.rows / self.length)

    @property
    def even(self) -> bool:
        """Whether all blocks have :attr:`length` rows."""
        return self.rows == self.count * self.length

    def scales(self, shard: torch.Tensor) -> torch.Tensor:
        """``(count, columns)``, of a shard of any shape.

        NaN where a value of the block is NaN or infinite: all of the block is NaN then, and nothing
        of it looks like a number.
        """
        value = self._blocks(shard).abs()
        # XLA's maximum may leave NaN out, on a CPU it does.
        largest = torch.where(value < math.inf, value, math.inf).amax(1)
        largest = torch.where(largest < math.inf, largest, math.nan)
        return (largest / _LARGEST[self.dtype]).to(self.scale_dtype)

    def payload(self, shard: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """``(rows, columns)`` in :attr:`dtype`, of a shard of any shape and its ``scales``."""
        scales = scales.float()
        scales = torch.where(scales == 0, 1.0, scales)  # a block of zeros
        value = self._blocks(shard) / scales[:, None]
        # A scale of 16 bits may be rounded down.
        value = value.clamp(-_LARGEST[self.dtype], _LARGEST[self.dtype])
        # By way of float16, as XLA goes on a CPU: the same bits wherever it is done.
        value = value.round() if self.dtype is torch.int8 else value.half()
        payload = value.to(self.dtype).view(self.count * self.length, self.columns)
        return payload if self.even else torch.slice_copy(payload, 0, 0, self.rows)

    def full(self, payload: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Of every rank's, one behind the other: ``(ranks * rows, columns)`` in the scales' dtype.

        Each value is rounded once, so it does not matter in which precision a chip multiplies.
        """
        if self.even:
            value = payload.view(-1, self.length, self.columns).to(scales.dtype) * scales[:, None]
            return value.view(payload.shape)
        each = scales[:, None].expand(-1, self.length, -1)
        each = each.reshape(-1, self.count * self.length, self.columns)
        each = torch.slice_copy(each, 1, 0, self.rows).reshape(payload.shape)
        return payload.to(scales.dtype) * each

    def _blocks(self, shard: torch.Tensor) -> torch.Tensor:
        """``(count, length, columns)``, float32, with zeros where the last blocks end."""
        value = shard.reshape(self.rows, self.columns).float()
        if not self.even:
            missing = self.count * self.length - self.rows
            value = torch.cat([value, value.new_zeros(missing, self.columns)])
        return value.view(self.count, self.length, self.columns)


def narrowed(
    layout: Layout, stored: torch.dtype, computed: torch.dtype, dtype: torch.dtype, small: int
) -> Blocks | None:
    """The blocks of a parameter of ``layout``, or ``None`` if it travels as without the option.

    That is the case for what has one dimension or none (norms, biases), what is stored in something
    else than float32 or 16 bits, what has up to ``small`` elements, and what nobody sends.
    """
    (*others, member) = layout.members
    if others or len(member.shape) < 2 or layout.size == 1 or stored not in _FROM:
        return None
    if math.prod(layout.padded_shape) <= small:
        return None
    return Blocks.of(layout, dtype, computed if computed is torch.bfloat16 else torch.float32)


def checked_gather_dtype(value: object, flatten: bool) -> None:
    """Raises ValueError or TypeError if ``gather_dtype`` is not possible."""
    if value is None:
        return
    allowed = ", ".join(str(dtype) for dtype in NARROW_DTYPES)
    if not isinstance(value, torch.dtype):
        raise TypeError(f"gather_dtype must be one of {allowed} or None, got {value!r}")
    if value is torch.float8_e5m2:
        raise ValueError(
            f"gather_dtype={value} has two bits of mantissa, and a range that blocks with a scale "
            f"of their own have no use for: pass torch.float8_e4m3fn, or torch.int8"
        )
    if value not in NARROW_DTYPES:
        raise ValueError(
            f"gather_dtype must be one of {allowed} or None, got {value}; to gather in 16 bits "
            "pass compute_dtype"
        )
    if flatten:
        raise ValueError(
            f"gather_dtype={value} and flatten_parameters=True exclude each other: norms and "
            "biases would share blocks with matrices, and a scale with their largest. Leave "
            "flatten_parameters out; small parameters travel together anyway"
        )

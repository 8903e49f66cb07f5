"""Tensors in 8 bits an element, with a scale for every block of elements.

Dynamic tree quantisation of Dettmers, "8-Bit Approximations for Parallelism in Deep Learning", 2015
(arXiv 1511.04561), by blocks as in Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", 2021 (arXiv 2110.02861): a block is divided by its largest magnitude, and each
element becomes the nearest of 256 values. Those are 0, 1, and in each of the seven decades below
1 evenly spaced ones, half as many in a decade as in the one above. Signed values have 64 in the
highest decade, for each sign; unsigned ones 128.

Which value is nearest is computed instead of looked up: tables are slow on TPUs.
"""

from __future__ import annotations

import torch

BLOCK = 2048
_DECADES = 7


def encode(value: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """``value``, float32, as numbers of values, uint8 of its shape, and the blocks' scales."""
    blocks = _in_blocks(value)
    scales = blocks.abs().amax(1)
    # Of a block of zeros all is 0.
    ratio = blocks / torch.where(scales > 0, scales, torch.ones_like(scales))[:, None]
    size = ratio.abs()
    number = (size > _middle(0.0, _value(0, 0, signed))).to(size.dtype)
    for decade in range(_DECADES):
        count, width = _count(decade, signed), _width(decade, signed)
        low = 10.0 ** (decade - _DECADES)
        place = ((size - low) / width).floor().clamp(0, count - 1) + _first(decade, signed)
        if decade == 0:
            number = number * place
        else:
            below = _value(decade - 1, _count(decade - 1, signed) - 1, signed)
            number = torch.where(size > _middle(below, _value(decade, 0, signed)), place, number)
    last = _value(_DECADES - 1, _count(_DECADES - 1, signed) - 1, signed)
    one = _first(_DECADES, signed)
    number = torch.where(size > _middle(last, 1.0), torch.full_like(number, one), number)
    if signed:
        # 1 is there only with the sign +.
        number = torch.where(ratio < 0, -number.clamp(max=one - 1), number) + (one - 1)
    return number.reshape(-1)[: value.numel()].view(value.shape).to(torch.uint8), scales


def decode(numbers: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The float32 values that :func:`encode` chose."""
    blocks = _in_blocks(_ratios(numbers, signed)) * scales[:, None]
    return blocks.reshape(-1)[: numbers.numel()].view(numbers.shape)


def decode_each(numbers: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    """The same, bit for bit, with a scale for each element: see :func:`scales_of_elements`."""
    return _ratios(numbers, signed) * scales


def scales_of_elements(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The blocks' scales, for each element of a tensor of this shape."""
    return scales.repeat_interleave(BLOCK)[: shape.numel()].view(shape)


def encode_again(
    value: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`encode`; what was a block before is encoded as it was, bit for bit.

    Args:
        value: float32.
        numbers, scales: what ``value`` was encoded as, with a scale for each element; 0 where it
            was not, or was in a block of zeros.
    """
    anew, scales_anew = encode(value, signed)
    before, own = _in_blocks(scales), _in_blocks(value)
    top = before.amax(1)
    same = ((before == top[:, None]) | ((before == 0) & (own == 0))).all(1)
    zero = _first(_DECADES, signed) - 1 if signed else 0
    kept = torch.where(scales > 0, numbers, torch.full_like(numbers, zero))
    of_element = scales_of_elements(same, value.shape)
    return torch.where(of_element, kept, anew), torch.where(same, top, scales_anew)


def _ratios(numbers: torch.Tensor, signed: bool) -> torch.Tensor:
    """The encoded values over the scale."""
    number = numbers.float()
    one = _first(_DECADES, signed)
    if signed:
        number = number - (one - 1)
    place = number.abs()
    size = torch.zeros_like(place)
    for decade in range(_DECADES):
        first = _first(decade, signed)
        own = (place - first) * _width(decade, signed) + _value(decade, 0, signed)
        size = torch.where(place >= first, own, size)
    size = torch.where(place >= one, torch.ones_like(size), size)
    return torch.where(number < 0, -size, size)


def values(signed: bool) -> torch.Tensor:
    """All 256 values, ascending, as encoded numbers count them."""
    numbers = torch.arange(256, dtype=torch.uint8)
    return torch.cat([decode(one[None], torch.ones(1), signed) for one in numbers])


def _in_blocks(value: torch.Tensor) -> torch.Tensor:
    flat = value.reshape(-1)
    missing = -flat.numel() % BLOCK
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(-1, BLOCK)


def _count(decade: int, signed: bool) -> int:
    """How many values of one sign a decade has."""
    return 2**decade if signed else 2 ** (decade + 1)


def _first(decade: int, signed: bool) -> int:
    """The number of a decade's smallest value; 0 is 0."""
    return 1 + sum(_count(below, signed) for below in range(decade))


def _width(decade: int, signed: bool) -> float:
    """The distance between two values of a decade."""
    return 0.9 * 10.0 ** (decade + 1 - _DECADES) / _count(decade, signed)


def _value(decade: int, place: int, signed: bool) -> float:
    return 10.0 ** (decade - _DECADES) + (place + 0.5) * _width(decade, signed)


def _middle(low: float, high: float) -> float:
    return (low + high) / 2

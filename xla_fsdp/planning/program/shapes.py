"""Parse shapes in HLO text, and compute the bytes of an array in its tiled layout."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

HBM = 0  # the memory space of arrays whose layout has none; see Shape.space

_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^}]*)\})?")
_TOKEN = re.compile(r"/\*.*?\*/|[()]|\w+\[[^\]]*\](?:\{[^}]*\})?")
_TILE = re.compile(r"\(([^()]*)\)")
_TILES = re.compile(r"(?<![A-Z])T((?:\([^()]*\))+)")
_SPACE = re.compile(r"S\((\d+)\)")
_ELEMENT_BITS = re.compile(r"E\((\d+)\)")
_COMBINE = -1  # "*" in a tile: this dimension is merged into the next minor one


@dataclass(frozen=True)
class Shape:
    """The shape and layout of an array.

    ``minor_to_major`` is the order of its dimensions in memory; ``tiles`` are applied one after the
    other. ``space`` is the memory space: 0 HBM, 1 VMEM, 2 synchronisation flags, 4 and 6 scalar
    memories, 5 the host. ``bits`` is the size of an element, 0 for tokens and opaque values.
    """

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    space: int = HBM
    bits: int = 0

    @property
    def bytes(self) -> int:
        """Size of the elements, without padding."""
        return (math.prod(self.dims) * self.bits + 7) // 8

    @cached_property
    def padded(self) -> int:
        """Size in bytes with the padding of the tiled layout."""
        sizes = [self.dims[d] for d in reversed(self.minor_to_major)]
        if len(sizes) != len(self.dims):
            sizes = list(self.dims)
        for tile in self.tiles:
            sizes = _tiled(sizes, tile)
        return (math.prod(sizes) * self.bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Tuple:
    """A tuple of shapes, which may be tuples themselves."""

    parts: tuple[Shape | Tuple, ...]

    @cached_property
    def leaves(self) -> tuple[Shape, ...]:
        """All arrays in it, in order."""
        return tuple(leaf for part in self.parts for leaf in leaves(part))


def leaves(shape: Shape | Tuple) -> tuple[Shape, ...]:
    """All arrays of a shape, in order."""
    return shape.leaves if isinstance(shape, Tuple) else (shape,)


def span(shape: Shape | Tuple, place: tuple[int, ...]) -> tuple[int, int]:
    """The range of leaves below an index such as ``(2, 0)``: first, and one past the last.

    Raises ValueError if the shape has no such index.
    """
    start = 0
    for number in place:
        if not isinstance(shape, Tuple) or number >= len(shape.parts):
            raise ValueError(f"{shape} has nothing at {place}")
        start += sum(len(leaves(part)) for part in shape.parts[:number])
        shape = shape.parts[number]
    return start, start + len(leaves(shape))


def padded_bytes(shape: Shape | Tuple) -> int:
    """Bytes of HBM of the arrays of a shape, including the padding of their tiled layouts."""
    return sum(leaf.padded for leaf in leaves(shape) if leaf.space == HBM)


class ShapeReader:
    """Parses shapes. Programs repeat few shapes often, so it caches them."""

    def __init__(self) -> None:
        self._known: dict[str, Shape | Tuple] = {}

    def read(self, text: str) -> Shape | Tuple:
        """The shape of ``text``; raises ValueError if ``text`` is not a shape."""
        known = self._known.get(text)
        if known is None:
            known = self._known[text] = self._tuple(text) if text[:1] == "(" else _array(text)
        return known

    def _tuple(self, text: str) -> Shape | Tuple:
        stack: list[list] = [[]]
        for token in _TOKEN.findall(text):
            if token == "(":
                stack.append([])
            elif token == ")" and len(stack) > 1:
                parts = stack.pop()
                stack[-1].append(Tuple(tuple(parts)))
            elif token[:2] != "/*" and token != ")":
                stack[-1].append(self.read(token))
        if len(stack) != 1 or len(stack[0]) != 1:
            raise ValueError(f"not the shape of a tuple: {text[:120]!r}")
        return stack[0][0]


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list such as ``2,0,1``."""
    return tuple(int(n) for n in text.replace(",", " ").split())


def _array(text: str) -> Shape:
    found = _ARRAY.fullmatch(text)
    if found is None:
        raise ValueError(f"not a shape: {text[:120]!r}")
    dtype, dims_text, layout = found[1], found[2], found[3] or ""
    # "<=8" is a bounded dimension; its memory is that of the bound.
    dims = tuple(int(d.strip().lstrip("<=").replace("?", "0")) for d in dims_text.split(",") if d)
    order, _, rest = layout.partition(":")
    bits = _ELEMENT_BITS.search(rest)
    space = _SPACE.search(rest)
    tiles = _TILES.search(rest)
    return Shape(
        dtype=dtype,
        dims=dims,
        minor_to_major=numbers(order),
        tiles=tuple(_tile(t) for t in _TILE.findall(tiles[1])) if tiles else (),
        space=int(space[1]) if space else HBM,
        bits=int(bits[1]) if bits else _bits(dtype),
    )


def _tile(text: str) -> tuple[int, ...]:
    return tuple(_COMBINE if t.strip() == "*" else int(t) for t in text.split(","))


def _bits(dtype: str) -> int:
    if dtype == "pred":
        return 8
    found = re.search(r"\d+", dtype)  # f32, bf16, s4, f8e4m3fn, c64
    return int(found[0]) if found else 0


def _tiled(sizes: list[int], tile: tuple[int, ...]) -> list[int]:
    """Sizes, major first, after tiling the minor ones: the numbers of tiles, then the tile."""
    sizes = [1] * (len(tile) - len(sizes)) + sizes
    outer, inner = sizes[: len(sizes) - len(tile)], sizes[len(sizes) - len(tile) :]
    merged: list[int] = []
    kept: list[int] = []
    carry = 1
    for size, length in zip(inner, tile, strict=True):
        if length == _COMBINE:
            carry *= size
        else:
            merged.append(size * carry)
            kept.append(length)
            carry = 1
    return outer + [-(-s // t) for s, t in zip(merged, kept, strict=True)] + kept

"""Reads and writes headers of safetensors files.

The header's length (8 bytes, little-endian) precedes the JSON header ``{name: {"dtype", "shape",
"data_offsets": [begin, end]}, "__metadata__": {str: str}}``. The bytes of the tensors follow it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from ..errors import InvalidMetadataError, UnreadableFileError
from .dtypes import DTYPES
from .strict import is_shape, read_json, write_json

MAX_HEADER_BYTES = 100_000_000
_METADATA = "__metadata__"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor. ``begin``, ``end``: the range of its bytes in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Container:
    entries: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def dump_header(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """The first bytes of a file of ``tensors`` (name, dtype, shape)."""
    described: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    begin = 0
    for name, dtype, shape in tensors:
        assert name not in described, name
        end = begin + math.prod(shape) * DTYPES[dtype].itemsize
        described[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    header = write_json(described)
    # Align tensors to eight bytes, so that a mapped file can be used directly.
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def read_container(read: Callable[[int, int], bytes], size: int, label: str) -> Container:
    """Reads the header of a file of ``size`` bytes.

    Raises:
        UnreadableFileError: the file is truncated, too long, or not a safetensors file.
        InvalidMetadataError: the header contradicts itself, or tensors overlap or leave gaps.
    """
    if size < 8:
        raise UnreadableFileError(f"{label}: has {size} bytes, too few for a safetensors file")
    length = int.from_bytes(read(0, 8), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise UnreadableFileError(
            f"{label}: the header would have {length} bytes, but only {size - 8} bytes follow and "
            f"at most {MAX_HEADER_BYTES} are allowed. The file is truncated, or not a safetensors "
            "file."
        )
    described = read_json(read(8, 8 + length), label)
    if not isinstance(described, dict):
        raise InvalidMetadataError(f"{label}: its header is not a JSON object")
    metadata = described.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise InvalidMetadataError(f"{label}: {_METADATA} in its header must map names to strings")
    start = 8 + length
    entries = {name: _entry(name, value, start, label) for name, value in described.items()}
    end = start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            what = "overlaps the tensor before it" if entry.begin < end else "leaves a gap"
            raise InvalidMetadataError(f"{label}: tensor {name!r:.120} {what}")
        end = entry.end
    if end != size:
        raise UnreadableFileError(
            f"{label}: has {size} bytes, but its header describes {end}: "
            + ("it is truncated" if size < end else "there are bytes after the end")
        )
    return Container(entries, metadata)


def _entry(name: str, value: Any, start: int, label: str) -> TensorEntry:
    def fail(what: str) -> NoReturn:
        raise InvalidMetadataError(f"{label}: tensor {name!r:.120}: {what}")

    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        fail("expected an object of dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        fail(f"unknown dtype {dtype!r:.40}")
    if not (is_shape(shape) and isinstance(offsets, list) and len(offsets) == 2) or not all(
        type(n) is int and 0 <= n < 1 << 63 for n in offsets
    ):
        fail(f"shape {shape!r:.80} and data_offsets {offsets!r:.80} must be lists of sizes")
    begin, end = offsets
    if math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        fail(f"{dtype} of shape {shape!r:.80} does not take data_offsets {offsets!r:.80}")
    return TensorEntry(dtype, tuple(shape), start + begin, start + end)

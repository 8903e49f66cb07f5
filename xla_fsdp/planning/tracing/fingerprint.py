"""A digest of a program that does not depend on who traced it, and where.

Two ranks, or two runs, with the same digest share one executable. The digest ignores the metadata
of instructions (scopes, files, lines), so an edit elsewhere in a source file does not change it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator

# Field numbers of xla/service/hlo.proto.
_MODULE_COMPUTATIONS, _MODULE_STACK_FRAMES = 3, 17
_COMPUTATION_INSTRUCTIONS = 2
_INSTRUCTION_METADATA = 7
_NAME = re.compile(
    rb"(?:forward|backward|recompute|optimizer|all_gather|reduce_scatter|all_reduce)\[[^\[\]]{0,300}\]"
)


def fingerprint(hlo: bytes) -> str:
    """SHA-256 of a serialized ``HloModuleProto`` without its metadata, in hexadecimal."""
    digest = hashlib.sha256()
    for number, field, content in _protobuf_fields(hlo):
        if number == _MODULE_COMPUTATIONS:
            for inner, inner_field, instruction in _protobuf_fields(content):
                if inner == _COMPUTATION_INSTRUCTIONS:
                    for leaf, leaf_field, _ in _protobuf_fields(instruction):
                        if leaf != _INSTRUCTION_METADATA:
                            digest.update(leaf_field)
                    digest.update(b";")
                else:
                    digest.update(inner_field)
            digest.update(b"}")
        elif number != _MODULE_STACK_FRAMES:
            digest.update(field)
    return digest.hexdigest()


def names(hlo: bytes) -> list[str]:
    """The names of modules and phases in a program's metadata, which :func:`fingerprint` ignores.

    Without the numbers that distinguish uses of one name: they depend on what was traced before.
    """
    return sorted({found.decode(errors="replace") for found in _NAME.findall(hlo)})


def _protobuf_fields(message: bytes) -> Iterator[tuple[int, memoryview, memoryview]]:
    """Number, all bytes and content of each field of a protobuf message (wire format)."""
    view, at = memoryview(message), 0
    while at < len(view):
        begin = at
        # Most numbers have one byte; there are hundreds of thousands of them.
        key = view[at]
        at += 1
        if key > 127:
            key, at = _varint(view, begin)
        kind = key & 7
        start = at
        if kind == 0:
            while view[at] > 127:
                at += 1
            at += 1
        elif kind == 1:
            at += 8
        elif kind == 2:
            length = view[at]
            start = at + 1
            if length > 127:
                length, start = _varint(view, at)
            at = start + length
        elif kind == 5:
            at += 4
        else:
            raise ValueError(f"not a protobuf message: wire type {kind} at byte {begin}")
        yield key >> 3, view[begin:at], view[start:at]


def _varint(view: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = view[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7

"""What a schedule copies between HBM and the host's memory, which layouts call space 5."""

from __future__ import annotations

from .hlo import Instruction
from .places import Line
from .shapes import Shape, leaves

_HOST = 5
_COPIES = frozenset("copy slice dynamic-slice dynamic-update-slice".split())


def host_transfers(line: Line) -> tuple[int, int]:
    """Bytes to the host and from it in a step, without padding; loops as often as they run."""
    to_host = to_device = 0
    shapes = {
        (place.scope, place.instruction.name): place.instruction.shape for place in line.places
    }
    for place in line.places:
        kind = place.instruction.opcode.removesuffix("-start")
        if kind not in _COPIES:
            continue
        given = [leaves(shapes[operand])[0] for operand in line.operands(place)]
        source, target = _ends(kind, place.instruction, given)
        if (source.space == _HOST) != (target.space == _HOST):
            # Of an update in place moves what is written, of a slice what is read.
            size = (source if kind == "dynamic-update-slice" else target).bytes * place.times
            to_host += size if target.space == _HOST else 0
            to_device += size if source.space == _HOST else 0
    return to_host, to_device


def _ends(kind: str, instruction: Instruction, given: list[Shape]) -> tuple[Shape, Shape]:
    """What is copied from and to. Of an asynchronous copy the shape is that of its result, of its
    operand and of its context; of a slice and an update of operands, result and context."""
    if kind == "dynamic-update-slice":
        return given[1], given[0]
    found = leaves(instruction.shape)
    if not instruction.opcode.endswith("-start"):
        return given[0], found[0]
    return given[0], found[0] if kind == "copy" else found[len(given)]

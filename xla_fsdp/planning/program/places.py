"""The schedule as one list: the entry computation, with loops, branches and calls inlined."""

from __future__ import annotations

from dataclasses import dataclass, field

from .hlo import Computation, Instruction, Module
from .trips import trip_count

_WITHOUT_OPERANDS = ("parameter", "constant")  # they have a number or a literal instead


@dataclass(frozen=True)
class Inline:
    """A computation that runs at a place.

    ``scope`` distinguishes the instances of a computation that is called more than once.
    """

    computation: Computation
    scope: int


@dataclass(eq=False)
class Place:
    """An instruction at its place in the schedule. It runs ``times`` times."""

    index: int
    instruction: Instruction
    scope: int
    times: int
    inline: list[Inline] = field(default_factory=list)  # of a loop: condition, body


@dataclass(eq=False)
class Line:
    """All places in order. The entry has scope 0. ``notes``: assumptions that were made."""

    module: Module
    places: list[Place]
    notes: list[str]

    def operands(self, place: Place) -> list[tuple[int, str]]:
        """The (scope, name) of every operand."""
        if place.instruction.opcode in _WITHOUT_OPERANDS:
            return []
        return [(place.scope, name) for name in place.instruction.operands]


def line_up(module: Module) -> Line:
    """List the instructions of a scheduled module in one sequence.

    A loop comes before its condition and body, which run once for each iteration. If the trip count
    is unknown, it is assumed to be 1, with a note. All branches of a conditional are included.
    Raises ValueError if an operand or a computation is not defined.
    """
    line = Line(module, [], [])
    scopes = iter(range(1, 1 << 60))

    def add(computation: Computation, scope: int, times: int) -> None:
        for instruction in computation.instructions:
            _check(computation, instruction)
            place = Place(len(line.places), instruction, scope, times)
            line.places.append(place)
            if instruction.opcode not in ("while", "conditional", "call"):
                continue
            inner = times
            if instruction.opcode == "while":
                trips = trip_count(module, computation, instruction)
                if trips is None:
                    line.notes.append(f"trip count of {instruction.name} is unknown, assumed 1")
                inner = times * (1 if trips is None else trips)
            elif instruction.opcode == "conditional":
                line.notes.append(f"all branches of {instruction.name} are counted")
            for name in _in_order(instruction):
                called = module.named(name, instruction)
                place.inline.append(Inline(called, next(scopes)))
                add(called, place.inline[-1].scope, inner)

    add(module.entry, 0, 1)
    return line


def _check(computation: Computation, instruction: Instruction) -> None:
    if instruction.opcode not in _WITHOUT_OPERANDS:
        for name in instruction.operands:
            if name not in computation.by_name:
                raise ValueError(f"{instruction.name} uses {name!r}, which is not defined")


def _in_order(instruction: Instruction) -> list[str]:
    """The computations that an instruction calls, the condition of a loop first."""
    if instruction.opcode == "while":
        return [(instruction.attribute(k) or "").lstrip("%") for k in ("condition", "body")]
    return list(instruction.called)

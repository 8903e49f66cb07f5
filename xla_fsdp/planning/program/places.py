"""The schedule as one list: the entry computation, with loops, branches and calls inlined."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from .hlo import Computation, Instruction, Module, Shape

_WITHOUT_OPERANDS = ("parameter", "constant")  # they have a number or a literal instead


@dataclass(eq=False)
class Place:
    """An instruction at its place in the schedule. It runs ``times`` times. ``scope`` distinguishes
    the instances of a ``computation`` that is called more than once. ``path``: its ``op_name``
    after those of the instructions that call its ``computation``. ``inline``: the scopes of the
    computations that it calls, of a loop those of condition and body."""

    index: int
    instruction: Instruction
    computation: Computation
    scope: int
    times: int
    path: str
    inline: list[int] = field(default_factory=list)


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

    def add(computation: Computation, scope: int, times: int, path: str) -> None:
        for instruction in computation.instructions:
            if instruction.opcode not in _WITHOUT_OPERANDS:
                for name in instruction.operands:
                    if name not in computation.by_name:
                        raise ValueError(f"{instruction.name} uses {name!r}, which is not defined")
            inside = f"{path}/{instruction.op_name}"
            place = Place(len(line.places), instruction, computation, scope, times, inside)
            line.places.append(place)
            if instruction.opcode not in ("while", "conditional", "call"):
                continue
            inner = times
            if instruction.opcode == "conditional":
                line.notes.append(f"all branches of {instruction.name} are counted")
            if instruction.opcode == "while":
                trips = trip_count(module, computation, instruction)
                if trips is None:
                    line.notes.append(f"trip count of {instruction.name} is unknown, assumed 1")
                inner = times * (1 if trips is None else trips)
                called = _condition_and_body(module, instruction)
            else:
                called = [module.named(name, instruction) for name in instruction.called]
            for one in called:
                place.inline.append(next(scopes))
                add(one, place.inline[-1], inner, inside)

    add(module.entry, 0, 1, "")
    return line


def _condition_and_body(module: Module, loop: Instruction) -> list[Computation]:
    keys = ("condition", "body")
    return [module.named((loop.attribute(key) or "").lstrip("%"), loop) for key in keys]


# The trip count of a loop is found by executing its counter, which consists of a few integers: the
# compiler splits one of 64 bits into two of 32, moves constants into and out of the loop's state,
# and fuses the comparison. So nothing here matches patterns: the integers that the condition needs
# are computed, iteration by iteration.

# Give up after this number of iterations. No training step has a loop that long.
_LIMIT = 100_000

_SAME = frozenset("copy bitcast reshape broadcast optimization-barrier opt-barrier".split())
_WRAPPED = frozenset("convert bitcast-convert".split())
# Operations on two numbers by opcode, comparisons by their direction.
_BINARY: Mapping[str, Callable[[int, int], int]] = MappingProxyType(
    {
        "add": operator.add,
        "subtract": operator.sub,
        "multiply": operator.mul,
        "minimum": min,
        "maximum": max,
        "and": operator.and_,
        "or": operator.or_,
        "xor": operator.xor,
        "LT": operator.lt,
        "LE": operator.le,
        "GT": operator.gt,
        "GE": operator.ge,
        "EQ": operator.eq,
        "NE": operator.ne,
    }
)


def trip_count(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """The trip count of a while loop in ``computation``; None if it is unknown.

    Raises ValueError if the loop's computations are not defined.
    """
    known = loop.backend_config.get("known_trip_count", {})
    if isinstance(known, dict) and str(known.get("n", "")).isdigit():
        return int(known["n"])
    condition, body = _condition_and_body(module, loop)
    outside = _Frame(module, computation, lambda number, place: None)
    # By iteration, and place in the tuple that is the loop's state.
    state: dict[tuple[int, int], int | None] = {}

    def element(trip: int, place: int) -> int | None:
        if (trip, place) not in state:
            before = frame(body, trip - 1) if trip else outside
            state[trip, place] = before.value(body.root.name if trip else loop.operands[0], place)
        return state[trip, place]

    def frame(part: Computation, trip: int) -> _Frame:
        def given(number: int, place: int | None) -> int | None:
            return None if place is None else element(trip, place)

        return _Frame(module, part, given)

    for trip in range(_LIMIT):
        more = frame(condition, trip).value(condition.root.name)
        if not more:
            return None if more is None else trip
    return None


@dataclass
class _Frame:
    """One execution of a computation, in which integers are computed on demand.

    ``given(number, place)`` is a parameter's value, or an element of it if ``place`` is not None.
    Unknown values are None.
    """

    module: Module
    computation: Computation
    given: Callable[[int, int | None], int | None]

    def value(self, name: str, place: int | None = None) -> int | None:
        """A value that is an integer, or a truth value as 0 or 1.

        ``place``: of an element, if the value is a tuple.
        """
        instruction = self.computation.by_name[name]
        opcode, operands = instruction.opcode, instruction.operands
        if opcode == "parameter":
            return self.given(int(operands[0]), place)
        if opcode in ("fusion", "call"):
            inner = _Frame(self.module, self.module.called_by(instruction), self._given(operands))
            return inner.value(inner.computation.root.name, place)
        if opcode == "tuple":
            return None if place is None else self.value(operands[place])
        if opcode == "get-tuple-element":
            return self.value(operands[0], int(instruction.attribute("index") or 0))
        if opcode == "copy-start":  # a tuple of result, operand and context
            return self.value(operands[0]) if place in (0, 1) else None
        if opcode == "copy-done":
            return self.value(operands[0], 0)
        if opcode in _SAME:
            return self.value(operands[0], place)
        shape = instruction.shape
        if not isinstance(shape, Shape) or any(d != 1 for d in shape.dims):
            return None
        if opcode == "constant":
            return _literal(operands[0])
        found = self._computed(instruction, shape.dtype)
        return None if found is None else _wrapped(found, shape.dtype)

    def _given(self, operands: Sequence[str]) -> Callable[[int, int | None], int | None]:
        """The parameters of a computation that is called with ``operands``."""
        return lambda number, place: self.value(operands[number], place)

    def _computed(self, instruction: Instruction, dtype: str) -> int | None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in _WRAPPED:
            return self.value(operands[0])
        if opcode == "select":
            chosen = self.value(operands[0])
            return None if chosen is None else self.value(operands[1 if chosen else 2])
        if opcode == "not":
            value = self.value(operands[0])
            return None if value is None else ~value
        direction = instruction.attribute("direction") or ""
        how = _BINARY.get(direction if opcode == "compare" else opcode)
        if how is None:
            return None
        left, right = (self.value(o) for o in operands)
        decides = {"and": 0, "or": 1}.get(opcode)
        if dtype == "pred" and decides is not None and decides in (left, right):
            return decides  # the other value does not matter
        return None if left is None or right is None else int(how(left, right))


def _literal(text: str) -> int | None:
    text = text.strip("{ }")
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _wrapped(value: int, dtype: str) -> int | None:
    """The number modulo the range of its type; None for types that are not integers."""
    if dtype == "pred":
        return value & 1
    found = re.fullmatch(r"([su])(\d+)", dtype)
    if found is None:
        return None
    bits = int(found[2])
    value &= (1 << bits) - 1
    return value - (1 << bits) if found[1] == "s" and value >> (bits - 1) else value

"""The schedule as one list, with loops, branches and calls inlined."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from .hlo import HloComputation, HloModule, Instruction, Shape, TupleShape, leaves


@dataclass(eq=False)
class Place:
    """An instruction in the schedule, which runs ``times`` times.

    ``scope`` numbers the calls of its computation. ``path``: its ``op_name`` after those of its
    callers. ``caller``: the outermost of the ``call`` instructions around it, up to a loop.
    """

    index: int
    instruction: Instruction
    scope: int
    times: int
    path: str
    caller: Instruction | None


@dataclass(eq=False)
class InlinedSchedule:
    """All places in order. The entry has scope 0. ``notes``: assumptions."""

    module: HloModule
    places: list[Place]
    notes: list[str]

    @cached_property
    def _places(self) -> Mapping[tuple[int, Instruction], Place]:
        return {(place.scope, place.instruction): place for place in self.places}

    def operands(self, place: Place) -> list[Place]:
        return [self._places[place.scope, operand] for operand in place.instruction.operands]


def inline_schedule(module: HloModule) -> InlinedSchedule:
    """List the instructions of a scheduled module in one sequence.

    A loop precedes its condition and body; an unknown trip count is assumed to be 1, with a note.
    All branches are included.
    """
    line = InlinedSchedule(module, [], [])
    scopes = iter(range(1, 1 << 60))

    def add(
        computation: HloComputation, scope: int, times: int, path: str, caller: Instruction | None
    ) -> None:
        for instruction in computation.instructions:
            inside = f"{path}/{instruction.op_name}"
            index = len(line.places)
            line.places.append(Place(index, instruction, scope, times, inside, caller))
            if instruction.opcode not in ("while", "conditional", "call"):
                continue
            inner, called = times, instruction.called
            if instruction.opcode == "conditional":
                line.notes.append(f"all branches of {instruction.name} are counted")
            if instruction.opcode == "while":
                trips = trip_count(computation, instruction)
                if trips is None:
                    line.notes.append(f"trip count of {instruction.name} is unknown, assumed 1")
                inner = times * (1 if trips is None else trips)
                called = called[::-1]
            outermost = (caller or instruction) if instruction.opcode == "call" else None
            for one in called:
                add(one, next(scopes), inner, inside, outermost)

    add(module.entry, 0, 1, "", None)
    return line


# A trip count is found by executing the loop's integers: the compiler splits a counter of 64 bits
# into two of 32, moves constants through the state, and fuses the comparison.

# No training step has a loop that long.
_LIMIT = 100_000

_SAME = frozenset("copy bitcast reshape broadcast optimization-barrier opt-barrier".split())
# Comparisons by direction. Integers of numpy wrap around as those of XLA do.
_OPERATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType({
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "minimum": np.minimum,
    "maximum": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "not": np.invert, "LT": np.less, "LE": np.less_equal, "GT": np.greater,
    "GE": np.greater_equal, "EQ": np.equal, "NE": np.not_equal,
    "select": lambda chosen, one, other: one if chosen else other,
    "convert": lambda value: value, "bitcast-convert": lambda value: value,
})  # fmt: skip


def trip_count(computation: HloComputation, loop: Instruction) -> int | None:
    """The trip count of a while loop; ``None`` if unknown."""
    known = loop.backend_config.get("known_trip_count", {})
    if isinstance(known, dict) and str(known.get("n", "")).isdigit():
        return int(known["n"])
    body, condition = loop.called
    integers = _Integers()
    state = integers.values(computation, ()).get(loop.operands[0])
    for trip in range(_LIMIT):
        more = integers.result(condition, [state])
        if not more:
            return None if more is None else trip
        state = integers.result(body, [state])
    return None


class _Integers:
    """Executes computations; only integers and tuples of them are known, other values are None."""

    def __init__(self) -> None:
        # Those with integers.
        self._instructions: dict[HloComputation, list[Instruction]] = {}

    def result(self, computation: HloComputation, arguments: Sequence[Any]) -> Any:
        return self.values(computation, arguments).get(computation.root)

    def values(
        self, computation: HloComputation, arguments: Sequence[Any]
    ) -> dict[Instruction, Any]:
        if computation not in self._instructions:
            self._instructions[computation] = [
                one for one in computation.instructions if any(map(_dtype, leaves(one.shape)))
            ]
        values: dict[Instruction, Any] = {}
        for one in self._instructions[computation]:
            if one.opcode == "parameter":
                number = one.message.parameter_number
                values[one] = arguments[number] if number < len(arguments) else None
            else:
                values[one] = self._value(one, [values.get(operand) for operand in one.operands])
        return values

    def _value(self, instruction: Instruction, operands: Sequence[Any]) -> Any:
        opcode = instruction.opcode
        if opcode in ("fusion", "call"):
            return self.result(instruction.called[0], operands)
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "copy-start":  # (result, operand, context)
            return operands[0], operands[0], None
        if opcode in ("get-tuple-element", "copy-done"):
            index = instruction.message.tuple_index
            return None if operands[0] is None else operands[0][index]
        if opcode in _SAME:
            return operands[0]
        dtype = _dtype(instruction.shape)
        if dtype is None:
            return None
        if opcode == "constant":
            (shape,) = leaves(instruction.shape)
            literal = getattr(instruction.message.literal, f"{shape.dtype}s")
            found = np.frombuffer(literal, dtype) if isinstance(literal, bytes) else literal
            return dtype.type(found[0])
        direction = instruction.message.comparison_direction.decode()
        operation = _OPERATIONS.get(direction if opcode == "compare" else opcode)
        decides = {"and": False, "or": True}.get(opcode)
        if dtype.kind == "b" and decides is not None and decides in operands:
            return np.bool_(decides)  # the other value does not matter
        needed = operands[:1] if opcode == "select" else operands
        if operation is None or any(value is None for value in needed):
            return None
        with np.errstate(over="ignore"):
            found = operation(*operands)
        return None if found is None else found.astype(dtype)


def _dtype(shape: Shape | TupleShape) -> np.dtype | None:
    """The numpy type of one integer or truth value; None for other shapes."""
    if not isinstance(shape, Shape) or any(d != 1 for d in shape.dims):
        return None
    known = re.fullmatch(r"pred|([su])(8|16|32|64)", shape.dtype)
    if known is None:
        return None
    return np.dtype(f"{'u' * (known[1] == 'u')}int{known[2]}" if known[1] else bool)

"""The schedule as one list, with loops, branches and calls inlined."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from .hlo import HloComputation, HloModule, Instruction, Shape, Tuple, leaves

_WITHOUT_OPERANDS = ("parameter", "constant")  # with a number or a literal instead


@dataclass(eq=False)
class Place:
    """An instruction in the schedule, which runs ``times`` times.

    ``scope`` numbers the calls of ``computation``. ``path``: its ``op_name`` after those of its
    callers. ``caller``: the outermost of the ``call`` instructions around it, up to a loop.
    """

    index: int
    instruction: Instruction
    computation: HloComputation
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
    def _by_name(self) -> Mapping[tuple[int, str], Place]:
        return {(place.scope, place.instruction.name): place for place in self.places}

    def operands(self, place: Place) -> list[Place]:
        if place.instruction.opcode in _WITHOUT_OPERANDS:
            return []
        return [self._by_name[place.scope, name] for name in place.instruction.operands]


def inline_schedule(module: HloModule) -> InlinedSchedule:
    """List the instructions of a scheduled module in one sequence.

    A loop precedes its condition and body; an unknown trip count is assumed to be 1, with a note.
    All branches are included. Raises ValueError for an undefined operand or computation.
    """
    line = InlinedSchedule(module, [], [])
    scopes = iter(range(1, 1 << 60))

    def add(
        computation: HloComputation, scope: int, times: int, path: str, caller: Instruction | None
    ) -> None:
        for instruction in computation.instructions:
            if instruction.opcode not in _WITHOUT_OPERANDS:
                for name in instruction.operands:
                    if name not in computation.by_name:
                        raise ValueError(f"{instruction.name} uses {name!r}, which is not defined")
            inside = f"{path}/{instruction.op_name}"
            index = len(line.places)
            place = Place(index, instruction, computation, scope, times, inside, caller)
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
            outermost = (caller or instruction) if instruction.opcode == "call" else None
            for one in called:
                add(one, next(scopes), inner, inside, outermost)

    add(module.entry, 0, 1, "", None)
    return line


def _condition_and_body(module: HloModule, loop: Instruction) -> list[HloComputation]:
    keys = ("condition", "body")
    return [module.named((loop.attribute(key) or "").lstrip("%"), loop) for key in keys]


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


def trip_count(module: HloModule, computation: HloComputation, loop: Instruction) -> int | None:
    """The trip count of a while loop; ``None`` if unknown. Raises ValueError if a computation is
    missing.
    """
    known = loop.backend_config.get("known_trip_count", {})
    if isinstance(known, dict) and str(known.get("n", "")).isdigit():
        return int(known["n"])
    condition, body = _condition_and_body(module, loop)
    integers = _Integers(module)
    state = integers.values(computation, ()).get(loop.operands[0])
    for trip in range(_LIMIT):
        more = integers.result(condition, [state])
        if not more:
            return None if more is None else trip
        state = integers.result(body, [state])
    return None


class _Integers:
    """Executes computations; only integers and tuples of them are known, other values are None."""

    def __init__(self, module: HloModule) -> None:
        self._module = module
        self._instructions: dict[str, list[Instruction]] = {}  # those with integers

    def result(self, computation: HloComputation, arguments: Sequence[Any]) -> Any:
        return self.values(computation, arguments).get(computation.root.name)

    def values(self, computation: HloComputation, arguments: Sequence[Any]) -> dict[str, Any]:
        name = computation.name
        if name not in self._instructions:
            self._instructions[name] = [
                one for one in computation.instructions if any(map(_dtype, leaves(one.shape)))
            ]
        values: dict[str, Any] = {}
        for one in self._instructions[name]:
            if one.opcode == "parameter":
                number = int(one.operands[0])
                values[one.name] = arguments[number] if number < len(arguments) else None
            else:
                values[one.name] = self._value(one, [values.get(name) for name in one.operands])
        return values

    def _value(self, instruction: Instruction, operands: Sequence[Any]) -> Any:
        opcode = instruction.opcode
        if opcode in ("fusion", "call"):
            return self.result(self._module.called_by(instruction), operands)
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "copy-start":  # (result, operand, context)
            return operands[0], operands[0], None
        if opcode in ("get-tuple-element", "copy-done"):
            index = int(instruction.attribute("index") or 0)
            return None if operands[0] is None else operands[0][index]
        if opcode in _SAME:
            return operands[0]
        dtype = _dtype(instruction.shape)
        if dtype is None:
            return None
        if opcode == "constant":
            literal = instruction.operands[0].strip("{ }")
            return dtype.type(literal == "true" if dtype.kind == "b" else int(literal))
        direction = instruction.attribute("direction") or ""
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


def _dtype(shape: Shape | Tuple) -> np.dtype | None:
    """The numpy type of one integer or truth value; None for other shapes."""
    if not isinstance(shape, Shape) or any(d != 1 for d in shape.dims):
        return None
    known = re.fullmatch(r"pred|([su])(8|16|32|64)", shape.dtype)
    if known is None:
        return None
    return np.dtype(f"{'u' * (known[1] == 'u')}int{known[2]}" if known[1] else bool)

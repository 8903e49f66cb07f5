"""Find the trip count of a loop by executing its counter.

The counter of a loop consists of a few integers: the compiler splits one of 64 bits into two of 32,
moves constants into and out of the loop's state, and fuses the comparison. So this module does not
match patterns. It computes the integers that the condition needs, iteration by iteration.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from .hlo import Computation, Instruction, Module
from .shapes import Shape

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
    condition, body = (
        module.named((loop.attribute(key) or "").lstrip("%"), loop) for key in ("condition", "body")
    )
    outside = _Frame(module, computation, lambda number, place: None)
    needed: set[int] = set()
    while True:
        try:
            return _run(module, condition, body, outside, loop.operands[0], needed)
        except _Needed as more:
            needed.add(more.place)


class _Needed(Exception):
    """The condition needs an element of the state that was not tracked yet."""

    def __init__(self, place: int):
        super().__init__(place)
        self.place = place


def _run(
    module: Module,
    condition: Computation,
    body: Computation,
    outside: _Frame,
    initial: str,
    needed: set[int],
) -> int | None:
    state: dict[int, int | None] = {place: outside.element(initial, place) for place in needed}
    for trips in range(_LIMIT):

        def read(_: int, place: int | None, state: Mapping[int, int | None] = state) -> int | None:
            if place is not None and place not in state:
                raise _Needed(place)
            return None if place is None else state[place]

        more = _Frame(module, condition, read).value(condition.root.name)
        if more is None:
            return None
        if not more:
            return trips
        inside = _Frame(module, body, read)
        state = {place: inside.element(body.root.name, place) for place in needed}
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

    def element(self, name: str, place: int) -> int | None:
        """An element of a value that is a tuple."""
        instruction = self.computation.by_name[name]
        if instruction.opcode == "tuple":
            return self.value(instruction.operands[place])
        if instruction.opcode == "parameter":
            return self.given(int(instruction.operands[0]), place)
        if instruction.opcode in ("fusion", "call"):
            inner = self._inner(instruction)
            return inner.element(inner.computation.root.name, place)
        if instruction.opcode in _SAME:
            return self.element(instruction.operands[0], place)
        if instruction.opcode == "copy-start":
            return self.value(instruction.operands[0]) if place in (0, 1) else None
        return None

    def value(self, name: str) -> int | None:
        """A value that is an integer, or a truth value as 0 or 1."""
        instruction = self.computation.by_name[name]
        shape, opcode = instruction.shape, instruction.opcode
        if not isinstance(shape, Shape) or any(d != 1 for d in shape.dims):
            return None
        if opcode == "constant":
            return _literal(instruction.operands[0])
        if opcode == "parameter":
            return self.given(int(instruction.operands[0]), None)
        if opcode == "get-tuple-element":
            return self.element(instruction.operands[0], int(instruction.attribute("index") or 0))
        if opcode == "copy-done":
            return self.element(instruction.operands[0], 0)
        if opcode in ("fusion", "call"):
            inner = self._inner(instruction)
            return inner.value(inner.computation.root.name)
        found = self._computed(instruction, shape.dtype)
        return None if found is None else _wrapped(found, shape.dtype)

    def _inner(self, instruction: Instruction) -> _Frame:
        def given(number: int, place: int | None) -> int | None:
            operand = instruction.operands[number]
            return self.value(operand) if place is None else self.element(operand, place)

        return _Frame(self.module, self.module.called_by(instruction), given)

    def _computed(self, instruction: Instruction, dtype: str) -> int | None:
        opcode, operands = instruction.opcode, instruction.operands
        if opcode in _SAME or opcode in _WRAPPED:
            return self.value(operands[0])
        if opcode == "select":
            chosen = self.value(operands[0])
            return None if chosen is None else self.value(operands[1 if chosen else 2])
        if opcode == "not":
            value = self.value(operands[0])
            return None if value is None else ~value
        how = _BINARY.get(
            instruction.attribute("direction") or "" if opcode == "compare" else opcode
        )
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

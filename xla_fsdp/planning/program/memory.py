"""Which buffers are live where in the schedule, by the compiler's own assignment."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from ..records import Buffer
from .assignment import Allocation, Assignment, Value, without_overlap
from .places import Line
from .scopes import Labels


class Memory:
    """HBM over the places of ``line``.

    Args:
        arguments: names of the arguments, by number; "" or too few where nobody knows.

    Attributes:
        buffers: everything in HBM but the program itself, largest first.
        curve: bytes in use at every place.
    """

    def __init__(
        self, line: Line, labels: Labels, assignment: Assignment, arguments: Sequence[str] = ()
    ) -> None:
        self._labels = labels
        self._arguments = arguments
        self._places = {place.instruction.name: place for place in reversed(line.places)}
        self._last = len(line.places) - 1
        self._place_of = self._positions(assignment)
        found = [buffer for one in assignment.allocations for buffer in self._of_allocation(one)]
        self.buffers = tuple(sorted(found, key=lambda b: (-b.bytes, b.born)))
        change = [0] * (len(line.places) + 1)
        for buffer in self.buffers:
            change[buffer.born] += buffer.bytes
            change[buffer.dies + 1] -= buffer.bytes
        self.curve = tuple(accumulate(change[:-1]))

    def _positions(self, assignment: Assignment) -> list[int]:
        """The place in the line for every place of the compiler's sequence.

        The sequence also has what is inside of fusions and asynchronous operations; that belongs
        to the last place before it.
        """
        at, places = 0, []
        for name in assignment.sequence:
            place = self._places.get(name)
            if place is not None:
                at = max(at, place.index)
            places.append(at)
        return places

    def _of_allocation(self, one: Allocation) -> Iterator[Buffer]:
        if one.category == "constant":
            return  # part of the program
        if one.category == "temporary":
            for value in without_overlap(one.values):
                yield self._buffer(value.name, value.bytes, value, "temporary", value.shape)
        elif one.values:
            value = one.values[0]
            number = len(self._arguments) if one.parameter is None else one.parameter
            name = self._arguments[number] if number < len(self._arguments) else ""
            yield self._buffer(name or value.name, one.bytes, value, one.category, value.shape)

    def _buffer(self, name: str, size: int, value: Value, category: str, shape: str) -> Buffer:
        place = self._places.get(value.name)
        phase, module = self._labels.of(place.instruction) if place else ("", "")
        born, dies = 0, self._last
        if category == "temporary":
            born, dies = self._place_of[value.born], self._place_of[value.dies]
        elif category == "output":
            born = self._place_of[value.born]
        if category == "argument":
            # "exp_avg of blocks.3.mlp.weight" belongs to blocks.3.mlp.weight.
            module = name.rpartition(" of ")[2] if name != value.name else ""
        return Buffer(
            name=name,
            bytes=size,
            born=born,
            dies=dies,
            category=category,
            shape=shape.partition("{")[0],
            opcode=place.instruction.opcode if place else "",
            module=module,
            phase=phase,
        )

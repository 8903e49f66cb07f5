"""Parses the text of an HLO module (``HloModule.to_string()``)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

HBM, HOST = 0, 5  # memory spaces; layouts that name none are in HBM

# A tuple's shape ends at the first ")" before an opcode: inside, ")" precedes a comma, a brace or
# another ")".
_ARRAY_THEN_OPCODE = re.compile(r"(\w+\[[^\]]*\](?:\{[^}]*\})?) ([a-z][\w-]*)\(")
_TUPLE_THEN_OPCODE = re.compile(r"\) ([a-z][\w-]*)\(")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([^\s=%]+) = ")
_COMPUTATION = re.compile(r"(ENTRY )?%?([^\s(%]+) .*\{\s*$")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations"
    r"|called_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_FIELD = re.compile(r'\b(\w+)=("(?:[^"\\]|\\.)*"|-?\d+)')
# An entire string, or one bracket.
_NESTING = re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\],]')

_SHAPE = re.compile(r"(\w+)\[([^\]]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_ELEMENT_BITS = re.compile(r"E\((\d+)\)")


@dataclass(frozen=True)
class Shape:
    """``layout``: order in memory and tiles, such as ``1,0:T(8,128)``. ``space``: 0 HBM, 1 VMEM,
    2 synchronisation flags, 4 and 6 scalar memories, 5 the host. ``bits``: 0 for tokens.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""
    space: int = HBM
    bits: int = 0

    @property
    def bytes(self) -> int:
        """Without padding."""
        return (math.prod(self.dims) * self.bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Tuple:
    parts: tuple[Shape | Tuple, ...]

    @cached_property
    def leaves(self) -> tuple[Shape, ...]:
        return tuple(leaf for part in self.parts for leaf in leaves(part))


def leaves(shape: Shape | Tuple) -> tuple[Shape, ...]:
    return shape.leaves if isinstance(shape, Tuple) else (shape,)


@lru_cache(maxsize=1 << 14)
def read_shape(text: str) -> Shape | Tuple:
    """Raises ValueError if ``text`` is no shape."""
    if text[:1] == "(" and text[-1] == ")":
        return Tuple(tuple(read_shape(part.strip()) for part in _split_list(text[1:-1])))
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError(f"not a shape: {text[:120]!r}")
    dtype, dims, layout = found[1], found[2], found[3] or ""
    bits, space = _ELEMENT_BITS.search(layout), _SPACE.search(layout)
    in_name = re.search(r"\d+", dtype)  # f32, bf16, s4, f8e4m3fn, c64
    usual = 8 if dtype == "pred" else int(in_name[0]) if in_name else 0
    return Shape(
        dtype=dtype,
        # "<=8" is a bounded dimension.
        dims=tuple(int(d.strip().lstrip("<=").replace("?", "0")) for d in dims.split(",") if d),
        layout=layout,
        space=int(space[1]) if space else HBM,
        bits=int(bits[1]) if bits else usual,
    )


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.replace(",", " ").split())


@dataclass(eq=False)
class Instruction:
    """``operands`` are names; a parameter or constant has its text there. ``attributes`` is
    everything after the operands, as written.
    """

    name: str
    opcode: str
    shape: Shape | Tuple
    operands: tuple[str, ...]
    attributes: str
    is_root: bool = False

    @cached_property
    def called(self) -> tuple[str, ...]:
        names = []
        for found in _CALLED.findall(self.attributes):
            names += [n.strip().lstrip("%") for n in found.strip("{}").split(",") if n.strip()]
        return tuple(names)

    @cached_property
    def op_name(self) -> str:
        fields = dict(_FIELD.findall(self.attribute("metadata") or ""))
        return _unescape(fields.get("op_name", "")[1:-1])

    @cached_property
    def backend_config(self) -> Mapping:
        """Empty if there is none, or if it is not JSON."""
        text = self.attribute("backend_config") or ""
        if text.startswith('"'):  # older printers quote it
            text = _unescape(text[1:-1])
        try:
            value = json.loads(text)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def attribute(self, key: str) -> str | None:
        text = self.attributes
        at = -1
        while (at := text.find(key + "=", at + 1)) >= 0:
            if at == 0 or text[at - 1] in ", ":
                start = at + len(key) + 1
                return text[start : _end_of_item(text, start)].strip()
        return None


@dataclass(eq=False)
class HloComputation:
    """Instructions in the order of the text (the schedule, if scheduled)."""

    name: str
    instructions: list[Instruction]

    @cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((i for i in self.instructions if i.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """In the order of their numbers."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: int(i.operands[0])))


@dataclass(eq=False)
class HloModule:
    """``devices``: the number of devices that run it."""

    name: str
    computations: Mapping[str, HloComputation]
    entry: HloComputation
    devices: int
    scheduled: bool

    def called_by(self, instruction: Instruction) -> HloComputation:
        """The first computation that it calls; ValueError if there is none."""
        name = instruction.called[0] if instruction.called else None
        return self.named(name, instruction)

    def named(self, name: str | None, user: Instruction) -> HloComputation:
        """The computation ``name`` that ``user`` calls; ValueError if there is none."""
        if name is None or name not in self.computations:
            raise ValueError(f"{user.opcode} {user.name} calls {name!r}, which is not defined")
        return self.computations[name]


def parse_module(text: str) -> HloModule:
    """Raises ValueError, with the line, if the text is not HLO."""
    lines = text.splitlines()
    header = next((line for line in lines if line.startswith("HloModule ")), None)
    if header is None:
        raise ValueError(f"no line starts with 'HloModule': {text[:80]!r} is not an HLO module")
    computations: dict[str, HloComputation] = {}
    entry = current = None
    defined: dict[str, Shape | Tuple] = {}
    for line in _join_lines(lines):
        if current is None:
            if line[:1] not in (" ", "") and (found := _COMPUTATION.match(line)):
                current, defined = HloComputation(found[2], []), {}
                computations[found[2]] = current
                entry = current if found[1] else entry
        elif line.startswith("}"):
            current = None
        elif line.strip():
            instruction = _instruction(line)
            if any("#" in name for name in instruction.operands):
                current.instructions += _elements(instruction, defined)
            current.instructions.append(instruction)
            defined[instruction.name] = instruction.shape
    if entry is None:
        raise ValueError(f"the module {header[:80]!r} has no ENTRY computation")
    counts = dict(_FIELD.findall(header))
    return HloModule(
        name=header.split()[1].rstrip(","),
        computations=computations,
        entry=entry,
        devices=int(counts.get("replica_count", 1)) * int(counts.get("num_partitions", 1)),
        scheduled="is_scheduled=true" in header,
    )


def _join_lines(lines: list[str]) -> Iterator[str]:
    """Yield lines, joined with those that continue an instruction (a constant, a string)."""
    pending = ""
    for line in lines:
        begins = line[:1] == " " and _INSTRUCTION.match(line) is not None
        if pending and not begins and not line.startswith("}"):
            pending += "\n" + line
            continue
        if pending:
            yield pending
        pending = line if begins else ""
        if not begins:
            yield line
    if pending:
        yield pending


def _instruction(line: str) -> Instruction:
    head = _INSTRUCTION.match(line)
    start = head.end() if head else 0
    if head and line[start] == "(":
        found = _TUPLE_THEN_OPCODE.search(line, start)
        shape_text, opcode = (line[start : found.start() + 1], found[1]) if found else ("", "")
    else:
        found = _ARRAY_THEN_OPCODE.match(line, start)
        shape_text, opcode = (found[1], found[2]) if found else ("", "")
    stop = _end_of_item(line, found.end(), ends="") if found else len(line)
    if head is None or found is None or stop == len(line):  # a bracket is not closed
        raise ValueError(f"not an HLO instruction: {line.strip()[:120]!r}")
    inside = line[found.end() : stop]
    if opcode in ("parameter", "constant"):
        operands: tuple[str, ...] = (inside.strip(),)
    else:
        # Some printers put the shape before the name.
        operands = tuple(item.split()[-1].lstrip("%") for item in _split_list(inside))
    rest = line[stop + 1 :].lstrip(", ")
    return Instruction(head[2], opcode, read_shape(shape_text), operands, rest, bool(head[1]))


def _elements(user: Instruction, defined: dict[str, Shape | Tuple]) -> list[Instruction]:
    """The elements of tuples among the operands: libtpu 0.0.51 writes ``%x#1`` for element 1 of
    ``%x``, without an instruction for it.
    """
    found: list[Instruction] = []
    if user.opcode in ("parameter", "constant"):
        return found
    for name in user.operands:
        of, mark, number = name.rpartition("#")
        if not mark or name in defined:
            continue
        whole = defined.get(of)
        if not isinstance(whole, Tuple) or int(number) >= len(whole.parts):
            raise ValueError(f"{user.name} uses {name!r}, which is not defined")
        shape = defined[name] = whole.parts[int(number)]
        found.append(Instruction(name, "get-tuple-element", shape, (of,), f"index={number}"))
    return found


def _end_of_item(text: str, start: int, ends: str = ",") -> int:
    """The end of the list item at ``start``: at ``ends``, or at the end of the list."""
    depth = 0
    for token in _NESTING.finditer(text, start):
        if token[0] in "({[":
            depth += 1
        elif token[0] in ")}]":
            depth -= 1
            if depth < 0:
                return token.start()
        elif token[0] == ends and depth == 0:
            return token.start()
    return len(text)


def _split_list(text: str) -> list[str]:
    """The items of a list, without comments."""
    if "/*" in text:
        text = re.sub(r"/\*.*?\*/", "", text)
    items = []
    start = 0
    while start < len(text):
        end = _end_of_item(text, start)
        items.append(text[start:end])
        start = end + 1
    return [item for item in items if item.strip()]


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text) if "\\" in text else text

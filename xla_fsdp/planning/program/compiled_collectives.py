"""Finds the collectives of a schedule, each once, with their groups of devices and bytes sent.

The TPU compiler may split an asynchronous collective: a fusion starts it, others do a part, and a
last one waits for it. Each contains a copy of the full collective, which identifies them. On a
SparseCore (TPU7x) it is a ``custom-call-start`` without operands, a ``custom-call-update``, where
it begins, and a ``custom-call-done``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...tpu.links import wire_bytes
from ...tpu.slices import Groups
from ..records import KINDS, CompiledCollective
from .hlo import HloComputation, HloModule, Instruction, Shape, Tuple, leaves, numbers
from .places import InlinedSchedule, Place
from .scopes import asked, parse_scope

# A rare kind counts as one that sends about the same bytes.
_KINDS = {**{kind: kind for kind in KINDS}, "ragged-all-to-all": "all-to-all"}
# A collective between slices is a send and a receive with the same name; ONE_TO_ONE is a permute.
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_SLICES = re.compile(r'_xla_megascale_target="\{([\d,]+)\}')
_START, _DONE = '"AsyncCollectiveStart"', '"AsyncCollectiveDone"'
_BY_CALL = ("async-start", "custom-call-start")

_GROUP = re.compile(r"\{([\d,\s]*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[((?:'\w+'=\d+,?)+)\] \{((?:'\w+',?)*)\}")


def parse_groups(text: str) -> Groups:
    """Parse groups: ``{{0,1},{2,3}}``, ``[2,2]<=[2,2]T(1,0)`` or ``mesh['a'=2,'b'=2] {'b'}``.

    The second: reshape numbers from 0 to the list after ``<=``, transpose, and split into rows. The
    third (libtpu 0.0.51): reshape them to the mesh; a group differs only in the named axes.
    """
    text = text.strip()
    if mesh := _MESH.fullmatch(text):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        along = re.findall(r"'(\w+)'", mesh[2])
        if not set(along) <= set(sizes) or len(set(along)) < len(along):
            raise ValueError(f"replica groups along {along} do not fit the mesh {mesh[1]!r}")
        order = [
            list(sizes).index(name) for name in (*(n for n in sizes if n not in along), *along)
        ]
        width = math.prod(sizes[name] for name in along)
        return _iota_groups(list(sizes.values()), order, width)
    if iota := _IOTA.fullmatch(text):
        *several, width = numbers(iota[1])  # a single number means one group
        dims = numbers(iota[2])
        order = list(numbers(iota[3]) if iota[3] else range(len(dims)))
        if sorted(order) != list(range(len(dims))) or math.prod(dims) != math.prod(several) * width:
            raise ValueError(f"replica groups {text!r} have inconsistent sizes")
        return _iota_groups(dims, order, width)
    if text and not re.fullmatch(r"\{(\s*\{[\d,\s]*\}\s*,?)*\s*\}", text):
        raise ValueError(f"replica groups in an unknown notation: {text[:120]!r}")
    groups = (numbers(g) for g in _GROUP.findall(text[1:-1]))
    return tuple(g for g in groups if g)


def _iota_groups(dims: Sequence[int], order: Sequence[int], width: int) -> Groups:
    numbered = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    return tuple(map(tuple, numbered.reshape(-1, width).tolist()))


@dataclass(frozen=True)
class Found:
    collectives: list[CompiledCollective]
    places: set[int]
    notes: list[str]


@dataclass
class _Open:
    place: Place
    core: Instruction  # possibly inside a fusion
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]
    fused: bool
    asynchronous: bool
    done: int | None = None


def find_collectives(line: InlinedSchedule) -> Found:
    """Raises ValueError for groups it cannot read."""
    search = _CollectiveFinder(line)
    for place in line.places:
        search.visit(place)
    notes = [
        f"{one.place.instruction.name} is started, but no instruction waits for it"
        for one in search.found
        if one.asynchronous and one.done is None
    ]
    found = sorted(search.found, key=lambda one: one.place.index)
    collectives = [_record(line.module, one, len(line.places) - 1) for one in found]
    return Found(collectives, search.own, notes)


class _CollectiveFinder:
    def __init__(self, line: InlinedSchedule):
        self._line, self._module = line, line.module
        # Those that run: by the place that started or forwarded them, or by what the fusions with
        # their parts share.
        self._started: dict[Place, _Open] = {}
        self._in_parts: dict[tuple[str, str, str], list[_Open]] = {}
        self._between: dict[str, _Open] = {}
        self.found: list[_Open] = []
        self.own: set[int] = set()

    def visit(self, place: Place) -> None:
        instruction, opcode = place.instruction, place.instruction.opcode
        if opcode in _KINDS:
            self._add(place, instruction, place.computation, leaves(instruction.shape))
        elif opcode in ("send", "recv") and _MEGASCALE.search(instruction.attributes):
            self._transfer(place)
        elif opcode.removesuffix("-start") in _KINDS:
            self._add(place, instruction, place.computation, asynchronous=True)
        elif opcode in ("fusion", *_BY_CALL):
            self._fusion(place)
        elif opcode.endswith(("-update", "-done")):
            running = (self._started.get(operand) for operand in self._line.operands(place))
            one = next(filter(None, running), None)
            if one is None:
                return
            if opcode.endswith("-done"):
                self._close(place, one, leaves(instruction.shape))
                return
            self._started[place] = one
            if opcode == "custom-call-update" and not one.place.instruction.operands:
                one.place = place  # it begins where it gets its operands
                self.own.add(place.index)

    def _transfer(self, place: Place) -> None:
        """A send starts a collective between slices; a receive has the shape of its result."""
        instruction = place.instruction
        rendezvous = _RENDEZVOUS.search(instruction.attributes)
        name = rendezvous[1] if rendezvous else instruction.name
        end = "operands" if instruction.opcode == "send" else "results"
        one = self._between.get(name)
        if one is None or getattr(one, end):
            one = self._add(place, instruction, asynchronous=True)
            self._between[name] = one
        setattr(one, end, leaves(instruction.shape)[:1])
        self.own.add(place.index)
        self._started[place] = one

    def _fusion(self, place: Place) -> None:
        inside = self._collectives_in(place.instruction)
        marks = [
            mark
            for one in (self._module.called_by(place.instruction).instructions if inside else ())
            for mark in (_START, _DONE)
            if one.opcode == "custom-call" and mark in one.attributes
        ]
        for computation, core in inside:
            # Of equal collectives the first ends first.
            running = self._in_parts.setdefault((core.opcode, core.op_name, str(core.shape)), [])
            if _DONE in marks:
                if running:
                    self._close(place, running.pop(0), ())
                continue
            started = place.instruction.opcode in _BY_CALL or _START in marks
            if not started and running:
                continue  # a part of a started collective
            results = leaves(core.shape)
            one = self._add(place, core, computation, results, started, fused=not started)
            if _START in marks:
                running.append(one)

    def _add(
        self,
        place: Place,
        core: Instruction,
        computation: HloComputation | None = None,
        results: tuple[Shape, ...] = (),
        asynchronous: bool = False,
        fused: bool = False,
    ) -> _Open:
        """``computation``: that of the operands of ``core``."""
        known = [computation.by_name[name] for name in core.operands] if computation else []
        operands = tuple(leaf for one in known for leaf in leaves(one.shape))
        one = _Open(place, core, operands, results, fused, asynchronous)
        self.found.append(one)
        if asynchronous:
            self._started[place] = one
        if not fused:
            self.own.add(place.index)
        return one

    def _close(self, place: Place, one: _Open, results: tuple[Shape, ...]) -> None:
        one.done = place.index
        one.results = one.results or results
        self.own.add(place.index)

    def _collectives_in(self, instruction: Instruction) -> list[tuple[HloComputation, Instruction]]:
        if not instruction.called:
            return []
        computation = self._module.called_by(instruction)
        found = []
        for one in computation.instructions:
            if one.opcode in _KINDS:
                found.append((computation, one))
            elif one.opcode == "fusion":
                found += self._collectives_in(one)
        return found


def _record(module: HloModule, one: _Open, last: int) -> CompiledCollective:
    core, instruction = one.core, one.place.instruction
    between = _MEGASCALE.search(core.attributes) if core.opcode in ("send", "recv") else None
    if between:
        kind = _KINDS.get(between[1].lower().replace("_", "-"), "collective-permute")
    else:
        kind = _KINDS[core.opcode.removesuffix("-start")]
    emitter = _emitter(core) or _emitter(instruction)
    if one.fused and kind == "all-reduce" and _scatters(module, one, emitter):
        kind = "reduce-scatter"
    if between:
        # Of the same device in every slice; the program numbers those of one slice.
        found, devices = _SLICES.search(core.attributes), module.devices
        slices = range(len(found[1].split(",")) if found else 1)
        groups: Groups = tuple(tuple(d + s * devices for s in slices) for d in range(devices))
    else:
        pairs = core.attribute("source_target_pairs")
        groups = parse_groups(core.attribute("replica_groups") or "" if pairs is None else pairs)
    if kind == "collective-permute":
        size = 2
    else:
        size = max((len(g) for g in groups), default=module.devices)
    results = one.results
    if not results and isinstance(instruction.shape, Tuple) and len(instruction.shape.parts) > 1:
        results = leaves(instruction.shape.parts[1])
    number_of_bytes = max(sum(s.bytes for s in shapes) for shapes in (one.operands, results))
    largest = max((*one.operands, *results), key=lambda s: s.bytes, default=None)
    names = [core.op_name, instruction.op_name]
    # Merged collectives have names only in the computation that adds.
    reducer = module.computations.get((core.attribute("to_apply") or "").lstrip("%"))
    names += [i.op_name for i in reducer.instructions] if reducer else []
    labels = [label for label in map(parse_scope, names) if any(label)] or [("", "")]
    return CompiledCollective(
        index=one.place.index,
        done=one.place.index if not one.asynchronous else last if one.done is None else one.done,
        name=instruction.name,
        kind=kind,
        asked=next((a for a in map(asked, names) if a), ""),
        dtype=largest.dtype if largest else "",
        bytes=number_of_bytes,
        groups=groups,
        group_size=size,
        wire_bytes=wire_bytes(kind, number_of_bytes, size),
        asynchronous=one.asynchronous,
        fused=one.fused,
        times=one.place.times,
        emitter=emitter or ("megascale" if between else ""),
        across_slices=bool(between),
        module=labels[0][1],
        phase=labels[0][0],
    )


def _emitter(instruction: Instruction) -> str:
    """The compiler's name for the algorithm, such as "RotatedPincer StrategyND"."""
    if "collective_offload_config" in instruction.backend_config:
        return "SparseCore"
    config = instruction.backend_config.get("collective_algorithm_config", {})
    if not isinstance(config, dict):
        return ""
    return " ".join(str(config[key]) for key in ("emitter", "strategy") if config.get(key))


def _scatters(module: HloModule, one: _Open, emitter: str) -> bool:
    if "AllReduceScatter" in emitter:
        return True
    for computation in module.computations.values():
        if computation.by_name.get(one.core.name) is one.core:
            users = [i for i in computation.instructions if one.core.name in i.operands]
            return bool(users) and all(i.opcode == "dynamic-slice" for i in users)
    return False

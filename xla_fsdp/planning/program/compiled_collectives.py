"""Finds the collectives of a schedule, each once, with their groups of devices and bytes sent.

The TPU compiler may split an asynchronous collective: a fusion starts it, others do a part, and a
last one waits for it. Each contains a copy of the full collective, which identifies them. On a
SparseCore (TPU7x) it is a ``custom-call-start`` without operands, a ``custom-call-update``, where
it begins, and a ``custom-call-done``.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...tpu.links import wire_bytes
from ...tpu.slices import Groups
from ..records import KINDS, CompiledCollective
from .hlo import HloModule, Instruction, Shape, TupleShape, leaves
from .places import InlinedSchedule, Place
from .scopes import asked, parse_scope

# A rare kind counts as one that sends about the same bytes.
_KINDS = {**{kind: kind for kind in KINDS}, "ragged-all-to-all": "all-to-all"}
# A collective between slices is a send and a receive with the same name; ONE_TO_ONE is a permute.
_MEGASCALE, _SLICES = "_xla_megascale_transfer_type", "_xla_megascale_target"
_RENDEZVOUS = "_xla_host_transfer_rendezvous"
_START, _DONE = b"AsyncCollectiveStart", b"AsyncCollectiveDone"
_BY_CALL = ("async-start", "custom-call-start")


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
        self._line = line
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
            self._add(place, instruction, leaves(instruction.shape))
        elif opcode in ("send", "recv") and _MEGASCALE in instruction.attributes:
            self._transfer(place)
        elif opcode.removesuffix("-start") in _KINDS:
            self._add(place, instruction, asynchronous=True)
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
        name = instruction.attributes.get(_RENDEZVOUS, instruction.name)
        end = "operands" if instruction.opcode == "send" else "results"
        one = self._between.get(name)
        if one is None or getattr(one, end):
            one = self._between[name] = self._add(place, instruction, asynchronous=True)
            one.operands = ()
        setattr(one, end, leaves(instruction.shape)[:1])
        self.own.add(place.index)
        self._started[place] = one

    def _fusion(self, place: Place) -> None:
        inside = self._collectives_in(place.instruction)
        marks = [
            one.message.custom_call_target
            for one in (place.instruction.called[0].instructions if inside else ())
        ]
        for core in inside:
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
            one = self._add(place, core, results, started, fused=not started)
            if _START in marks:
                running.append(one)

    def _add(
        self,
        place: Place,
        core: Instruction,
        results: tuple[Shape, ...] = (),
        asynchronous: bool = False,
        fused: bool = False,
    ) -> _Open:
        operands = tuple(leaf for one in core.operands for leaf in leaves(one.shape))
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

    def _collectives_in(self, instruction: Instruction) -> list[Instruction]:
        found = []
        for one in instruction.called[0].instructions if instruction.called else ():
            if one.opcode in _KINDS:
                found.append(one)
            elif one.opcode == "fusion":
                found += self._collectives_in(one)
        return found


def _record(module: HloModule, one: _Open, last: int) -> CompiledCollective:
    core, instruction = one.core, one.place.instruction
    between = core.attributes.get(_MEGASCALE, "") if core.opcode in ("send", "recv") else ""
    if between:
        kind = _KINDS.get(between.lower().replace("_", "-"), "collective-permute")
    else:
        kind = _KINDS[core.opcode.removesuffix("-start")]
    emitter = _emitter(core) or _emitter(instruction)
    if one.fused and kind == "all-reduce" and _scatters(module, one, emitter):
        kind = "reduce-scatter"
    if between:
        # Of the same device in every slice; the program numbers those of one slice.
        named = core.attributes.get(_SLICES, "").partition("}")[0]  # "{1,2}x{0:3}"
        devices, slices = module.devices, range(named.count(",") + 1)
        groups: Groups = tuple(tuple(d + s * devices for s in slices) for d in range(devices))
    else:
        groups = core.groups
    if kind == "collective-permute":
        size = 2
    else:
        size = max((len(g) for g in groups), default=module.devices)
    results = one.results
    if (
        not results
        and isinstance(instruction.shape, TupleShape)
        and len(instruction.shape.parts) > 1
    ):
        results = leaves(instruction.shape.parts[1])
    number_of_bytes = max(sum(s.bytes for s in shapes) for shapes in (one.operands, results))
    largest = max((*one.operands, *results), key=lambda s: s.bytes, default=None)
    names = [core.op_name, instruction.op_name]
    # Merged collectives have names only in the computation that adds.
    names += [i.op_name for reducer in core.called for i in reducer.instructions]
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
    users = [i for i in module.instructions if one.core in i.operands]
    return bool(users) and all(i.opcode == "dynamic-slice" for i in users)

"""Reads one step from a trace of ``xla_fsdp.profile``, to compare it with a plan.

On a TPU, a step is what one chip did (the line "XLA Ops" of its plane). A trace of CPU ranks does
not record the rank of an instruction: totals are means over all ranks, which run in lockstep.
"""

from __future__ import annotations

import os
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from .program.hlo import module_in
from .program.schedule import computing_places, read_line
from .protobuf import message_classes
from .records import CompiledCollective, Slot

_DEVICE = re.compile(r"/device:TPU:\d+")
_HOST = "/host:CPU"
_HLO_PLANE = "/host:metadata"
_OPS = "XLA Ops"
_NAME = re.compile(r"%?([\w.\-]+)")
_STEP = "train"  # the name of a step in xla_fsdp.profile
_KNOWN = 0.9  # the least share of the instructions that ran which the program must contain
_LOST = 1e-9  # seconds: the shown length of events that have none
_MOST_BYTES = 2 << 30  # protobuf's limit for a message

# Fields of XLA's xplane.proto. Strings are bytes: some may not be UTF-8.
_MESSAGES = {
    "XSpace": ["planes XPlane* 1"],
    "XPlane": ["name bytes 2", "lines XLine* 3", "event_metadata EventEntry* 4",
               "stat_metadata StatEntry* 5"],
    "EventEntry": ["key int64 1", "value XEventMetadata 2"],
    "StatEntry": ["key int64 1", "value XStatMetadata 2"],
    "XLine": ["name bytes 2", "timestamp_ns int64 3", "events XEvent* 4"],
    "XEvent": ["metadata_id int64 1", "offset_ps int64 2", "duration_ps int64 3", "stats XStat* 4"],
    "XStat": ["metadata_id int64 1", "double_value double 2", "uint64_value uint64 3",
              "int64_value int64 4", "str_value bytes 5", "bytes_value bytes 6",
              "ref_value uint64 7"],
    "XEventMetadata": ["name bytes 2", "display_name bytes 4", "stats XStat* 5"],
    "XStatMetadata": ["name bytes 2"],
}  # fmt: skip
_VALUES = [field.split()[0] for field in _MESSAGES["XStat"][1:]]


def messages() -> Mapping[str, Any]:
    return message_classes("xla_fsdp.recorded", _MESSAGES)


@dataclass(frozen=True)
class ProfileEvent:
    name: str
    shown: str
    begin: float
    end: float
    stats: Mapping[str, Any]


class Plane:
    """The events of one device, or of the host.

    ``kinds``: name, shorter name and stats of each kind of event.
    """

    def __init__(self, message: Any) -> None:
        self.name = _utf8(message.name)
        self._lines = message.lines
        self._stats = {entry.key: _utf8(entry.value.name) for entry in message.stat_metadata}
        self.kinds = {
            entry.key: (
                _utf8(entry.value.name),
                _utf8(entry.value.display_name),
                self._read(entry.value.stats),
            )
            for entry in message.event_metadata
        }

    def events(self, line: str = "") -> Iterator[ProfileEvent]:
        for one in self._lines:
            if line in ("", _utf8(one.name)):
                for event in one.events:
                    name, shown, stats = self.kinds.get(event.metadata_id, ("", "", {}))
                    begin = 1e-9 * one.timestamp_ns + 1e-12 * event.offset_ps
                    end = begin + 1e-12 * max(event.duration_ps, 0)
                    own = self._read(event.stats) if event.stats else {}
                    yield ProfileEvent(name, shown, begin, end, {**stats, **own})

    def _read(self, stats: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for stat in stats:
            given = [field for field in _VALUES if stat.HasField(field)]
            if given:
                value = getattr(stat, given[-1])
                if given[-1] == "str_value":
                    value = _utf8(value)
                elif given[-1] == "ref_value":
                    value = self._stats.get(value, "")
                found[self._stats.get(stat.metadata_id, "")] = value
        return found


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _planes(path: Path) -> list[Plane]:
    size = path.stat().st_size
    if size >= _MOST_BYTES:
        raise ValueError(f"has {size} bytes, the limit is {_MOST_BYTES}: record fewer steps")
    try:
        space = messages()["XSpace"].FromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError("is not a trace, or is damaged: record it again") from error
    planes = [Plane(plane) for plane in space.planes]
    if not planes:
        raise ValueError("is empty: the recording was interrupted; record it again")
    return planes


@dataclass(frozen=True)
class RecordedProgram:
    """One compiled program; all mappings are by the name of the instruction.

    ``compute``: (phase, module). ``starts``: the collective that it starts. ``ends``: the
    instruction that waits for that collective. ``times``: how often it runs in one execution.
    """

    name: str
    compute: Mapping[str, tuple[str, str]]
    starts: Mapping[str, CompiledCollective]
    ends: Mapping[str, str]
    times: Mapping[str, int]

    @property
    def modules(self) -> set[str]:
        found = {module for _, module in self.compute.values()}
        return {*found, *(c.module for c in self.starts.values())} - {""}


def read_program(name: str, proto: bytes) -> RecordedProgram:
    """Parse an HloProto; ValueError if it is not scheduled, or damaged in any way."""
    try:
        line, found, labels = read_line(module_in(proto))
    except Exception as error:  # the type depends on what is damaged
        raise ValueError(f"cannot read program {name} ({error}): record the trace again") from error
    names = [place.instruction.name for place in line.places]
    compute = {
        place.instruction.name: labels.of(place.instruction)
        for place in computing_places(line, found.places)
    }
    times = Counter[str]()
    for place in line.places:
        times[place.instruction.name] += place.times
    starts = {names[c.index]: c for c in found.collectives}
    asynchronous = [c for c in found.collectives if c.asynchronous and c.done > c.index]
    ends = {names[c.index]: names[c.done] for c in asynchronous}
    return RecordedProgram(line.module.name, compute, starts, ends, times)


@dataclass(frozen=True)
class Share:
    """One instruction in a step, in seconds of one rank.

    ``kind``: "compute", or the traced collective. ``waited``: the part in which compute waits.
    """

    kind: str
    phase: str
    module: str
    seconds: float
    waited: float = 0.0


@dataclass(frozen=True)
class RecordedStep:
    """One step of a trace.

    ``seconds``: median from the first instruction to the last. ``period``: median from one step to
    the next, ``None`` for a single step. ``slots``: the timeline of step ``number``. ``shares``:
    means over steps and ranks. ``modules``: all in the program.
    """

    source: str
    device: str
    on_cpu: bool
    ranks: int
    steps: int
    number: int
    seconds: float
    period: float | None
    slots: tuple[Slot, ...]
    shares: tuple[Share, ...]
    modules: frozenset[str]


def read_trace(folder: str | os.PathLike[str]) -> RecordedStep:
    """Read a step from a trace: a file, or the newest in a folder that ``xla_fsdp.profile`` wrote.

    Raises FileNotFoundError without a trace; ValueError if it is damaged or has no module names.
    """
    path = Path(folder)
    if not path.is_file():
        found = sorted(path.glob("plugins/profile/*/*.xplane.pb"))
        if not found:
            raise FileNotFoundError(
                f"{path}: has no trace (plugins/profile/*/*.xplane.pb): record one with "
                "xla_fsdp.profile or --profile_steps, and give the folder of the recording"
            )
        path = max(found, key=lambda each: (each.parent.name, each.stat().st_mtime))
    try:
        return _recorded_step(str(path), _planes(path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _recorded_step(source: str, planes: list[Plane]) -> RecordedStep:
    device, events = _device(planes)
    program, mine = _main_program(planes, events)
    host = next((plane for plane in planes if plane.name == _HOST), None)
    marks = {e.stats.get("step_num") for e in host.events() if e.name == _STEP} if host else set()
    once = [len(found) for name, found in mine.items() if program.times[name] == 1]
    executions = statistics.mode(once) if once else 1
    steps = len(marks) or 1
    # Otherwise a step is incomplete, or runs the program several times.
    steps = 1 if executions % steps else steps
    on_cpu = device == _HOST
    ranks = max(executions // steps, 1) if on_cpu else 1
    windows = [
        {op: ran[n * len(ran) // steps : (n + 1) * len(ran) // steps] for op, ran in mine.items()}
        for n in range(steps)
    ]
    begins = [min(e.begin for some in window.values() for e in some) for window in windows]
    ends = [max(e.end for some in window.values() for e in some) for window in windows]
    lengths = [end - begin for begin, end in zip(begins, ends, strict=True)]
    periods = [later - begin for begin, later in zip(begins, begins[1:], strict=False)]
    number = sorted(range(steps), key=lengths.__getitem__)[(steps - 1) // 2]  # the median
    return RecordedStep(
        source=source,
        device=f"{ranks} CPU rank{'s' if ranks > 1 else ''}" if on_cpu else device,
        on_cpu=on_cpu,
        ranks=ranks,
        steps=steps,
        number=number,
        seconds=statistics.median(lengths),
        period=statistics.median(periods) if periods else None,
        slots=tuple(_slots(program, windows[number], begins[number])),
        shares=tuple(_shares(program, mine, executions)),
        modules=frozenset(program.modules),
    )


def _device(planes: list[Plane]) -> tuple[str, list[tuple[str, str, ProfileEvent]]]:
    """The name of a chip that ran something, or the host; its (instruction, program, event)."""
    for plane in sorted(planes, key=lambda plane: plane.name):
        if _DEVICE.fullmatch(plane.name):
            found = [
                (_instruction_name(event), _unsigned(str(event.stats.get("program_id", ""))), event)
                for event in plane.events(_OPS)
            ]
            if found:
                return plane.name.rpartition("device:")[2], found
    for plane in planes:
        if plane.name == _HOST:
            on_cpu = [e for e in plane.events() if "hlo_op" in e.stats and "hlo_module" in e.stats]
            found = [(str(e.stats["hlo_op"]), str(e.stats["hlo_module"]), e) for e in on_cpu]
            if found:
                return _HOST, found
    raise ValueError("no device ran anything during the recording: record later steps")


def _instruction_name(event: ProfileEvent) -> str:
    """The name of the instruction; on a TPU, ``event.name`` is its full text."""
    shown = event.shown or str(event.stats.get("hlo_op", ""))
    match = _NAME.match(shown or event.name)
    return match[1] if match else ""


def _unsigned(text: str) -> str:
    """The number of a program as unsigned 64 bits; traces may write it as signed."""
    return str(int(text) % (1 << 64)) if re.fullmatch(r"-?\d{1,20}", text) else text


def _main_program(
    planes: list[Plane], events: list[tuple[str, str, ProfileEvent]]
) -> tuple[RecordedProgram, dict[str, list[ProfileEvent]]]:
    """The program with module names that took most time, and its events by instruction."""
    spent: dict[str, float] = {}
    for _, key, event in events:
        spent[key] = spent.get(key, 0.0) + event.end - event.begin
    protos: dict[str, list[tuple[str, bytes]]] = {}
    kinds = [kind for plane in planes if plane.name == _HLO_PLANE for kind in plane.kinds.values()]
    for name, _, stats in kinds:
        base, _, number = name.rpartition("(")  # "jit_step(81)"
        some = [(base, value) for value in stats.values() if isinstance(value, bytes)]
        for key in {base, _unsigned(number.removesuffix(")"))} & spent.keys():
            protos.setdefault(key, []).extend(some)
    for key in sorted(protos, key=lambda key: -spent[key]):
        ran: dict[str, list[ProfileEvent]] = {}
        for op, of, event in sorted(events, key=lambda one: one[2].begin):
            if of == key:
                ran.setdefault(op, []).append(event)
        for name, proto in protos[key]:
            if b"forward[" in proto or b"backward[" in proto:
                program = read_program(name, proto)
                known = {op: some for op, some in ran.items() if op in program.times}
                if len(protos[key]) > 1:
                    _require_alone(program, ran)
                if program.modules and len(known) >= _KNOWN * len(ran):
                    return program, known
    raise ValueError(
        "no program in this trace has module names: enter xla_fsdp.profile before the first step, "
        "and do not use enable_compilation_cache"
    )


def _require_alone(program: RecordedProgram, ran: dict[str, list[ProfileEvent]]) -> None:
    """Raise ValueError if several programs of one name ran: those of CPU ranks have no numbers."""
    counts = {len(some) for op, some in ran.items() if program.times.get(op) == 1}
    if not ran.keys() <= program.times.keys() or len(counts) > 1:
        raise ValueError(
            f"several programs in this trace have the name {program.name}, so their instructions "
            "cannot be assigned: record only one model in a process"
        )


def _slots(
    program: RecordedProgram, window: Mapping[str, list[ProfileEvent]], begin: float
) -> list[Slot]:
    slots = []
    for op, events in window.items():
        ends = events
        if op in program.compute:
            lane, (phase, module) = "compute", program.compute[op]
        elif op in program.starts:
            collective = program.starts[op]
            lane, phase, module = "collective", collective.phase, collective.module
            if op in program.ends:
                ends = window.get(program.ends[op], [])
        else:
            continue
        # From each start to the next end: executions of one collective do not overlap.
        for first, last in zip(events, ends, strict=False):
            end, ready = max(last.end, first.begin + _LOST) - begin, op in program.ends
            slots.append(Slot(lane, first.begin - begin, end, 0, op, module, phase, ready))
    return sorted(slots, key=lambda slot: slot.begin)


def _shares(
    program: RecordedProgram, mine: dict[str, list[ProfileEvent]], executions: int
) -> list[Share]:
    def seconds(op: str) -> float:
        return sum(event.end - event.begin for event in mine.get(op, ())) / executions

    shares = [
        Share("compute", *program.compute[op], seconds(op), 0.0)
        for op in mine
        if op in program.compute
    ]
    for op, c in program.starts.items():
        if op not in mine:
            continue
        took = waited = seconds(op)
        done = program.ends.get(op)
        if done in mine:
            pairs = zip(mine[op], mine[done], strict=False)
            took = sum(max(end.end - start.begin, 0.0) for start, end in pairs) / executions
            waited = seconds(done)
        shares.append(Share(c.asked or c.kind, c.phase, c.module, took, waited))
    return shares

"""Read one step from a recorded trace, as a plan has it: slots of a timeline, and totals.

The trace contains a copy of each program, which has the module and the phase of each instruction.
It is parsed with the same code as the program of a plan, so both use the same names.

On a TPU, a step is what one chip did (the line "XLA Ops" of its plane). CPU ranks are threads of
one process, and the trace does not record the rank of an instruction. There, totals are the mean
over all ranks, and the timeline shows all of them. Ranks run in lockstep, since programs have
collectives, so the executions of an instruction in order of time belong to the steps in order.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from ..program.collectives import find_collectives
from ..program.hlo import parse_module
from ..program.places import line_up
from ..program.schedule import computing
from ..program.scopes import Labels
from ..records import Collective, Slot
from .xspace import Event, Plane, hlo_module, read, trace_in

_DEVICE = re.compile(r"/device:TPU:\d+")
_HOST = "/host:CPU"
_OPS = "XLA Ops"
_NAME = re.compile(r"%?([\w.\-]+)")
_STEP = "train"  # what xla_fsdp.profile calls a step
_KNOWN = 0.9  # the share of the instructions that ran which must be in the program
_LOST = 1e-9  # seconds: the length of events that have none

_HLO_PLANE = "/host:metadata"
_SECONDS_TO_READ = 120.0


@dataclass(frozen=True)
class Program:
    """One compiled program. All mappings are by the name of the instruction.

    ``compute``: (phase, module) of instructions that compute. ``starts``: the collective that an
    instruction starts. ``ends``: the collective that it waits for. ``times``: how often it runs in
    one execution of the program.
    """

    name: str
    compute: Mapping[str, tuple[str, str]]
    starts: Mapping[str, Collective]
    ends: Mapping[str, Collective]
    times: Mapping[str, int]

    @property
    def modules(self) -> set[str]:
        found = {module for _, module in self.compute.values()}
        return {*found, *(c.module for c in self.starts.values())} - {""}


def texts_of(planes: list[Plane]) -> dict[str, list[bytes]]:
    """The serialized HLO modules of the programs in a trace, by their names in the trace."""
    found: dict[str, list[bytes]] = {}
    for plane in planes:
        if plane.name == _HLO_PLANE:
            for name, stats in plane.kinds():
                for value in stats.values():
                    if isinstance(value, bytes):
                        found.setdefault(name, []).append(value)
    return found


def read_program(name: str, proto: bytes) -> Program:
    """Parse the program in an HloProto.

    Raises:
        ValueError: this XLA cannot read it, or it is not scheduled.
    """
    try:
        text = _text(hlo_module(proto))
    except DecodeError as error:
        raise ValueError(f"program {name} is damaged") from error
    module = parse_module(text)
    if not module.scheduled:
        raise ValueError(f"program {name} is not scheduled")
    line = line_up(module)
    found = find_collectives(line)
    labels = Labels(line, {c.name: (c.phase, c.module) for c in found.collectives})
    names = [place.instruction.name for place in line.places]
    compute = {
        place.instruction.name: labels.of(place.instruction)
        for place in computing(line, found.places)
    }
    times: dict[str, int] = {}
    for place in line.places:
        times[place.instruction.name] = times.get(place.instruction.name, 0) + place.times
    starts = {names[c.index]: c for c in found.collectives}
    ends = {names[c.done]: c for c in found.collectives if c.done > c.index}
    return Program(module.name, compute, starts, ends, times)


def _text(module: bytes) -> str:
    """The module as text. XLA runs in a separate process, because damaged bytes may crash it."""
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.hlo_child"],
        input=module, capture_output=True, timeout=_SECONDS_TO_READ, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError("XLA cannot read a program in this trace")
    return done.stdout.decode()


@dataclass(frozen=True)
class Share:
    """The time of one instruction in a step, in seconds of one rank.

    ``kind``: "compute", or the kind of the traced collective, such as "all-gather". ``waited``: the
    part of ``seconds`` in which compute waits.
    """

    kind: str
    phase: str
    module: str
    seconds: float
    waited: float = 0.0


@dataclass(frozen=True)
class RecordedStep:
    """One step of a trace.

    Attributes:
        source: the file.
        device: the name of the device, to be printed.
        on_cpu: whether CPU ranks ran it; their times are not those of a TPU.
        ranks: the number of ranks in the timeline.
        steps: the number of steps in the trace; ``number`` is the step of ``slots``.
        seconds: the median time of a step from its first instruction to its last.
        period: the median time from one step to the next; ``None`` if there is only one step.
        slots: the timeline of one step, in seconds from its begin.
        shares: means over all steps and ranks.
        modules: all modules in the program, whether or not they took time.
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
    """Read a step from the newest trace in a folder that ``xla_fsdp.profile`` wrote.

    Raises:
        FileNotFoundError: there is no trace.
        ValueError: the trace is damaged, or has no program with module names.
    """
    path = trace_in(folder)
    planes = read(path)
    try:
        return _step(str(path), planes)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _step(source: str, planes: list[Plane]) -> RecordedStep:
    device, events = _device(planes)
    program, mine = _main_program(planes, events)
    host = next((plane for plane in planes if plane.name == _HOST), None)
    marks = {e.stats.get("step_num") for e in host.events() if e.name == _STEP} if host else set()
    once = [len(found) for name, found in mine.items() if program.times[name] == 1]
    executions = statistics.mode(once) if once else 1
    steps = len(marks) or 1
    if (
        executions % steps
    ):  # the first or last step is incomplete, or a step runs the program several times
        steps = 1
    on_cpu = device == _HOST
    ranks = max(executions // steps, 1) if on_cpu else 1
    windows = [_window(mine, number, steps) for number in range(steps)]
    begins = [min(e.begin for _, e in window) for window in windows]
    ends = [max(e.end for _, e in window) for window in windows]
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


def _device(planes: list[Plane]) -> tuple[str, list[tuple[str, str, Event]]]:
    """The name of a chip that ran something, or the host, and its events: (instruction, program,
    event)."""
    for plane in sorted(planes, key=lambda plane: plane.name):
        if _DEVICE.fullmatch(plane.name):
            found = [
                (_of(event), _number(str(event.stats.get("program_id", ""))), event)
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


def _of(event: Event) -> str:
    """The name of the instruction. On a TPU the event has the full text of the instruction."""
    shown = event.shown or str(event.stats.get("hlo_op", ""))
    match = _NAME.match(shown or event.name)
    return match[1] if match else ""


def _number(text: str) -> str:
    """The number of a program as unsigned; it has 64 bits and may be written as signed."""
    return str(int(text) % (1 << 64)) if re.fullmatch(r"-?\d{1,20}", text) else text


def _main_program(
    planes: list[Plane], events: list[tuple[str, str, Event]]
) -> tuple[Program, dict[str, list[Event]]]:
    """The program with module names that took most time, and the events of its instructions."""
    spent: dict[str, float] = {}
    for _, key, event in events:
        spent[key] = spent.get(key, 0.0) + event.end - event.begin
    protos: dict[str, list[tuple[str, bytes]]] = {}
    for name, some in texts_of(planes).items():
        # In "jit_step(81)", jit_step is the program's name and 81 its number.
        base, _, number = name.rpartition("(")
        for key in {base, _number(number.removesuffix(")"))} & spent.keys():
            protos.setdefault(key, []).extend((base, proto) for proto in some)
    for key in sorted(protos, key=lambda key: -spent[key]):
        ran: dict[str, list[Event]] = {}
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


def _require_alone(program: Program, ran: dict[str, list[Event]]) -> None:
    """Check that of several programs with one name only ``program`` ran.

    Programs of CPU ranks have no numbers that would distinguish them.

    Raises:
        ValueError: others ran as well.
    """
    counts = {len(some) for op, some in ran.items() if program.times.get(op) == 1}
    if not ran.keys() <= program.times.keys() or len(counts) > 1:
        raise ValueError(
            f"several programs in this trace have the name {program.name}, so their instructions "
            "cannot be assigned: record only one model in a process"
        )


def _window(mine: dict[str, list[Event]], number: int, steps: int) -> list[tuple[str, Event]]:
    """The events of one of the steps."""
    return [
        (op, event)
        for op, some in mine.items()
        for event in some[number * len(some) // steps : (number + 1) * len(some) // steps]
    ]


def _slots(program: Program, window: Sequence[tuple[str, Event]], begin: float) -> list[Slot]:
    """The timeline: compute, and collectives until the instruction that waits for them."""
    slots, open_ = [], dict[str, list[Slot]]()
    for op, event in sorted(window, key=lambda one: one[1].begin):
        start, end = event.begin - begin, max(event.end, event.begin + _LOST) - begin
        if op in program.compute:
            phase, module = program.compute[op]
            slots.append(Slot("compute", start, end, 0, op, module, phase))
        elif op in program.starts:
            c = program.starts[op]
            asynchronous = c.asynchronous and c.done > c.index
            slot = Slot("collective", start, end, 0, c.name, c.module, c.phase, asynchronous)
            if asynchronous:
                open_.setdefault(c.name, []).append(slot)
            else:
                slots.append(slot)
        elif op in program.ends:
            c = program.ends[op]
            for slot in open_.get(c.name, [])[:1]:
                open_[c.name].remove(slot)
                slots.append(
                    Slot("collective", slot.begin, end, 0, c.name, c.module, c.phase, True)
                )
    return sorted(slots, key=lambda slot: slot.begin)


def _shares(program: Program, mine: dict[str, list[Event]], executions: int) -> list[Share]:
    """The time of each instruction that computes, and of each collective."""

    def seconds(op: str) -> float:
        return sum(event.end - event.begin for event in mine.get(op, ())) / executions

    shares = [
        Share("compute", *program.compute[op], seconds(op), 0.0)
        for op in mine
        if op in program.compute
    ]
    waits = {c.name: op for op, c in program.ends.items()}
    for op, c in program.starts.items():
        if op not in mine:
            continue
        done = waits.get(c.name) if c.asynchronous else None
        took, waited = seconds(op), seconds(op)
        if done is not None and done in mine:
            # From each start to the next done: executions of one collective do not overlap.
            pairs = zip(mine[op], mine[done], strict=False)
            took = sum(max(end.end - start.begin, 0.0) for start, end in pairs) / executions
            waited = seconds(done)
        shares.append(Share(c.asked or c.kind, c.phase, c.module, took, waited))
    return shares

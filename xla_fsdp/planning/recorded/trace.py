"""From a recorded trace to one step in terms of a plan: slots of a timeline, and totals.

Which module and phase an instruction is of, the trace's own copy of each program says. It is read
with the very code that reads the program of a plan, so that both use the same names.

On a TPU a step is what one chip did (its plane's line "XLA Ops"). On CPU ranks, which are threads
of one process, the trace does not say whose an instruction is: totals are then the mean of all
ranks, and the timeline has all of them. Ranks keep in step, since programs have collectives: the
occurrences of an instruction in order of time belong to steps in order.
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
_KNOWN = 0.9  # of the instructions that ran, in the program that they are taken to be of
_LOST = 1e-9  # seconds: events of no length are still seen

_HLO_PLANE = "/host:metadata"
_SECONDS_TO_READ = 120.0


@dataclass(frozen=True)
class Program:
    """One compiled program, by the names of its instructions.

    ``compute``: (phase, module) of what computes. ``starts``: the collective that begins with an
    instruction; ``ends``: the one that is waited for by it. ``times``: how often it runs in one
    execution of the program.
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
    """The HLO modules of the programs in a trace, serialised, by what the trace calls them."""
    found: dict[str, list[bytes]] = {}
    for plane in planes:
        if plane.name == _HLO_PLANE:
            for name, stats in plane.kinds():
                for value in stats.values():
                    if isinstance(value, bytes):
                        found.setdefault(name, []).append(value)
    return found


def read_program(name: str, proto: bytes) -> Program:
    """The program in an HloProto.

    Raises:
        ValueError: it is none that this XLA knows, or is not scheduled.
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
    """The module as text. By XLA in a process of its own, which damaged bytes may end."""
    done = subprocess.run(
        [sys.executable, "-m", f"{__package__}.hlo_child"],
        input=module, capture_output=True, timeout=_SECONDS_TO_READ, check=False,
    )  # fmt: skip
    if done.returncode:
        raise ValueError("XLA cannot read a program of it")
    return done.stdout.decode()


@dataclass(frozen=True)
class Share:
    """What one instruction takes in a step, in seconds of one rank.

    ``kind``: "compute", or what was traced of a collective, such as "all-gather"; ``waited``: the
    part of it that nothing else can be done in.
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
        device: whose it is, for people.
        on_cpu: whether it is of CPU ranks, whose times say nothing of a TPU.
        ranks: how many of them the timeline shows.
        steps: how many there are in the trace; ``number`` is the one that ``slots`` are of.
        seconds: of a step from its first instruction to its last, the median of all.
        period: from one step to the next, the median; ``None`` of one alone.
        slots: of one step, in seconds from its begin.
        shares: means of all steps and ranks.
        modules: that the program names, whether or not they took time.
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
    """The step in the newest trace of a folder that ``xla_fsdp.profile`` was given.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, or has no program with names of modules in it.
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
    if executions % steps:  # the first or the last was cut off, or a step runs the program often
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
    """A chip that ran something, or the host with its CPU ranks; instructions by program."""
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
    raise ValueError("no device ran anything while it was recorded: record later steps")


def _of(event: Event) -> str:
    """The instruction's name; on a TPU an event is called by its whole text."""
    shown = event.shown or str(event.stats.get("hlo_op", ""))
    match = _NAME.match(shown or event.name)
    return match[1] if match else ""


def _number(text: str) -> str:
    """Of a program: 64 bits, which one writes with a sign and another without."""
    return str(int(text) % (1 << 64)) if re.fullmatch(r"-?\d{1,20}", text) else text


def _main_program(
    planes: list[Plane], events: list[tuple[str, str, Event]]
) -> tuple[Program, dict[str, list[Event]]]:
    """The program with names of modules in which most time was spent, and what ran of it."""
    spent: dict[str, float] = {}
    for _, key, event in events:
        spent[key] = spent.get(key, 0.0) + event.end - event.begin
    protos: dict[str, list[tuple[str, bytes]]] = {}
    for name, some in texts_of(planes).items():
        # "jit_step(81)": the program's name and its number.
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
        "no program in it has names of modules: enter xla_fsdp.profile before the first step, and "
        "start without enable_compilation_cache"
    )


def _require_alone(program: Program, ran: dict[str, list[Event]]) -> None:
    """CPU ranks' programs have no numbers, and several may have one name, of which only one ran.

    Raises:
        ValueError: others ran, too.
    """
    counts = {len(some) for op, some in ran.items() if program.times.get(op) == 1}
    if not ran.keys() <= program.times.keys() or len(counts) > 1:
        raise ValueError(
            f"several programs in it are called {program.name}, and cannot be told apart: record "
            "one model in a process"
        )


def _window(mine: dict[str, list[Event]], number: int, steps: int) -> list[tuple[str, Event]]:
    """What ran in one of the steps."""
    return [
        (op, event)
        for op, some in mine.items()
        for event in some[number * len(some) // steps : (number + 1) * len(some) // steps]
    ]


def _slots(program: Program, window: Sequence[tuple[str, Event]], begin: float) -> list[Slot]:
    """The timeline: what computes, and collectives up to where they are waited for."""
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
    """What each instruction takes, once for each collective."""

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
            # From each start to the next done, in order: a collective is not started twice at once.
            pairs = zip(mine[op], mine[done], strict=False)
            took = sum(max(end.end - start.begin, 0.0) for start, end in pairs) / executions
            waited = seconds(done)
        shares.append(Share(c.asked or c.kind, c.phase, c.module, took, waited))
    return shares

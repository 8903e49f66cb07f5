"""The report as text."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ...wording import join_some
from ..records import KINDS, Buffer, CompiledCollective, Op, Schedule, Timing

if TYPE_CHECKING:
    from .report import Report

GIB, MIB, GB, MB = 2**30, 2**20, 10**9, 10**6
MB_MEANS = "10^6 bytes"
UNKNOWN = "unknown"
TINY = 64 * 1024  # a smaller collective takes its latency
_COUNTED = ("count", "sync", "async", "< 64 KiB", "MB sent")
_NO_CYCLES = "the compiler stopped before it estimated cycles"
NO_MODULE, NO_PHASE = "outside of modules", "no phase"
_RECOMPUTATION, _OPTIMIZER = "recomputation", "optimizer"
_BY_MODULE = ("forward", "recomputed", "backward", "optimizer", NO_PHASE)
_KIND_OF_WORK = {
    "matmul": "matmuls and what is fused with them",
    "kernel": "attention and other Pallas kernels",
    "attention": "attention without a kernel (batched matmuls, softmax)",
    "elementwise": "normalization and other elementwise",
    "copy": "copies and changes of layout",
    "": "compute of unknown kind",  # in reports of older versions
}
NUMBER = re.compile(r"\.\d+(?=\.|$)")
_ACTIVATIONS, _MODULES = "activations of {}", 4
_COLUMN = 66  # characters
_PREFIX = re.compile(r"^[A-Z_]+: (XLA:TPU compile permanent error\. )?")


def figure(value: float | None, digits: int = 0, unit: str = "") -> str:
    if value is None:
        return UNKNOWN
    return f"{value:,.{digits}f} {unit}".rstrip()


def percent(part: float | None, digits: int = 0) -> str:
    return figure(None if part is None else 100 * part, digits, "%")


def milliseconds(seconds: float | None, digits: int = 2) -> str:
    return figure(None if seconds is None else 1e3 * seconds, digits, "ms")


def fraction(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def short(text: str, most: int) -> str:
    """``text``, shortened in the middle to at most ``most`` characters."""
    if len(text) <= most:
        return text
    return text[: most // 2 - 1] + "…" + text[len(text) - (most - most // 2) :]


def unit_names(modules: Iterable[str]) -> dict[str, str]:
    """The top-level unit of every module: the shortest path that is no parent of numbered blocks.

    ``blocks.3.attn.qkv`` belongs to ``blocks.3``; ``model.norm`` is a unit if there is a
    ``model.layers.0``.
    """
    paths = {m: [c for c in m.split(".") if c and not c.startswith("_")] for m in set(modules)}
    holders: set[tuple[str, ...]] = set()
    for path in paths.values():
        number = next((i for i, part in enumerate(path) if part.isdigit()), 0)
        holders.update(tuple(path[: i + 1]) for i in range(number))
    found = {}
    for module, path in paths.items():
        depth = 1
        while depth < len(path) and tuple(path[:depth]) in holders:
            depth += 1
        found[module] = ".".join(path[:depth])
    return found


def executions(collectives: Sequence[CompiledCollective]) -> int:
    """Executions in a step."""
    return sum(c.times for c in collectives)


def wire(collectives: Sequence[CompiledCollective]) -> int:
    """Bytes that a device sends for them in a step."""
    return sum(c.wire_bytes * c.times for c in collectives)


@dataclass(frozen=True)
class Section:
    """``columns``: the names after the first."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def numeric(self) -> list[bool]:
        return [all(_is_number(cell) for cell in column) for column in zip(*self.rows, strict=True)]

    def lines(self) -> list[str]:
        table = [(self.title, *self.columns)]
        for row in self.rows:
            first, *more = textwrap.wrap(row[-1], _COLUMN) or [""]
            table.append((f"  {row[0]}", *row[1:-1], first))
            table += [("",) * (len(row) - 1) + (line,) for line in more]
        return aligned(table, [False, *self.numeric()[1:]])


def _is_number(cell: str) -> bool:
    return cell[:1] in ("", "-", "–") or cell[:1].isdigit() or cell in ("yes", "NO", UNKNOWN)


def aligned(table: Sequence[Sequence[str]], numeric: Sequence[bool]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, numeric, strict=True)
        padded = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells]
        lines.append("  ".join(padded).rstrip())
    return lines


def report_text(report: Report) -> str:
    lines = [report.verdict, *textwrap.wrap(reason(report), 100), subtitle(report)]
    for section in sections(report):
        lines += ["", *section.lines()]
    for heading, texts in (
        ("Notes", remarks(report)),
        ("Warnings", report.warnings),
        ("What to change", report.suggestions),
    ):
        lines += ["", heading] if texts else []
        for one in texts:
            lines += textwrap.wrap(one, 100, initial_indent="  * ", subsequent_indent="    ")
    return "\n".join(lines)


def subtitle(report: Report) -> str:
    what = f"{report.title}: " if report.title else ""
    return f"{what}{report.topology}, {report.devices} devices ({report.chip})"


def reason(report: Report) -> str:
    """The beginning of the compiler's message if the step does not fit."""
    first = report.refusal.strip().partition("\n\n")[0]
    return short(" ".join(_PREFIX.sub("", first).split()), 300)


def why_no_pictures(report: Report) -> str:
    """Why there is no timeline or no picture; "" if there are both."""
    if not report.schedule.curve:
        refused = "the compiler stopped before it assigned buffers" if report.refusal else ""
        return f"Nothing to draw: {refused or 'the schedule is empty'}."
    if not report.timed and report.refusal:
        return "No timeline: the compiler stopped before it estimated any times."
    if not report.timed or not report.timing.slots:
        return "No timeline: the compiler estimated no times."
    return ""


def remarks(report: Report) -> list[str]:
    notes = [*report.notes, *report.schedule.notes]
    if report.schedule.collectives:
        notes.append(f"Interconnect model: {report.link_model.removeprefix('Model: ')}")
        notes.append(f"MB are {MB_MEANS}; KiB, MiB and GiB are powers of 1024.")
    return notes


def sections(report: Report) -> list[Section]:
    tables = [
        _memory_section(report),
        _host_section(report),
        _parts_section(report),
        _hbm_section(report),
        _largest_section(report),
        _collectives_section(report),
        _by_unit(report),
    ]
    if report.placed:
        tables += [_traffic(report), _time(report), _time_section(report), _module_section(report)]
    return [t for t in (*tables, _program_section(report)) if t.rows]


def _explained(title: str, rows: Sequence[tuple[str, str, str]], unit: str = "") -> Section:
    return Section(title, (unit, "how obtained"), tuple(rows))


def _memory_section(report: Report) -> Section:
    m, refused = report.memory, bool(report.refusal)
    by = f"the compiler's {'buffer assignment' if refused else 'memory statistics'}"
    donated, code = (None if refused and not size else size for size in (m.aliased, m.code))
    rows: list[tuple[str, float | None, str]] = []
    if report.sized:
        rows = [
            ("arguments", m.arguments, f"{by}: parameters, optimizer state, batch"),
            ("outputs", m.outputs, by),
            ("donated", donated and -donated, f"{by}: outputs that reuse buffers of arguments"),
            ("temporaries", m.temporaries, f"{by}, including fragmentation"),
            ("code", code, "the executable itself" if code is None else f"{by}: the executable"),
        ]
        if m.other_programs:
            rows.append(
                ("other parts", m.other_programs, "tensors of the other programs of the step")
            )
        known = "the known values above" if refused else "the above"
        rows.append(("required", m.required, f"sum of {known}"))
        if not refused:
            how = "without code and fragmentation"
            how = f"the schedule, {how}" if m.host_temporaries else f"{how}; may count VMEM"
            rows.append(("live peak", m.peak, how))
        summed = max(report.schedule.curve, default=0)
        rows.append(("live peak, computed", summed, "sum of the live buffers in the schedule"))
    rows.append(("capacity", report.hbm_capacity, report.hbm_source))
    small = 0 < m.required < GIB
    scale, digits, unit = (MIB, 1, "MiB") if small else (GIB, 3, "GiB")
    lines = [(name, figure(size and size / scale, digits), how) for name, size, how in rows]
    if report.sized:
        headroom = f"headroom {percent(report.headroom, 1)} of the capacity"
        lines.append(("fits", "yes" if report.fits_device else "NO", headroom))
    return _explained("HBM of a device", lines, unit)


def _host_section(report: Report) -> Section:
    stored, schedule = report.memory.host_temporaries, report.schedule
    moved = schedule.to_host + schedule.to_device
    rows: list[tuple[str, str, str]] = []
    if stored or moved:
        how = "per step, from the scheduled program"
        rows = [
            ("offloaded", figure(stored / MIB, 1, "MiB"), "the compiler's buffer assignment"),
            ("copied to it", figure(schedule.to_host / MB, 1, "MB"), how),
            ("copied back", figure(schedule.to_device / MB, 1, "MB"), how),
        ]
        if report.timed:
            speed = figure(moved / report.timing.step / GB, 1, "GB/s")
            rows.append(("needs", speed, "to hide in the modelled step"))
    if host := report.host:
        part = "the modelled step includes the part that does not overlap"
        where = f"on the links to the host; {part if report.parts else 'NOT in the modelled step'}"
        read = "tensors of the traced step"
        rows += [
            ("shards", figure(host.shards / GB, 2, "GB"), read),
            ("gradients", figure(host.gradients / GB, 2, "GB"), read),
            ("optimizer", figure(host.state / GB, 2, "GB"), "state that its first step creates"),
            ("buffers", figure(host.buffers / GB, 2, "GB"), "buffers for transfers, at most"),
            ("gradients sent", figure(host.to_host / MB, 1, "MB"),
             "per step, when the program has ended"),
            ("shards sent", figure(host.to_device / MB, 1, "MB"),
             "per step, in the dtype of the gather"),
            ("transfer time", milliseconds(host.seconds), f"{where}: {host.link_source}"),
            ("a host needs", figure(report.host_required / GB, 1, "GB"), f"{host.ranks} rank(s)"),
            ("a host has", figure(host.capacity / GB, 1, "GB"), host.source),
            ("fits", "yes" if report.fits_host else "NO", "if nothing else uses host memory"),
        ]  # fmt: skip
    return _explained("Host memory for a device", rows)


def _parts_section(report: Report) -> Section:
    rows = [
        (
            short(part.name, 40),
            str(part.times),
            figure(part.required / GIB, 2),
            figure(1e3 * part.seconds, 1),
            figure(part.to_device / MB, 1),
            figure(part.to_host / MB, 1),
        )
        for part in report.parts
    ]
    columns = ("runs", "HBM, GiB", "ms (MODEL)", "MB of shards", "MB of gradients")
    return Section("Parts of the step", columns, tuple(rows))


def _largest_section(report: Report) -> Section:
    live = report.schedule.live_at_peak()
    rows = []
    for b in live[:10]:
        owner = b.name if b.category == "argument" else b.module
        role = f"{b.category}, {b.phase}" if b.phase else b.category
        size = f"{b.bytes / MIB:,.1f}"
        rows.append((short(b.shape, 30), size, b.opcode, short(owner, 40), role))
    title = f"Largest at the peak ({min(len(live), 10)} of {len(live)})"
    return Section(title, ("MiB", "op", "module or name", "role"), tuple(rows))


def buffers_by_kind(schedule: Schedule) -> dict[str, list[Buffer]]:
    """Numbered modules, such as equal blocks, count together."""
    gathers = {c.name for c in schedule.collectives if "all-gather" in (c.kind, c.asked)}
    trained = {b.name.partition(" of ")[2] for b in schedule.buffers if b.category == "argument"}
    needed = Counter[str]()
    for one in schedule.live_at_peak() if schedule.curve else ():
        if (one.category, one.phase) == ("temporary", "forward") and one.name not in gathers:
            needed[NUMBER.sub(".N", one.module)] += one.bytes
    largest = [module for module, _ in needed.most_common(_MODULES) if module]
    before = ("parameters", "optimizer state", "other arguments", "outputs", "gathered weights")
    after = ("other activations", "made in backward", "made in optimizer", "other temporaries")
    names = [*before, *map(_ACTIVATIONS.format, largest), *after]
    found: dict[str, list[Buffer]] = {name: [] for name in names}
    for buffer in schedule.buffers:
        module = NUMBER.sub(".N", buffer.module)
        if buffer.category == "argument":
            if " of " in buffer.name:
                kind = "optimizer state"
            else:
                kind = "parameters" if buffer.name in trained else "other arguments"
        elif buffer.category == "output":
            kind = "outputs"
        elif buffer.name in gathers or buffer.opcode.startswith("all-gather"):
            kind = "gathered weights"
        elif buffer.phase == "forward":
            kind = _ACTIVATIONS.format(module) if module in largest else "other activations"
        else:
            kind = f"made in {buffer.phase}"
        found[kind if kind in found else "other temporaries"].append(buffer)
    return found


def hbm_by_kind(report: Report) -> dict[str, int]:
    at = report.schedule.peak_index
    sizes = {
        kind: sum(b.bytes for b in buffers if b.born <= at <= b.dies)
        for kind, buffers in buffers_by_kind(report.schedule).items()
    }
    return {kind: size for kind, size in sizes.items() if size}


def _hbm_section(report: Report) -> Section:
    sizes = hbm_by_kind(report)
    small = sum(sizes.values()) < GIB
    scale, digits, unit = (MIB, 1, "MiB") if small else (GIB, 3, "GiB")
    rows = [
        (kind, figure(size / scale, digits), percent(size / report.hbm_capacity, 1))
        for kind, size in sizes.items()
        if round(size / scale, digits)
    ]
    return Section("HBM at the peak, by kind", (unit, "of the capacity"), tuple(rows))


def _collectives_section(report: Report) -> Section:
    """Those whose kind the compiler changed are listed separately."""
    kinds: dict[str, list[CompiledCollective]] = {}
    for c in sorted(report.schedule.collectives, key=lambda c: KINDS.index(c.kind)):
        name = f"{c.kind} (traced as {c.asked})" if c.asked not in ("", c.kind) else c.kind
        kinds.setdefault(name, []).append(c)
    if len(kinds) > 1:
        kinds["total"] = list(report.schedule.collectives)
    rows = [(name, *_counts(some)) for name, some in kinds.items()]
    return Section("Collectives of a step", _COUNTED, tuple(rows))


def _counts(some: Sequence[CompiledCollective]) -> tuple[str, ...]:
    ready = executions([c for c in some if c.asynchronous])
    tiny = executions([c for c in some if c.bytes < TINY])
    numbers = executions(some), executions(some) - ready, ready, tiny
    return *map(str, numbers), figure(wire(some) / MB, 1)


def _by_unit(report: Report) -> Section:
    collectives = report.schedule.collectives
    found = _grouped(collectives, lambda c: c.wire_bytes * c.times, 5)
    rows = tuple((name, *_counts(some)) for name, some in found)
    return Section("Collectives by module", _COUNTED, rows)


T = TypeVar("T", Op, CompiledCollective)


def _grouped(
    items: Sequence[T], size: Callable[[T], float], most: int
) -> list[tuple[str, list[T]]]:
    """Items by top-level unit, largest first, the smallest together; empty without modules."""
    unit = unit_names(one.module for one in items)
    if not any(unit.values()):
        return []
    found: dict[str, list[T]] = {}
    for one in items:
        name = NUMBER.sub(".N", unit[one.module]) or NO_MODULE
        found.setdefault(name, []).append(one)
    ranked = sorted(found.items(), key=lambda item: -sum(map(size, item[1])))
    groups = []
    for name, some in ranked[:most]:
        alike = len({unit[one.module] for one in some})
        groups.append((f"{short(name, 36)} ({alike})" if alike > 1 else short(name, 40), some))
    if rest := [one for _, some in ranked[most:] for one in some]:
        number = len(ranked) - most
        groups.append((f"{number} smaller module{'s' if number > 1 else ''}", rest))
    return groups


def _traffic(report: Report) -> Section:
    collectives, timing, timed = report.schedule.collectives, report.timing, report.timed
    sent, bound, ratio = report.wire_bytes, report.bound_wire_bytes, report.wire_ratio
    how = "scheduled program, loops count per iteration"
    rows = [("sent", figure(sent / MB, 1, "MB"), how)]
    rows += [("bound", figure(bound / MB if bound else None, 1, "MB"), report.bound_label)]
    if ratio is not None:
        less = "1.00 is plain ZeRO-3; kept parameters lower it"
        rows += [("sent / bound", f"{ratio:.2f} ×", less)]
    across = [c for c in collectives if c.across_slices]
    if across:
        rows += [("between slices", figure(wire(across) / MB, 1, "MB"), "of what is sent")]
    if collectives:
        ready = [c for c in collectives if c.asynchronous]
        inside = fraction(wire([c for c in ready if c.overlap_cycles]), sent)
        overlapped = fraction(timing.overlapped, timing.collective)
        ready_how = "of the bytes: the device could compute during them"
        inside_how = "of the bytes: compute is scheduled during them" if timed else _NO_CYCLES
        overlapped_how = "of the collectives' time, MODEL" if timed else _NO_CYCLES
        rows += [
            ("asynchronous", percent(fraction(wire(ready), sent)), ready_how),
            ("asynchronous with compute", percent(inside if timed else None), inside_how),
            ("overlapped", percent(overlapped if timed else None), overlapped_how),
        ]
    return _explained("Traffic of a device", rows)


def _time(report: Report) -> Section:
    t, timed = report.timing, report.timed
    by_cycles = "the compiler's cycle estimates at the chip's clock"
    figures = [
        ("compute", t.compute, by_cycles if timed else _NO_CYCLES),
        ("collectives", t.collective, "interconnect model, see Notes"),
        ("overlapped", t.overlapped, "collectives that overlap with compute in this schedule"),
        ("exposed", t.exposed, "the rest, in which compute waits (modelled, not measured)"),
    ]
    if t.copies:
        figures.append(("copies", t.copies, "the device waits for host memory, see Notes"))
    figures.append(("step", t.step, f"compute + exposed{' + copies' if t.copies else ''}"))
    rows = [
        (name, milliseconds(seconds if timed or name == "collectives" else None), how)
        for name, seconds, how in figures
    ]
    flops = f"{t.model_flops / 1e12:,.2f} TFLOP a device, over its peak"
    rows.append(("MFU", percent(t.mfu if timed else None, 1), flops))
    return _explained("Time of a step: MODEL", rows)


def time_by_kind(report: Report) -> dict[str, float]:
    """See :attr:`Report.time_by_kind`."""
    if report.parts or not report.timed:  # the schedule has one program of a streamed step
        return {}
    found = dict.fromkeys(_KIND_OF_WORK.values(), 0.0) | {_RECOMPUTATION: 0.0, _OPTIMIZER: 0.0}
    for op, seconds in timed_ops(report.schedule, report.timing).items():
        if op.phase == "optimizer":
            kind = _OPTIMIZER
        elif op.recomputed:
            kind = _RECOMPUTATION
        else:
            kind = _KIND_OF_WORK[op.work]
        found[kind] += seconds
    found["collectives, exposed"] = report.timing.exposed
    found["copies to and from the host, exposed"] = report.timing.copies
    return {kind: seconds for kind, seconds in found.items() if seconds}


def timed_ops(schedule: Schedule, timing: Timing) -> dict[Op, float]:
    """The modelled seconds of the operations that have a time."""
    second = fraction(timing.compute, sum(op.cycles * op.times for op in schedule.ops))
    return {op: second * op.cycles * op.times for op in schedule.ops if op.cycles}


def _time_section(report: Report) -> Section:
    rows = [
        (kind, milliseconds(seconds), percent(seconds / report.timing.step, 1))
        for kind, seconds in time_by_kind(report).items()
    ]
    return Section("Where the time goes: MODEL", ("", "of a step"), tuple(rows))


def time_by_module(report: Report) -> dict[str, dict[str, float]]:
    if report.parts or not report.timed:  # the schedule has one program of a streamed step
        return {}
    seconds = timed_ops(report.schedule, report.timing)
    found = {}
    for name, ops in _grouped(list(seconds), seconds.__getitem__, 8):
        times = found[name] = dict.fromkeys(_BY_MODULE, 0.0)
        for op in ops:
            times["recomputed" if op.recomputed else op.phase or NO_PHASE] += seconds[op]
    return found


def _module_section(report: Report) -> Section:
    rows = [
        (name, *(figure(1e3 * seconds, 2) for seconds in times.values()))
        for name, times in time_by_module(report).items()
    ]
    return Section("Compute by module, ms: MODEL", _BY_MODULE, tuple(rows))


def _program_section(report: Report) -> Section:
    ranks, code, options = report.ranks_traced, report.program_bytes, report.compiler_options
    cached = "from the cache: time of the compilation" if report.from_cache else "measured here"
    size = code / MIB if code or not report.refusal else None
    rows = [
        ("compile time", figure(report.compile_seconds, 1, "s"), cached),
        ("code", figure(size, 1, "MiB"), "size of the generated code"),
    ]
    for who, most in (
        ("planning", report.planner_host_memory),
        ("compiler", report.compiler_host_memory),
    ):
        if most:
            how = f"peak of host memory of the {who} process on this machine"
            rows.append((f"memory, {who}", figure(most / GIB, 2, "GiB"), how))
    if report.placed:
        rows.append(("instructions", f"{report.schedule.length:,}", "places in the schedule"))
    listed = join_some([str(rank) for rank in ranks], 8)
    same = "all run one program" if report.executables == 1 else "RANKS DIFFER"
    which = f"ranks {listed}: {same}" if len(ranks) > 1 else f"rank {listed}, no other was traced"
    rows.append(("executables", f"{report.executables} of {len(ranks)}", which))
    if report.versions:
        rows.append(("versions", "", ", ".join(f"{n} {v}" for n, v in report.versions.items())))
    if options:
        values = "; ".join(f"{name}={value}" for name, value in options.items())
        rows.append(("options", f"{len(options)}", values))
    if report.chip_config:
        rows.append(("cores", "", f"{report.chip_config}: one device a chip"))
    return _explained("Program", rows)

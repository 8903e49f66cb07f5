"""The tables of a report as cells, for text and page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..records import KINDS, Collective, HostNeeds
from .amounts import GB, GIB, MB, MIB, UNKNOWN, figure, milliseconds, percent, share, short, units
from .findings import Findings

TINY = 64 * 1024  # bytes: the time of a smaller collective is its latency
SENT = "MB sent"
_COUNTED = ("count", "sync", "async", "< 64 KiB", SENT)
_NO_CYCLES = "the compiler stopped before it estimated cycles"


@dataclass(frozen=True)
class Section:
    """A table of the report. ``columns``: the names of the columns after the first. ``bars``: the
    column that a page also draws as bars."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    bars: str = ""

    def numeric(self) -> list[bool]:
        """Which columns have only figures; these are aligned to the right."""
        return [all(_is_number(cell) for cell in column) for column in zip(*self.rows, strict=True)]


def sections(report: Findings) -> list[Section]:
    """All tables that are not empty."""
    tables = [
        _memory(report),
        _host(report),
        _parts(report),
        _largest(report),
        _collectives(report),
        _by_unit(report),
    ]
    if report.placed:
        tables += [_traffic(report), _time(report)]
    return [t for t in (*tables, _program(report)) if t.rows]


def aligned(table: Sequence[Sequence[str]], numeric: Sequence[bool]) -> list[str]:
    """Rows as lines; figures are aligned to the right, words to the left."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = zip(row, widths, numeric, strict=True)
        padded = [cell.rjust(width) if right else cell.ljust(width) for cell, width, right in cells]
        lines.append("  ".join(padded).rstrip())
    return lines


def of_kinds(collectives: Sequence[Collective]) -> dict[str, list[Collective]]:
    """The collectives by kind; those whose kind the compiler changed are listed separately."""
    found: dict[str, list[Collective]] = {}
    for kind in KINDS:
        for c in (c for c in collectives if c.kind == kind):
            name = f"{kind} (traced as {c.asked})" if c.asked not in ("", kind) else kind
            found.setdefault(name, []).append(c)
    return found


def count(collectives: Sequence[Collective]) -> int:
    """The number of collectives that run in a step."""
    return sum(c.times for c in collectives)


def wire(collectives: Sequence[Collective]) -> int:
    """Bytes that a device sends for the collectives in a step."""
    return sum(c.wire_bytes * c.times for c in collectives)


def _memory(report: Findings) -> Section:
    m, summed = report.memory, max(report.schedule.curve, default=0)
    by = f"the compiler's {'buffer assignment' if report.refusal else 'memory statistics'}"
    donated, code = (None if report.refusal and not size else size for size in (m.aliased, m.code))
    rows: list[tuple[str, float | None, str]] = []
    if report.sized:
        known = "sum of the above" if not report.refusal else "sum of the known values above"
        rows = [
            ("arguments", m.arguments, f"{by}: parameters, optimizer state, batch"),
            ("outputs", m.outputs, by),
            ("donated", donated and -donated, f"{by}: outputs that reuse buffers of arguments"),
            ("temporaries", m.temporaries, f"{by}, including fragmentation"),
            ("code", code, "the executable itself" if code is None else f"{by}: the executable"),
            *(
                [("other parts", m.beside, "tensors of the other programs of the step")]
                if m.beside
                else []
            ),
            ("required", m.required, known),
        ]
        if not report.refusal:
            said = "the schedule" if m.host_temporaries else by
            rows += [("live peak", m.peak, f"{said}, without code and fragmentation")]
        rows += [("live peak, computed", summed, "sum of the live buffers in the schedule")]
    rows += [("capacity", report.hbm_capacity, report.hbm_source)]
    small = 0 < m.required < GIB
    scale, digits, unit = (MIB, 1, "MiB") if small else (GIB, 3, "GiB")
    lines = [(name, figure(size and size / scale, digits), how) for name, size, how in rows]
    if report.sized:
        headroom = f"headroom {percent(report.headroom, 1)} of the capacity"
        lines += [("fits", "yes" if report.fits_device else "NO", headroom)]
    return Section("HBM of a device", (unit, "how obtained"), tuple(lines))


def _host(report: Findings) -> Section:
    held, schedule = report.memory.host_temporaries, report.schedule
    rows: list[tuple[str, ...]] = []
    if held or schedule.to_host or schedule.to_device:
        rows = [("offloaded", figure(held / MIB, 1, "MiB"), "the compiler's buffer assignment")]
        for name, size in (("copied to it", schedule.to_host), ("copied back", schedule.to_device)):
            rows.append((name, figure(size / MB, 1, "MB"), "per step, from the scheduled program"))
        moved = schedule.to_host + schedule.to_device
        if report.timed:
            speed = figure(moved / report.timing.step / 1e9, 1, "GB/s")
            rows.append(("needs", speed, "to hide in the modelled step"))
    if report.host is not None:
        rows += _offloaded(report, report.host)
    return Section("Host memory for a device", ("", "how obtained"), tuple(rows))


def _offloaded(report: Findings, host: HostNeeds) -> list[tuple[str, str, str]]:
    read, said = "tensors of the traced step", "on the links to the host"
    said += (
        "; the modelled step includes the part that does not overlap"
        if report.parts
        else "; NOT in the modelled step"
    )
    rows = [
        ("shards", figure(host.shards / GB, 2, "GB"), read),
        ("gradients", figure(host.gradients / GB, 2, "GB"), read),
        ("optimizer", figure(host.state / GB, 2, "GB"), "state that its first step creates"),
        ("buffers", figure(host.buffers / GB, 2, "GB"), "buffers for transfers, at most"),
        (
            "gradients sent",
            figure(host.to_host / MB, 1, "MB"),
            "per step, when the program has ended",
        ),
        (
            "shards sent",
            figure(host.to_device / MB, 1, "MB"),
            "per step, in the dtype of the gather",
        ),
        ("transfer time", milliseconds(host.seconds), f"{said}: {host.link_source}"),
        ("a host needs", figure(report.host_required / GB, 1, "GB"), f"{host.ranks} rank(s)"),
        ("a host has", figure(host.capacity / GB, 1, "GB"), host.source),
    ]
    rows.append(("fits", "yes" if report.fits_host else "NO", "if nothing else uses host memory"))
    return rows


def _parts(report: Findings) -> Section:
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


def _largest(report: Findings) -> Section:
    live = report.schedule.live_at_peak()
    rows = []
    for b in live[:10]:
        owner = b.name if b.category == "argument" else b.module
        role = f"{b.category}, {b.phase}" if b.phase else b.category
        size = f"{b.bytes / MIB:,.1f}"
        rows.append((short(b.shape, 30), size, b.opcode, short(owner, 40), role))
    title = f"Largest at the peak ({min(len(live), 10)} of {len(live)})"
    return Section(title, ("MiB", "op", "module or name", "role"), tuple(rows), "MiB")


def _collectives(report: Findings) -> Section:
    collectives = report.schedule.collectives
    kinds = of_kinds(collectives)
    if len(kinds) > 1:
        kinds["total"] = list(collectives)
    rows = [(name, *_counts(some)) for name, some in kinds.items()]
    return Section("Collectives of a step", _COUNTED, tuple(rows), SENT)


def _counts(some: Sequence[Collective]) -> tuple[str, ...]:
    ready = count([c for c in some if c.asynchronous])
    tiny = count([c for c in some if c.bytes < TINY])
    numbers = count(some), count(some) - ready, ready, tiny
    return *map(str, numbers), figure(wire(some) / MB, 1)


def _by_unit(report: Findings, most: int = 5) -> Section:
    """Bytes by top-level unit, the largest first."""
    collectives = report.schedule.collectives
    unit = units(c.module for c in collectives)
    found: dict[str, list[Collective]] = {}
    for c in collectives:
        found.setdefault(unit[c.module] or "(no module)", []).append(c)
    if not any(unit.values()):
        found = {}  # the program names no modules
    ranked = sorted(found.items(), key=lambda item: -wire(item[1]))
    if len(ranked) > most + 1:
        rest = [c for _, some in ranked[most:] for c in some]
        ranked = [*ranked[:most], (f"others ({len(ranked) - most})", rest)]
    rows = [(short(u, 40), *_counts(some)) for u, some in ranked]
    return Section("Collectives by module", _COUNTED, tuple(rows), SENT)


def _traffic(report: Findings) -> Section:
    collectives, timing = report.schedule.collectives, report.timing
    ready = [c for c in collectives if c.asynchronous]
    inside = [c for c in ready if c.overlap_cycles]
    bound, ratio = report.bound_wire_bytes, report.wire_ratio
    rows = [
        (
            "sent",
            figure(report.wire_bytes / MB, 1, "MB"),
            "scheduled program, loops count per iteration",
        )
    ]
    if bound and ratio is not None:
        rows += [("bound", figure(bound / MB, 1, "MB"), report.bound_label)]
        less = "1.00 is plain ZeRO-3; kept parameters lower it"
        rows += [("sent / bound", f"{ratio:.2f} ×", less)]
    else:
        rows += [("bound", UNKNOWN, report.bound_label)]
    across = [c for c in collectives if c.across_slices]
    if across:
        rows += [("between slices", figure(wire(across) / MB, 1, "MB"), "of what is sent")]
    if collectives:
        parts = [share(wire(some), report.wire_bytes) for some in (ready, inside)]
        how = "of the bytes: sent while the device could compute"
        rows += [("asynchronous", percent(parts[0]), how)]
        how = "of the bytes: compute is scheduled during them" if report.timed else _NO_CYCLES
        rows += [("with compute inside", percent(parts[1] if report.timed else None), how)]
        hidden = share(timing.overlapped, timing.collective) if report.timed else None
        how = "of the collectives' time, MODEL" if report.timed else _NO_CYCLES
        rows += [("hidden", percent(hidden), how)]
    return Section("Traffic of a device", ("", "how obtained"), tuple(rows))


def _time(report: Findings) -> Section:
    t, known = report.timing, report.timed
    flops = f"{t.model_flops / 1e12:,.2f} TFLOP a device, over its peak"
    waits = "the rest, in which compute waits (modelled, not measured)"
    figures = [
        ("compute", t.compute, "the compiler's cycle estimates at the chip's clock"),
        ("collectives", t.collective, "interconnect model, see Notes"),
        ("overlapped", t.overlapped, "collectives that overlap with compute in this schedule"),
        ("exposed", t.exposed, waits),
        *(
            [("copies", t.copies, "the device waits for host memory, see Notes")]
            if t.copies
            else []
        ),
        ("step", t.step, "compute + exposed + copies" if t.copies else "compute + exposed"),
    ]
    rows = []
    for name, seconds, how in figures:
        found = known or name == "collectives"
        source = how if known or name != "compute" else _NO_CYCLES
        rows.append((name, milliseconds(seconds if found else None), source))
    rows += [("MFU", percent(t.mfu if known else None, 1), flops)]
    return Section("Time of a step: MODEL", ("", "how obtained"), tuple(rows))


def _program(report: Findings) -> Section:
    ranks, code = report.ranks_traced, report.program_bytes
    cached = "from the cache: time of the compilation" if report.from_cache else "measured here"
    listed = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    same = "all run one program" if report.executables == 1 else "RANKS DIFFER"
    size = code / MIB if code or not report.refusal else None
    rows = [("compile time", figure(report.compile_seconds, 1, "s"), cached)]
    rows += [("code", figure(size, 1, "MiB"), "size of the generated code")]
    if report.placed:
        rows += [("instructions", f"{report.schedule.length:,}", "places in the schedule")]
    how = f"ranks {listed}: {same}"
    rows += [("executables", f"{report.executables} of {len(ranks)}", how)]
    if report.versions:
        names = ", ".join(f"{name} {version}" for name, version in report.versions.items())
        rows += [("versions", "", names)]
    if report.compiler_options:
        names = "; ".join(f"{name}={how}" for name, how in report.compiler_options.items())
        rows += [("options", f"{len(report.compiler_options)}", names)]
    if report.chip_config:
        rows += [("cores", "", f"{report.chip_config}: one device a chip")]
    return Section("Program", ("", "how obtained"), tuple(rows))


def _is_number(cell: str) -> bool:
    return cell[:1] in "-" or cell[:1].isdigit() or cell in ("yes", "NO", UNKNOWN)

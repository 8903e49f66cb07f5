"""Reports made by hand, for tests."""

import dataclasses
import itertools

from xla_fsdp.planning import records
from xla_fsdp.planning.records import WORK, Buffer, CompilerMemory, Op, Schedule, Slot, Timing
from xla_fsdp.planning.reporting.report import Report

GIB, MS = 2**30, 1e-3
HOSTILE = '<script>alert("1")</script>&$x^$'
MESSAGE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 19.06G of 15.48G hbm. Exceeded hbm capacity by 3.57G.\n\n"
    "Total hbm usage >= 19.57G:\n    reserved        530.12M\n"
)
NOTHING = Timing(0, 0, 0, 0, 0, 0, 0)
PARTS = {
    "ops": Op, "collectives": records.CompiledCollective, "buffers": Buffer,
    "host_copies": records.HostCopy,
}  # fmt: skip


def schedule_of(*what):
    """A schedule of 100 places with these operations, collectives, buffers and copies."""
    found = {
        name: tuple(one for one in what if isinstance(one, kind)) for name, kind in PARTS.items()
    }
    return Schedule(100, curve=(1,) * 100, peak_index=50, **found)


def make(blocks=2, steps=3, **changes):
    """A forward and a backward over blocks, each with a gather and ``steps`` operations."""
    ops, collectives, buffers, slots = [], [], [], []
    now, place = 0.0, 0
    for phase in ("forward", "backward"):
        for block in range(blocks):
            module = f"blocks.{block}.mlp"
            ready = bool(block % 2)
            name, ranks = f"all-gather.{place}", (tuple(range(8)),)
            collectives.append(
                records.CompiledCollective(
                    "all-gather", 8_000_000, ranks, index=place, done=place + 2 * ready, name=name,
                    asked="all-gather", dtype="bf16", group_size=8, wire_bytes=7_000_000,
                    asynchronous=ready, overlap_cycles=100 * ready, module=module, phase=phase,
                )
            )  # fmt: skip
            slots.append(
                Slot("collective", now, now + MS, place, name, module, phase, asynchronous=ready)
            )
            shape, opcode = "bf16[2000,2000]", "all-gather"
            live = (8_000_000, place, place + steps)
            buffers.append(Buffer(name, *live, "temporary", shape, opcode, module, phase))
            now, place = now + (0 if ready else MS), place + 1
            for number in range(steps):
                again = phase == "backward" and not number
                work = WORK[number % len(WORK)]
                name, end = f"fusion.{place}", now + 3 * MS
                ops.append(Op(place, name, "fusion", 1000, 1, module, phase, again, work))
                what = place, name, module, phase
                slots.append(Slot("compute", now, end, *what, recomputed=again))
                now, place = end, place + 1
    buffers.append(Buffer("p0", GIB, 0, place - 1, "argument", "f32[268435456]", "parameter", "w"))
    change = [0] * (place + steps + 1)
    for buffer in buffers:
        change[buffer.born] += buffer.bytes
        change[buffer.dies + 1] -= buffer.bytes
    curve = tuple(itertools.accumulate(change[:place]))
    peak = max(range(place), key=curve.__getitem__)
    schedule = Schedule(place, tuple(ops), tuple(collectives), tuple(buffers), curve, peak)
    timing = Timing(0.018, 0.004, 0.002, 0.002, now, 1e12, 0.42, tuple(slots))
    figures = dict(
        topology="v3-128", chip="TPU v3", devices=128, hbm_capacity=4 * GIB, hbm_source="libtpu",
        memory=CompilerMemory(GIB, GIB, GIB, GIB // 2, GIB // 8, max(curve)), schedule=schedule,
        timing=timing, bound_wire_bytes=14_000_000, bound_label="two gathers, one reduce-scatter",
        link_model="a ring of 70 GB/s links", compile_seconds=12.5, program_bytes=2**20,
        ranks_traced=(0, 1, 127), executables=1, title="ours", versions={"torch": "2.9.0"},
        warnings=("The last block is not wrapped.",),
    )  # fmt: skip
    return Report(**figures | changes)


def refused(**changes):
    """Of a program that the compiler laid out, but gave no estimates and no code for."""
    whole = make()
    slots = tuple(s for s in whole.timing.slots if s.lane == "collective")
    timing = Timing(0, 0.004, 0, 0.004, 0.004, 1e12, 3.84, slots)
    memory = CompilerMemory(GIB, GIB, 0, 4 * GIB, 0, max(whole.schedule.curve))
    figures = {"timing": timing, "memory": memory, "program_bytes": 0, "refusal": MESSAGE}
    return dataclasses.replace(whole, **(figures | changes))


def given_up():
    """Of a program that the compiler refused before it laid anything out."""
    schedule, memory = Schedule(0, (), (), (), (), 0), CompilerMemory(0, 0, 0, 0, 0, 0)
    return refused(schedule=schedule, memory=memory, timing=NOTHING)

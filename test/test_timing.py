"""The model of the links and of the timeline, against answers worked out by hand."""

import pytest
from reports import MS
from reports import schedule_of as schedule

from xla_fsdp.planning.records import CompiledCollective, HostCopy, Op, Schedule
from xla_fsdp.planning.timing import time_step
from xla_fsdp.tpu.chips import DCN_LATENCY, LAUNCH
from xla_fsdp.tpu.links import Links, collective_seconds, describe_links
from xla_fsdp.tpu.topology import resolve

US = 1e-6
HOP = 1 * US
V5E = resolve("v5e:8x16")  # a line of 8 (x), a ring of 16 (y), 45 GB/s
V4 = resolve("v4:4x4x4")  # rings of 4, 45 GB/s
V3 = resolve("v3-8")  # 2x2 chips of two cores, 82 GB/s


def collective(kind, size, groups=(), *, ranks=None, index=0, done=None, **fields):
    ranks = ranks or len(groups[0])
    parts = {"all-reduce": 2 * (ranks - 1) / ranks, "collective-permute": 1}
    return CompiledCollective(
        kind, size, tuple(map(tuple, groups)), index=index, done=index if done is None else done,
        name=f"{kind}.{index}", asked="", dtype="bf16", group_size=ranks,
        wire_bytes=int(size * parts.get(kind, (ranks - 1) / ranks)),
        asynchronous=done is not None, **fields,
    )  # fmt: skip


def columns(width, height):
    """Groups along y of a slice of ``width`` x ``height`` ranks, and along x."""
    along_y = [range(x, width * height, width) for x in range(width)]
    along_x = [range(y * width, (y + 1) * width) for y in range(height)]
    return along_y, along_x


def op(index, seconds, times=1):
    return Op(index, f"fusion.{index}", "fusion", round(seconds * 1.5e9), times)


def copy(index, done, to_host=True, times=1):
    """1 ms at 15 GB/s, a v5e's link to the host in each direction."""
    return HostCopy(index, done, 15_000_000, to_host, times)


# Each: what is scheduled, and the milliseconds that copies add, and of the step.
@pytest.mark.parametrize(
    "what, copies, step",
    [
        ((op(1, 0.4e-3), copy(0, 2)), 0.6, 1),  # what compute does not hide
        ((op(1, 2e-3), copy(0, 2)), 0, 2),
        ((op(1, 1e-3), copy(3, 3)), 1, 2),  # not asynchronous
        # One after the other in one direction, both directions at once.
        ((copy(0, 9), copy(1, 8, to_host=False)), 1, 1),
        ((copy(0, 9), copy(1, 8)), 2, 2),
        ((op(1, 0.4e-3, times=10), copy(0, 2, times=10), copy(5, 6)), 7, 11),
    ],
)
def test_copies(what, copies, step):
    time = time_step(schedule(*what), V5E, 1e9)
    assert (1e3 * time.copies, 1e3 * time.step) == pytest.approx((copies, step))
    assert time.exposed == pytest.approx(0.0)


def test_links_to_the_host():
    measured = time_step(schedule(op(1, 0.4e-3), copy(0, 2)), V5E, 1e9, host_link=(30e9, 1e9))
    assert measured.step == pytest.approx(0.5e-3)
    half = time_step(schedule(copy(0, 2)), V3, 1e9)  # two devices share the link of a chip
    assert half.step == pytest.approx(2e-3)


Y16, X8 = columns(8, 16)
ONE_RING = ["1DAllGatherNonMajorDimImbalanced", "SingleInputAllReduceScatterFusion StrategyRing"]
ALL_RINGS = ["", "3DAllGatherOnMajorDim", "UniDirectionNDRingStrategy"]
PLANES = [range(z * 16, (z + 1) * 16) for z in range(4)]
STRIDED = [range(x + 8 * start, 128, 16) for start in range(2) for x in range(8)]
SHIFT = [(i, (i + 8) % 128) for i in range(128)]  # around every ring of 16
ROWS = [(8 * y + x, 8 * y + (x + 1) % 8) for y in range(16) for x in range(8)]
GATHER, REDUCE, PERMUTE = "all-gather", "all-reduce", "collective-permute"
MB = 10**6


# Each: the slice, the collective, and its time but for the launch: hops, and bytes over bandwidth.
@pytest.mark.parametrize(
    "slice, what, hops, sent",
    [
        # A ring of 16 in both directions, a line of 8 at the speed of one link, and both at once.
        (V5E, collective(GATHER, 16 * MB, Y16), 8, 15e6 / (2 * 45e9)),
        (V5E, collective("reduce-scatter", 16 * MB, X8), 7, 14e6 / 45e9),
        (V5E, collective(GATHER, 128 * MB, ranks=128), 7 + 8, 127e6 / (3 * 45e9)),
        # One ring where the compiler says so; else three rings of 4, or two.
        *(
            (V5E, collective(GATHER, 128 * MB, ranks=128, emitter=name), 64, 127e6 / (2 * 45e9))
            for name in ONE_RING
        ),
        *(
            (V4, collective(REDUCE, 64 * MB, ranks=64, emitter=name), 12, 2 * 63e6 / (6 * 45e9))
            for name in ALL_RINGS
        ),
        (V4, collective(GATHER, 64 * MB, PLANES, emitter=""), 4, 60e6 / (4 * 45e9)),
        # Both cores of every chip; the same core of every chip: two groups on the same links.
        (V3, collective(GATHER, 8 * MB, ranks=8), 2, 7e6 / (2 * 82e9)),
        (V3, collective(GATHER, 8 * MB, [range(0, 8, 2), range(1, 8, 2)]), 2, 12e6 / (2 * 82e9)),
        # Inside the chips: half of 900 GB/s for each core, read and written.
        (V3, collective(GATHER, 8 * MB, [(0, 1), (2, 3), (4, 5), (6, 7)]), 0, 2 * 4e6 / 450e9),
        (V3, collective(GATHER, 8 * MB, [(0, 2), (4, 6)]), 1, 4e6 / 82e9),
        # An all-to-all crosses the middle: a quarter of the time of a gather, on a ring.
        (V5E, collective("all-to-all", MB, Y16), 8, 16e6 / (2 * 45e9) / 4),
        (V5E, collective("all-to-all", MB, X8), 7, 8 * 1e6 / (4 * 45e9)),
        (V5E, collective(PERMUTE, MB, SHIFT), 1, 1e6 / 45e9),
        (V5E, collective(PERMUTE, MB, ROWS), 7, 1e6 / 45e9),  # the way back of a line is free
        (V3, collective(PERMUTE, MB, [(0, 2), (1, 3)]), 1, 2e6 / 82e9),  # both cores of a chip
        (V5E, collective(GATHER, 8 * MB, STRIDED), 8, 2 * 7e6 / (2 * 45e9)),
        # No grid: 0 to 1, 1 back and up to 8, 8 to 0. No link twice, at most two hops, two steps.
        (V5E, collective(GATHER, 3 * MB, [(0, 1, 8)]), 4, 2e6 / 45e9),
    ],
)
def test_time_of_a_collective(slice, what, hops, sent):
    assert collective_seconds(what, slice) == pytest.approx(LAUNCH + hops * HOP + sent)


def test_published_measurements():
    """Scaling book, part 3: v5e, two all-gathers on a line of 4 chips, one on a ring of 16."""
    line = resolve("v5e:8x4")
    along_y, _ = columns(8, 4)
    small = collective_seconds(collective(GATHER, 2 * 256 * 256, along_y), line)
    assert small == pytest.approx(8 * US, rel=0.05)
    large = collective_seconds(collective(GATHER, 2 * 2048 * 8192, along_y), line)
    assert 0.8 * 680 * US < large < 680 * US
    ring = collective_seconds(collective(GATHER, 100 * MB, Y16), V5E)
    assert 0.95 < 100 * MB * 15 / 16 / ring / 90e9 < 1


def test_one_rank_takes_nothing():
    assert collective_seconds(collective(GATHER, 1 << 20, [(0,), (1,)]), V5E) == 0


@pytest.mark.parametrize("kind", ["all-gather", "collective-permute"])
@pytest.mark.parametrize("groups", [[(0, 128)], [(0, 1), (0, 1)]])
def test_impossible_groups(kind, groups):
    with pytest.raises(ValueError, match="v5e:8x16 has 128 ranks"):
        collective_seconds(collective(kind, 8, groups), V5E)


def test_description():
    assert "axes of 8 (line), 16 (ring) chips, 45 GB/s a link" in describe_links(V5E)
    assert "Scaling book" in describe_links(V5E) and "share" in describe_links(V3)
    assert "no links" in describe_links(resolve("v5e-1"))


V5E_8 = resolve("v5e-8")
# 1 ms on two lines of v5e: 4 hops (1 and 3 of the lines), the launch, and the rest on the links.
SIZE = round((MS - LAUNCH - 4 * HOP) * 2 * 45e9 * 8 / 7)


def gather(index, done=None, **fields):
    return collective("all-gather", SIZE, ranks=8, index=index, done=done, **fields)


def times(*what):
    timing = time_step(schedule(*what), V5E_8, 0.0)
    assert timing.step == pytest.approx(timing.compute + timing.exposed)
    assert timing.collective == pytest.approx(timing.overlapped + timing.exposed)
    assert all(0 <= s.begin <= s.end <= timing.step * 1.001 for s in timing.slots)
    figures = timing.compute, timing.collective, timing.exposed
    return tuple(pytest.approx(f / MS, rel=1e-4, abs=1e-4) for f in figures)


# Each: what is scheduled, and the milliseconds of compute, of collectives, and exposed.
@pytest.mark.parametrize(
    "what, expected",
    [
        ((op(0, 2 * MS), gather(1), op(2, 3 * MS)), (5, 1, 1)),
        ((gather(0, 2), op(1, 3 * MS)), (3, 1, 0)),
        ((gather(0, 2), op(1, 0.4 * MS), op(3, 3 * MS)), (3.4, 1, 0.6)),
        # Links take one after the other: the second runs from 1 to 2 ms, with compute of 0.75 ms.
        ((gather(0, 3), gather(1, 5), op(2, 0.5 * MS), op(4, 0.25 * MS)), (0.75, 2, 1.25)),
        ((gather(0, 9), gather(1), op(2, 5 * MS)), (5, 2, 2)),
        ((gather(0, 3), op(1, 0.1 * MS, 7), op(4, MS)), (1.7, 1, 0.3)),
    ],
)
def test_timeline(what, expected):
    assert times(*what) == expected


@pytest.mark.parametrize("n", [0, 1, 2, 50])
def test_loops(n):
    body = gather(1, 3, times=n), op(2, 0.6 * MS, n), op(4, 0.1 * MS, n)
    assert times(op(0, MS), *body, op(5, MS)) == (2 + 0.7 * n, n, 0.4 * n)


def test_collective_that_two_loops_share():
    compute, total, _ = times(gather(0, 2, times=3), op(1, 0.1 * MS, 6), op(2, 0.1 * MS, 3))
    assert (compute, total) == (0.9, 3)


def test_slots():
    what = op(0, 2 * MS), gather(1, 3, module="blocks.0", phase="forward"), op(2, MS / 2)
    slots = time_step(schedule(*what, op(4, MS)), V5E_8, 0.0).slots
    found = [(s.lane, s.index, s.label, s.asynchronous) for s in slots]
    assert found == [
        ("compute", 0, "fusion.0", False),
        ("collective", 1, "all-gather.1", True),
        ("compute", 2, "fusion.2", False),
        ("compute", 4, "fusion.4", False),
    ]
    assert [s.begin / MS for s in slots] == pytest.approx([0, 2, 2, 3], rel=1e-3)
    assert [s.end / MS for s in slots] == pytest.approx([2, 3, 2.5, 4], rel=1e-3)
    assert slots[1].module == "blocks.0" and slots[1].phase == "forward"


def test_utilisation():
    timing = time_step(schedule(op(0, MS), gather(1)), V5E_8, 98.5e9)
    assert timing.mfu == pytest.approx(0.25, rel=1e-3)  # half of 197 TFLOP/s for half of the time
    nothing = time_step(schedule(), V5E_8, 1.0)
    assert nothing.step == nothing.mfu == 0


PAIRS = [(rank, rank + 8) for rank in range(8)]


def test_time_between_slices():
    """3.125 GB/s a chip; an all-reduce takes the latency twice; the links stay free meanwhile."""
    where = resolve("2xv5litepod-8")
    links = Links(where)
    gather, reduce, slow = (
        collective(kind, 20 * MB, PAIRS, done=done, across_slices=True)
        for kind, done in ((GATHER, 0), (REDUCE, 0), (REDUCE, 3))
    )
    assert links.seconds(gather) == pytest.approx(LAUNCH + DCN_LATENCY + 10e6 / 3.125e9)
    assert links.seconds(reduce) == pytest.approx(LAUNCH + 2 * DCN_LATENCY + 20e6 / 3.125e9)
    assert "3.125 GB/s a chip" in describe_links(where) and "slices" not in describe_links(
        resolve("v4-8")
    )
    with pytest.raises(ValueError, match="v3 are not joined"):
        Links(resolve("v3-8")).seconds(gather)

    seconds, inside = links.seconds(reduce), collective(GATHER, 8 * MB, ranks=8, index=1)
    waits = links.seconds(inside)
    ops = (Op(2, "f", "fusion", 3_000_000),)  # 2 ms
    for collectives, step in (((slow,), seconds), ((slow, inside), max(seconds, waits + 2e-3))):
        timing = time_step(Schedule(4, ops, collectives, (), (0,) * 4, 0), where, 1.0)
        assert timing.step == pytest.approx(step)
        assert timing.collective == pytest.approx(seconds)

"""Plans for several slices that the data-center network joins."""

import pytest
import torch
from torch import nn

from xla_fsdp.planning.records import Collective, Op, Schedule
from xla_fsdp.planning.timing import time_step
from xla_fsdp.tpu.chips import DCN_LATENCY, LAUNCH
from xla_fsdp.tpu.links import Links, describe
from xla_fsdp.tpu.topology import UnknownTopologyError, resolve

PARAMETERS = 2 * 512 * 512
MB = 10**6


def test_names_of_several_slices():
    two = resolve("2xv5litepod-256")
    assert (two.devices, two.chips, two.hosts, two.count) == (512, 512, 128, 2)
    assert two.options["num_slices"] == 2 and "num_slices" not in resolve("v5litepod-256").options
    assert two.coordinates() == resolve("v5litepod-256").coordinates()
    assert resolve("4xv4:2x2x1").devices == 16
    assert resolve("1xv3-8").devices == 8
    for name, reason in (("2xv3-8", "v3 slices are not joined"), ("0xv4-8", "0 slices")):
        with pytest.raises(UnknownTopologyError, match=reason):
            resolve(name)
    with pytest.raises(UnknownTopologyError, match="no v5litepod slice of 7"):
        resolve("2xv5litepod-7")


def between(kind, size, index=0, done=0):
    groups = tuple((rank, rank + 8) for rank in range(8))
    sent = size if kind == "all-reduce" else size // 2
    return Collective(
        kind, size, groups, index=index, done=done, name=kind, asked=kind, dtype="f32",
        group_size=2, wire_bytes=sent, asynchronous=True, across_slices=True,
    )  # fmt: skip


def test_time_between_slices():
    """3.125 GB/s a chip; an all-reduce takes the latency twice; the links stay free meanwhile."""
    where = resolve("2xv5litepod-8")
    links = Links(where)
    gather, reduce = between("all-gather", 20 * MB), between("all-reduce", 20 * MB)
    assert links.seconds(gather) == pytest.approx(LAUNCH + DCN_LATENCY + 10e6 / 3.125e9)
    assert links.seconds(reduce) == pytest.approx(LAUNCH + 2 * DCN_LATENCY + 20e6 / 3.125e9)
    assert "3.125 GB/s a chip" in describe(where) and "slices" not in describe(resolve("v4-8"))
    with pytest.raises(ValueError, match="v3 are not joined"):
        Links(resolve("v3-8")).seconds(gather)

    slow, seconds = between("all-reduce", 20 * MB, 0, 3), links.seconds(reduce)
    inside = Collective(
        "all-gather", 8 * MB, (), index=1, done=1, name="g", asked="all-gather", dtype="f32",
        group_size=8, wire_bytes=7 * MB, asynchronous=False,
    )  # fmt: skip
    waits = links.seconds(inside)
    ops = (Op(2, "f", "fusion", 3_000_000),)  # 2 ms
    for collectives, step in (((slow,), seconds), ((slow, inside), max(seconds, waits + 2e-3))):
        timing = time_step(Schedule(4, ops, collectives, (), (0,) * 4, 0), where, 1.0)
        assert timing.step == pytest.approx(step)
        assert timing.collective == pytest.approx(seconds)


def step_with(**options):
    def step():
        from xla_fsdp import XlaFullyShardedDataParallel

        model = XlaFullyShardedDataParallel(
            nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)), **options
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(64, 512).to("xla")).square().mean().backward()
        optimizer.step()

    return step


def planned_on_two_slices(cache):
    """Hybrid, as by default: gathers stay within a slice, shards of gradients are summed between
    the two. Sharded over all: everything crosses as well."""
    from xla_fsdp import ShardingStrategy, plan

    schedules = []
    for hybrid, options in (
        (True, {}),
        (True, {"device_mesh": [[0, 1, 2, 3], [4, 5, 6, 7]]}),
        (True, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
        (False, {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
    ):
        step = step_with(**options)
        report = plan(step, "2xv5litepod-4", cache=cache, progress=False, ranks=[0, 7])
        schedules.append(report.schedule)
        assert report.fits and report.devices == 8 and report.executables == 1
        collectives = report.schedule.collectives
        across = [c for c in collectives if c.across_slices]
        assert all(c.asynchronous and c.done > c.index for c in across)
        assert {c.groups for c in across} == {((0, 4), (1, 5), (2, 6), (3, 7))}
        sent = sum(c.wire_bytes * c.times for c in across)
        if hybrid:
            assert {c.kind for c in across} == {"all-reduce"}
            # A shard of float32, to the other slice.
            assert sent == pytest.approx(4 * PARAMETERS / 4, rel=0.05)
        else:
            # Two gathers and two reductions of weights, half a shard of four each.
            assert {c.kind for c in across} == {"all-gather", "reduce-scatter"}
            assert sent == pytest.approx(2 * 4 * PARAMETERS / 4 / 2, rel=0.01)
        within = [c for c in collectives if not c.across_slices]
        assert within and all(set(sum(c.groups, ())) <= set(range(4)) for c in within)
        assert "between slices" in str(report) and "3.125 GB/s" in str(report)
        assert report.timing.collective > 2 * DCN_LATENCY
    assert schedules[0] == schedules[1] == schedules[2] != schedules[3]


@pytest.mark.slow
def test_planned_on_two_slices(elsewhere, tmp_path):
    elsewhere(planned_on_two_slices, str(tmp_path))

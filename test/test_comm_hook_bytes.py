"""What hooks send, read off the program that the TPU compiler makes."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

V5E = "v5e:2x4"
WIDTH = 512
MATRIX = WIDTH * WIDTH * 4


def _step(hook, over="all", hybrid=False):
    """A step of two matrices, each 1 MiB, and their biases."""
    import torch_xla.runtime as xr

    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    def step():
        options = {}
        if hybrid:
            options = {
                "sharding_groups": [[0, 1, 2, 3], [4, 5, 6, 7]],
                "sharding_rank": xr.global_ordinal() % 4,
                "sharding_world_size": 4,
                "replication_groups": [[one, one + 4] for one in range(4)],
            }
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        model = FSDP(model, **options)
        if hook is not None:
            model.register_comm_hook(None, hook, over)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(64, WIDTH).to("xla")
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _sent(report):
    """Bytes of a rank's reductions by kind, dtype and size of the group."""
    found = collections.Counter()
    for one in report.schedule.collectives:
        kind = one.asked or one.kind
        if kind != "all-gather":
            found[kind, one.dtype, one.group_size] += one.wire_bytes * one.times
    return found


def bytes_of_hooks():
    from xla_fsdp import plan
    from xla_fsdp.comm_hooks import bf16_compress_hook

    def planned(*args, **kwargs):
        return _sent(plan(_step(*args, **kwargs), V5E, cache=False, progress=False, ranks=[0]))

    def near(value):  # the compiler pads small ones
        return pytest.approx(value, rel=0.01)

    sent = planned(None)
    assert sent == {("reduce-scatter", "f32", 8): near(2 * MATRIX * 7 // 8)}, sent
    uncompressed = sent["reduce-scatter", "f32", 8]

    sent = planned(bf16_compress_hook)
    assert sent == {("reduce-scatter", "bf16", 8): uncompressed // 2}, sent

    # Over two replicas of four ranks: the second sum is of shards.
    sent = planned(bf16_compress_hook, "replicas", hybrid=True)
    shards = 2 * MATRIX // 4
    assert sent["reduce-scatter", "f32", 4] == near(2 * MATRIX * 3 // 4), sent
    assert sent["all-reduce", "bf16", 2] == near(shards // 2), sent


@pytest.mark.slow
def test_bytes_of_hooks(elsewhere):
    elsewhere(bytes_of_hooks)

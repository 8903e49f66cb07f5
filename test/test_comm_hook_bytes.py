"""What hooks send and keep, read off the program that the TPU compiler makes."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

V5E = "v5e:2x4"
WIDTH, RANK = 512, 4
MATRIX = WIDTH * WIDTH * 4


def _step(hook, state=None, over="all", hybrid=False):
    """A step of two matrices, each 1 MiB, and their biases, once the hook has its memory."""
    import torch_xla
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
            model.register_comm_hook(state() if state else None, hook, over)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        x = torch.randn(64, WIDTH).to("xla")
        (model(x) - x).square().mean().backward()
        model.zero_grad()
        torch_xla.sync()
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
    from xla_fsdp.comm_hooks import PowerSGDState, bf16_compress_hook, powerSGD_hook

    def planned(*args, **kwargs):
        report = plan(_step(*args, **kwargs), V5E, cache=False, progress=False, ranks=[0])
        return report, _sent(report)

    def state():
        return PowerSGDState(matrix_approximation_rank=RANK, start_powerSGD_iter=0)

    def near(value):  # the compiler pads small ones
        return pytest.approx(value, rel=0.01)

    plain, sent = planned(None)
    assert sent == {("reduce-scatter", "f32", 8): near(2 * MATRIX * 7 // 8)}, sent
    uncompressed = sent["reduce-scatter", "f32", 8]

    _, sent = planned(bf16_compress_hook)
    assert sent == {("reduce-scatter", "bf16", 8): uncompressed // 2}, sent

    power, sent = planned(powerSGD_hook, state)
    biases = sent.pop(("reduce-scatter", "f32", 8))
    factors = 2 * (WIDTH + WIDTH) * RANK * 4
    assert sent == {("all-reduce", "f32", 8): near(factors * 2 * 7 // 8)}, sent
    assert biases < 16 << 10
    # The gradients in full that errors are, and Q, both written where they were read.
    kept = 2 * MATRIX + 2 * WIDTH * RANK * 4
    for name in ("arguments", "aliased"):
        more = getattr(power.memory, name) - getattr(plain.memory, name)
        assert kept <= more <= 1.01 * kept, (name, more, kept)
    assert power.memory.outputs - power.memory.aliased < 4096
    assert power.memory.peak - plain.memory.peak < kept + 3 * MATRIX

    # Over two replicas of four ranks: errors are those of a shard, and the shards' rows are
    # matrices. Biases are in a bucket of their own.
    power, sent = planned(powerSGD_hook, state, "replicas", hybrid=True)
    factors, biases = 2 * (WIDTH // 4 + WIDTH) * RANK * 4, 2 * WIDTH // 4 * 4
    assert sent == {
        ("reduce-scatter", "f32", 4): near(2 * MATRIX * 3 // 4),
        ("all-reduce", "f32", 2): near(factors + biases),
    }, sent
    kept = 2 * MATRIX // 4 + 2 * WIDTH * RANK * 4
    shards = 2 * MATRIX // 8  # a quarter of the parameters here, an eighth there
    more = power.memory.aliased - plain.memory.aliased
    assert kept + shards <= more <= 1.01 * (kept + shards), (more, kept, shards)


def test_bytes_and_memory_of_hooks(elsewhere):
    elsewhere(bytes_of_hooks)

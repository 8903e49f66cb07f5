"""``reshard_after_forward=<int>``: gathers of the backward stay within that many ranks."""

import functools
import re

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank, without_ranks
from planned import training_step
from test_special_uses import inputs, inputs_of_all, mlp, trace_as_on_tpu, wrapped
from test_strategy import assert_trains_alike
from torch import nn

from xla_fsdp import ShardingStrategy, XlaFullyShardedDataParallel, checkpoint_module, plan
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.sharding.state import units_in


@pytest.mark.slow
@on_each_rank(8)
def test_eight_ranks_and_hybrid_sharding(rank):
    for options in (
        {"reshard_after_forward": 2},
        {"reshard_after_forward": 4, "shard_param_on_dim_0": True},
        {"reshard_after_forward": 2, "device_mesh": [[0, 2, 4, 6], [1, 3, 5, 7]]},
        {"reshard_after_forward": 2, "sharding_strategy": ShardingStrategy.FULL_SHARD},
    ):
        assert_trains_alike(rank, 8, disable_reshard_on_root=False, **options)


GATHER = re.compile(r"(bf16|f32)\[([\d,]*)\][^=]* all-gather\(.*replica_groups=(\S+}}),")


def gathers(rank, reshard):
    trace_as_on_tpu()
    model = wrapped(mlp(), "1", reshard_after_forward=reshard, compute_dtype=torch.bfloat16)
    torch_xla.sync()
    loss = model(inputs(rank).to("xla")).float().square().mean()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss.detach(), *grads])
    torch_xla.sync()
    return sorted(
        (kind, torch.Size(map(int, shape.split(","))).numel(), groups)
        for kind, shape, groups in GATHER.findall(hlo)
    )


ALL, PAIRS = "{{0,1,2,3}}", "{{0,1},{2,3}}"


@on_each_rank(4)
def test_the_backward_gathers_within_the_small_groups(rank):
    zero3, pairs, zero2, one, four = (gathers(rank, reshard) for reshard in (True, 2, False, 1, 4))
    # Parameters padded to 128 elements a rank; the root, which keeps its, has four of them.
    assert zero3 == four == [("bf16", 1024, ALL)] * 2 + [("bf16", 2048, ALL)]
    assert pairs == [("bf16", 1024, ALL), ("bf16", 1024, PAIRS), ("bf16", 2048, ALL)]
    assert zero2 == one == [("bf16", 1024, ALL), ("bf16", 2048, ALL)]


@on_each_rank(4)
def test_recomputation_gathers_within_the_small_groups_too(rank):
    """A unit inside a checkpoint gathers in its forward, and twice what the backward needs."""
    trace_as_on_tpu()
    options = {"reshard_after_forward": 2, "disable_reshard_on_root": False}
    plain = mlp()
    plain(inputs_of_all()).square().mean().backward()
    model = mlp()
    model[1] = checkpoint_module(nn.Sequential(FSDP(model[1], **options)))
    model = FSDP(model, **options)
    loss = model(inputs(rank).to("xla")).square().mean()
    secondaries = [ref() for _, unit in units_in(model) for ref in unit._secondaries]
    assert all(one.pieces for one in secondaries)
    loss.backward()
    assert not any(one.pieces for one in secondaries)  # whoever holds the loss
    grads = [p.grad for p in model.parameters()]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss.detach(), *grads])
    torch_xla.sync()
    with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True, writeback=False):
        for own, value in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad.cpu(), value.grad)
    # The root and the unit forward; the root, the unit and its recomputation backward.
    groups = sorted(groups for *_, groups in GATHER.findall(hlo))
    assert groups == [ALL] * 2 + [PAIRS] * 3


@on_each_rank(4)
def test_what_numbers_mean(rank):
    for number in (3, 0, -2, 8, 2.0):
        with pytest.raises((ValueError, TypeError), match=f"got {number}. Pass one of|, got 2.0"):
            FSDP(mlp(), reshard_after_forward=number)
    for given, meant in ((True, True), (False, False), (1, False), (2, 2), (4, True)):
        found = FSDP(mlp(), reshard_after_forward=given).fsdp_options.reshard_after_forward
        assert found is meant


WIDTH, BLOCKS = 512, 4


def _model(reshard):
    fsdp = functools.partial(
        XlaFullyShardedDataParallel, compute_dtype=torch.bfloat16, reshard_after_forward=reshard
    )

    def block():
        return fsdp(nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(),
                                  nn.Linear(2 * WIDTH, WIDTH)))  # fmt: skip

    return fsdp(nn.Sequential(*(block() for _ in range(BLOCKS))))


@pytest.mark.slow
@without_ranks
def test_a_plan_shows_less_on_the_wire_and_half_of_the_parameters():
    found = {}
    for reshard in (True, 2, False):
        step = training_step(functools.partial(_model, reshard), 8, WIDTH)
        report = plan(step, "v3-8", cache=False, progress=False, ranks=[0, 7])
        assert report.executables == 1
        sent = sum(
            c.wire_bytes * c.times
            for c in report.schedule.collectives
            if c.kind == "all-gather" and c.phase == "backward"
        )
        found[reshard] = report.memory.peak, sent
    whole = 2 * BLOCKS * 2 * WIDTH * WIDTH * 2  # bytes, in bfloat16
    (zero3, sent), (pairs, less), (zero2, none) = (found[key] for key in (True, 2, False))
    assert none == 0 and less == pytest.approx(sent * (1 / 2) / (7 / 8), rel=0.02)
    assert zero3 < pairs <= zero3 + 0.55 * whole
    assert pairs < zero2

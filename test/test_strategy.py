"""sharding_strategy, device_mesh and a number of ranks: what each stands for, and how it trains."""

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from on_ranks import on_each_rank, raises, slow, without_ranks
from planned import training_step
from small_models import (
    here,
    inputs,
    inputs_of_all,
    mean_square,
    mlp,
    trace_as_on_tpu,
    wrapped,
)
from torch import nn

from xla_fsdp import ShardingStrategy, checkpoint_module, full_state_dict, plan
from xla_fsdp import ShardingStrategy as S
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.sharding.state import units_in
from xla_fsdp.wrap import transformer_auto_wrap_policy

WAYS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@dataclasses.dataclass
class Mesh:
    """As torch's DeviceMesh has it, which needs process groups to be made."""

    mesh: Any


def trained(model: nn.Module, batches: list[torch.Tensor]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in batches:
        model(batch).square().mean().backward()
        clip = getattr(model, "clip_grad_norm_", None)
        norm = clip(0.1) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1  # so that it matters whose norm it is
        optimizer.step()
        optimizer.zero_grad()
    return model


def assert_trains_alike(rank: int, size: int, **options: Any):
    plain = trained(mlp(), [torch.cat([inputs(r, s) for r in range(size)]) for s in range(2)])
    linear = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    model = FSDP(mlp(), auto_wrap_policy=linear, **options)
    trained(model, [here(rank, s) for s in range(2)])
    torch_xla.sync()
    with FSDP.summon_full_params(model, writeback=False):
        for own, value in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.detach().cpu(), value.detach())
    torch.testing.assert_close(full_state_dict(model, rank0_only=False), plain.state_dict())
    return model


@pytest.mark.parametrize("ranks", [2, slow(4)])
@on_each_rank(timeout=1500)
def test_every_strategy_trains_like_plain_torch(rank):
    size = xr.world_size()
    rows = torch.arange(size).view(2, -1)
    grid = rows.tolist()
    for way in WAYS:
        strategy = ShardingStrategy[way]
        given: dict[str, Any] = {"sharding_strategy": strategy}
        if "HYBRID" in way:
            given["device_mesh"] = rows if way == "HYBRID_SHARD" else Mesh(rows)
        model = assert_trains_alike(rank, size, **given)
        for wrapper in FSDP.fsdp_modules(model):
            assert wrapper.sharding_strategy is strategy
            world = wrapper._unit.world
            if way == "NO_SHARD":
                assert (world.rank, world.size, world.replicas) == (0, 1, size)
            elif "HYBRID" in way:
                own = rank % (size // 2), size // 2, 2
                assert (world.rank, world.size, world.replicas) == own
                assert [list(group) for group in world.groups] == grid
            else:
                assert (world.rank, world.size, world.replicas) == (rank, size, 1)
            if way != "NO_SHARD":
                zero3 = way in ("FULL_SHARD", "HYBRID_SHARD")
                assert wrapper.fsdp_options.reshard_after_forward is zero3
    # A mesh says the groups without a strategy as well, in any order of the ranks.
    turned = [*range(1, size), 0]
    model = assert_trains_alike(rank, size, device_mesh=turned, reshard_after_forward=False)
    assert (model.rank, model.world_size) == ((rank - 1) % size, size)
    model = assert_trains_alike(rank, size, device_mesh=Mesh(rows.T.tolist()))
    assert model._unit.world.replicas == size // 2
    hybrid = {
        "sharding_groups": tuple(map(tuple, grid)),
        "sharding_rank": rank % (size // 2),
        "sharding_world_size": size // 2,
        "replication_groups": rows.T.tolist(),
    }
    for more in ({}, {"device_mesh": grid}):
        strategy = ShardingStrategy.HYBRID_SHARD
        model = FSDP(mlp(), sharding_strategy=strategy, **more, **hybrid)
        assert model._unit.world.replicas == 2


@on_each_rank(2)
def test_what_does_not_go_together_is_refused(rank):
    from torch.distributed.fsdp import ShardingStrategy as Theirs

    groups = {"sharding_groups": [[0], [1]], "sharding_rank": 0, "sharding_world_size": 1}

    both = {"sharding_groups": [[0, 1]], "sharding_rank": rank, "sharding_world_size": 2}
    meshes = [0], [0, 0], [[[0, 1]]], "ranks", [0.5, 1.0], 7, [[0], [1, 2]], object()
    for text, options in (
        ("sharding_strategy must be ShardingStrategy", {"sharding_strategy": Theirs.FULL_SHARD}),
        (r"SHARD_GRAD_OP has no replicas, but replication_groups=\[\[0, 1\]\]",
         {"sharding_strategy": S.SHARD_GRAD_OP, "replication_groups": [[0, 1]], **groups}),
        (r"sharding_groups=\[\[0, 1\]\] contradicts .*NO_SHARD",
         {"sharding_strategy": S.NO_SHARD, **both}),
        (r"sharding_groups=\[\[0\], \[1\]\] contradicts .*device_mesh=\[0, 1\]",
         {"device_mesh": [0, 1], **groups}),
        ("needs a 2-D device_mesh", {"sharding_strategy": S.HYBRID_SHARD, "device_mesh": [0, 1]}),
        *(("device_mesh must contain .*each of the 2 ranks once", {"device_mesh": mesh})
          for mesh in meshes),
    ):  # fmt: skip
        raises(ValueError, text, FSDP, mlp(), **options)


@pytest.mark.slow
@on_each_rank(8)
def test_eight_ranks_and_hybrid_sharding(rank):
    for options in (
        {"reshard_after_forward": 2},
        {"reshard_after_forward": 4, "shard_param_on_dim_0": True},
        {"reshard_after_forward": 2, "device_mesh": [[0, 2, 4, 6], [1, 3, 5, 7]]},
    ):
        assert_trains_alike(rank, 8, disable_reshard_on_root=False, **options)


GATHER = re.compile(r"(bf16|f32)\[([\d,]*)\][^=]* all-gather\(.*replica_groups=(\S+}}),")


def gathers(rank, reshard):
    trace_as_on_tpu()
    model = wrapped(mlp(), "1", reshard_after_forward=reshard, compute_dtype=torch.bfloat16)
    torch_xla.sync()
    loss = model(here(rank)).float().square().mean()
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
    mean_square(plain, inputs_of_all()).backward()
    model = mlp()
    model[1] = checkpoint_module(nn.Sequential(FSDP(model[1], **options)))
    model = FSDP(model, **options)
    loss = mean_square(model, here(rank))
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
        assert FSDP(mlp(), reshard_after_forward=given).fsdp_options.reshard_after_forward is meant


WIDTH, BLOCKS = 512, 4


def _model(reshard):
    fsdp = functools.partial(FSDP, compute_dtype=torch.bfloat16, reshard_after_forward=reshard)

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

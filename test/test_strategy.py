"""sharding_strategy and device_mesh: each is what it stands for, and trains like plain torch."""

import dataclasses
from typing import Any

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from on_ranks import on_each_rank
from test_special_uses import inputs, mlp
from torch import nn

from xla_fsdp import ShardingStrategy, full_state_dict
from xla_fsdp import ShardingStrategy as S
from xla_fsdp import XlaFullyShardedDataParallel as FSDP

WAYS = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


@dataclasses.dataclass
class Mesh:
    """As torch's DeviceMesh has it, which needs process groups to be made."""

    mesh: Any


def trained(model: nn.Module, batches: list[torch.Tensor]) -> nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in batches:
        loss = model(batch).square().mean()
        loss.backward()
        clip = getattr(model, "clip_grad_norm_", None)
        norm = clip(0.1) if clip else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1  # so that it matters whose norm it is
        optimizer.step()
        optimizer.zero_grad()
    return model


def small_policy(module, recurse, nonwrapped_numel=0, **_):
    return True if recurse else isinstance(module, nn.Linear)


def assert_trains_alike(rank: int, size: int, **options: Any):
    plain = trained(mlp(), [torch.cat([inputs(r, s) for r in range(size)]) for s in range(2)])
    model = FSDP(mlp(), auto_wrap_policy=small_policy, **options)
    trained(model, [inputs(rank, s).to("xla") for s in range(2)])
    torch_xla.sync()
    with FSDP.summon_full_params(model, writeback=False):
        for own, value in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.detach().cpu(), value.detach())
    torch.testing.assert_close(full_state_dict(model, rank0_only=False), plain.state_dict())
    return model


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
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
        (r"sharding_groups=\[\[0\], \[1\]\] contradicts device_mesh=\[0, 1\]",
         {"device_mesh": [0, 1], **groups}),
        ("needs a 2-D device_mesh", {"sharding_strategy": S.HYBRID_SHARD, "device_mesh": [0, 1]}),
        *(("device_mesh must contain .*each of the 2 ranks once", {"device_mesh": mesh})
          for mesh in meshes),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=text):
            FSDP(mlp(), **options)

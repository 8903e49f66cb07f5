"""Settings that tune finds, applied to a model: it trains like plain torch whatever they say."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from test_tuning import V3, WIDTH, facts
from test_tuning import Network as Wide
from torch import nn

from xla_fsdp import ShardingSettings
from xla_fsdp.planning.tuning.api import _groups

TWO, SINGLY = ShardingSettings(blocks_per_unit=2), ShardingSettings()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    def __init__(self, join=lambda blocks: nn.Sequential(*blocks)):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 8)
        self.blocks = join(Block() for _ in range(3))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


# These use every way to apply settings; the simpler ones are in MORE_WAYS.
WAYS = {
    "defaults": ShardingSettings(),
    "scanned, kept": ShardingSettings(scan=True, recompute="all", keep=("up",)),
    "some kept, some recomputed": ShardingSettings(kept_blocks=1, recompute=2),
    "by size, some kept": ShardingSettings(units=100, kept_blocks=("blocks.1.up", "blocks.2.down")),
    "two blocks a unit, some recomputed, one unit kept": ShardingSettings(
        blocks_per_unit=2, recompute=1, kept_blocks=(2,)
    ),
    "hybrid": ShardingSettings(shard_group_size=2, reshard_after_forward=False),
}
MORE_WAYS = {
    "one unit, recomputed": ShardingSettings(units="model", recompute="all"),
    "by size": ShardingSettings(units=100, recompute="all"),
    "scanned": ShardingSettings(scan=True, recompute="all"),
    "others kept": ShardingSettings(kept_blocks=(0, 2)),
    "two blocks a unit": ShardingSettings(blocks_per_unit=2),
    "no prefetch": ShardingSettings(
        forward_prefetch=False, backward_prefetch="none", limit_all_gathers=False,
        collective_routes="default",
    ),
}  # fmt: skip


def inputs(rank, step):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * rank + step))


def trained(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def each_way_trains_alike(rank, ways):
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp import full_state_dict

    size = xr.world_size()
    plain = trained(Network(), [torch.cat([inputs(r, s) for r in range(size)]) for s in range(2)])
    wanted = plain.state_dict()
    for name, settings in ways.items():
        if settings.scan or settings.kept_blocks in (1, (2,)):
            model = settings.wrap_root(Network(settings.join))
        else:
            model = settings.wrap(Network())
        trained(model, [inputs(rank, s).to("xla") for s in range(2)])
        torch_xla.sync()
        found = full_state_dict(model, rank0_only=False)
        assert set(found) == set(wanted), name
        for key, value in found.items():
            torch.testing.assert_close(value, wanted[key], msg=f"{name}: {key}")
    # In place, blocks in a list become a loop as well.
    model = WAYS["scanned, kept"].wrap(Network())
    assert type(model.module.blocks).__name__ == "ScannedBlocks"


@pytest.mark.parametrize("ways", [WAYS, pytest.param(MORE_WAYS, marks=pytest.mark.slow)])
def test_whatever_they_say_it_trains_like_plain_torch(run_ranks, ways):
    run_ranks(each_way_trains_alike, 4, ways)


def numbered(join=lambda blocks: nn.Sequential(*blocks)):
    """Blocks that differ in a number, as those of transformers do."""
    network = Network()
    for number, block in enumerate(network.blocks):
        block.layer_idx = number
    network.blocks = join(network.blocks)
    return network


def blocks_may_differ_in_a_number(rank):
    import torch_xla

    from xla_fsdp import full_state_dict

    scanned, found = ShardingSettings(scan=True, recompute="all"), []
    for settings in (scanned, ShardingSettings()):
        join = partial(settings.join, ignore=["layer_idx"])
        for model in (
            settings.wrap(numbered(), ignore=["layer_idx"]), settings.wrap_root(numbered(join)),
        ):  # fmt: skip
            trained(model, [inputs(rank, 0).to("xla")])
            torch_xla.sync()
            found.append(full_state_dict(model, rank0_only=False))
    for other in found[1:]:
        for name, value in found[0].items():
            torch.testing.assert_close(other[name], value, msg=name)
    with pytest.raises(ValueError, match="layer_idx"):
        scanned.wrap(numbered())
    with pytest.raises(TypeError, match="ignore must be names, such as"):
        scanned.wrap(numbered(), ignore="layer_idx")
    with pytest.raises(ValueError, match=r"keep=\('up',\): the settings determine this"):
        scanned.join([Block()], keep=("up",))


def refused(rank):
    settings = ShardingSettings()
    with pytest.raises(ValueError, match="shard_group_size=3 does not divide the 2 ranks"):
        settings.changed(shard_group_size=3).wrap(Network())
    with pytest.raises(ValueError, match="kept_blocks=4: the model has 3 blocks; at most 3"):
        settings.changed(kept_blocks=4).wrap(Network())
    with pytest.raises(ValueError, match="reshard_after_forward=False: the settings determine"):
        settings.wrap(Network(), reshard_after_forward=False)
    with pytest.raises(
        ValueError, match=r"kept_blocks=\(1, 3\): the model has 3 blocks; at most 3"
    ):
        settings.changed(kept_blocks=(1, 3)).wrap(Network())
    with pytest.raises(ValueError, match=r"blocks 0, 1 are one unit \(blocks_per_unit=2\)"):
        settings.changed(kept_blocks=1, blocks_per_unit=2).wrap(Network())
    by_size = settings.changed(units=100, kept_blocks=("blocks.1",))
    with pytest.raises(ValueError, match="'blocks.1' is no unit; .* the units are blocks.0"):
        by_size.wrap(Network())
    two = settings.changed(blocks_per_unit=2)
    with pytest.raises(ValueError, match="blocks_per_unit=2: the blocks are not all of one"):
        two.wrap(Network(lambda blocks: nn.ModuleList(blocks)))
    with pytest.raises(ValueError, match="flatten_parameters=True and blocks_per_unit exclude"):
        two.wrap(Network(), flatten_parameters=True)
    heard = Network()
    heard.blocks.register_forward_hook(lambda *given: None)
    with pytest.raises(ValueError, match="'blocks' has hooks, which would be lost"):
        two.wrap(heard)
    scanned = settings.changed(scan=True, recompute="all")
    with pytest.raises(ValueError, match="scan=True: the blocks are not all of one nn.Sequential"):
        scanned.wrap(Network(lambda blocks: nn.ModuleList(blocks)))
    with pytest.raises(
        ValueError, match="collective_routes must be 'auto' or 'default', got 'fast'"
    ):
        from xla_fsdp import XlaFullyShardedDataParallel

        XlaFullyShardedDataParallel(Network(), collective_routes="fast")


def ignored_and_refused(rank):
    blocks_may_differ_in_a_number(rank)
    refused(rank)


def test_what_may_differ_and_what_does_not_go_with_a_model(run_ranks):
    run_ranks(ignored_and_refused, 2)


# Several blocks in one unit: gathered together, and called what they are called singly.


def names_are_those_of_blocks_wrapped_singly(rank, folder):
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import full_state_dict, load_checkpoint, save_checkpoint

    grouped, singly = TWO.wrap(Network()), SINGLY.wrap(Network())
    assert len(FSDP.fsdp_modules(grouped)) == 3 and len(FSDP.fsdp_modules(singly)) == 4
    (_, first, last) = FSDP.fsdp_modules(grouped)
    assert len(first.sharded_params) == 8 and len(last.sharded_params) == 4
    for model in (grouped, singly):
        trained(model, [inputs(rank, 0).to("xla")])
        torch_xla.sync()
    names = [name for name, _ in singly.named_parameters()]
    assert [name for name, _ in grouped.named_parameters()] == names
    assert list(grouped.state_dict()) == list(singly.state_dict()) == names
    assert grouped.get_shard_metadata()["parameters"] == singly.get_shard_metadata()["parameters"]
    modules = {name for name, _ in Network().named_modules()}
    assert {name for name, _ in grouped.named_modules()} == modules
    assert grouped.get_submodule("blocks.2.up") is grouped.blocks[-1].up
    assert len(grouped.blocks) == 3
    with pytest.raises(TypeError, match="cannot run one by one: call x = blocks"):
        list(grouped.blocks)
    with pytest.raises(AttributeError):
        grouped.get_submodule("blocks.3")

    # What the one holds the other takes, and a copy is a model of its own.
    fresh = TWO.wrap(Network())
    fresh.load_state_dict(singly.state_dict())
    found, wanted = (
        full_state_dict(fresh, rank0_only=False),
        full_state_dict(singly, rank0_only=False),
    )
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    clone = copy.deepcopy(fresh)
    trained(clone, [inputs(rank, 5).to("xla")])
    moved = full_state_dict(clone, rank0_only=False)
    found = full_state_dict(fresh, rank0_only=False)
    assert not any(torch.equal(moved[name], found[name]) for name in wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    save_checkpoint(folder, grouped, step=2)
    load_checkpoint(folder, singly)
    found = full_state_dict(singly, rank0_only=False)
    for name, value in full_state_dict(grouped, rank0_only=False).items():
        assert torch.equal(found[name], value), name
    with FSDP.summon_full_params(grouped):
        assert grouped.get_parameter("blocks.1.up.weight").shape == (16, 8)

    # What does not fit is named as everywhere.
    state = singly.state_dict()
    state["blocks.7.up.weight"] = state.pop("blocks.1.up.weight")
    state["blocks.2.down.bias"] = torch.zeros(3)
    with pytest.raises(RuntimeError) as error:
        fresh.load_state_dict(state)
    text = str(error.value)
    assert 'Missing key(s) in state_dict: "blocks.1.up.weight"' in text
    assert 'Unexpected key(s) in state_dict: "blocks.7.up.weight"' in text
    assert "size mismatch for blocks.2.down.bias" in text and "_unit_" not in text


def test_names_are_those_of_blocks_wrapped_singly(run_ranks, tmp_path):
    run_ranks(names_are_those_of_blocks_wrapped_singly, 2, str(tmp_path / "checkpoint"))


def gathers_of(settings):
    """How many all-gathers a traced step of four blocks has."""
    from xla_fsdp import training_step
    from xla_fsdp.planning.program.hlo import parse_module
    from xla_fsdp.planning.tracing.step import trace_step
    from xla_fsdp.planning.tuning.facts import hlo_text

    def loss(model, settings):
        return model(torch.zeros(8, WIDTH).to("xla")).float().square().mean()

    step = training_step(lambda: Wide(4), loss, compute_dtype=torch.bfloat16)
    traced = trace_step(lambda: step(settings), 0, V3.devices, V3)
    module = parse_module(hlo_text(traced.program.hlo))
    every = (one for part in module.computations.values() for one in part.instructions)
    return sum(one.opcode == "all-gather" for one in every)


def gathers_of_several():
    kept = TWO.changed(kept_blocks=(2, 3))
    return gathers_of(SINGLY), gathers_of(TWO), gathers_of(kept)


def test_a_unit_of_two_blocks_is_gathered_at_once(elsewhere):
    """A block has two matrices, which travel by themselves, and vectors, which go together."""
    singly, pairs, one_kept = elsewhere(gathers_of_several)
    assert singly - pairs == 2 * 2  # the vectors of each pair in one, forward and backward
    assert pairs - one_kept == 5  # the second gathers of a unit of two blocks


def test_units_of_several_are_tried_where_a_trace_says_that_they_can_be():
    class Asking:
        def __init__(self, error=None):
            self.error, self.asked = error, []

        def trace(self, settings):
            self.asked.append(settings)
            if self.error:
                raise self.error

    able, unable = Asking(), Asking(ValueError("the blocks are not all of one nn.Sequential"))
    assert _groups(able.trace, {}, facts(), 4) and not _groups(unable.trace, {}, facts(), 4)
    assert able.asked == unable.asked == [TWO.changed(batch=4)]
    # Not asked where the caller has said it, and where there are too few.
    assert not _groups(able.trace, {"blocks_per_unit": (2,)}, facts(), 4)
    assert not _groups(able.trace, {}, facts(blocks=3), 4) and len(able.asked) == 1

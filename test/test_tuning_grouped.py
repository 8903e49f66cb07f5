"""Several blocks in one unit: gathered together, and called what they are called singly."""

from __future__ import annotations

import copy

import pytest
import torch
from test_tuning import V3, WIDTH, Network, facts
from test_tuning_applied import Network as Trained
from test_tuning_applied import inputs, trained

from xla_fsdp import ShardingSettings
from xla_fsdp.planning.tuning.api import _groups

TWO, SINGLY = ShardingSettings(blocks_per_unit=2), ShardingSettings()


def names_are_those_of_blocks_wrapped_singly(rank, folder):
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import full_state_dict, load_checkpoint, save_checkpoint

    grouped, singly = TWO.wrap(Trained()), SINGLY.wrap(Trained())
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
    modules = {name for name, _ in Trained().named_modules()}
    assert {name for name, _ in grouped.named_modules()} == modules
    assert grouped.get_submodule("blocks.2.up") is grouped.blocks[-1].up
    assert len(grouped.blocks) == 3
    with pytest.raises(TypeError, match="cannot run one by one: call x = blocks"):
        list(grouped.blocks)
    with pytest.raises(AttributeError):
        grouped.get_submodule("blocks.3")

    # What the one holds the other takes, and a copy is a model of its own.
    fresh = TWO.wrap(Trained())
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

    step = training_step(lambda: Network(4), loss, compute_dtype=torch.bfloat16)
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

"""Settings that tune finds, applied to a model: it trains like plain torch whatever they say."""

import os
import re
from functools import partial

import pytest
import torch
from lazy_modules import torch_xla
from on_ranks import on_each_rank
from test_tuning import Block
from torch import nn

from xla_fsdp import ShardingSettings, full_state_dict
from xla_fsdp.planning.tuning.settings import ShallowSettings
from xla_fsdp.planning.tuning.tuning import Tuning


class Network(nn.Module):
    def __init__(self, join=lambda blocks: nn.Sequential(*blocks)):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 8)
        self.blocks = join(Block(8, 16) for _ in range(3))
        self.last = nn.Linear(8, 2)

    def forward(self, x):
        return self.last(self.blocks(self.first(x)))


WAYS = {
    "scanned, kept": ShardingSettings(scan=True, recompute="all", keep=("up",)),
    "scanned, on the host": ShardingSettings(
        scan=True, recompute="all", keep=("up",), offload=True, scoped_vmem_kib=49152
    ),
    "some kept, some recomputed": ShardingSettings(kept_blocks=1, recompute=2),
    "some recomputed, one unit kept": ShardingSettings(recompute=1, kept_blocks=(2,)),
    "by size, some kept": ShardingSettings(units=100, kept_blocks=("blocks.1.up", "blocks.2.down")),
    "by size": ShardingSettings(units=100, recompute="all"),
    "one unit": ShardingSettings(
        batch=5, units="model", recompute="all", backward_prefetch="post"
    ),
    "hybrid": ShardingSettings(shard_group_size=2, reshard_after_forward=False),
    "alone": ShardingSettings(shard_group_size=1, kept_blocks=(0, 2), recompute=2, offload=True),
    "no prefetch": ShardingSettings(
        forward_prefetch=False, backward_prefetch="none", limit_all_gathers=False,
        collective_routes="default",
    ),
}  # fmt: skip
# Those whose blocks a script joins itself; the others are pasted as code.
JOINED = ("scanned, kept", "some kept, some recomputed", "some recomputed, one unit kept")


def inputs(rank, step):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * rank + step))


def trained(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def pasted(settings):
    """The model after the code to paste."""
    found = Tuning(settings, (), "v3-8", 8, 2**34, 1, 1, 0, samples=False)
    script = {"model": Network()}
    exec(found.code, script)
    assert script["settings"] == settings
    if settings.scoped_vmem_kib:
        assert "xla_tpu_scoped_vmem_limit_kib=49152" in os.environ["LIBTPU_INIT_ARGS"]
    if settings.scan:
        assert type(script["model"].module.blocks).__name__ == "ScannedBlocks"
    return script["model"]


@pytest.mark.slow
@on_each_rank(4)
def test_whatever_they_say_it_trains_like_plain_torch(rank, size):
    plain = trained(Network(), [torch.cat([inputs(r, s) for r in range(size)]) for s in range(2)])
    wanted = plain.state_dict()
    for name, settings in WAYS.items():
        joined = name in JOINED
        model = settings.wrap_root(Network(settings.join)) if joined else pasted(settings)
        trained(model, [inputs(rank, s).to("xla") for s in range(2)])
        torch_xla.sync()
        found = full_state_dict(model, rank0_only=False)
        assert set(found) == set(wanted), name
        for key, value in found.items():
            torch.testing.assert_close(value, wanted[key], msg=f"{name}: {key}")
    os.environ.pop("LIBTPU_INIT_ARGS", None)


def numbered(join=lambda blocks: nn.Sequential(*blocks)):
    """Blocks that differ in a number, as those of transformers do."""
    network = Network()
    for number, block in enumerate(network.blocks):
        block.layer_idx = number
    network.blocks = join(network.blocks)
    return network


@on_each_rank(2)
def test_blocks_may_differ_in_a_number(rank):
    scanned, found = ShardingSettings(scan=True, recompute="all"), []
    for settings in (scanned, ShardingSettings()):
        join = partial(settings.join, ignore=["layer_idx"])
        in_place = settings.wrap(numbered(), ignore=["layer_idx"])
        for model in (in_place, settings.wrap_root(numbered(join))):
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
        scanned.join([Block(8, 16)], keep=("up",))


@on_each_rank(2)
def test_what_does_not_go_with_a_model(rank):
    scanned, by_size = {"scan": True, "recompute": "all"}, {"units": 100}
    heard = Network()
    heard.blocks.register_forward_hook(lambda *given: None)
    for changes, network, message in (
        ({"shard_group_size": 3}, Network(), "shard_group_size=3 does not divide the 2 ranks"),
        ({"kept_blocks": 4}, Network(), "kept_blocks=4: the model has 3 blocks; at most 3"),
        ({"kept_blocks": (1, 3)}, Network(), r"kept_blocks=\(1, 3\): the model has 3 blocks; at m"),
        ({**by_size, "kept_blocks": ("blocks.1",)}, Network(),
         "'blocks.1' is no unit; .* the units are blocks.0"),
        (scanned, heard, "'blocks' has hooks, which would be lost"),
        (scanned, Network(nn.ModuleList), "scan=True: the blocks are not all of one nn.Sequential"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ShardingSettings(**changes).wrap(network)
    with pytest.raises(ValueError, match="reshard_after_forward=False: the settings determine"):
        ShardingSettings().wrap(Network(), reshard_after_forward=False)


@on_each_rank(2)
def test_only_the_first_blocks_are_built(rank):
    few = ShallowSettings.of(ShardingSettings(recompute="all"), 2)
    for model in (few.wrap(Network()), few.wrap_root(Network(few.join))):
        names = " ".join(name for name, _ in model.named_parameters())
        assert set(re.findall(r"blocks\.(\d)", names)) == {"0", "1"}
        trained(model, [inputs(rank, 0).to("xla")])
    looped = few.changed(recompute="none").wrap(Network(lambda blocks: nn.ModuleList(blocks)))
    assert len(looped.module.blocks) == 2

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Network(), Network()

    with pytest.raises(ValueError, match="not all of one list, so none can be left out"):
        few.wrap(Pair())

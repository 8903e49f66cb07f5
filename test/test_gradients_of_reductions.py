"""Norms and sums of shards in a loss: gradients are those of one process, whatever else differs."""

import pytest
import torch
from torch import nn

import xla_fsdp
from xla_fsdp import ShardingStrategy, XlaFullyShardedDataParallel

RANKS = 4


def built():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


def batch(rank):
    return torch.randn(5, 8, generator=torch.Generator().manual_seed(rank))


def weighted_penalty(model, x):
    """What goes back to a norm is another number on each rank: its own batch's loss."""
    own = model(x).pow(2).mean()
    norms = sum(p.norm() for p in model.parameters())
    return own * (1 + norms) + own * sum(p.max() + p.sum() for p in model.parameters())


def gradient_penalty(model, x):
    """Norms whose gradient is a part of the loss."""
    norms = sum(p.norm() ** 2 for p in model.parameters())
    gradients = torch.autograd.grad(norms, list(model.parameters()), create_graph=True)
    return sum(g.square().sum() for g in gradients) * model(x).mean().detach()


class Inside(nn.Module):
    """Reads the weights of a layer with a wrapper of its own within the forward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        y = self.inner(x)
        decay = sum(p.square().sum() for p in self.inner.parameters()) + self.inner[0].bias.sum()
        return y * decay


def read_inside(model, x):
    return model(x).pow(2).mean()


CASES = {
    "weighted": (weighted_penalty, False),
    "of gradients": (gradient_penalty, False),
    "in a forward": (read_inside, True),
}


def gradients(rank, case, options):
    loss_of, inside = CASES[case]
    if rank is None:
        model = Inside(built()) if inside else built()
        sum(loss_of(model, batch(r)) / RANKS for r in range(RANKS)).backward()
        return {name: p.grad for name, p in model.named_parameters()}
    options = {**options}
    if "sharding_groups" in options:
        options |= {"sharding_rank": rank % 2, "sharding_world_size": 2}
    if options.pop("in_place", False):
        model = xla_fsdp.fully_shard(built())
        model = xla_fsdp.fully_shard(Inside(model)) if inside else model
    else:
        model = XlaFullyShardedDataParallel(built(), **options)
        if inside:
            model = XlaFullyShardedDataParallel(Inside(model), **options)
    loss_of(model, batch(rank).to("xla")).backward()
    return {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}


OPTIONS = {
    "wrapper": {},
    "in place": {"in_place": True},
    "rows": {"shard_param_on_dim_0": True},
    "hybrid": {"sharding_groups": [[0, 1], [2, 3]], "replication_groups": [[0, 2], [1, 3]]},
    "replicas": {"sharding_strategy": ShardingStrategy.NO_SHARD},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_equal_those_of_one_process(run_ranks, case, options):
    want = gradients(None, case, {})
    for found in run_ranks(gradients, RANKS, case, OPTIONS[options]):
        assert found.keys() == want.keys()
        for name, grad in want.items():
            torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-5, msg=name)

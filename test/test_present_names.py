"""Layers that are swapped, renamed, removed or wrapped after sharding have their present names."""

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank
from torch import nn

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP


class Scaled(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleDict({name: nn.Linear(6, 6) for name in ("a", "b", "c")})

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


def swap(layers):
    layers["a"], layers["c"] = layers["c"], layers["a"]


def rename(layers):
    layers["last"] = layers.pop("c")


def remove(layers):
    del layers["b"]


def surround(layers):
    layers["b"] = Scaled(layers["b"])


CHANGES = [swap, rename, remove, surround]


@pytest.mark.parametrize("form", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@on_each_rank(2)
def test_states_have_present_names(rank, tmp_path, form, change):
    plain, inner = Model(), Model()
    model = FSDP(inner) if form == "wrapper" else xla_fsdp.fully_shard(inner)
    change(plain.layers)
    change(inner.layers)
    optimizers = [torch.optim.Adam(one.parameters(), lr=0.1) for one in (plain, model)]
    plain(torch.ones(2, 6)).square().mean().backward()
    model(torch.ones(2, 6).to("xla")).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
    torch_xla.sync()
    xla_fsdp.save_checkpoint(str(tmp_path), model, optimizers[1], step=1)
    state = xla_fsdp.full_state_dict(model, rank0_only=False)
    moments = xla_fsdp.full_optim_state_dict(model, optimizers[1], rank0_only=False)["state"]
    for parameter in model.parameters():
        parameter.data.zero_()
    xla_fsdp.load_checkpoint(str(tmp_path), model, optimizers[1])
    again = xla_fsdp.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(again, state, rtol=0, atol=0)
    assert list(state) == list(plain.state_dict())
    torch.testing.assert_close(state, plain.state_dict(), rtol=1e-4, atol=1e-5)
    named = dict(plain.named_parameters())
    found = {name: moment["exp_avg"] for name, moment in moments.items()}
    expected = {name: optimizers[0].state[p]["exp_avg"] for name, p in named.items()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)

"""Layers that are swapped, renamed, removed or wrapped after sharding have their present names."""

import pytest
import torch
import torch_xla
from torch import nn

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP


class Scaled(nn.Module):
    """A module around a layer, as LoRA puts them."""

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


def trained(rank, form, change, folder):
    """Full state, full optimizer state and a checkpoint, after a change and a step."""
    inner = Model()
    model = FSDP(inner) if form == "wrapper" else xla_fsdp.fully_shard(inner)
    change(inner.layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 6).to("xla")).square().mean().backward()
    optimizer.step()
    torch_xla.sync()
    xla_fsdp.save_checkpoint(folder, model, optimizer, step=1)
    state = xla_fsdp.full_state_dict(model, rank0_only=False)
    moments = xla_fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
    for parameter in model.parameters():
        parameter.data.zero_()
    xla_fsdp.load_checkpoint(folder, model, optimizer)
    again = xla_fsdp.full_state_dict(model, rank0_only=False)
    assert all(torch.equal(again[name], value) for name, value in state.items())
    return state, moments["state"]


@pytest.mark.parametrize("form", ["wrapper", "fully_shard"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_states_have_present_names(run_ranks, tmp_path, form, change):
    plain = Model()
    change(plain.layers)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    plain(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    for state, moments in run_ranks(trained, 2, form, change, str(tmp_path)):
        assert list(state) == list(plain.state_dict())
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=name)
        assert set(moments) == set(dict(plain.named_parameters()))
        for name, parameter in plain.named_parameters():
            expected = optimizer.state[parameter]["exp_avg"]
            torch.testing.assert_close(moments[name]["exp_avg"], expected, rtol=1e-4, atol=1e-6)

"""A model that is moved before it is wrapped: weights that two modules share, and optimizers."""

import copy

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import full_state_dict

WIDTH = 6


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(9, WIDTH)
        self.first, self.second = nn.LSTM(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight
        self.second.weight_hh_l0 = self.first.weight_hh_l0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.first(self.embed(tokens))
        return self.head(self.second(states)[0])


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(9, (5, 2), generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, loss) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


@on_each_rank(2)
def test_moved_then_wrapped(rank):
    plain = Tied()
    expected = train(
        plain, lambda model: sum(model(tokens(n)).square().mean() for n in range(2)) / 2
    )
    for options in ({}, {"flatten_parameters": True}):
        model = Tied().to(torch_xla.device())
        assert model.head.weight is model.embed.weight
        assert model.second._flat_weights[1] is model.first.weight_hh_l0
        assert len(list(model.parameters())) == len(list(plain.parameters()))
        model = FSDP(model, **options)
        train(model, lambda model: model(tokens(rank).to("xla")).square().mean())
        for name, value in full_state_dict(model).items():
            torch.testing.assert_close(value.cpu(), plain.state_dict()[name], rtol=1e-4, atol=1e-5)
    assert expected[0] > expected[-1]


@on_each_rank(1)
def test_other_moves_are_those_of_torch(rank):
    model = Tied()
    weight = model.head.weight
    assert model.to(torch.float64) is model and model.head.weight is weight is model.embed.weight
    alike = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    alike[1].load_state_dict(copy.deepcopy(alike[0].state_dict()))
    alike.to(torch_xla.device())
    assert alike[0].weight is not alike[1].weight
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
    assert scripted.to(torch.float64)[0].weight.dtype == torch.float64


@on_each_rank(2)
def test_an_optimizer_made_before_the_wrapping(rank):
    model = Tied()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model = FSDP(model.to(torch_xla.device()))
    model(tokens(rank).to(torch_xla.device())).sum().backward()
    with pytest.raises(RuntimeError, match=r"made before module.*shape \[9, 6\] on cpu"):
        optimizer.step()
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # it has what to train


@on_each_rank(1)
def test_hooks_and_attributes_stay(rank):
    model, calls = nn.Linear(2, 2), []
    model.weight.register_hook(lambda grad: grad * 5)
    handle = model.bias.register_post_accumulate_grad_hook(lambda bias: calls.append(bias))
    model.weight.no_decay = True
    model.to(torch_xla.device())
    model(torch.ones(1, 2).to(torch_xla.device())).sum().backward()
    assert model.weight.no_decay and model.weight.grad.flatten().tolist() == [5.0] * 4
    assert len(calls) == 1 and calls[0] is model.bias
    handle.remove()
    model(torch.ones(1, 2).to(torch_xla.device())).sum().backward()
    assert len(calls) == 1


BEFORE_ANY_NAME = """
import torch, torch_xla
import xla_fsdp

model = torch.nn.Module()
model.a, model.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
model.b.weight = model.a.weight
model.to(torch_xla.device())
assert model.a.weight is model.b.weight
"""


def test_from_the_import_on(run_script):
    done = run_script(BEFORE_ANY_NAME, env={"PJRT_DEVICE": "CPU"})
    assert done.returncode == 0, done.stderr

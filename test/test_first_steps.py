"""Optimizer steps: one program for the first ones; over lists, the values of steps one by one."""

from unittest import mock

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank
from torch import nn, optim

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.sharding.optimizer_hook import _CHOSEN

OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW, capturable": lambda p: optim.AdamW(p, lr=0.01, capturable=p[0].is_xla),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    # The first momentum is the gradient, undampened: another program.
    "SGD, dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
}


def train(make, wrap, device):
    """Weights after three steps, the optimizer's state, and programs compiled in each step."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)))
    optimizer = make(list(model.parameters()))
    batch = torch.randn(8, 4).to(device)
    programs = [sum(xla_fsdp.compilation_counts())]
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if device == "xla":
            torch_xla.sync()
        programs.append(sum(xla_fsdp.compilation_counts()))
    state = [
        {key: torch.as_tensor(value).detach().cpu() for key, value in values.items()}
        for values in optimizer.state_dict()["state"].values()
    ]
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return weights, state, [b - a for a, b in zip(programs, programs[1:], strict=False)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_each_rank(1)
def test_one_program_for_all_steps(rank, name):
    weights, state, programs = train(OPTIMIZERS[name], FSDP, "xla")
    assert programs[1:] == [int(name == "SGD, dampening"), 0]
    plain_weights, plain_state, _ = train(OPTIMIZERS[name], lambda model: model, "cpu")
    assert [values.keys() for values in state] == [values.keys() for values in plain_state]
    mine = weights + [value for values in state for value in values.values()]
    theirs = plain_weights + [value for values in plain_state for value in values.values()]
    for sharded, plain in zip(mine, theirs, strict=True):
        # A shard is flat and has padding at its end.
        values = sharded.flatten()[: plain.numel()]
        torch.testing.assert_close(values, plain.flatten(), rtol=1e-4, atol=1e-6)


@on_each_rank(1)
def test_other_constants_stay_constants(rank):
    class Makes(optim.Optimizer):
        def step(self):
            with torch.no_grad():
                inside = torch.zeros(3, device="xla"), torch.full_like(value, 2.0)
            with torch.enable_grad():  # as the forward of a closure
                return *inside, torch.zeros(3), torch.zeros(3, device="xla")

    value = torch.ones(2).to("xla")
    *inside, on_host, forward = Makes([value], {}).step()
    assert on_host.device.type == "cpu"
    with torch.no_grad():
        after = torch.zeros(3, device="xla")
    texts = [torch_xla._XLAC._get_xla_tensors_text([t]) for t in (*inside, forward, after)]
    assert ["device_data" in text for text in texts] == [True, True, False, False]


STEPS = {
    "sgd": (optim.SGD, dict(lr=0.1)),
    "nesterov": (optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    "dampening": (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3, maximize=True)),
    "adam": (optim.Adam, dict(lr=0.1, weight_decay=0.1, amsgrad=True)),
    "adamw": (optim.AdamW, dict(lr=0.1, maximize=True)),
    "rmsprop": (optim.RMSprop, dict(lr=0.1, momentum=0.9, centered=True, weight_decay=0.1)),
    "adadelta": (optim.Adadelta, dict(lr=0.1, weight_decay=0.1)),
    "adamax": (optim.Adamax, dict(lr=0.1, weight_decay=0.1)),
}


def _trained(kind, options, steps=3):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    model = FSDP(network.to("xla"))
    optimizer = kind(model.parameters(), **options)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 5), 0.1 * (step + 1), device="xla")).square().sum().backward()
        torch_xla.sync()
        optimizer.step()
        program = torch_xla._XLAC._get_xla_tensors_hlo(list(model.parameters()))
        torch_xla.sync()
    assert optimizer.__dict__.get(_CHOSEN, []) == []
    return optimizer, program, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("case", STEPS)
@on_each_rank(2)
def test_the_same_bit_for_bit(rank, case):
    kind, options = STEPS[case]
    lists, program, values = _trained(kind, options)
    single, expected_program, expected = _trained(kind, {**options, "foreach": False})
    assert program.count("\n") == expected_program.count("\n")
    assert all(map(torch.equal, values, expected))
    # The choice that a saved state shows is the user's.
    assert [group["foreach"] for group in lists.param_groups] == [None]
    assert [group["foreach"] for group in single.param_groups] == [False]


@on_each_rank(1)
def test_only_where_it_may(rank):
    calls = []
    with mock.patch.object(torch, "_foreach_add_", wraps=torch._foreach_add_) as add:
        for options in ({}, {"foreach": False}, {"lr": torch.tensor(0.1)}):
            add.reset_mock()
            _trained(optim.SGD, {"lr": 0.1, **options}, steps=1)
            calls.append(add.called)
    assert calls == [True, False, False]

    _, _, expected = _trained(optim.AdamW, {"lr": 0.1})
    with pytest.warns(UserWarning, match="fused=True") as warned:
        fused, _, values = _trained(optim.AdamW, {"lr": 0.1, "fused": True, "foreach": False})
    assert len(warned) == 1 and all(map(torch.equal, values, expected))
    assert [(group["fused"], group["foreach"]) for group in fused.param_groups] == [(None, None)]
    fused = optim.SGD([nn.Parameter(torch.ones(2, device="xla"))], lr=0.1, fused=True)
    fused.param_groups[0]["params"][0].grad = torch.ones(2, device="xla")
    scaler = torch.amp.GradScaler("xla", init_scale=2.0)
    scaler.scale(torch.ones((), device="xla"))
    with pytest.raises(RuntimeError, match="without fused=True"):
        scaler.step(fused)


@on_each_rank(1)
def test_a_step_within_a_step(rank):
    """Such as a plan's, which makes the state first, in a hook that comes before or after ours."""
    model = FSDP(nn.Linear(3, 3).to("xla"))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def inner(optimizer, args, kwargs):
        if not seen:
            seen.append(optimizer.param_groups[0]["foreach"])
            optimizer.step()
            seen.append(optimizer.param_groups[0]["foreach"])

    optimizer.register_step_pre_hook(inner)
    model(torch.ones(1, 3, device="xla")).sum().backward()
    optimizer.step()
    assert seen == [True, True] and optimizer.param_groups[0]["foreach"] is None

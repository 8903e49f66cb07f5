"""Optimizers' steps over lists of shards: the values and the program of steps one by one."""

from unittest import mock

import pytest
import torch
import torch_xla
from torch import nn, optim

from xla_fsdp import XlaFullyShardedDataParallel
from xla_fsdp.sharding.optimizer_hook import _CHOSEN

CASES = {
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
    """The program of the last step, and the values after it."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    model = XlaFullyShardedDataParallel(network.to("xla"))
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


def _equal(rank, kind, options):
    lists, program, values = _trained(kind, options)
    single, expected_program, expected = _trained(kind, {**options, "foreach": False})
    assert program.count("\n") == expected_program.count("\n")
    assert all(map(torch.equal, values, expected))
    # The choice that a saved state shows is the user's.
    assert [group["foreach"] for group in lists.param_groups] == [None]
    assert [group["foreach"] for group in single.param_groups] == [False]


@pytest.mark.parametrize("case", CASES)
def test_the_same_bit_for_bit(run_ranks, case):
    run_ranks(_equal, 2, *CASES[case])


def _taken(rank):
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


def test_only_where_it_may(run_ranks):
    run_ranks(_taken, 1)


def _nested(rank):
    model = XlaFullyShardedDataParallel(nn.Linear(3, 3).to("xla"))
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


def test_a_step_within_a_step(run_ranks):
    """Such as a plan's, which makes the state first, in a hook that comes before or after ours."""
    run_ranks(_nested, 1)

"""Optimizer steps: one program for the first ones; over lists, the values of steps one by one."""

from unittest import mock

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank, raises
from torch import nn, optim

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.sharding.optimizer_hook import _CHOSEN

OPTIMIZERS = {
    "SGD": (optim.SGD, dict(lr=0.1)),
    "nesterov": (optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)),
    # The first momentum is the gradient, undampened: another program.
    "dampening": (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.3, maximize=True)),
    "Adam": (optim.Adam, dict(lr=0.01, weight_decay=0.1, amsgrad=True)),
    "AdamW": (optim.AdamW, dict(lr=0.01, maximize=True)),
    "AdamW, capturable": (optim.AdamW, dict(lr=0.01, capturable=True)),
    "NAdam": (optim.NAdam, dict(lr=0.01)),
    "RMSprop": (optim.RMSprop, dict(lr=0.01, momentum=0.9, centered=True, weight_decay=0.1)),
    "Adagrad": (optim.Adagrad, dict(lr=0.01, initial_accumulator_value=0.5)),
    "Adadelta": (optim.Adadelta, dict(lr=0.1, weight_decay=0.1)),
    "Adamax": (optim.Adamax, dict(lr=0.1, weight_decay=0.1)),
}
# Whose state is made in the first step in a way of their own, or by constants.
MAKES_STATE = OPTIMIZERS.keys() - {"Adadelta", "Adamax"}
HAS_LISTS = OPTIMIZERS.keys() - {"AdamW, capturable", "NAdam", "Adagrad"}


def trained(kind, options, wrap=FSDP, device="xla", steps=3):
    """The optimizer, weights, programs compiled in each step, and the text of the last update."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False)))
    optimizer = kind(model.parameters(), **options)
    programs, text = [sum(xla_fsdp.compilation_counts())], ""
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 5), 0.1 * (step + 1)).to(device)).square().sum().backward()
        optimizer.step()
        if device == "xla":
            text = torch_xla._XLAC._get_xla_tensors_hlo(list(model.parameters()))
            torch_xla.sync()
        programs.append(sum(xla_fsdp.compilation_counts()))
    assert optimizer.__dict__.get(_CHOSEN, []) == []
    compiled = [b - a for a, b in zip(programs, programs[1:], strict=False)]
    return optimizer, [p.detach().cpu() for p in model.parameters()], compiled, text


@pytest.mark.parametrize("name", sorted(MAKES_STATE))
@on_each_rank(1)
def test_one_program_for_all_steps(rank, name):
    kind, options = OPTIMIZERS[name]
    optimizer, weights, programs, _ = trained(kind, options)
    assert programs[1:] == [int(name == "dampening"), 0]
    options = options | {"capturable": False} if "capturable" in options else options
    plain, plain_weights, *_ = trained(kind, options, lambda model: model, "cpu")
    states, plain_states = (one.state_dict()["state"].values() for one in (optimizer, plain))
    assert [values.keys() for values in states] == [values.keys() for values in plain_states]
    mine = weights + [value for values in states for value in values.values()]
    theirs = plain_weights + [value for values in plain_states for value in values.values()]
    for sharded, value in zip(
        map(torch.as_tensor, mine), map(torch.as_tensor, theirs), strict=True
    ):
        # A shard is flat and has padding at its end.
        found = sharded.detach().cpu().flatten()[: value.numel()]
        torch.testing.assert_close(found, value.detach().flatten(), rtol=1e-4, atol=1e-6)


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


@pytest.mark.parametrize("name", sorted(HAS_LISTS))
@on_each_rank(2)
def test_over_lists_the_same_bit_for_bit(rank, name):
    kind, options = OPTIMIZERS[name]
    lists, values, _, text = trained(kind, options)
    single, expected, _, expected_text = trained(kind, {**options, "foreach": False})
    assert text.count("\n") == expected_text.count("\n")
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
            trained(optim.SGD, {"lr": 0.1, **options}, steps=1)
            calls.append(add.called)
    assert calls == [True, False, False]

    _, expected, *_ = trained(optim.AdamW, {"lr": 0.1})
    with pytest.warns(UserWarning, match="fused=True") as warned:
        fused, values, *_ = trained(optim.AdamW, {"lr": 0.1, "fused": True, "foreach": False})
    assert len(warned) == 1 and all(map(torch.equal, values, expected))
    assert [(group["fused"], group["foreach"]) for group in fused.param_groups] == [(None, None)]
    fused = optim.SGD([nn.Parameter(torch.ones(2, device="xla"))], lr=0.1, fused=True)
    fused.param_groups[0]["params"][0].grad = torch.ones(2, device="xla")
    scaler = torch.amp.GradScaler("xla", init_scale=2.0)
    scaler.scale(torch.ones((), device="xla"))
    raises(RuntimeError, "without fused=True", scaler.step, fused)


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


class Around(optim.Optimizer):
    """As many libraries write an optimizer around another one: without torch's constructor."""

    def __init__(self, inner):
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, inner.state
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self._patch_step_function()

    def step(self):
        self.inner.step()


class MakesMasks(optim.SGD):
    def __init__(self, params, **options):
        super().__init__(params, **options)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["mask"] = torch.zeros(parameter.shape, dtype=torch.bool)


@on_each_rank(2)
def test_optimizers_of_other_libraries(rank):
    around, values, *_ = trained(lambda p, **options: Around(optim.AdamW(p, **options)), {})
    _, expected, *_ = trained(optim.AdamW, {})
    assert all(map(torch.equal, values, expected))
    saved = around.inner.state_dict()["state"].values()
    assert all(type(value) is torch.Tensor for state in saved for value in state.values())
    message = r"MakesMasks has state of the shape of the full parameter '0.weight', \[7, 5\]"
    raises(RuntimeError, message, trained, MakesMasks, {"lr": 0.1})
    no_shard = {"sharding_strategy": xla_fsdp.ShardingStrategy.NO_SHARD}
    trained(MakesMasks, {"lr": 0.1}, lambda model: FSDP(model, **no_shard))

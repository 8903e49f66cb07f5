"""Parameters in bfloat16: float32 masters, and rounding at random."""

import copy
import functools
import pickle

import pytest
import test_optim
import torch
from on_ranks import raises, slow
from test_optim import Block, Model, Saved, gradients, put_plain_gradients, weights
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.optim import Adafactor, AdamW8bit, MasterWeights, StochasticRounding, stochastic
from xla_fsdp.planning.tracing.step import trace_step
from xla_fsdp.tpu.topology import resolve

ADAMW = {"lr": 0.003, "betas": (0.8, 0.9), "weight_decay": 0.1}
STEPS = 4
MAKES = {
    "master": lambda p: MasterWeights(p, torch.optim.AdamW, **ADAMW),
    "factors": lambda p: MasterWeights(p, Adafactor, lr=0.01),
    "bytes": lambda p: MasterWeights(p, AdamW8bit, lr=0.003, min_8bit_size=0),
    "random": lambda p: StochasticRounding(p, torch.optim.AdamW, seed=5, **ADAMW),
}


def plain(block=Block) -> nn.Module:
    torch.manual_seed(0)
    model = Model(block).bfloat16()
    model.first.float()  # one that is not narrow
    return model


def train(model, optimizer, first: int, last: int) -> None:
    for t in range(first, last + 1):
        put_plain_gradients(model, gradients(plain(), t))
        optimizer.step()


@functools.cache
def unsharded(way: str) -> dict[str, torch.Tensor]:
    model = plain()
    train(model, MAKES[way](model.parameters()), 1, STEPS)
    return weights(model)


def assert_alike(found, expected) -> None:
    """Equal but for few elements that a last digit of float32 rounds another way."""
    assert found.keys() == expected.keys()
    values = [(found[name].float(), value.float()) for name, value in expected.items()]
    for one, other in values:
        torch.testing.assert_close(one, other, rtol=1 / 64, atol=1e-6)
    ours, theirs = (torch.cat([pair[i].reshape(-1) for pair in values]) for i in range(2))
    assert (ours != theirs).float().mean() < 0.02


def test_masters_are_what_a_float32_model_would_be():
    model = plain()
    optimizer = MAKES["master"](model.parameters())
    train(model, optimizer, 1, STEPS)
    wide = plain().float()
    reference = torch.optim.AdamW(wide.parameters(), **ADAMW)
    train(wide, reference, 1, STEPS)
    for name, parameter in model.named_parameters():
        value = wide.get_parameter(name)
        assert torch.equal(parameter, value.to(parameter.dtype))
        state = optimizer.state.get(parameter, {})
        if "master" in state:
            assert torch.equal(state["master"], value) and state["exp_avg"].dtype is torch.float32
        else:
            assert name.startswith("first.") or not parameter.requires_grad
    optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, 1, 1)
    assert all(map(torch.equal, before, model.parameters()))


def test_masters_follow_who_else_changes_a_parameter():
    parameter = nn.Parameter(torch.ones(4).bfloat16())
    optimizer = MasterWeights([parameter], torch.optim.SGD, lr=1.0)
    parameter.grad = torch.full((4,), 2.0**-12).bfloat16()
    optimizer.step()  # too small a step for bfloat16
    assert torch.equal(parameter, torch.ones(4).bfloat16())
    with torch.no_grad():
        parameter[0] = 3.0
    optimizer.step()
    expected = torch.tensor([3.0, 1 - 2.0**-12, 1 - 2.0**-12, 1 - 2.0**-12]) - 2.0**-12
    assert torch.equal(optimizer.state[parameter]["master"], expected)
    # As does a state dict, in full.
    other = nn.Parameter(parameter.detach().clone())
    again = MasterWeights([other], torch.optim.SGD, lr=1.0)
    again.load_state_dict(optimizer.state_dict())
    other.grad = parameter.grad
    again.step()
    assert torch.equal(again.state[other]["master"], expected - 2.0**-12)


@pytest.mark.parametrize(
    "way, here, there",
    [
        ("master", ["flat"], []),
        slow("master", ["nested"], [("nested", "scan")]),
        slow("random", ["nested"], [("nested", "dim0")]),
        slow("factors", ["nested"], [("nested", "flat")]),
    ],
)
def test_on_shards_and_on_other_ranks(run_ranks, tmp_path, way, here, there):
    given = way, Saved(MAKES[way], build=plain, alike=assert_alike), unsharded(way)
    run_ranks(test_optim.save_and_go_on, 2, str(tmp_path), here, *given)
    if there:
        run_ranks(test_optim.on_other_ranks, 4, str(tmp_path), there, *given)


def test_rounding_is_unbiased_and_exact_where_it_can_be():
    count = 1 << 16
    at = torch.arange(count, dtype=torch.int32)
    for number, share in enumerate((0.0, 0.1, 0.5, 0.9)):
        for low, width in ((1.0, 2.0**-7), (-3.0, -(2.0**-6)), (2.0**-20, 2.0**-27)):
            value = torch.full((count,), low + share * width)
            bits = stochastic.random_bits(at, torch.tensor(100 + number, dtype=torch.int32))
            found = stochastic.rounded(value, bits).float()
            ups = (found == low + width).float().mean().item()
            assert ((found == low) | (found == low + width)).all()
            # Four standard deviations; the bits are always the same.
            assert abs(ups - share) <= 4 * (share * (1 - share) / count) ** 0.5 + 2**-15
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    found = stochastic.rounded(special, torch.full((4,), -1, dtype=torch.int32))
    assert torch.equal(found[:2].float(), special[:2]) and found[2].isnan() and found[3] == 0
    # Bits differ between steps, elements and seeds, and each is set half of the time.
    bits = stochastic.random_bits(at, torch.tensor(7, dtype=torch.int32))
    other = stochastic.random_bits(at, torch.tensor(8, dtype=torch.int32))
    for one in (bits, bits ^ other, bits ^ bits.roll(1)):
        for place in range(16):
            share = (torch.bitwise_right_shift(one, place) & 1).float().mean().item()
            assert abs(share - 0.5) < 4 * 0.5 / count**0.5


def test_small_steps_add_up():
    parameter = nn.Parameter(torch.ones(1 << 12).bfloat16())
    optimizer = StochasticRounding([parameter], torch.optim.SGD, seed=1, lr=1.0)
    for _ in range(64):
        parameter.grad = torch.full_like(parameter, 2.0**-12)
        optimizer.step()
    # 64 steps of 2**-12 are two of bfloat16's below 1, of which rounding loses every one.
    assert abs(parameter.float().mean().item() - (1 - 2.0**-6)) < 2.0**-11


@pytest.mark.parametrize("way", ["master", "factors", "bytes", "random"])
def test_copies_step_like_the_original(way):
    model = plain()
    optimizer = MAKES[way](model.parameters())
    train(model, optimizer, 1, 2)
    twins = [copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))]
    train(model, optimizer, 3, 4)
    for twin, own in twins:
        own.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"]
        train(twin, own, 3, 4)
        torch.testing.assert_close(twin.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_what_is_refused():
    half = nn.Parameter(torch.zeros(2).half())
    narrow = nn.Parameter(torch.zeros(2).bfloat16())
    raises(TypeError, "bfloat16, but .* is float16", StochasticRounding, [half], torch.optim.SGD)
    raises(ValueError, "seed must be >= 0", StochasticRounding, [narrow], torch.optim.SGD, seed=-1)
    with pytest.raises(TypeError, match="seed must be an int, got 1.5"):
        StochasticRounding([narrow], torch.optim.SGD, seed=1.5)
    for wrong in (3, MasterWeights):
        raises(TypeError, "optimizer_class must be the class", MasterWeights, [narrow], wrong)
    raises(TypeError, "optimizer_class must make", MasterWeights, [narrow], lambda groups: 3)
    one = MasterWeights([narrow], torch.optim.SGD, lr=1.0)
    other = MasterWeights([narrow], AdamW8bit)
    narrow.grad = torch.ones_like(narrow)
    one.step()
    other.load_state_dict(one.state_dict())
    raises(RuntimeError, "optimizer='SGD', but it was made with 'AdamW8bit'", other.step)


def traced(way):
    """A rank's step, as a plan sees it: nothing may be fetched from the device."""

    def step():
        model = FSDP(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16())
        optimizer = MAKES[way](model.parameters())
        loss = model(torch.zeros(8, 64, dtype=torch.bfloat16).to("xla")).float().sum()
        loss.backward()
        optimizer.step()
        return loss

    found = [trace_step(step, rank, 4, resolve("v5litepod-4")).program for rank in (0, 3)]
    assert found[0].fingerprint == found[1].fingerprint
    return set(found[0].arguments)


@pytest.mark.parametrize("way", ["master", "random"])
def test_a_plan_knows_the_state(elsewhere, way):
    names = elsewhere(traced, way)
    assert ("master of 0.weight" in names) is (way == "master")
    assert "exp_avg of 0.weight" in names

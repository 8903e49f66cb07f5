"""The learning rates of the examples."""

from functools import partial

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR


def rates_of(factor, steps):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    scheduler = LambdaLR(optimizer, factor)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found, optimizer.param_groups[0]["lr"]


def test_steps_down_as_published(common):
    factor = partial(common.schedules.steps_down, warmup=5 * 10, every=30 * 10, divisor=10)
    rates, _ = rates_of(factor, 1000)
    assert rates[0] == pytest.approx(0.4 / 50) and rates[24] == pytest.approx(0.2)
    for epoch, rate in ((5, 0.4), (29, 0.4), (30, 0.04), (60, 0.004), (99, 0.0004)):
        assert rates[epoch * 10] == pytest.approx(rate)


@pytest.mark.parametrize("warmup, divisor", [(1, 1e200), (1e6, 1e308)])
def test_the_rate_is_never_nought_nor_too_small_to_compute(common, warmup, divisor):
    warmup = round(2 * warmup)
    factor = partial(common.schedules.steps_down, warmup=warmup, every=2, divisor=divisor)
    rates, _ = rates_of(factor, 10)
    assert all(0 < rate < 1e-29 for rate in rates[2:])


def test_half_a_cosine_to_nought(common):
    rates, after = rates_of(partial(common.schedules.half_cosine, warmup=10, total=110), 110)
    assert rates[9] == rates[10] == pytest.approx(0.4) and rates[60] == pytest.approx(0.2)
    assert min(rates) > 0 and after == pytest.approx(0, abs=1e-12)


def test_the_decay_is_that_of_fairseq(common):
    factor = partial(common.schedules.polynomial, warmup=5, total=25, end=0.1)
    linear = [factor(step, power=1.0) for step in (0, 4, 5, 15, 25, 99)]
    assert linear == pytest.approx([0.2, 1.0, 1.0, 0.55, 0.1, 0.1])
    assert factor(15, power=2.0) == pytest.approx(0.1 + 0.9 / 4)


@pytest.mark.parametrize("kind", ["step", "cosine"])
def test_goes_on_by_epochs_and_as_the_flags_say_now(common, kind):
    """Epochs of 20 steps, and after the second, on half the ranks, of 40; another rate."""

    def factor(steps):
        if kind == "step":
            down = common.schedules.steps_down
            return partial(down, warmup=steps, every=2 * steps, divisor=10)
        return partial(common.schedules.half_cosine, warmup=steps, total=5 * steps)

    def optimizer(lr, momentum):
        parameter = torch.nn.Parameter(torch.zeros(1))
        return torch.optim.SGD([parameter], lr=lr, momentum=momentum)

    before = optimizer(0.4, 0.9)
    schedule = LambdaLR(before, factor(20))
    for _ in range(2 * 20):
        before.step()
        schedule.step()
    after = optimizer(0.1, 0.8)
    then = LambdaLR(after, factor(40))
    given = common.schedules.settings(after)
    after.load_state_dict(before.state_dict())
    then.load_state_dict(schedule.state_dict())
    common.schedules.resume(after, then, given, 2 * 40)
    found = []
    for _ in range(3 * 40):
        found.append(after.param_groups[0]["lr"])
        after.step()
        then.step()
    whole, _ = rates_of(factor(40), 5 * 40)
    assert found == pytest.approx([rate / 4 for rate in whole[2 * 40 :]])
    assert after.param_groups[0]["momentum"] == 0.8

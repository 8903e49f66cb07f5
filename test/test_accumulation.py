"""Several backwards before a step, each reduced or stored by no_sync: as one batch in torch."""

import collections
import contextlib
import copy

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from on_ranks import on_each_rank, raises, without_ranks
from small_models import mean_square, whole, without_sync, wrapped
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import fully_shard, plan

WIDTH, DEPTH = 512, 3


def planned(hold: bool):
    """What a rank sends and needs in a micro-batch that is a program of its own, not the first."""

    def step():
        layers = (FSDP(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(DEPTH))
        model = FSDP(nn.Sequential(*layers))
        other = nn.Parameter(torch.zeros(1).to("xla"))
        x = torch.randn(64, WIDTH).to("xla")
        for number in range(2):
            with model.no_sync() if hold else contextlib.nullcontext():
                model(x).tanh().square().mean().backward()
            if number == 0:
                torch_xla.sync()
        other.grad = torch.ones(1).to("xla")
        optimizer = torch.optim.SGD([other], lr=0.1)
        optimizer.step()  # ends a plan
        return model, optimizer

    report = plan(step, "v5e:2x4", cache=False, progress=False, ranks=[0])
    sent = collections.Counter()
    for one in report.schedule.collectives:
        sent[one.asked or one.kind] += one.wire_bytes * one.times
    return report.memory, sent


@pytest.mark.slow
@without_ranks
def test_bytes_and_memory_of_both_ways():
    gradient = DEPTH * WIDTH * WIDTH * 4
    reduction = gradient * 7 // 8
    (each, sent_each), (held, sent_held) = planned(False), planned(True)
    assert sent_each["all-gather"] == sent_held["all-gather"] > 0
    assert sent_each["reduce-scatter"] == reduction and not sent_held["reduce-scatter"]
    # Held: gradients in full instead of shards, written where they were read, and only once.
    assert held.arguments - each.arguments == held.aliased - each.aliased == reduction
    assert held.outputs - held.aliased < 4096
    assert gradient <= held.peak - each.peak + gradient // 8 < 1.5 * gradient


@on_each_rank(2)
def test_gradients_that_are_asked_for_by_name(rank):
    """Weights so large that every rank has elements of them."""
    torch.manual_seed(2)
    middle = nn.Sequential(nn.Linear(24, 24), nn.Tanh())
    plain = nn.Sequential(nn.Linear(24, 24), middle, nn.Linear(24, 3))

    def rows(rank, number):
        return torch.randn(2, 24, generator=torch.Generator().manual_seed(100 * number + rank))

    def asked_for(one, ranks, device, no_sync):
        names = dict(one.named_parameters())

        def loss(number):
            return one(torch.cat([rows(r, number) for r in ranks]).to(device)).square().mean()

        with no_sync():
            loss(0).backward(inputs=[names["0.weight"], names["1.0.weight"]])
            inside = torch.autograd.grad(loss(1), [names["2.bias"], names["0.weight"]])
        outside = torch.autograd.grad(loss(2), [names["0.weight"]])
        loss(3).backward(inputs=[names["0.bias"]])
        kept = {name: p.grad for name, p in names.items() if p.grad is not None}
        assert list(kept) == ["0.weight", "0.bias", "1.0.weight"]
        zeros = {name: torch.zeros_like(p) for name, p in names.items()}
        handed = {"2.bias": inside[0], "0.weight": inside[1]}, {"0.weight": outside[0]}
        return [zeros | given for given in (kept, *handed)]

    model = wrapped(copy.deepcopy(plain), "1")
    ours = asked_for(model, [rank], "xla", model.no_sync)
    theirs = asked_for(plain, range(xr.world_size()), "cpu", contextlib.nullcontext)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(whole(model, mine), expected, rtol=1e-4, atol=1e-6)


X = torch.ones(4, 6)


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 6)


def backward_without_sync(model):
    with without_sync(model):
        mean_square(model, X.to("xla")).backward()


def norm_of_gradients(model):
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize("wrap", [FSDP, fully_shard])
@on_each_rank(2)
def test_gradients_that_are_not_reduced_cannot_be_used(rank, wrap):
    model = wrap(linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("xla", init_scale=4.0)
    scaler.scale(torch.ones((), device="xla"))
    backward_without_sync(model)
    shards = list(model.parameters())
    grad = shards[0].grad
    assert (grad.shape, grad.dtype, grad.device.type) == ((6, 6), torch.float32, "xla")
    assert "UnreducedGradient('weight'" in repr(grad)
    for use in (
        lambda: nn.utils.get_total_norm([p.grad for p in shards]),
        lambda: nn.utils.clip_grad_norm_(shards, 1.0),
        lambda: nn.utils.clip_grad_value_(shards, 0.001),
        lambda: model.clip_grad_norm_(1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: grad.abs().max(),
        lambda: grad + shards[0],
        optimizer.step,
    ):
        text = "'weight' are stored by no_sync and not reduced.* Run the last backward before"
        raises(RuntimeError, text, use)
    other = wrap(linear())
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    mean_square(model, X.to("xla")).backward()
    plain = linear()
    (plain(X).square().mean() * 2).backward()
    assert norm_of_gradients(model) == pytest.approx(norm_of_gradients(plain))
    optimizer.step()


DROPS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "deleted": lambda model, optimizer: [delattr(p, "grad") for p in model.parameters()],
    "foreach": lambda model, optimizer: torch._foreach_zero_([p.grad for p in model.parameters()]),
}


@pytest.mark.parametrize("wrap", [FSDP, fully_shard])
@on_each_rank(1)
def test_stored_gradients_are_dropped_as_in_torch(rank, wrap):
    plain = linear()
    plain(X).square().mean().backward()
    for name, drop in DROPS.items():
        model = wrap(linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward_without_sync(model)
        drop(model, optimizer)
        mean_square(model, X.to("xla")).backward()
        assert norm_of_gradients(model) == pytest.approx(norm_of_gradients(plain)), name

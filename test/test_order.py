"""The order of gathers and reductions: what is held for it, and that values do not depend on it."""

import copy
import re
from unittest import mock

import pytest
import torch
from lazy_modules import torch_xla
from on_ranks import on_each_rank
from small_models import Computes, assert_same_backward, here, mlp, trace_as_on_tpu, wrapped
from torch import nn

from xla_fsdp import BackwardPrefetch, checkpoint_module
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.collectives.order import Order
from xla_fsdp.collectives.routes import attributes_of
from xla_fsdp.collectives.world import World
from xla_fsdp.tpu.topology import resolve

PREFETCH = [
    {"forward_prefetch": forward, "backward_prefetch": backward, "limit_all_gathers": limit}
    for forward, backward, limit in (
        (True, BackwardPrefetch.BACKWARD_PRE, True),
        (False, BackwardPrefetch.BACKWARD_POST, True),
        (True, None, True),
        (False, None, False),
        (True, BackwardPrefetch.BACKWARD_PRE, False),
    )
]


def deep():
    torch.manual_seed(5)
    return nn.Sequential(*[nn.Sequential(mlp(), nn.Linear(3, 6)) for _ in range(3)])


def nothing_held(model):
    order = model._unit.order
    return order._on_host is None and not any(sum(order._events.values(), []))


@pytest.mark.parametrize("checkpoint", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", PREFETCH, ids=range(len(PREFETCH)))
@on_each_rank(2)
def test_gradients_are_the_same_in_every_order(rank, options, checkpoint):
    trace_as_on_tpu()
    plain, model = deep(), deep()
    for index in range(3):
        inner = checkpoint_module(model[index]) if checkpoint else model[index]
        model[index] = FSDP(inner, **options)
    model = FSDP(model, **options)
    for step in range(2):
        for one in (model, plain):
            one.zero_grad()
        assert_same_backward(model, plain, rank, step=step)
        assert nothing_held(model)


@on_each_rank(1)
def test_nothing_is_held_after_a_step(rank):
    trace_as_on_tpu()

    def hides(self, x):
        class Output:
            value = self.inner(x)

        return Output

    x = here(rank)
    opaque = wrapped(Computes(hides, inner=nn.Linear(6, 6)))
    opaque(x).value.sum().backward()
    assert nothing_held(opaque)

    first, second = nn.Linear(6, 6), nn.Linear(6, 6)
    parts = Computes(lambda self, x: self.second(self.first(x)), first=first, second=second)
    model = wrapped(parts, "first")
    model(x)
    assert nothing_held(model)
    model.first(x)  # a part of the model by itself
    assert nothing_held(model)
    torch_xla.sync()
    clone = copy.deepcopy(model)
    assert clone._unit.order is not model._unit.order
    assert clone._unit.order is clone.first._unit.order
    with model.no_sync():
        model(x).sum().backward()
    model(x, *()).mul(0).sum().backward()
    assert nothing_held(model)


@on_each_rank(1)
def test_what_waits_keeps_its_values(rank):
    """Whatever a gathered parameter begins with, the next is what it was."""
    for first in (1.0, -0.0, float("inf"), -float("inf"), float("nan")):
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
            order = Order()
            shard = torch.tensor([-0.0, 1.0, 5.0], dtype=dtype).to("xla")
            assert order.delay(shard) is shard
            order.add_gather(torch.full((4, 2), first).to("xla"))
            waited = order.delay(shard).cpu()
            assert waited.dtype == dtype and torch.equal(waited, shard.cpu())
            assert torch.equal(torch.signbit(waited), torch.signbit(shard.cpu()))


@on_each_rank(2)
def test_float16_gradients_are_divided_before_they_are_summed(rank):
    """Sums that float16 cannot hold; their mean it can."""
    layer = nn.Linear(1, 1, bias=False)
    model = wrapped(nn.Sequential(layer), compute_dtype=torch.float16)
    model(torch.full((1, 1), 40000.0).to(torch_xla.device())).sum().backward()
    grad = next(model.parameters()).grad.to_local().cpu()[0]
    assert rank != 0 or abs(grad - 40000) < 50


@on_each_rank(1)
def test_one_process_that_sees_a_slice(rank):
    """Nobody launched ranks: a whole slice is there, but the process is alone."""
    kind, devices = resolve("v5litepod-8").chip.device_kind, attributes_of(resolve("v5litepod-8"))
    with (
        mock.patch("torch_xla.runtime.global_runtime_device_attributes", lambda: devices),
        mock.patch("torch_xla.core.xla_model.xla_device_kind", lambda device: kind),
    ):
        world = World.current()
    assert world.size == 1 and world.routes is None
    shard = torch.ones(4, 128).to(world.device)
    assert world.all_gather(shard).shape == world.reduce_scatter(shard).shape == (4, 128)


@on_each_rank(2)
def test_shards_wait_before_they_are_cast(rank):
    """Cast first, the narrow shards of the forward are kept for the backward."""
    trace_as_on_tpu()
    model = wrapped(mlp(), "1", compute_dtype=torch.bfloat16)
    torch_xla.sync()
    model(here(rank)).sum().backward()
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([p.grad for p in model.parameters()])
    # Types of what waits for the gather before.
    types = re.findall(r"= (\w+)\[[\d,]+\]\S* select\(", hlo)
    assert types and set(types) == {"f32"}

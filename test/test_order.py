"""Gathers and reductions: their order, on which no value depends, and what travels in each."""

import collections
import copy
import re
from unittest import mock

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank, slow
from small_models import Computes, assert_same_backward, here, hybrid, mlp, trace_as_on_tpu, wrapped
from torch import nn

from xla_fsdp import BackwardPrefetch, checkpoint_module
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.collectives.order import Order
from xla_fsdp.collectives.routes import attributes_of
from xla_fsdp.collectives.world import World
from xla_fsdp.comm_hooks import bf16_compress_hook
from xla_fsdp.tpu.topology import resolve

PREFETCH = [
    {"forward_prefetch": False, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
    {"backward_prefetch": None, "limit_all_gathers": False},
]


def deep():
    torch.manual_seed(5)
    return nn.Sequential(*[nn.Sequential(mlp(), nn.Linear(3, 6)) for _ in range(3)])


def nothing_held(model):
    order = model._unit.order
    return order._on_host is None and not any(sum(order._events.values(), []))


@pytest.mark.parametrize("checkpoint", [False, slow(True)])
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
    model = wrapped(nn.Sequential(nn.Linear(1, 1, bias=False)), compute_dtype=torch.float16)
    model(torch.full((1, 1), 40000.0).to("xla")).sum().backward()
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
    types = re.findall(r"= (\w+)\[[\d,]+\]\S* select\(", hlo)
    assert types and set(types) == {"f32"}


COLLECTIVE = re.compile(
    r"= (\w+)\[([\d,]*)\][^=]* (all-gather|reduce-scatter|all-reduce|all-to-all)\("
)


def collectives_of(model, loss):
    """Dtype, shape and kind of each in the program of a backward that is not computed yet."""
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss.detach(), *grads])
    torch_xla.sync()
    return COLLECTIVE.findall(hlo)


def program(rank, options, frozen, hook):
    """Collectives of one forward and backward as (kind, dtype), and the elements they return."""
    trace_as_on_tpu()
    plain = mlp()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name not in frozen)
    replicas = hybrid(rank) if hook == ["replicas"] else {}
    model = wrapped(plain, "1", **options, **replicas)
    if hook:
        model.register_comm_hook(None, bf16_compress_hook, *hook)
    torch_xla.sync()
    loss = model(here(rank)).float().square().mean()
    found = collections.Counter()
    for dtype, shape, kind in collectives_of(model, loss):
        found[kind, dtype] += 1
        found[kind, "elements"] += torch.Size(int(d) for d in shape.split(",") if d).numel()
    return found


# The root has two linear layers, the inner unit one: four and two parameters, all of them small.
INNER, ROOT = 2, 4
FROZEN = ["0.weight", "1.0.weight", "1.0.bias"]
KEPT = {"reshard_after_forward": False}
GATHERS, REDUCTIONS = ("all-gather", "f32"), ("reduce-scatter", "f32")
# Each parameter is padded to 128 elements a rank, of 4 ranks.
GATHERED, REDUCED = ("all-gather", "elements"), ("reduce-scatter", "elements")
ALL_REDUCED = {REDUCTIONS: 2, REDUCED: 128 * (ROOT + INNER)}


BF16, ROWS = {"compute_dtype": torch.bfloat16}, {"shard_param_on_dim_0": True}
WIDE = {"compute_dtype": torch.float16, "fp32_reduce_scatter": True}
NARROW_REDUCTIONS = ("reduce-scatter", "bf16")


@pytest.mark.parametrize(
    "options, frozen, hook, expected",
    [
        ({}, [], None, {GATHERS: 3, GATHERED: 512 * (ROOT + 2 * INNER)} | ALL_REDUCED),
        # The root keeps its parameters in any case, its backward follows at once.
        (KEPT, [], None, {GATHERS: 2, GATHERED: 512 * (ROOT + INNER)} | ALL_REDUCED),
        ({"flatten_parameters": True}, [], None, {GATHERS: 3, REDUCTIONS: 2}),
        ({}, FROZEN, None, {GATHERS: 3, REDUCTIONS: 1, REDUCED: 128 * (ROOT + INNER - 3)}),
        (BF16, [], None, {("all-gather", "bf16"): 3, NARROW_REDUCTIONS: 2}),
        (WIDE | ROWS, [], None, {("all-gather", "f16"): 3, REDUCTIONS: 2}),
        ({}, [], ["all"], {GATHERS: 3, NARROW_REDUCTIONS: 2}),
        # The sum over replicas is an all-gather and a sum here.
        ({}, [], ["replicas"], {GATHERS: 3, REDUCTIONS: 2, ("all-gather", "bf16"): 2}),
    ],
    ids="resharded kept flat frozen bf16 f16-wide-reductions hook hook-over-replicas".split(),
)
def test_gathers_and_reductions_are_counted_out(run_ranks, options, frozen, hook, expected):
    for found in run_ranks(program, 4, options, frozen, hook):
        assert found | expected == found
        assert found.keys() - {GATHERED, REDUCED} <= expected.keys()


def sizes():
    trace_as_on_tpu()
    model = Computes(
        lambda self, x: self.norm(self.small(self.large(x).relu()).double()).sum(),
        large=nn.Linear(640, 512),  # 1.25 MiB
        small=nn.Linear(512, 8),
        norm=nn.LayerNorm(8, dtype=torch.float64),
    )
    model = FSDP(model)
    return sorted(collectives_of(model, model(torch.randn(3, 640).to("xla"))))


@on_each_rank(2)
def test_large_parameters_travel_alone_and_small_ones_together_by_dtype(rank):
    rows = 320 // 128 + 1 + 4096 // 256  # a rank's biases and its part of the small matrix
    assert sizes() == sorted([
        # In rows as the matrix has them, both ranks' and one rank's.
        ("f32", "512,640", "all-gather"),
        ("f32", "256,640", "reduce-scatter"),
        ("f32", f"{2 * rows},128", "all-gather"),
        ("f32", f"{rows},128", "reduce-scatter"),
        ("f64", "4,128", "all-gather"),
        ("f64", "2,128", "reduce-scatter"),
    ])  # fmt: skip

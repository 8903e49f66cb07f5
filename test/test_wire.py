"""What travels: read off the traced program of a step, not off the Python."""

import collections
import contextlib
import re

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank
from small_models import Computes, here, mlp, trace_as_on_tpu, wrapped
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.sharding.unreduced import UnreducedGradient

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


def program(rank, options, frozen=()):
    """Collectives of one forward and backward as (kind, dtype), and the elements they return."""
    trace_as_on_tpu()
    plain = mlp()
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name not in frozen)
    model = wrapped(plain, "1", **options)
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


@pytest.mark.parametrize(
    "options, frozen, expected",
    [
        ({}, [], {GATHERS: 3, GATHERED: 512 * (ROOT + 2 * INNER)} | ALL_REDUCED),
        # The root keeps its parameters in any case, its backward follows at once.
        (KEPT, [], {GATHERS: 2, GATHERED: 512 * (ROOT + INNER)} | ALL_REDUCED),
        ({"flatten_parameters": True}, [], {GATHERS: 3, REDUCTIONS: 2}),
        ({}, FROZEN, {REDUCTIONS: 1, REDUCED: 128 * (ROOT + INNER - len(FROZEN))}),
    ],
    ids=["resharded", "kept", "flat: one collective a unit", "frozen: not reduced"],
)
def test_gathers_and_reductions_are_counted_out(run_ranks, options, frozen, expected):
    for found in run_ranks(program, 4, options, frozen):
        assert found.keys() == {GATHERS, REDUCTIONS, GATHERED, REDUCED}
        assert found | expected == found


@pytest.mark.parametrize("fp32_reduce_scatter", [False, True])
@pytest.mark.parametrize("compute_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("cut", [{}, {"flatten_parameters": True}, {"shard_param_on_dim_0": True}])
def test_compute_dtype_governs_the_wire(run_ranks, compute_dtype, fp32_reduce_scatter, cut):
    options = {"compute_dtype": compute_dtype, "fp32_reduce_scatter": fp32_reduce_scatter, **cut}
    narrow = {torch.bfloat16: "bf16", torch.float16: "f16"}[compute_dtype]
    reduced = "f32" if fp32_reduce_scatter else narrow
    for found in run_ranks(program, 2, options):
        kinds = {key for key in found if key[1] != "elements"}
        assert kinds == {("all-gather", narrow), ("reduce-scatter", reduced)}


def sizes():
    trace_as_on_tpu()
    model = Computes(
        lambda self, x: self.norm(self.small(self.large(x).relu()).double()).sum(),
        large=nn.Linear(640, 512),  # 1.25 MiB
        small=nn.Linear(512, 8),
        norm=nn.LayerNorm(8, dtype=torch.float64),
    )
    model = FSDP(model)
    loss = model(torch.randn(3, 640).to(torch_xla.device()))
    return sorted(collectives_of(model, loss))


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


@on_each_rank(2)
def test_no_sync_saves_reductions(rank):
    trace_as_on_tpu()
    counts = []
    for hold in (True, False):
        model = wrapped(mlp(), "1")
        torch_xla.sync()
        with model.no_sync() if hold else contextlib.nullcontext():
            model(here(rank)).sum().backward()
        held = [isinstance(p.grad, UnreducedGradient) for p in model.parameters()]
        assert all(one is hold for one in held)
        found = collectives_of(model, model(here(rank)).sum())
        counts.append(sum(kind == "reduce-scatter" for _, _, kind in found))
    assert counts == [2, 4]


@pytest.mark.parametrize("as_on_tpu", [True, False])
@on_each_rank(2)
def test_no_sync_loses_no_gradient_of_a_unit_that_is_left_out(rank, as_on_tpu):
    """The last micro-batch does not use a unit that an earlier one, inside no_sync, did."""
    trace_as_on_tpu(as_on_tpu)
    model = Computes(
        lambda self, x, use_inner: self.outer(self.inner(x) if use_inner else x),
        inner=nn.Linear(6, 6),
        outer=nn.Linear(6, 6),
    )
    model, x = wrapped(model, "inner"), here(rank)
    with model.no_sync():
        model(x, True).sum().backward()
    model(x, False).sum().backward()
    # So small that every value is on the first rank, the other has padding.
    for parameter in model.parameters():
        assert (parameter.grad.to_local().abs().sum().item() > 0) is (rank == 0)

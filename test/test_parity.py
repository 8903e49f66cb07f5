"""Sharded training equals unsharded training: losses, gradients, clipped norms and weights.

The model (``zoo.py``) has shared, frozen, unused, uneven, 0-d, empty and tiny parameters; every
case trains it for some steps on real ranks and once on plain torch; in float64 for five.
"""

import contextlib
import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from covering import covering, pairs_of
from lazy_modules import torch_xla, xr
from on_ranks import only_full, slow
from small_models import of_parameters, trace_as_on_tpu, whole
from torch import nn
from zoo import Block, Zoo, batches, loss_of

from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module
from xla_fsdp.wrap import transformer_auto_wrap_policy

# The first writes the optimizer's state, the second uses it, and in a third nothing would be new:
# what errors come of more steps is seen in `float64`.
STEPS = 2
CLIP = 0.5


@dataclass(frozen=True)
class Case:
    wrapping: str = "nested"  # root, nested, auto, flat, dim0
    checkpoint: bool = False
    accumulation: str = "none"  # none, no_sync, plain
    optimizer: str = "sgd"  # sgd, adamw
    norm_type: float = 2.0
    dtype: torch.dtype = torch.float32  # of the parameters
    compute_dtype: torch.dtype | None = None
    options: tuple[tuple[str, Any], ...] = ()
    steps: int = STEPS
    as_on_tpu: bool = False


def build(case: Case) -> nn.Module:
    torch.manual_seed(3)
    return Zoo().to(case.dtype)


def optimizer_for(case: Case, parameters) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)
    # A large epsilon: where a gradient is all rounding error, Adam would amplify it to a full step.
    # Decay would reach the unused parameters in a flat vector, which unsharded have no gradient.
    decay = 0.0 if case.wrapping == "flat" else 0.1
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=decay)


def fit(case: Case, model: nn.Module, mine, forward, clip) -> dict[str, Any]:
    """Losses and norms by step; by name, gradients of the first step, and weights.

    ``mine(batch)``: this process's part; ``clip()``: the norm.
    """
    optimizer = optimizer_for(case, model.parameters())
    found: dict[str, Any] = {"losses": [], "norms": []}
    for tokens in batches(case.steps):
        losses = []
        parts = tokens.chunk(1 if case.accumulation == "none" else 2)
        for number, part in enumerate(map(mine, parts)):
            hold = case.accumulation == "no_sync" and number == 0
            with model.no_sync() if hold else contextlib.nullcontext():
                loss = loss_of(forward(part), part)
                (loss / len(parts)).backward()
            losses.append(loss.detach())
        # Copies in each step, and fetched after the last: all steps are one program.
        gradients = {name: grad.clone() for name, grad in of_parameters(model).items()}
        found.setdefault("gradients", gradients)
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        if norm.device.type == "xla":
            torch_xla.sync()
        found["losses"].append(sum(loss.item() for loss in losses) / len(losses))
        found["norms"].append(norm.item())
    return {**found, "weights": model.state_dict()}


def unsharded(case: Case, device: str | torch.device = "cpu") -> dict[str, Any]:
    model = build(case).to(device)
    model.tie()
    # torch refuses the maximum of an empty gradient.
    clipped = [p for p in model.parameters() if p.numel()]
    clip = functools.partial(nn.utils.clip_grad_norm_, clipped, CLIP, case.norm_type)

    def forward(tokens):
        if case.compute_dtype is None:
            return model(tokens)
        cast = {name: p.to(case.compute_dtype) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, cast, (tokens,), tie_weights=True)

    return fit(case, model, lambda batch: batch.to(device), forward, clip)


cached = functools.cache(unsharded)


def expected(case: Case) -> dict[str, Any]:
    """Of the one of all cases that train alike unsharded."""
    decay_differs = case.wrapping == "flat" and case.optimizer == "adamw"
    accumulation = "none" if case.accumulation == "none" else "plain"
    like = replace(case, wrapping="flat" if decay_differs else "root", accumulation=accumulation)
    return cached(replace(like, checkpoint=False, options=(), as_on_tpu=False))


def wrap(case: Case, model: nn.Module) -> nn.Module:
    kinds = {"flat": "flatten_parameters", "dim0": "shard_param_on_dim_0"}
    options = dict(case.options, compute_dtype=case.compute_dtype)
    options |= {option: True for name, option in kinds.items() if name == case.wrapping}
    fsdp = functools.partial(XlaFullyShardedDataParallel, **options)
    recomputed = checkpoint_module if case.checkpoint else lambda module: module
    if case.wrapping == "root":
        for block in model.blocks:
            recomputed(block)
        return fsdp(model)
    if case.wrapping == "auto":
        classes = {Block, nn.Embedding}
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)

        def wrapper(module, *args, **kwargs):
            return XlaFullyShardedDataParallel(recomputed(module), *args, **kwargs)

        return fsdp(model, auto_wrap_policy=policy, auto_wrapper_callable=wrapper)
    for number, block in enumerate(model.blocks):
        model.blocks[number] = fsdp(recomputed(block))
    return fsdp(model)


def on_rank(rank: int, case: Case) -> dict[str, Any]:
    trace_as_on_tpu(case.as_on_tpu)
    model = wrap(case, build(case))

    def mine(batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(xr.world_size())[rank].to("xla")

    clip = functools.partial(model.clip_grad_norm_, CLIP, case.norm_type)
    found = fit(case, model, mine, model, clip)
    return found | {kind: whole(model, found[kind]) for kind in ("gradients", "weights")}


def assert_equal(ranks: list[dict[str, Any]], reference: dict[str, Any], **tolerance) -> None:
    close = functools.partial(torch.testing.assert_close, **tolerance)
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
    losses = zip(*(rank["losses"] for rank in ranks), strict=True)
    found = ranks[0] | {"losses": [sum(step) / len(ranks) for step in losses]}
    for kind, value in reference.items():
        close(found[kind], value, msg=lambda text, kind=kind: f"{kind}: {text}")


WRAPPINGS = ["root", "nested", "auto", "flat", "dim0"]
ACCUMULATIONS = ["none", "no_sync", "plain"]
PRODUCT = list(itertools.product(WRAPPINGS, [True, False], [False, True], ACCUMULATIONS))
COVERING = covering(PRODUCT, lambda cell: pairs_of(tuple(enumerate(cell))))
SINGLY = covering(COVERING, lambda cell: set(enumerate(cell)))


def cross() -> list:
    """The product; by default cells that show every setting, and in CI every pair of settings.
    Optimizer, norm, ranks and way of tracing go round."""
    rotation = zip(
        itertools.cycle(["sgd", "adamw"]),
        itertools.cycle([2.0, 1.0, 2.0, math.inf, 2.0]),
        itertools.cycle([2, 3, 2, 4, 3, 2, 1]),  # each rank traces for itself
        itertools.cycle([True, False]),
    )
    cells = [*COVERING, *(cell for cell in PRODUCT if cell not in COVERING)]
    found = []
    for cell, (optimizer, norm, ranks, as_on_tpu) in zip(cells, rotation, strict=False):
        wrapping, reshard, *how = cell
        options = () if reshard else (("reshard_after_forward", False),)
        case = Case(wrapping, *how, optimizer, norm, options=options, as_on_tpu=as_on_tpu)
        name = "-".join(map(str, [*cell, optimizer, norm, as_on_tpu, ranks]))
        marks = pytest.mark.slow if cell in COVERING else pytest.mark.full
        marks = () if cell in SINGLY else marks
        found.append((ranks, pytest.param(case, ranks, marks=marks, id=name)))
    # By ranks, else processes of ranks would be started over and over.
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


@pytest.fixture
def check(run_ranks):
    def run(case: Case, ranks: int, rtol: float, atol: float) -> None:
        assert_equal(run_ranks(on_rank, ranks, case), expected(case), rtol=rtol, atol=atol)

    return run


@pytest.mark.parametrize("case, ranks", cross())
def test_float32(check, case, ranks):
    check(case, ranks, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "wrapping",
    [
        "nested",
        *(slow(wrapping) for wrapping in ("flat", "dim0")),
        *(only_full(wrapping) for wrapping in ("root", "auto")),
    ],
)
def test_float64_to_the_last_digits(run_ranks, wrapping):
    case = Case(wrapping, True, "no_sync", "adamw", dtype=torch.float64, as_on_tpu=True, steps=5)
    plain = replace(case, accumulation="plain")
    # On an XLA device, whose own way of computing a function is not at issue.
    (reference,) = run_ranks(lambda rank: unsharded(plain, torch_xla.device()), 1)
    assert_equal(run_ranks(on_rank, 3, case), reference, rtol=1e-11, atol=1e-13)


NARROW = list(itertools.product(["nested", "flat", "dim0"], [torch.bfloat16, torch.half], [0, 1]))
# Each dtype, and each way to reduce.
NARROW_SINGLY = covering(covering(NARROW), lambda case: set(case[1:]))


@pytest.mark.parametrize(
    "wrapping, compute_dtype, fp32_reduce_scatter",
    [one if one in NARROW_SINGLY else slow(*one) for one in covering(NARROW)],
)
def test_narrow_compute_dtype(check, wrapping, compute_dtype, fp32_reduce_scatter):
    options = (("fp32_reduce_scatter", bool(fp32_reduce_scatter)),)
    case = Case(wrapping, True, "no_sync", compute_dtype=compute_dtype, options=options)
    # Two ways of rounding to 8 or 11 bits, two steps on.
    tolerance = 0.06 if compute_dtype is torch.bfloat16 else 0.01
    check(case, 4, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters(check, dtype):
    check(Case("nested", False, "none", dtype=dtype, steps=3), 3, rtol=0.1, atol=0.1)


def test_switches_do_not_change_results(check):
    options = {
        "optimization_barrier_in_forward": False,
        "optimization_barrier_in_backward": False,
        "sync_on_finalization": True,
        "disable_reshard_on_root": False,
        "execute_sharding_on_init": False,
        "pin_layout_in_collective_ops": False,
        "reduce_scatter_bucket_size_mb": 8,
        "coalesce_all_gather_ops": True,
    }
    check(Case("nested", True, options=tuple(options.items())), 4, rtol=2e-4, atol=2e-5)

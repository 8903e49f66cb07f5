"""Sharded training equals unsharded training: losses, gradients, clipped norms and weights.

The model (``zoo.py``) has shared, frozen, unused, uneven, 0-d, empty and tiny parameters; every
case trains it for some steps on real ranks and once on plain torch; in float64 for five.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from covering import covering, pairs_of
from lazy_modules import torch_xla, xr
from torch import nn
from zoo import Block, Zoo, batches, loss_of

from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module
from xla_fsdp.consolidate import consolidate_sharded_state_dicts
from xla_fsdp.ranks.rank import current_rank
from xla_fsdp.wrap import transformer_auto_wrap_policy

# The first writes the optimizer's state, the second uses it, and in a third nothing would be new:
# what errors come of more steps is seen in `float64`.
STEPS = 2
CLIP = 0.5


@dataclass(frozen=True)
class Case:
    """One way to train; the defaults are the wrapper's."""

    wrapping: str = "nested"  # root, nested, auto, flat, dim0
    checkpoint: bool = False
    accumulation: str = "none"  # none, no_sync, plain
    optimizer: str = "sgd"  # sgd, adamw
    norm_type: float = 2.0
    dtype: torch.dtype = torch.float32  # of the parameters
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS
    as_on_tpu: bool = False  # traced like there
    one_program: bool = True  # else the first step, which makes the optimizer's state, is another

    @property
    def micro_batches(self) -> int:
        return 1 if self.accumulation == "none" else 2

    def __str__(self) -> str:
        options = [f"{k}={str(v).removeprefix('torch.')}" for k, v in self.options.items()]
        parts = [self.wrapping, "checkpoint" * self.checkpoint, self.accumulation, self.optimizer]
        dtype = str(self.dtype).removeprefix("torch.")
        tpu = "as_on_tpu" * self.as_on_tpu
        return "-".join(part for part in [*parts, dtype, tpu, *options] if part)


@dataclass
class Run:
    """What a training run leaves behind; losses and norms by step, tensors by parameter name."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step
    weights: dict[str, torch.Tensor]


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


def add_state(optimizer: torch.optim.Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        one, other = (torch.zeros_like(p, device="cpu").to(p.device) for _ in range(2))
        optimizer.state[p] = (
            {"momentum_buffer": one}
            if isinstance(optimizer, torch.optim.SGD)
            else {"step": torch.tensor(0.0), "exp_avg": one, "exp_avg_sq": other}
        )


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies, to be fetched after the step: a fetch here would compile a program of its own."""
    return {
        n: p.grad.clone() if p.grad is not None else torch.zeros_like(p)
        for n, p in model.named_parameters(remove_duplicate=False)
    }


def unsharded_case(case: Case) -> Case:
    """The one of all cases that train alike unsharded, whose result may be shared."""
    decay_differs = case.wrapping == "flat" and case.optimizer == "adamw"
    dtype = case.options.get("compute_dtype")
    return dataclasses.replace(
        case, wrapping="flat" if decay_differs else "root", checkpoint=False,
        accumulation="none" if case.accumulation == "none" else "plain",
        options={"compute_dtype": dtype} if dtype else {}, as_on_tpu=False, one_program=False,
    )  # fmt: skip


def fit(case: Case, model: nn.Module, mine, forward, clip) -> dict[str, Any]:
    """The fields of a Run. ``mine(batch)``: this process's part; ``clip()``: the norm."""
    optimizer = optimizer_for(case, model.parameters())
    if case.one_program:
        add_state(optimizer)
    out: dict[str, Any] = {"losses": [], "norms": []}
    for tokens in batches(case.steps):
        losses = []
        for number, part in enumerate(map(mine, tokens.chunk(case.micro_batches))):
            hold = case.accumulation == "no_sync" and number == 0
            with model.no_sync() if hold else contextlib.nullcontext():
                loss = loss_of(forward(part), part)
                (loss / case.micro_batches).backward()
            losses.append(loss.detach())
        if case.one_program or "gradients" not in out:
            gradients = gradients_of(model)
            out.setdefault("gradients", gradients)
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        if norm.device.type == "xla":
            torch_xla.sync()
        out["losses"].append(sum(loss.item() for loss in losses) / len(losses))
        out["norms"].append(norm.item())
    out["gradients"] = {name: value.cpu() for name, value in out["gradients"].items()}
    out["weights"] = {name: value.cpu() for name, value in model.state_dict().items()}
    return out


def unsharded(case: Case, device: str | torch.device = "cpu") -> Run:
    """The whole batch in one process, on plain torch tensors."""
    model = build(case).to(device)
    model.tie()
    # torch refuses the maximum of an empty gradient.
    clipped = [p for p in model.parameters() if p.numel()]
    clip = functools.partial(nn.utils.clip_grad_norm_, clipped, CLIP, case.norm_type)
    forward = functools.partial(_computed, case, model)
    return Run(**fit(case, model, lambda batch: batch.to(device), forward, clip))


def unsharded_on_xla(rank: int, case: Case) -> Run:
    """The same on an XLA device, whose own way of computing a function is not at issue."""
    return unsharded(case, torch_xla.device())


def _computed(case: Case, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    dtype = case.options.get("compute_dtype")
    if dtype is None:
        return model(tokens)
    cast = {name: p.to(dtype) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, cast, (tokens,), tie_weights=True)


def wrap(case: Case, model: nn.Module) -> nn.Module:
    kinds = {"flat": "flatten_parameters", "dim0": "shard_param_on_dim_0"}
    options = {**case.options, **{kinds[name]: True for name in kinds if name == case.wrapping}}
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


def one_rank(rank: int, case: Case) -> dict[str, Any]:
    current_rank().as_on_tpu = case.as_on_tpu
    model = wrap(case, build(case))
    metadata = model.get_shard_metadata()

    def mine(batch: torch.Tensor) -> torch.Tensor:
        return batch.chunk(xr.world_size())[rank].to(torch_xla.device())

    clip = functools.partial(model.clip_grad_norm_, CLIP, case.norm_type)
    return {"metadata": metadata, **fit(case, model, mine, model, clip)}


def merge(ranks: list[dict[str, Any]]) -> Run:
    metadata = ranks[0]["metadata"]

    def whole(key: str) -> dict[str, torch.Tensor]:
        return consolidate_sharded_state_dicts([rank[key] for rank in ranks], metadata)

    losses = [sum(step) / len(ranks) for step in zip(*(r["losses"] for r in ranks), strict=True)]
    for rank in ranks:
        assert rank["norms"] == ranks[0]["norms"]
    return Run(losses, ranks[0]["norms"], whole("gradients"), whole("weights"))


def assert_equal(sharded: Run, reference: Run, rtol: float, atol: float) -> None:
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    close(torch.tensor(sharded.losses), torch.tensor(reference.losses))
    close(torch.tensor(sharded.norms), torch.tensor(reference.norms))
    for name in ("gradients", "weights"):
        ours, theirs = getattr(sharded, name), getattr(reference, name)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            close(ours[key], value, msg=lambda text, key=key, name=name: f"{name} {key}: {text}")


WRAPPINGS = ["root", "nested", "auto", "flat", "dim0"]
SLOW = pytest.mark.slow
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
        options = {} if reshard else {"reshard_after_forward": False}
        case = Case(wrapping, *how, optimizer, norm, options=options, as_on_tpu=as_on_tpu)
        marks = pytest.mark.slow if cell in COVERING else pytest.mark.full
        marks = () if cell in SINGLY else marks
        found.append((ranks, pytest.param(case, ranks, marks=marks, id=f"{case}-{ranks}ranks")))
    # By ranks, else processes of ranks would be started over and over.
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


@pytest.fixture(scope="module")
def trained_unsharded():
    """``trained_unsharded(case, train)``: ``train(case)``, once for all that train alike."""
    known = {}

    def run(case: Case, train) -> Run:
        case = unsharded_case(case)
        key = repr(case)  # its options can not be hashed
        if key not in known:
            known[key] = train(case)
        return known[key]

    return run


@pytest.fixture
def check(run_ranks, trained_unsharded):
    def run(case: Case, ranks: int, rtol: float, atol: float) -> None:
        sharded = merge(run_ranks(one_rank, ranks, case))
        assert_equal(sharded, trained_unsharded(case, unsharded), rtol, atol)

    return run


@pytest.mark.parametrize("case, ranks", cross())
def test_float32(check, case, ranks):
    check(case, ranks, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    "wrapping",
    [
        "nested",
        *(pytest.param(wrapping, marks=SLOW) for wrapping in ("flat", "dim0")),
        *(pytest.param(wrapping, marks=pytest.mark.full) for wrapping in ("root", "auto")),
    ],
)
def test_float64_to_the_last_digits(run_ranks, trained_unsharded, wrapping):
    case = Case(wrapping, True, "no_sync", "adamw", dtype=torch.float64, as_on_tpu=True, steps=5)
    sharded = merge(run_ranks(one_rank, 3, case))
    reference = trained_unsharded(case, lambda like: run_ranks(unsharded_on_xla, 1, like)[0])
    assert_equal(sharded, reference, rtol=1e-11, atol=1e-13)


NARROW = list(itertools.product(["nested", "flat", "dim0"], [torch.bfloat16, torch.half], [0, 1]))
# Each dtype, and each way to reduce.
NARROW_SINGLY = covering(covering(NARROW), lambda case: set(case[1:]))


@pytest.mark.parametrize(
    "wrapping, compute_dtype, fp32_reduce_scatter",
    [
        case if case in NARROW_SINGLY else pytest.param(*case, marks=SLOW)
        for case in covering(NARROW)
    ],
)
def test_narrow_compute_dtype(check, wrapping, compute_dtype, fp32_reduce_scatter):
    options = {"compute_dtype": compute_dtype, "fp32_reduce_scatter": bool(fp32_reduce_scatter)}
    case = Case(wrapping, True, "no_sync", options=options)
    # Two ways of rounding to 8 or 11 bits, two steps on.
    tolerance = 0.06 if compute_dtype is torch.bfloat16 else 0.01
    check(case, 4, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters(check, dtype):
    case = Case("nested", False, "none", dtype=dtype, steps=3, one_program=False)
    check(case, 3, rtol=0.1, atol=0.1)


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
    check(Case("nested", True, options=options, one_program=False), 4, rtol=2e-4, atol=2e-5)

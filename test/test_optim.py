"""Optimizers of ``xla_fsdp.optim`` on shards and in checkpoints, against those in plain torch."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch_xla.debug.metrics as met
from lazy_modules import torch_xla
from on_ranks import on_each_rank, raises, slow, without_ranks
from small_models import here, hybrid, inputs_of_all, mean_square, mlp, whole
from torch import nn

import xla_fsdp
import xla_fsdp.optim
from xla_fsdp import ShardingStrategy, plan, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.consolidate.errors import ModelMismatchError
from xla_fsdp.optim import LAMB, LARS, Adafactor, AdamW8bit, Muon, split_matrices
from xla_fsdp.sharding.layout import spec_of
from xla_fsdp.sharding.metadata import sharded_names
from xla_fsdp.sharding.sharded_parameter import as_sharded, local
from xla_fsdp.sharding.state import units_in
from xla_fsdp.sharding.unit import paths_of

STEPS = (1, 2)


class Unused(nn.Module):
    """Gradients are put where a backward would leave them."""

    def forward(self, x):
        return x


class Block(Unused):
    """Parameters that are hard to shard: odd sizes, a vector, a number, a frozen one, a shared."""

    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 13)
        self.square = nn.Linear(width, width, bias=False)
        self.again = nn.Linear(width, width, bias=False)
        self.again.weight = self.square.weight
        self.frozen = nn.Linear(width, 3).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.zero = nn.Parameter(torch.zeros(5))
        self.cube = nn.Parameter(torch.randn(2, 3, 7))


class Matrices(Unused):
    def __init__(self, width: int):
        super().__init__()
        self.left = nn.Parameter(torch.randn(width, width))
        self.right = nn.Parameter(torch.randn(width, width))
        self.tall = nn.Parameter(torch.randn(29, width))


class Model(Unused):
    def __init__(self, block=Block):
        super().__init__()
        self.first = nn.Linear(5, 16, bias=block is Block)
        # Enough for a loop: a parameter is a hundred operations to compile.
        self.blocks = nn.ModuleList([block(9), block(9)])


def plain(block=Block) -> nn.Module:
    torch.manual_seed(0)
    return Model(block)


OPTIONS = {"flat": {"flatten_parameters": True}, "dim0": {"shard_param_on_dim_0": True}}


def wrapped(kind: str, block=Block, build=plain) -> nn.Module:
    options = OPTIONS.get(kind.removesuffix("scan"), {})
    model = build(block)
    if kind.endswith("scan"):
        model.blocks = scan_blocks(model.blocks, **options)
    else:
        model.blocks = nn.ModuleList(FSDP(one, **options) for one in model.blocks)
    return FSDP(model, **options)


def gradients(model: nn.Module, step: int) -> dict[str, torch.Tensor]:
    """Of the unsharded model, other ones in each step; one parameter has none but zeros."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: (torch.randn(p.shape, generator=generator) * ("1.gain" not in name)).to(p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def put_gradients(model: nn.Module, grads: dict[str, torch.Tensor]) -> None:
    units = list(units_in(model))
    names = sharded_names(paths_of(model), units)
    for _, unit in units:
        pieces: dict[nn.Parameter, list[torch.Tensor]] = {}
        for tensor, holder, _ in unit.holders():
            if holder.requires_grad:
                full = [grads[known[0]] for known in names[tensor]]
                pieces.setdefault(holder, []).append(tensor.layout.cut(full, unit.world.rank))
        for holder, cut in pieces.items():
            spec = spec_of(holder)
            grad = cut[0] if not spec.depth else torch.stack(cut)
            holder.grad = as_sharded(grad.to(holder.device), spec)


def reference(step, block=Block, trained=None) -> dict[str, torch.Tensor]:
    """Weights after training plain parameters with ``step(name, parameter, grad, state, t)``."""
    model = plain(block)
    states: dict[str, dict] = {}
    for t in STEPS:
        for name, grad in gradients(model, t).items():
            parameter = model.get_parameter(name)
            if trained is None or trained(parameter):
                with torch.no_grad():
                    step(parameter, grad, states.setdefault(name, {}), t)
    return weights(model)


def put_plain_gradients(model: nn.Module, grads: dict[str, torch.Tensor]) -> None:
    for name, grad in grads.items():
        parameter = model.get_parameter(name)
        parameter.grad = grad.to(parameter.dtype)


def train_plain(model: nn.Module, optimizer, steps=STEPS) -> dict[str, torch.Tensor]:
    for t in steps:
        put_plain_gradients(model, gradients(model, t))
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(model, optimizer, block, steps, build=plain):
    for t in steps:
        put_gradients(model, gradients(build(block), t))
        optimizer.step()
        torch_xla.sync()


def with_plain(make, block=Block) -> dict[str, torch.Tensor]:
    model = plain(block)
    return train_plain(model, make(model.parameters()))


def assert_weights(found, expected, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def lamb_step(w, g, state, t, lr=0.02, betas=(0.8, 0.99), eps=1e-6, decay=0.03):
    m = state["m"] = betas[0] * state.get("m", 0) + (1 - betas[0]) * g
    v = state["v"] = betas[1] * state.get("v", 0) + (1 - betas[1]) * g * g
    r = (m / (1 - betas[0] ** t)) / ((v / (1 - betas[1] ** t)).sqrt() + eps)
    u = r + decay * w
    both = w.norm() > 0 and u.norm() > 0
    w -= lr * (w.norm() / u.norm() if both else 1.0) * u


def lars_step(w, g, state, t, lr=0.5, momentum=0.8, decay=0.03, trust=0.02):
    both = w.norm() > 0 and g.norm() > 0
    local = trust * w.norm() / (g.norm() + decay * w.norm()) if both else 1.0
    state["v"] = momentum * state.get("v", 0) + lr * local * (g + decay * w)
    w -= state["v"]


def make_lamb(parameters):
    return LAMB(parameters, lr=0.02, betas=(0.8, 0.99), weight_decay=0.03)


def make_lars(parameters):
    return LARS(parameters, 0.5, momentum=0.8, weight_decay=0.03, trust_coefficient=0.02)


def make_muon(parameters, dtype=torch.float32, **options):
    matrices, _ = split_matrices(p for p in parameters if p.requires_grad)
    return Muon(matrices, lr=0.05, compute_dtype=dtype, **options)


def muon_step(w, g, state, t, lr=0.05, momentum=0.95, decay=0.1):
    b = state["b"] = momentum * state.get("b", 0) + (1 - momentum) * g
    x = (1 - momentum) * g + momentum * b
    x = x / x.norm()
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * (x @ x.T) @ x + 2.0315 * (x @ x.T) @ (x @ x.T) @ x
    w *= 1 - lr * decay
    w -= lr * max(1, w.shape[0] / w.shape[1]) ** 0.5 * x


ADAFACTOR = {"lr": 0.65, "weight_decay": 0.1}
EVERY = {"lamb": (make_lamb, Block), "lars": (make_lars, Block)}
EVERY |= {"adafactor": (functools.partial(Adafactor, **ADAFACTOR), Block)}
EVERY |= {"muon": (make_muon, Matrices), "muon beside others": (make_muon, Block)}


@functools.cache
def expected_weights():
    return {
        "lamb": reference(lamb_step),
        "lars": reference(lars_step),
        "adafactor": with_plain(functools.partial(torch.optim.Adafactor, **ADAFACTOR)),
        "muon": reference(muon_step, Matrices),
        "muon beside others": reference(muon_step, trained=lambda parameter: parameter.dim() == 2),
    }


@pytest.mark.parametrize(
    "ranks, kinds",
    [
        (2, ["flat", "dim0scan"]),
        slow(4, ["nested"]),
        slow(2, ["nested", "dim0", "scan"]),
    ],
)
@on_each_rank(timeout=1500)
def test_shards_are_trained_as_the_unsharded_model(rank, kinds):
    expected = expected_weights()
    for kind in kinds:
        models = {}
        for name, (make, block) in EVERY.items():
            if name == "muon beside others" and kind == "flat":
                continue
            model = wrapped(kind, block)
            models[name] = model, make(model.parameters()), block
        for t in STEPS:
            for model, optimizer, block in models.values():
                put_gradients(model, gradients(plain(block), t))
                optimizer.step()
            torch_xla.sync()
        for name, (model, _, _) in models.items():
            found = whole(model, model.state_dict())
            try:
                assert_weights(found, expected[name], rtol=2e-4, atol=2e-5)
            except AssertionError as error:
                raise AssertionError(f"{name}, {kind}: {error}") from error
            for key, value in model.state_dict().items():
                assert torch.isfinite(value).all(), (name, kind, key)


def test_on_plain_parameters_they_are_the_reference():
    for name, (make, block) in EVERY.items():
        assert_weights(with_plain(make, block), expected_weights()[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_is_that_of_torch(nesterov):
    options = {"nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
    ours = with_plain(lambda parameters: make_muon(parameters, torch.bfloat16, **options), Matrices)
    theirs = with_plain(lambda p: torch.optim.Muon(p, lr=0.05, **options), Matrices)
    # Both iterate in bfloat16, of 8 bits, and round after other operators; the elements of three
    # updates are 3 * 0.05 * 0.2 * sqrt(29) at most, and the formulas are compared in float32 above.
    assert_weights(ours, theirs, rtol=0, atol=0.16 * 2**-6)


@pytest.mark.parametrize("name", ["lamb", "lars", "adafactor", "muon", "8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_dicts_load_as_those_of_torch(name, dtype):
    eight = functools.partial(AdamW8bit, min_8bit_size=0), Matrices
    make, block = {**EVERY, "8bit": eight}[name]
    one, other = (plain(block).to(dtype) for _ in range(2))
    optimizers = [make(model.parameters()) for model in (one, other)]
    for t in (1, 2, 3):
        for model, optimizer in zip((one, other), optimizers, strict=True):
            put_plain_gradients(model, gradients(one, t))
            if model is other and t == 2:
                optimizer.load_state_dict(optimizer.state_dict())
            optimizer.step()
    # torch's load_state_dict rounds state to the parameter's dtype.
    precision = 0 if dtype is torch.float32 else 0.02
    expected = one.state_dict()
    assert_weights(other.state_dict(), expected, precision, precision)
    assert all(torch.isfinite(value).all() for value in expected.values())


@pytest.mark.slow
@on_each_rank(4)
def test_replicas_and_parameters_that_are_not_sharded(rank):
    for name in ("lamb", "muon", "adafactor"):
        make, block = EVERY[name]
        model = plain(block)
        model.blocks = nn.ModuleList(FSDP(one, **hybrid(rank)) for one in model.blocks)
        torch_xla.sync()
        model.first.to("xla")
        optimizer = make(model.parameters())
        for t in STEPS:
            grads = gradients(plain(block), t)
            put_gradients(model, grads)
            for key, parameter in model.first.named_parameters():
                parameter.grad = grads[f"first.{key}"].to("xla")
            optimizer.step()
            torch_xla.sync()
        found = xla_fsdp.full_state_dict(model, rank0_only=False)  # of the ranks of its replica
        assert_weights(found, expected_weights()[name], rtol=2e-4, atol=2e-5)


def of_others(rank):
    for make in (torch.optim.Adafactor, torch.optim.Muon):
        model = wrapped("dim0", Matrices)
        put_gradients(model, gradients(plain(Matrices), 1))
        said = r"needs parameter '.*full_tensor\(\).*NO_SHARD"
        raises(RuntimeError, said, make(model.parameters()).step)


def refused(rank):
    model = wrapped("flat")
    raises(ValueError, "'flat_param_0' .* shape .*flatten_parameters", Muon, model.parameters())
    nested = wrapped("nested")
    matrices, others = split_matrices(nested.parameters())
    raises(ValueError, "a parameter of shape", Muon, others)
    assert len(matrices) == 1 + 2 * 3  # frozen ones too
    parameter = nn.Parameter(torch.zeros(3, 2))
    parameter.grad = torch.zeros(3, 2).to_sparse()
    raises(RuntimeError, "real, dense gradients, .* a sparse one", make_lamb([parameter]).step)


def lbfgs(rank):
    def train(model, x):
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

        def closure():
            optimizer.zero_grad()
            loss = mean_square(model, x)
            loss.backward()
            return loss

        optimizer.step(closure)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    raises(
        RuntimeError, "(?s)view needs parameter '0.wei.*NO_SHARD", train, FSDP(mlp()), here(rank)
    )
    # It compares losses, which must be the same on all ranks: they see the same batch.
    one = FSDP(mlp(), sharding_strategy=ShardingStrategy.NO_SHARD)
    found = train(one, inputs_of_all().to("xla"))
    for ours, plain_one in zip(found, train(mlp(), inputs_of_all()), strict=True):
        torch.testing.assert_close(ours.reshape(-1)[: plain_one.numel()], plain_one.reshape(-1))


def copied(rank):
    for kind in ("flat", "scan"):
        model = wrapped(kind)
        twin = copy.deepcopy(model)
        for one in (model, twin):
            train(one, make_lamb(one.parameters()), Block, (1, 2))
        expected = {name: value.cpu() for name, value in model.state_dict().items()}
        assert_weights({n: v.cpu() for n, v in twin.state_dict().items()}, expected, 0, 0)


@pytest.mark.parametrize("check", [of_others, refused, lbfgs, copied])
def test_on_two_ranks(run_ranks, check):
    run_ranks(check, 2)


@pytest.mark.parametrize(
    "name, options, match",
    [
        ("LAMB", {"lr": -1.0}, "lr must be >= 0, got -1.0"),
        ("LAMB", {"betas": (0.9, 1.0)}, r"betas\[1\] must be >= 0 and < 1, got 1.0"),
        ("LAMB", {"eps": 0}, "eps must be > 0, got 0"),
        ("LARS", {"momentum": 1}, "momentum must be >= 0 and < 1"),
        ("LARS", {"trust_coefficient": 0.0}, "trust_coefficient must be > 0"),
        ("Adafactor", {"d": 0.5}, "d must be >= 1, got 0.5"),
        ("Adafactor", {"eps": (0.0, 1e-3)}, r"eps\[0\] must be > 0, got 0.0"),
        ("Adafactor", {"beta2_decay": 0.8}, "-beta2_decay must be >= 0, got -0.8"),
        ("Muon", {"ns_steps": 0}, "ns_steps must be >= 1 and < 100"),
        ("Muon", {"ns_coefficients": (1, 2)}, "ns_coefficients must be three numbers"),
        ("Muon", {"adjust_lr_fn": "other"}, "adjust_lr_fn must be None, 'original' or"),
        ("Muon", {"compute_dtype": torch.int8}, "compute_dtype must be a floating-point dtype"),
        ("AdamW8bit", {"min_8bit_size": -1}, "min_8bit_size must be >= 0, got -1"),
    ],
)
def test_options_are_checked(name, options, match):
    with pytest.raises(ValueError, match=match):
        getattr(xla_fsdp.optim, name)([nn.Parameter(torch.zeros(2, 2))], **options)


@pytest.mark.slow
@without_ranks
def test_what_a_step_sends_is_in_its_plan(tmp_path):
    width, blocks = 128, 8

    def steps(*optimizers):
        def step():
            fsdp = functools.partial(FSDP, compute_dtype=torch.bfloat16)
            model = fsdp(nn.Sequential(*(fsdp(nn.Linear(width, width)) for _ in range(blocks))))
            both = split_matrices(model.parameters())
            model(torch.randn(8, width).to("xla")).square().mean().backward()
            for optimizer, parameters in zip(optimizers, both, strict=True):
                optimizer(parameters).step()

        report = plan(step, "v3-8", cache=str(tmp_path), progress=False)
        assert report.executables == 1  # though ranks hold, and compute, other parts
        return [c for c in report.schedule.collectives if c.phase == "optimizer"]

    sent = steps(Muon, LAMB)
    norms = [c for c in sent if c.kind == "all-reduce"]
    # Two float32 numbers of each bias, and torch_xla's token: one all-reduce for all.
    assert [c.bytes for c in norms] == [4 * (2 * blocks + 1)]
    assert norms[0].module == "norms of parameters and updates"
    gathered = sum(c.wire_bytes * c.times for c in sent if c.kind == "all-gather")
    # Momenta in bfloat16, and the matrices made of them.
    assert gathered == 2 * 2 * blocks * width**2 * 7 // 8
    assert {c.kind for c in sent} == {"all-reduce", "all-gather"}

    sent = steps(Adafactor, functools.partial(AdamW8bit, min_8bit_size=0))
    assert {c.kind for c in sent} == {"all-reduce"}
    # Rows, columns and a norm of each matrix, then the norm of its update.
    numbers = [blocks * (2 * width + 1), blocks]
    assert [c.bytes for c in sent] == [4 * (number + 1) for number in numbers]


@on_each_rank(1)
def test_every_step_is_one_program(rank):
    before = {name: met.counter_value(name) for name in met.counter_names()}
    every = [EVERY[name] for name in ("lamb", "lars", "adafactor", "muon")]
    every.append((functools.partial(AdamW8bit, min_8bit_size=0), Block))
    for make, block in every:
        model = wrapped("flat" if make is not make_muon else "dim0", block)
        optimizer = make(model.parameters())
        counts = []
        for t in range(1, 6):
            put_gradients(model, gradients(plain(block), t))
            optimizer.param_groups[0]["lr"] = 0.01 / t  # a schedule
            optimizer.step()
            torch_xla.sync()
            counts.append((met.metric_data("CompileTime") or (0,))[0])
        # The first program makes the state.
        assert counts[1] == counts[4], (make, counts)
    on_host = [name for name in met.counter_names() if name.startswith("aten::")]
    assert not [name for name in on_host if met.counter_value(name) != before.get(name)]


class Saved(NamedTuple):
    make: Callable
    block: type[nn.Module] = Block
    build: Callable = plain
    alike: Callable = functools.partial(assert_weights, rtol=2e-4, atol=2e-5)


def eight_bits(**options):
    # Blocks of other ranks round the moments otherwise: a hundredth of a step or two.
    make = functools.partial(AdamW8bit, lr=0.02, betas=(0.8, 0.9), **options)
    return Saved(make, alike=functools.partial(assert_weights, rtol=2e-4, atol=4e-3))


MAKES = {name: Saved(*EVERY[name]) for name in ("adafactor", "lamb", "lars", "muon")}
MAKES |= {"8bit": eight_bits(min_8bit_size=0), "small": eight_bits()}


def state_of(model, optimizer):
    return {
        (name, key): local(value.detach()).cpu()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def save_and_go_on(rank, folder, kinds, name, saved, expected):
    make, block, build, alike = saved
    for kind in kinds:
        model = wrapped(kind, block, build)
        optimizer = make(model.parameters())
        train(model, optimizer, block, (1, 2), build)
        path = f"{folder}/{name}-{kind}"
        xla_fsdp.save_checkpoint(path, model, optimizer, step=2)
        full = xla_fsdp.full_state_dict(model), xla_fsdp.full_optim_state_dict(model, optimizer)
        if rank == 0:
            torch.save(full, f"{path}.pt")
        again = wrapped(kind, block, build)
        resumed = make(again.parameters())
        xla_fsdp.load_checkpoint(path, again, resumed)
        before, after = state_of(model, optimizer), state_of(again, resumed)
        assert before.keys() == after.keys()
        for (key, what), value in before.items():
            assert after[key, what].dtype is value.dtype and after[key, what].shape == value.shape
            if what != "variance" or kind != "flat":  # has elements of matrices, which are unused
                assert torch.equal(after[key, what], value), (kind, name, key, what)
        if name == "factors":  # the optimizer first: what it copies knows no shards yet
            copied, twin = copy.deepcopy((resumed, again))
            train(twin, copied, block, (3, 4), build)
            alike(whole(twin, twin.state_dict()), expected)
        train(model, optimizer, block, (3, 4), build)
        train(again, resumed, block, (3, 4), build)
        found = whole(again, again.state_dict())
        torch.testing.assert_close(found, whole(model, model.state_dict()), rtol=0, atol=0)
        alike(found, expected)


def on_other_ranks(rank, folder, pairs, name, saved, expected):
    make, block, build, alike = saved
    for kind, other in pairs:
        model = wrapped(other, block, build)
        optimizer = make(model.parameters())
        full = torch.load(f"{folder}/{name}-{kind}.pt") if rank == 0 else (None, None)
        if other == "flat":
            xla_fsdp.load_full_state_dict(model, full[0])
            xla_fsdp.load_full_optim_state_dict(model, optimizer, full[1])
        else:
            xla_fsdp.load_checkpoint(f"{folder}/{name}-{kind}", model, optimizer)
        if name == "adafactor":
            wrong = torch.load(f"{folder}/{name}-{kind}.pt")[1]
            wrong["state"]["first.weight"]["row_var"] = torch.ones(3, 1)
            with pytest.raises(ModelMismatchError, match="'first.weight'.*'row_var' is .3, 1."):
                xla_fsdp.load_full_optim_state_dict(model, optimizer, wrong)
            wrong["param_groups"][0]["maximize"] = True
            with pytest.raises(ModelMismatchError, match="trained with maximize"):
                xla_fsdp.load_full_optim_state_dict(model, optimizer, {**wrong, "state": {}})
        train(model, optimizer, block, (3, 4), build)
        alike(whole(model, model.state_dict()), expected)


@pytest.mark.parametrize(
    "name, here, there",
    [
        slow("8bit", ["nested"], [("nested", "scan")]),
        slow("adafactor", ["flat", "nested"], [("flat", "scan"), ("nested", "flat")]),
        slow("small", ["nested"], [("nested", "flat")]),
        ("lars", ["nested"], [("nested", "flat")]),
        ("muon", ["nested"], [("nested", "dim0scan")]),
    ],
)
def test_state_is_saved_and_loads_elsewhere(run_ranks, tmp_path, name, here, there):
    saved = MAKES[name]
    model = plain(saved.block)
    expected = train_plain(model, saved.make(model.parameters()), (1, 2, 3, 4))
    run_ranks(save_and_go_on, 2, str(tmp_path), here, name, saved, expected)
    run_ranks(on_other_ranks, 4, str(tmp_path), there, name, saved, expected)
    for kind in here:
        in_plain_torch(f"{tmp_path}/{name}-{kind}.pt", expected, name)


def in_plain_torch(path, expected, name):
    weights, full = torch.load(path)
    make, block, _, alike = MAKES[name]
    if name == "adafactor":
        make = functools.partial(torch.optim.Adafactor, **ADAFACTOR)
    model = plain(block)
    optimizer = make(model.parameters())
    model.load_state_dict(weights)
    numbers = {n: i for i, (n, _) in enumerate(model.named_parameters())}
    state = {numbers[n]: own for n, own in full["state"].items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    alike(train_plain(model, optimizer, (3, 4)), expected)

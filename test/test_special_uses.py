"""Uses of a wrapper beyond one forward and one backward: each equals the unsharded model."""

import collections
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from on_ranks import finish_step, on_each_rank
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module
from xla_fsdp.consolidate import consolidate_sharded_state_dicts
from xla_fsdp.layers import all_gather_with_grad
from xla_fsdp.ranks.rank import current_rank
from xla_fsdp.sharding.sharded_parameter import local

WIDTH = 6


def mlp() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, 3),
    )


def wrapped(model: nn.Module, *children: str, **options):
    for child in children:
        parent = model.get_submodule(child.rpartition(".")[0])
        setattr(parent, child.rpartition(".")[2], FSDP(model.get_submodule(child), **options))
    return FSDP(model, **options)


def trace_as_on_tpu(on_tpu: bool = True) -> None:
    """Until the launch is over, this rank traces what a TPU would get, if ``on_tpu``."""
    current_rank().as_on_tpu |= on_tpu


def inputs(rank: int, step: int = 0) -> torch.Tensor:
    """Two rows for each rank; every rank can make every other's."""
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def inputs_of_all(step: int = 0) -> torch.Tensor:
    return torch.cat([inputs(rank, step) for rank in range(xr.world_size())])


def whole(model, tensors) -> dict[str, torch.Tensor]:
    """Full tensors by name, from this rank's shards: gathered through the ranks' rendezvous."""
    mine = {name: local(value).detach().cpu() for name, value in tensors.items()}
    ranks = xm.mesh_reduce("whole", mine, lambda values: values)
    return consolidate_sharded_state_dicts(ranks, model.get_shard_metadata())


def gradients(model) -> dict[str, torch.Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return whole(model, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named})


def assert_same_gradients(model, plain: nn.Module) -> None:
    torch_xla.sync()
    ours = gradients(model)
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-6)


def assert_same_backward(model, plain: nn.Module, rank: int) -> None:
    model(inputs(rank).to("xla")).square().mean().backward()
    plain(inputs_of_all()).square().mean().backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("reshard", [True, False])
@on_each_rank(2)
def test_several_forwards_before_one_backward(rank, reshard):
    plain = mlp()
    model = wrapped(mlp(), "1", reshard_after_forward=reshard)
    loss = sum(model(inputs(rank, step).to("xla")).square().mean() for step in range(3))
    loss.backward()
    sum(plain(inputs_of_all(step)).square().mean() for step in range(3)).backward()
    assert_same_gradients(model, plain)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.fork = Fork()

    def forward(self, x):
        used, _unused = self.fork(torch.tanh(self.layer(x)))
        return self.layer(used)


class Fork(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.left(x), self.right(x)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
@on_each_rank(2)
def test_the_same_unit_twice_and_an_unused_output(rank, reshard, checkpointed):
    plain, model = Twice(), Twice()
    if checkpointed:
        checkpoint_module(model.layer)
        checkpoint_module(model.fork)
    model = wrapped(model, "layer", "fork", reshard_after_forward=reshard)
    assert_same_backward(model, plain, rank)


def contrastive(features):
    logits = F.normalize(features) @ F.normalize(features).T * 3
    return F.cross_entropy(logits, torch.arange(len(features)).to(logits.device))


@pytest.mark.parametrize("dim", [0, -1])
@on_each_rank(2)
def test_a_loss_over_the_examples_of_all_ranks(rank, dim):
    class Gathers(nn.Module):
        def forward(self, x):
            return all_gather_with_grad(x.movedim(0, dim), dim).movedim(dim, 0)

    plain, model = mlp(), mlp()
    model.append(checkpoint_module(Gathers()))
    model = wrapped(model, "1")
    loss = contrastive(model(inputs(rank).to(torch_xla.device())))
    loss.backward()
    full = contrastive(plain(inputs_of_all()))
    full.backward()
    torch_xla.sync()
    torch.testing.assert_close(loss.detach().cpu(), full.detach())
    assert_same_gradients(model, plain)
    for wrong, match in ((torch.ones(2), "on the XLA device"), (loss, "without dimensions")):
        with pytest.raises(ValueError, match=match):
            all_gather_with_grad(wrong)


class Trip(nn.Module):
    def __init__(self):
        super().__init__()
        self.when = None
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        if self.when == "forward":
            raise ZeroDivisionError("in forward")
        if self.when == "backward" and x.requires_grad:
            x.register_hook(self.trip)
        return torch.tanh(x)

    def trip(self, grad):
        raise ZeroDivisionError("in backward")


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
@on_each_rank(2)
def test_an_exception_leaves_nothing_behind(rank, when, checkpointed):
    def build():
        torch.manual_seed(6)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Trip(), nn.Linear(WIDTH, 3))

    plain, model = build(), build()
    trip = model[1]
    if checkpointed:
        checkpoint_module(trip)
    model = wrapped(model, "0", "1")
    names = [name for name, _ in model.named_parameters()]
    shapes = [p.shape for p in model.parameters()]
    shard_shapes = {name: value.shape for name, value in model.state_dict().items()}
    trip.when = when
    with pytest.raises(ZeroDivisionError):
        model(inputs(rank).to("xla")).square().mean().backward()
    trip.when = None
    assert [name for name, _ in model.named_parameters()] == names
    assert [p.shape for p in model.parameters()] == shapes
    assert {n: v.shape for n, v in model.state_dict().items()} == shard_shapes
    model.zero_grad()
    assert_same_backward(model, plain, rank)


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    note: str
    total: Any = dataclasses.field(init=False, default=None)


# What a forward returns, and where its tensor is in it.
OUTPUTS = {
    "dict": (lambda y: {"a": y, "b": {"c": [y.detach(), "text"]}}, lambda out: out["a"]),
    "ordered": (lambda y: collections.OrderedDict(a=y, n=3), lambda out: out["a"]),
    "list": (lambda y: [y, None, 4], lambda out: out[0]),
    "namedtuple": (lambda y: Pair(y, "text"), lambda out: out.first),
    "dataclass": (lambda y: Result(y, "text"), lambda out: out.value),
    "packed": (lambda y: PackedSequence(y, torch.tensor([1, 1])), lambda out: out.data),
    "nested": (lambda y: ({"a": (Pair(y, [y]),)},), lambda out: out[0]["a"][0].second[0]),
}


class Structured(nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make = make

    def forward(self, x, *, scale=1.0, extra=None):
        x = x["x"][0]
        y = self.linear(x.data if isinstance(x, PackedSequence) else x) * scale
        if extra is not None:
            y = y + extra.first
        return self.make(y)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", OUTPUTS)
@on_each_rank(2)
def test_structured_inputs_and_outputs(rank, kind, checkpointed):
    dtype = torch.bfloat16 if kind in ("dict", "packed") else None
    make, tensor_of = OUTPUTS[kind]
    plain, model = Structured(make), Structured(make)
    if checkpointed:
        checkpoint_module(model)
    model = wrapped(model, compute_dtype=dtype)
    x, extra = inputs(0), inputs(1)
    if kind == "packed":
        x = PackedSequence(x, torch.tensor([1, 1]))
    given = {"x": (x.to("xla"), torch.tensor([1, 2], device="xla"))}
    out = model(given, scale=0.5, extra=Pair(extra.to("xla"), "text"))
    expected = plain({"x": (x, None)}, scale=0.5, extra=Pair(extra, "text"))
    assert type(out) is type(expected)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype else {"rtol": 1e-4, "atol": 1e-6}
    assert tensor_of(out).dtype is (dtype or torch.float32)
    for one in (out, expected):
        tensor_of(one).float().square().mean().backward()
    torch_xla.sync()
    ours = gradients(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, **tolerance)


@on_each_rank(1)
def test_one_rank_is_bit_for_bit_the_unwrapped_model(rank):
    plain = mlp().to("xla")
    model = wrapped(mlp(), "1")
    pair = [(m, torch.optim.AdamW(m.parameters(), 0.1)) for m in (plain, model)]
    for step in range(3):
        losses = []
        for m, optimizer in pair:
            loss = m(inputs(0, step).to("xla")).square().mean()
            loss.backward()
            finish_step(optimizer)
            losses.append(loss.item())
        assert losses[0] == losses[1]
    ours = whole(model, model.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(ours[name], value.cpu())

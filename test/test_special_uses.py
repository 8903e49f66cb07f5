"""Uses of a wrapper beyond one forward and one backward: each equals the unsharded model."""

import collections
import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

WIDTH = 6


def mlp() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, 3),
    )


def wrapped(model: nn.Module, *children: str, **options):
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    for child in children:
        parent = model.get_submodule(child.rpartition(".")[0])
        setattr(parent, child.rpartition(".")[2], FSDP(model.get_submodule(child), **options))
    return FSDP(model, **options)


def trace_as_on_tpu() -> None:
    """Until the launch is over, this rank traces what a TPU would get."""
    from xla_fsdp.ranks.rank import current_rank

    current_rank().as_on_tpu = True


def inputs(rank: int, step: int = 0) -> torch.Tensor:
    """Two rows for each rank; every rank can make every other's."""
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def whole(model, tensors) -> dict[str, torch.Tensor]:
    """Full tensors by name, from this rank's shards: gathered through the ranks' rendezvous."""
    import torch_xla.core.xla_model as xm

    from xla_fsdp.consolidate import consolidate_sharded_state_dicts
    from xla_fsdp.sharding.sharded_parameter import local

    mine = {name: local(value).detach().cpu() for name, value in tensors.items()}
    ranks = xm.mesh_reduce("whole", mine, lambda values: values)
    return consolidate_sharded_state_dicts(ranks, model.get_shard_metadata())


def gradients(model) -> dict[str, torch.Tensor]:
    named = model.named_parameters(remove_duplicate=False)
    return whole(model, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named})


def assert_same_gradients(model, plain: nn.Module) -> None:
    ours = gradients(model)
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(ours[name], expected, rtol=1e-4, atol=1e-6)


def run(run_ranks, fn, *args, ranks=2) -> None:
    """Assertions are made inside the ranks."""
    run_ranks(fn, ranks, *args)


def several_forwards(rank, reshard):
    import torch_xla
    import torch_xla.runtime as xr

    plain = mlp()
    model = wrapped(mlp(), "1", reshard_after_forward=reshard)
    device = torch_xla.device()
    loss = sum(model(inputs(rank, step).to(device)).square().mean() for step in range(3))
    loss.backward()
    ranks = range(xr.world_size())
    sum(
        plain(torch.cat([inputs(r, step) for r in ranks])).square().mean() for step in range(3)
    ).backward()
    torch_xla.sync()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("reshard", [True, False])
def test_several_forwards_before_one_backward(run_ranks, reshard):
    run(run_ranks, several_forwards, reshard)


class Twice(nn.Module):
    """Calls one unit twice, and one of its outputs not at all."""

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


def same_unit_twice(rank, reshard, checkpointed):
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp import checkpoint_module

    plain, model = Twice(), Twice()
    if checkpointed:
        checkpoint_module(model.layer)
        checkpoint_module(model.fork)
    model = wrapped(model, "layer", "fork", reshard_after_forward=reshard)
    model(inputs(rank).to(torch_xla.device())).square().mean().backward()
    plain(torch.cat([inputs(r) for r in range(xr.world_size())])).square().mean().backward()
    torch_xla.sync()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_the_same_unit_twice_and_an_unused_output(run_ranks, reshard, checkpointed):
    run(run_ranks, same_unit_twice, reshard, checkpointed)


def contrastive(features):
    """Compares each example with each other."""
    logits = F.normalize(features) @ F.normalize(features).T * 3
    return F.cross_entropy(logits, torch.arange(len(features)).to(logits.device))


def compared_over_ranks(rank, dim):
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp import checkpoint_module
    from xla_fsdp.layers import all_gather_with_grad

    class Gathers(nn.Module):
        def forward(self, x):
            return all_gather_with_grad(x.movedim(0, dim), dim).movedim(dim, 0)

    plain, model = mlp(), mlp()
    model.append(checkpoint_module(Gathers()))
    model = wrapped(model, "1")
    loss = contrastive(model(inputs(rank).to(torch_xla.device())))
    loss.backward()
    full = contrastive(plain(torch.cat([inputs(r) for r in range(xr.world_size())])))
    full.backward()
    torch_xla.sync()
    torch.testing.assert_close(loss.detach().cpu(), full.detach())
    assert_same_gradients(model, plain)
    for wrong, match in ((torch.ones(2), "on the XLA device"), (loss, "without dimensions")):
        with pytest.raises(ValueError, match=match):
            all_gather_with_grad(wrong)


@pytest.mark.parametrize("dim", [0, -1])
def test_a_loss_over_the_examples_of_all_ranks(run_ranks, dim):
    run(run_ranks, compared_over_ranks, dim)


def no_grad_then_training(rank):
    import torch_xla

    device = torch_xla.device()
    plain, model = mlp(), wrapped(mlp(), "1")
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    reference = torch.optim.SGD(plain.parameters(), 0.5)
    for step in range(3):
        x = inputs(0, step)
        with torch.no_grad():
            evaluated = model(x.to(device))
        torch.testing.assert_close(evaluated.cpu(), plain(x).detach(), rtol=1e-4, atol=1e-6)
        model(x.to(device)).square().mean().backward()
        plain(x).square().mean().backward()
        optimizer.step(), reference.step()
        optimizer.zero_grad(), reference.zero_grad()
        torch_xla.sync()
    # Values loaded after a forward are the ones that the next forward uses.
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(inputs(0).to(device)).cpu()
        for parameter in model.parameters():
            parameter.mul_(0)
        assert model(inputs(0).to(device)).abs().sum().item() == 0
        model.load_state_dict(saved)
        torch.testing.assert_close(model(inputs(0).to(device)).cpu(), before)


def test_forward_without_grad_then_training_then_loading(run_ranks):
    run(run_ranks, no_grad_then_training)


class Trip(nn.Module):
    """Raises in forward or in backward when told to."""

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


def trip_and_go_on(rank, when, checkpointed):
    import torch_xla
    import torch_xla.runtime as xr

    from xla_fsdp import checkpoint_module

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
    device = torch_xla.device()
    trip.when = when
    with pytest.raises(ZeroDivisionError):
        model(inputs(rank).to(device)).square().mean().backward()
    trip.when = None
    # Nothing is left behind that a user can see ...
    assert [name for name, _ in model.named_parameters()] == names
    assert [p.shape for p in model.parameters()] == shapes
    assert {n: v.shape for n, v in model.state_dict().items()} == shard_shapes
    model.zero_grad()
    # ... and the next step is as if nothing had been.
    model(inputs(rank).to(device)).square().mean().backward()
    plain(torch.cat([inputs(r) for r in range(xr.world_size())])).square().mean().backward()
    torch_xla.sync()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_an_exception_leaves_nothing_behind(run_ranks, when, checkpointed):
    run(run_ranks, trip_and_go_on, when, checkpointed)


Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Result:
    value: torch.Tensor
    note: str
    total: Any = dataclasses.field(init=False, default=None)


class Structured(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(7)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x, *, scale=1.0, extra=None):
        y = self.linear(x["x"][0]) * scale
        if extra is not None:
            y = y + extra.first
        return {
            "dict": lambda: {"a": y, "b": {"c": [y.detach(), "text"]}},
            "ordered": lambda: collections.OrderedDict(a=y, n=3),
            "list": lambda: [y, None, 4],
            "namedtuple": lambda: Pair(y, "text"),
            "dataclass": lambda: Result(y, "text"),
            "nested": lambda: ({"a": (Pair(y, [y]),)},),
        }[self.kind]()


def result_of(kind, out):
    return {
        "dict": lambda: out["a"],
        "ordered": lambda: out["a"],
        "list": lambda: out[0],
        "namedtuple": lambda: out.first,
        "dataclass": lambda: out.value,
        "nested": lambda: out[0]["a"][0].second[0],
    }[kind]()


def structures(rank, kind, dtype, checkpointed):
    import torch_xla

    from xla_fsdp import checkpoint_module

    plain, model = Structured(kind), Structured(kind)
    if checkpointed:
        checkpoint_module(model)
    model = wrapped(model, compute_dtype=dtype)
    device = torch_xla.device()
    x, extra = inputs(0), inputs(1)
    given = {"x": (x.to(device), torch.tensor([1, 2], device=device))}
    out = model(given, scale=0.5, extra=Pair(extra.to(device), "text"))
    expected = plain({"x": (x, None)}, scale=0.5, extra=Pair(extra, "text"))
    assert type(out) is type(expected)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype else {"rtol": 1e-4, "atol": 1e-6}
    assert result_of(kind, out).dtype is (dtype or torch.float32)
    result_of(kind, out).float().square().mean().backward()
    result_of(kind, expected).square().mean().backward()
    torch_xla.sync()
    ours = gradients(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, **tolerance)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", ["dict", "ordered", "list", "namedtuple", "dataclass", "nested"])
def test_structured_inputs_and_outputs(run_ranks, kind, checkpointed):
    run(run_ranks, structures, kind, torch.bfloat16 if kind == "dict" else None, checkpointed)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, packed: PackedSequence) -> PackedSequence:
        return packed._replace(data=torch.tanh(self.linear(packed.data)))


def packed_sequences(rank, dtype):
    import torch_xla

    plain, model = Packed(), wrapped(Packed(), compute_dtype=dtype)
    sequences = [torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(n)) for n in (4, 2)]
    packed = pack_sequence(sequences)
    moved = packed._replace(data=packed.data.to(torch_xla.device()))
    out, expected = model(moved), plain(packed)
    assert type(out) is PackedSequence
    assert out.data.dtype is (dtype or torch.float32)
    assert torch.equal(out.batch_sizes, packed.batch_sizes)
    tolerance = {"rtol": 0.02, "atol": 0.02} if dtype else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(out.data.float().cpu(), expected.data, **tolerance)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_packed_sequences(run_ranks, dtype):
    run(run_ranks, packed_sequences, dtype)


def freezing(rank):
    import torch_xla
    import torch_xla.runtime as xr

    plain, model = mlp(), wrapped(mlp(), "1")
    device = torch_xla.device()
    everyone = torch.cat([inputs(r) for r in range(xr.world_size())])
    for frozen in (["1.0.weight"], ["1.0.weight", "1.0.bias"], [], ["0.weight", "2.bias"]):
        for named in (plain, model):
            named.zero_grad()
            for name, parameter in named.named_parameters():
                parameter.requires_grad_(name not in frozen)
        model(inputs(rank).to(device)).square().mean().backward()
        plain(everyone).square().mean().backward()
        torch_xla.sync()
        for name, parameter in model.named_parameters():
            assert (parameter.grad is None) == (name in frozen)
        assert_same_gradients(model, plain)


def test_freezing_after_wrapping(run_ranks):
    run(run_ranks, freezing)


def retained(rank):
    import torch_xla
    import torch_xla.runtime as xr

    plain, model = mlp(), wrapped(mlp(), "1")
    loss = model(inputs(rank).to(torch_xla.device())).square().mean()
    everyone = torch.cat([inputs(r) for r in range(xr.world_size())])
    expected = plain(everyone).square().mean()
    for _ in range(2):
        loss.backward(retain_graph=True)
        expected.backward(retain_graph=True)
    torch_xla.sync()
    assert_same_gradients(model, plain)


def test_backward_twice_through_one_graph(run_ranks):
    run(run_ranks, retained)


def copies(rank):
    import torch_xla

    original = mlp()
    first, second = copy.deepcopy(original), copy.deepcopy(original)
    model = wrapped(first, "1")
    x = inputs(0)
    torch.testing.assert_close(
        model(x.to(torch_xla.device())).detach().cpu(), second(x).detach(), rtol=1e-4, atol=1e-6
    )


def test_deepcopy_before_wrapping(run_ranks):
    run(run_ranks, copies)


class Inplace(nn.Module):
    """In-place operators right after and right before a unit, as in residual networks."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        y = self.first(x)
        y += 1
        z = self.second(y * 2)
        z *= 3
        return F.relu_(z)


def inplace(rank):
    import torch_xla
    import torch_xla.runtime as xr

    plain, model = Inplace(), wrapped(Inplace(), "first", "second")
    model(inputs(rank).to(torch_xla.device())).square().mean().backward()
    plain(torch.cat([inputs(r) for r in range(xr.world_size())])).square().mean().backward()
    torch_xla.sync()
    assert_same_gradients(model, plain)


def test_inplace_operators_around_units(run_ranks):
    run(run_ranks, inplace)


def bitwise(rank):
    import torch_xla

    device = torch_xla.device()
    plain = mlp().to(device)
    model = wrapped(mlp(), "1")
    pair = [(m, torch.optim.AdamW(m.parameters(), 0.1)) for m in (plain, model)]
    for step in range(3):
        losses = []
        for m, optimizer in pair:
            loss = m(inputs(0, step).to(device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    ours = whole(model, model.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(ours[name], value.cpu())


def test_one_rank_is_bit_for_bit_the_unwrapped_model(run_ranks):
    run(run_ranks, bitwise, ranks=1)

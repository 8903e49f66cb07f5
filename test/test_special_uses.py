"""Uses of a wrapper beyond one forward and one backward: as plain torch, or refused."""

import collections
import copy
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
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

from xla_fsdp import CPUOffload, CPUOffloadPolicy, checkpoint_module, fully_shard, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
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


class Transposed(nn.Module):
    def forward(self, weight):
        return weight.T


@on_each_rank(2)
def test_cached_parametrizations(rank):
    """What ``parametrize.cached`` stores may be a view of a parameter that is freed."""

    def model():
        found = mlp()
        for layer in (found[0], found[1][0]):
            parametrize.register_parametrization(layer, "weight", Transposed())
        return found

    for wrap in (lambda found: wrapped(found, "1"), fully_shard):
        plain, ours = model(), wrap(model())
        with parametrize.cached():
            sum(ours(inputs(rank, step).to("xla")).square().mean() for step in range(2)).backward()
            sum(plain(inputs_of_all(step)).square().mean() for step in range(2)).backward()
        assert_same_gradients(ours, plain)


@on_each_rank(2)
def test_memory_formats(rank):
    """Shards are vectors, which have no channels to put last: torch raises for those on a CPU."""

    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))

    images = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    for wrap in (
        FSDP,
        lambda module: FSDP(module, cpu_offload=CPUOffload()),
        lambda module: fully_shard(module, offload_policy=CPUOffloadPolicy()),
    ):
        plain, ours = model(), wrap(model()).to(memory_format=torch.channels_last)
        ours(images.chunk(2)[rank].to("xla")).square().mean().backward()
        plain(images).square().mean().backward()
        assert_same_gradients(ours, plain)


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
        return self.make(torch.tanh(y))  # of which the backward needs the values


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


class Module(nn.Module):
    def __init__(self, compute):
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


def returned(module, x):
    return module.linear(x), module.linear.bias, [module.linear.weight.to(x.dtype)]


def stored(module, x):
    out = module.linear(x)
    module.stored = out.square().sum()
    return torch.tanh(out)


def changed(module, x):
    weight = module.linear.weight.clone()
    with torch.no_grad():
        weight.mul_(2)
    return x @ weight


def inplace(module, x):
    return module.linear(torch.relu_(x.mul_(2)))


def loss_of(module, out):
    if module.compute is returned:
        return out[0].square().mean() + (out[1].exp().sum() + out[2][0].square().sum()) * 0.1
    if module.compute is inplace:  # around the unit, too
        out = torch.relu_(out.add_(1) * 2)
    if module.compute is stored:
        return out.mean() + 0.01 * module.stored / out.shape[0]
    return out.square().mean()


@pytest.mark.parametrize("needs_grad", [False, True], ids=["", "input grad"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("compute", [returned, stored, changed, inplace])
@on_each_rank(2)
def test_gradients_are_those_of_plain_torch(rank, compute, checkpointed, needs_grad):
    if compute is returned:
        checkpointed = False  # returns its parameters, computes next to nothing
    plain, module = Module(compute), Module(compute)
    model = nn.Sequential(checkpoint_module(module) if checkpointed else module)
    model = wrapped(model, "0")

    def step(model, module, x):
        x = x.requires_grad_() if needs_grad else x
        # Not a leaf, so that it may be changed in place.
        loss_of(module, model(x * 1)).backward()

    step(model, module, inputs(rank).to(torch_xla.device()))
    step(plain, plain, inputs_of_all())
    assert_same_gradients(model, nn.Sequential(plain))


@on_each_rank(2)
def test_changes_in_place_are_detected_as_without_wrapper(rank):
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.linear(x)
            z = y.square()
            y.add_(1)
            return z

    model = wrapped(Late())
    with pytest.raises(RuntimeError, match="changed in place after the forward used it"):
        model(inputs(rank).to(torch_xla.device())).sum().backward()


@on_each_rank(2)
def test_gradients_of_gradients(rank):
    def penalty(model, x):
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return grad.square().sum(1).mean()

    plain, model = mlp(), wrapped(mlp(), "1")
    penalty(model, inputs(rank).to(torch_xla.device()).requires_grad_()).backward()
    everyone = inputs_of_all().requires_grad_()
    penalty(plain, everyone).backward()
    assert_same_gradients(model, plain)
    given, names = inputs(rank).to(torch_xla.device()), r"'\S+', '\S+'.* no second derivative"
    parameters = list(model.parameters())

    def gradients(model, x, **options):
        return torch.autograd.grad(model(x).square().mean(), list(model.parameters()), **options)

    def vector_product(gradients):
        return sum((grad * 2).sum() for grad in gradients)

    with pytest.raises(RuntimeError, match=names):
        vector_product(gradients(model, given, create_graph=True)).backward()
    with pytest.raises(RuntimeError, match=names):
        once = gradients(model, given, create_graph=True)
        torch.autograd.grad(vector_product(once), parameters)
    before = gradients(model, given)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(2e-3)
    after = gradients(model, given)
    found = sum(((a - b) / 1e-3).sum() for a, b in zip(after, before, strict=True)).item()
    whole = inputs_of_all()
    once = gradients(plain, whole, create_graph=True)
    right = torch.autograd.grad(vector_product(once), list(plain.parameters()))
    assert found == pytest.approx(sum(grad.sum() for grad in right).item(), rel=2e-2)
    # A graph that nobody uses changes nothing.
    model.zero_grad()
    loss = model(given).square().mean()
    loss.backward(create_graph=True)
    for parameter, grad in zip(parameters, after, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), grad.full_tensor())


@on_each_rank(2)
def test_copies_and_inference_mode(rank):
    model = wrapped(mlp(), "1")
    averaged = torch.optim.swa_utils.AveragedModel(model)
    twin = copy.deepcopy(model)
    x = inputs(rank).to("xla")
    model(x).sum().backward()
    assert all(p.grad is None for p in twin.parameters())
    with torch.no_grad():
        expected = model(x).cpu()
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(x).cpu(), expected)
        assert torch.equal(averaged(x).cpu(), expected)
    with torch.inference_mode():
        assert torch.equal(twin(x).cpu(), expected)
    # Copies have no gradients, and so nothing of what no_sync holds.
    model = wrapped(mlp(), "1")
    with model.no_sync():
        model(x).sum().backward()
    twin = copy.deepcopy(model)
    for one in (twin, model):
        one(x).sum().backward()
    for once, twice in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(once.grad * 2, twice.grad)


@on_each_rank(2)
def test_meta_weights_shared_across_units(rank):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[1].weight = model[0].weight
        model[0].weight.no_decay = True
    model = wrapped(model, "0", "1")
    assert len(list(model.parameters())) == 3
    full = whole(model, model.state_dict())
    assert torch.equal(full["0.weight"], full["1.weight"])
    assert model[0].module.weight.no_decay


@on_each_rank(2)
def test_a_module_under_two_names(rank):
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = self.a

        def forward(self, x):
            return self.b(self.a(x))

    plain = Shared()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model = wrapped(plain)
    ours = whole(model, model.state_dict())
    assert ours.keys() == expected.keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


@on_each_rank(2)
def test_refusals(rank):
    with pytest.raises(ValueError, match=f"no group of sharding_groups has this rank, {rank}"):
        FSDP(mlp(), sharding_groups=[[0, 1]], sharding_rank=1 - rank, sharding_world_size=2)
    model = wrapped(mlp(), "1")
    outer = nn.ModuleDict({"inner": model, "head": nn.Linear(2, 2)})
    bias = torch.ones(2)
    outer.load_state_dict({"head.bias": bias}, strict=False, assign=True)
    assert outer["head"].bias.data_ptr() == bias.data_ptr()
    with pytest.raises(ValueError, match="Leave assign out"):
        outer.load_state_dict(outer.state_dict(), assign=True)
    half = FSDP(mlp().half())
    assert half.gradient_predivide_factor == 2 and half.gradient_postdivide_factor == 1


def leaves_work_behind(rank, synced):
    model = wrapped(mlp(), "1")
    for _ in range(2):
        model(inputs(rank).to(torch_xla.device())).square().mean().backward()
        if synced:
            torch_xla.sync()
    return [p.grad for p in model.parameters()] if rank == 0 and synced else None


def test_launches_that_leave_work_behind(run_ranks):
    for synced in (False, True, False, True):
        run_ranks(leaves_work_behind, 2, synced)


@on_each_rank(1)
def test_torch_compile_is_refused(rank):
    x = inputs(rank).to("xla")
    for backend in ("eager", "aot_eager", "openxla"):
        model = wrapped(mlp(), "1")
        around = torch.compile(model, backend=backend)
        with pytest.raises(RuntimeError, match="Sequential, which is wrapped, .* leave torch.comp"):
            around(x)
        model(x).sum().backward()  # the remedy

        inside = wrapped(mlp(), "1")
        inside.module[1] = torch.compile(inside.module[1], backend=backend)
        with pytest.raises(RuntimeError, match="'1' in a wrapper is compiled by torch.compile"):
            inside(x)
        method = mlp()
        method[2].compile(backend=backend)
        with pytest.raises(RuntimeError, match="'2' in a wrapper is compiled by torch.compile"):
            wrapped(method)(x)
    parent = nn.Sequential(nn.Tanh(), wrapped(mlp(), "1"))
    with pytest.raises(RuntimeError, match="was called inside torch.compile"):
        torch.compile(parent, backend="eager")(x)
    itself = wrapped(mlp())
    itself.compile(backend="eager")
    with pytest.raises(RuntimeError, match="torch.compile"):
        itself(x)
    blocks = scan_blocks([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    with pytest.raises(RuntimeError, match="ScannedBlocks, which is wrapped, .* torch.compile"):
        torch.compile(blocks, backend="eager")(x)
    torch_xla.sync()


@pytest.mark.parametrize("ranks", [1, 2])
@on_each_rank()
def test_torch_func_is_refused(rank):
    model, plain = wrapped(mlp(), "1"), mlp()
    x = inputs(rank).to("xla")
    own = dict(model.named_parameters())

    def loss(one):
        return model(one).square().mean()

    # What torch knows of forward-mode is the process's, and ranks are its threads.
    alone = xr.world_size() == 1
    forward_mode = (
        lambda: torch.func.jvp(model, (x,), (torch.ones_like(x),)),
        lambda: torch.func.hessian(loss)(x),
    )
    for call in (
        *(forward_mode if alone else ()),
        lambda: torch.func.grad(loss)(x),
        lambda: torch.func.vmap(model)(x),
        lambda: torch.func.vjp(model, x),
        lambda: torch.func.jacrev(loss)(x),
        lambda: torch.func.grad(
            lambda p: torch.func.functional_call(model, p, (x,)).square().mean()
        )(own),
    ):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                with pytest.raises(RuntimeError, match="transformation of torch.func .* backward"):
                    call()
    blocks = scan_blocks([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    with pytest.raises(RuntimeError, match="transformation of torch.func"):
        torch.func.grad(lambda one: blocks(one).sum())(x)

    # The remedies that the message names, and what is no transformation of Python.
    def of_inputs(one, device):
        given = inputs(rank).to(device).requires_grad_()
        (grad,) = torch.autograd.grad(one(given).square().mean(), given, create_graph=True)
        jacobian = torch.autograd.functional.jacobian(one, given.detach())
        scaled = torch.func.vmap(lambda row: row * 2)(one(given))
        return [tensor.detach().cpu() for tensor in (grad, jacobian, scaled)]

    found, expected = of_inputs(model, "xla"), of_inputs(plain, "cpu")
    torch_xla.sync()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert_same_backward(model, plain, rank)

    if not alone:
        return

    def directional(one, device):
        with torch.autograd.forward_ad.dual_level():
            given = inputs(rank).to(device)
            dual = torch.autograd.forward_ad.make_dual(given, torch.ones_like(given))
            return torch.autograd.forward_ad.unpack_dual(one(dual)).tangent.cpu()

    torch.testing.assert_close(directional(model, "xla"), directional(plain, "cpu"))


@on_each_rank(2)
def test_hooks_of_saved_tensors_read_values(rank):
    """Autograd calls them within operators."""
    plain, model = mlp(), wrapped(mlp(), "1")
    with torch.autograd.graph.save_on_cpu():
        loss = model(inputs(rank).to("xla")).square().mean()
    loss.backward()
    plain(inputs_of_all()).square().mean().backward()
    assert_same_gradients(model, plain)

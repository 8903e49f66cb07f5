"""Uses that once gave wrong values, or an error that explains nothing."""

import copy

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank
from test_special_uses import (
    WIDTH,
    assert_same_gradients,
    inputs,
    inputs_of_all,
    mlp,
    whole,
    wrapped,
)
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module


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

"""In a forward a parameter answers as plain torch's, or raises an error that says what to use."""

import copy
import io
import re

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_each_rank, raises
from small_models import Computes, assert_same_gradients
from small_models import wrapped as in_units
from torch import nn

from xla_fsdp import FSDPModule, fully_shard, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP

WIDTH = 6


class Asking(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.3)
        self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.weight.scale, self.frozen.scale = 3.0, 4.0
        self.seen = []

    def forward(self, x):
        if "ask" in vars(self):
            self.seen.append(self.ask(self))
        return F.linear(x, self.weight * self.weight.scale, self.frozen)


def wrapped(**options):
    module = Asking()
    return FSDP(nn.Sequential(FSDP(module, **options))), module


def in_place():
    model = in_units(nn.Sequential(Asking()), "0", wrap=fully_shard)
    assert isinstance(model, FSDPModule)
    return model, model[0]


def scanned():
    blocks = scan_blocks([Asking(), Asking()], ignore=["seen"])
    return FSDP(nn.Sequential(blocks)), blocks.module


FORMS = {
    "wrapper": wrapped,
    "dim 0": lambda: wrapped(shard_param_on_dim_0=True),
    "kept": lambda: wrapped(reshard_after_forward=False),
    "flat": lambda: wrapped(flatten_parameters=True),
    "fully_shard": in_place,
    "scanned": scanned,
}
MODELS = FORMS | {"plain": lambda: (model := nn.Sequential(Asking()).to("xla"), model[0])}


def asked(rank, form, ask, steps=1):
    torch.manual_seed(0)
    model, module = MODELS[form]()
    object.__setattr__(module, "seen", [])
    object.__setattr__(module, "ask", ask)
    for _ in range(steps):
        model(torch.ones(2, WIDTH, device="xla")).sum().backward()
    return module.seen, module


def answers(module):
    def of(parameter):
        return (
            isinstance(parameter, nn.Parameter), parameter.requires_grad, parameter.is_leaf,
            parameter.grad_fn, parameter.scale, hasattr(parameter, "other"), parameter.shape,
            parameter.requires_grad_(parameter.requires_grad) is parameter,
        )  # fmt: skip

    with torch.no_grad():
        without = [of(module.weight), of(module.frozen)]
    named = [(name, p.requires_grad, p.scale) for name, p in module.named_parameters()]
    return of(module.weight), of(module.frozen), without, named


@pytest.mark.parametrize("form", FORMS)
@on_each_rank(2)
def test_it_answers_as_plain_torch(rank, form):
    want, _ = asked(rank, "plain", answers)
    got, _ = asked(rank, form, answers)
    assert len(got) >= 1 and all(one == want[0] for one in got), (want, got)


def sets_attributes(module):
    weight = module.weight
    weight.note = getattr(weight, "note", 0) + 1
    weight.gone = True
    del weight.gone
    with pytest.raises(AttributeError, match="gone"):
        weight.gone  # noqa: B018
    return weight.note, hasattr(weight, "gone")


@pytest.mark.parametrize("form", FORMS)
@on_each_rank(2)
def test_attributes_that_a_forward_sets_are_kept(rank, form):
    seen, module = asked(rank, form, sets_attributes, steps=3)
    notes = [note for note, _ in seen]
    # Blocks of a loop share one parameter, and are traced once in each direction.
    assert notes == [*range(1, len(notes) + 1)] and len(notes) >= 3
    if form in ("wrapper", "dim 0", "kept", "fully_shard"):
        assert module.weight.note == 3 and not hasattr(module.weight, "gone")
    if form == "flat":
        model, _ = wrapped(flatten_parameters=True)
        with FSDP.summon_full_params(model):
            assert {p.scale for p in model.parameters()} == {3.0, 4.0}


@on_each_rank(2)
def test_a_flattened_parameter_has_the_metadata_of_its_vector(rank):
    module = Asking()
    module.number = nn.Parameter(torch.tensor(2), requires_grad=False)
    model = FSDP(nn.Sequential(module), flatten_parameters=True)
    copied = copy.deepcopy(model).double()

    def metadata(module):
        parameters = module.weight, module.frozen, module.number
        return [(p.requires_grad, p.dtype) for p in parameters]

    fixed = [(False, torch.float32), (False, torch.int64)]
    assert metadata(module) == [(True, torch.float32), *fixed]
    model.requires_grad_(False)
    assert metadata(module) == [(False, torch.float32), *fixed]
    assert metadata(copied.module[0])[:2] == [(True, torch.float64), (False, torch.float64)]
    with pytest.raises(RuntimeError, match="requires_grad needs parameter '0.weight'"):
        module.weight.requires_grad = True


@pytest.mark.parametrize("form", [form for form in FORMS if form != "scanned"])
@on_each_rank(2)
def test_data_keeps_its_values_when_the_parameter_is_freed(rank, form):
    def ask(module):
        return module.weight.data, module.frozen.data

    (want,), (got,) = asked(rank, "plain", ask)[0], asked(rank, form, ask)[0]
    for one, other in zip(got, want, strict=True):
        assert type(one) is torch.Tensor and not one.requires_grad
        assert torch.equal(one.cpu(), other.cpu())


def result_of(action, module):
    # Not pytest.raises, whose traceback would keep what a loop traces.
    try:
        return action(module)
    except RuntimeError as error:
        return str(error)


FROZEN = "between steps"
REFUSED = {
    "freezing": (lambda m: m.weight.requires_grad_(False), FROZEN),
    "freezing by assignment": (lambda m: setattr(m.weight, "requires_grad", False), FROZEN),
    "a gradient": (lambda m: setattr(m.weight, "grad", torch.ones(1)), "after backward()"),
    "another name": (lambda m: setattr(m, "other", m.weight), "local variable"),
    "unfreezing": (lambda m: m.frozen.requires_grad_(), FROZEN),
}


def assert_refused(rank, form, action, remedy, name="weight"):
    seen, _ = asked(rank, form, lambda module: result_of(action, module))
    assert seen
    for text in seen:
        assert re.search(rf"parameter '(0\.)*{name}'.*{re.escape(remedy)}", text), text


@pytest.mark.parametrize("form", ["wrapper", "flat", "fully_shard", "scanned"])
@on_each_rank(2)
def test_what_would_be_lost_raises(rank, form):
    for case, (action, remedy) in REFUSED.items():
        assert_refused(rank, form, action, remedy, "frozen" if case == "unfreezing" else "weight")


@pytest.mark.parametrize("form", FORMS)
@on_each_rank(2)
def test_a_gradient_that_is_not_here_raises(rank, form):
    def gradients(module):
        if form == "wrapper":
            module.weight = module.weight  # which may be assigned to itself
        return module.weight.grad, module.frozen.grad

    for action, before in ((gradients, (None, None)), (nn.Module.zero_grad, None)):
        seen, _ = asked(rank, form, lambda m, action=action: result_of(action, m), steps=2)
        assert seen[0] == before
        assert "after backward()" in seen[-1], seen


@pytest.mark.parametrize("form", ["wrapper", "fully_shard"])
@on_each_rank(2)
def test_hooks_of_a_forward(rank, form):
    torch.manual_seed(0)
    model, module = MODELS[form]()
    grads, after = [], []

    def ask(module):
        if not grads:
            module.weight.register_hook(lambda grad: grads.append(grad.clone()))
            module.weight.register_post_accumulate_grad_hook(after.append)

    module.ask = ask
    x = torch.full((2, WIDTH), float(rank + 1), device="xla")
    for _ in range(2):
        model(x).sum().backward()
    assert len(grads) == len(after) == 2
    assert after[0] is module.weight
    total = module.weight.grad.sum().item()
    assert torch.equal((grads[0] + grads[1]).cpu(), module.weight.grad.cpu())
    # Two steps, 3 * 2 rows of the mean input 1.5, in each of 36 elements.
    assert total == pytest.approx(2 * 3 * 2 * 1.5 * WIDTH * WIDTH)


@pytest.mark.parametrize("form", ["flat", "scanned"])
@on_each_rank(2)
def test_hooks_of_one_of_several_in_a_tensor_raise(rank, form):
    for method in ("register_hook", "register_post_accumulate_grad_hook"):
        action = lambda module, method=method: getattr(module.weight, method)(print)  # noqa: E731
        assert_refused(rank, form, action, "one tensor with others")


def copies(module):
    copied = copy.deepcopy(module.weight)
    file = io.BytesIO()
    torch.save(module.frozen, file)
    file.seek(0)
    loaded = torch.load(file)
    cast = copy.deepcopy(module.frozen.bfloat16())
    return (
        type(copied) is type(loaded) is nn.Parameter,
        copied.scale == 3.0 and copied.requires_grad and not loaded.requires_grad,
        torch.equal(copied, module.weight) and torch.equal(loaded, module.frozen),
        type(cast) is torch.Tensor and torch.equal(cast, module.frozen.bfloat16()),
    )


@on_each_rank(1)
def test_copies_are_parameters_that_nothing_shards(rank):
    assert asked(rank, "wrapper", copies)[0] == [(True, True, True, True)]


@pytest.mark.parametrize("frozen", [False, True])
@on_each_rank(1)
def test_casts_that_are_changed_in_place(rank, frozen):
    """What autograd saves of such a cast cannot be made of the parameter again."""

    def compute(self, x):
        half = self.weight.to(torch.float64)
        half.mul_(2)
        again = half.float()
        again[0] = 1
        return x @ again.t() + x @ self.weight.detach().double().float()

    plain = Computes(compute, weight=nn.Parameter(torch.randn(WIDTH, WIDTH)))
    plain.requires_grad_(not frozen)
    model = FSDP(nn.Sequential(FSDP(copy.deepcopy(plain))))
    x = torch.randn(3, WIDTH, requires_grad=True)
    mine = x.detach().to("xla").requires_grad_()
    for module, given in ((plain, x), (model, mine)):
        module(given).square().sum().backward()
    torch.testing.assert_close(mine.grad.cpu(), x.grad, rtol=1e-5, atol=1e-5)
    assert_same_gradients(model, nn.Sequential(plain))


@on_each_rank(2)
def test_a_frozen_trunk_has_no_backward(rank):
    trunk = FSDP(nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    model = FSDP(nn.Sequential(trunk, nn.Linear(WIDTH, 2)))
    features = []
    trunk.register_forward_hook(lambda *args: features.append(args[-1]))
    loss = model(torch.ones(2, WIDTH, device="xla")).sum()
    gathers, gather = [], trunk._unit.gather
    trunk._unit.gather = lambda *args: gathers.append(1) or gather(*args)
    loss.backward()
    assert not features[0].requires_grad and features[0].grad_fn is None
    assert not gathers
    assert [p.grad is None for p in model.parameters()] == [True, True, False, False]


@on_each_rank(2)
def test_an_optimizer_that_a_forward_makes_raises(rank):
    (optimizer,), _ = asked(rank, "wrapper", lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    raises(RuntimeError, r"Make the optimizer from model.parameters\(\) outside", optimizer.step)

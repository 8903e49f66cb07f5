"""Forwards, losses, frozen parts and hooks beyond one forward and one backward: as plain torch."""

import collections
import contextlib
import copy
import dataclasses
import functools
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.runtime as xr
from on_ranks import finish_step, on_each_rank, raises, slow
from small_models import (
    WIDTH,
    Computes,
    assert_same_backward,
    assert_same_gradients,
    here,
    inputs,
    inputs_of_all,
    mean_square,
    mlp,
    trace_as_on_tpu,
    whole,
    without_sync,
    wrapped,
)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.checkpoint.inventory import make_inventory
from xla_fsdp.layers import all_gather_with_grad


@on_each_rank(2)
def test_memory_formats(rank):
    """Shards are vectors, which have no channels to put last: torch raises for those on a CPU."""

    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 3))

    images = torch.randn(4, 2, 4, 4, generator=torch.Generator().manual_seed(0))
    for wrap in (
        FSDP,
        functools.partial(FSDP, cpu_offload=xla_fsdp.CPUOffload()),
        functools.partial(xla_fsdp.fully_shard, offload_policy=xla_fsdp.CPUOffloadPolicy()),
    ):
        plain, ours = model(), wrap(model()).to(memory_format=torch.channels_last)
        ours(images.chunk(2)[rank].to("xla")).square().mean().backward()
        plain(images).square().mean().backward()
        assert_same_gradients(ours, plain)
    flat, text = FSDP(model(), flatten_parameters=True), "'flat_param_0'.* leave memory_format out"
    raises(RuntimeError, text, flat.to, memory_format=torch.channels_last)


@pytest.mark.parametrize("wrap", [FSDP, xla_fsdp.fully_shard, xla_fsdp.scan_blocks])
@on_each_rank(2)
def test_a_default_device(rank, size, folder, wrap):
    """Around everything that a script does."""

    def train(model, x):
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)
        for _ in range(2):
            mean_square(model, x).backward()
            finish_step(optimizer)
        return optimizer

    torch.manual_seed(3)
    plain, x = [nn.Linear(WIDTH, WIDTH) for _ in range(2)], here(rank)
    with torch.device("xla"):
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        for ours, theirs in zip(layers, plain, strict=True):
            ours.load_state_dict(theirs.state_dict())
        model = wrap(layers if wrap is xla_fsdp.scan_blocks else nn.Sequential(*layers))
        optimizer = train(model, x)
        xla_fsdp.save_checkpoint(folder, model, optimizer, step=1)
        xla_fsdp.load_checkpoint(folder, model, optimizer)
        found = xla_fsdp.full_state_dict(model, rank0_only=False)
    train(nn.Sequential(*plain), inputs_of_all())
    torch.testing.assert_close(found, nn.Sequential(*plain).state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrap", [FSDP, xla_fsdp.fully_shard, xla_fsdp.scan_blocks])
@on_each_rank(1)  # the flags are those of all threads
def test_parameters_stay_the_same_objects(rank, wrap):
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = wrap(list(layers) if wrap is xla_fsdp.scan_blocks else copy.deepcopy(layers))
    state, first = model.state_dict(), next(model.parameters())
    for flag, calls in (
        ("swap", [model.half, lambda: model.to("xla"), lambda: model.load_state_dict(state)]),
        ("overwrite", [model.half, lambda: nn.Sequential(model).to(torch.float64)]),
    ):
        change = getattr(torch.__future__, f"set_{flag}_module_params_on_conversion")
        change(True)
        try:
            for call in calls:
                text = rf"would replace .*[.]set_{flag}_module_params_on_conversion\(False\)"
                raises(RuntimeError, text, call)
        finally:
            change(False)
        calls[0]()  # the remedy
    values = nn.Parameter(torch.ones(first.shape, device="xla", dtype=first.dtype))
    for pair in ((first, values), (values, first)):
        text = "would replace parameter '.*weight' .*copy_"
        raises(RuntimeError, text, torch.utils.swap_tensors, *pair)
    with torch.no_grad():
        first.copy_(values)
    assert first is next(model.parameters()) and first.full_tensor().eq(1).all()


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

    for wrap in (lambda found: wrapped(found, "1"), xla_fsdp.fully_shard):
        plain, ours = model(), wrap(model())
        with parametrize.cached():
            sum(ours(inputs(rank, step).to("xla")).square().mean() for step in range(2)).backward()
            sum(plain(inputs_of_all(step)).square().mean() for step in range(2)).backward()
        assert_same_gradients(ours, plain)


@pytest.mark.parametrize("reshard", [True, False])
@on_each_rank(2)
def test_saved_tensors_on_the_host(rank, reshard):
    """Autograd calls these hooks within operators. They get activations, and no parameter."""
    packed = []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.device, tensor.cpu()

    def loss_of(model, x):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[1].to(kept[0])):
            return mean_square(model, x)

    plain, model = mlp(), wrapped(mlp(), "1", reshard_after_forward=reshard)
    loss_of(model, here(rank)).backward()
    assert torch.Size([2, WIDTH]) in packed and torch.Size([WIDTH, WIDTH]) not in packed
    loss_of(plain, inputs_of_all()).backward()
    assert_same_gradients(model, plain)


def contrastive(model, x):
    features = F.normalize(model(x))
    logits = features @ features.T * 3
    return F.cross_entropy(logits, torch.arange(len(features)).to(logits.device))


@pytest.mark.parametrize("dim", [0, -1])
@on_each_rank(2)
def test_a_loss_over_the_examples_of_all_ranks(rank, dim):
    def gather(self, x):
        return all_gather_with_grad(x.movedim(0, dim), dim).movedim(dim, 0)

    model = mlp()
    model.append(xla_fsdp.checkpoint_module(Computes(gather)))
    model = wrapped(model, "1")
    assert_same_backward(model, mlp(), rank, contrastive)
    loss = contrastive(model, here(rank))
    torch.testing.assert_close(loss.cpu(), contrastive(mlp(), inputs_of_all()))
    for wrong, match in ((torch.ones(2), "on the XLA device"), (loss, "without dimensions")):
        raises(ValueError, match, all_gather_with_grad, wrong)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
@on_each_rank(2)
def test_an_exception_leaves_nothing_behind(rank, when, checkpointed):
    def fail(*given):
        raise ZeroDivisionError

    def compute(self, x):
        x = self.linear(x)
        if self.when == "forward":
            fail()
        if self.when == "backward" and x.requires_grad:
            x.register_hook(fail)
        return torch.tanh(x)

    def build():
        torch.manual_seed(6)
        first, own, last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        return nn.Sequential(first, Computes(compute, linear=own, when=None), last)

    def shapes():
        kinds = dict(model.named_parameters()), model.state_dict()
        return [{name: value.shape for name, value in kind.items()} for kind in kinds]

    plain, model = build(), build()
    trip = model[1]
    if checkpointed:
        xla_fsdp.checkpoint_module(trip)
    model = wrapped(model, "0", "1")
    before = shapes()
    trip.when = when
    with pytest.raises(ZeroDivisionError):
        mean_square(model, here(rank)).backward()
    trip.when = None
    assert shapes() == before
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


def structured(make):
    torch.manual_seed(7)

    def compute(self, x, *, scale=1.0, extra=None):
        x = x["x"][0]
        y = self.linear(x.data if isinstance(x, PackedSequence) else x) * scale
        if extra is not None:
            y = y + extra.first
        return make(torch.tanh(y))  # of which the backward needs the values

    return Computes(compute, linear=nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", OUTPUTS)
@on_each_rank(2)
def test_structured_inputs_and_outputs(rank, kind, checkpointed):
    dtype = torch.bfloat16 if kind in ("dict", "packed") else None
    make, tensor_of = OUTPUTS[kind]
    plain, model = structured(make), structured(make)
    if checkpointed:
        xla_fsdp.checkpoint_module(model)
    model = wrapped(model, compute_dtype=dtype)
    x, extra = inputs(0), inputs(1)
    if kind == "packed":
        x = PackedSequence(x, torch.tensor([1, 1]))
    given = {"x": (x.to("xla"), torch.tensor([1, 2], device="xla"))}
    out = model(given, scale=0.5, extra=Pair(extra.to("xla"), "text"))
    expected = plain({"x": (x, None)}, scale=0.5, extra=Pair(extra, "text"))
    assert type(out) is type(expected)
    assert tensor_of(out).dtype is (dtype or torch.float32)
    for one in (out, expected):
        tensor_of(one).float().square().mean().backward()
    assert_same_gradients(model, plain, *([0.02, 0.02] if dtype else []))


@on_each_rank(1)
def test_one_rank_is_bit_for_bit_the_unwrapped_model(rank):
    plain = mlp().to("xla")
    model = wrapped(mlp(), "1")
    pair = [(m, torch.optim.AdamW(m.parameters(), 0.1)) for m in (plain, model)]
    for step in range(3):
        losses = []
        for m, optimizer in pair:
            loss = mean_square(m, here(0, step))
            loss.backward()
            finish_step(optimizer)
            losses.append(loss.item())
        assert losses[0] == losses[1]
    ours = whole(model, model.state_dict())
    for name, value in plain.state_dict().items():
        assert torch.equal(ours[name], value.cpu())


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

    def build(wrap=lambda module: module):
        torch.manual_seed(5)
        return nn.Sequential(wrap(Computes(compute, linear=nn.Linear(WIDTH, WIDTH))))

    def loss(model, x):
        x = x.requires_grad_() if needs_grad else x
        out = model(x * 1)  # not a leaf, so that it may be changed in place
        return loss_of(getattr(model[0], "module", model[0]), out)

    model = wrapped(build(xla_fsdp.checkpoint_module) if checkpointed else build(), "0")
    assert_same_backward(model, build(), rank, loss)


@on_each_rank(2)
def test_changes_in_place_are_detected_as_without_wrapper(rank):
    def late(self, x):
        y = self.linear(x)
        z = y.square()
        y.add_(1)
        return z

    model = wrapped(Computes(late, linear=nn.Linear(WIDTH, WIDTH)))
    with pytest.raises(RuntimeError, match="changed in place after the forward used it"):
        model(here(rank)).sum().backward()


@on_each_rank(2)
def test_gradients_of_gradients(rank):
    def penalty(model, x):
        (grad,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)
        return grad.square().sum(1).mean()

    plain, model = mlp(), wrapped(mlp(), "1")
    assert_same_backward(model, plain, rank, penalty)
    given, names = here(rank), r"'\S+', '\S+'.* no second derivative"
    parameters = list(model.parameters())

    def gradients(model, x, **options):
        return torch.autograd.grad(mean_square(model, x), list(model.parameters()), **options)

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
    once = gradients(plain, inputs_of_all(), create_graph=True)
    right = torch.autograd.grad(vector_product(once), list(plain.parameters()))
    assert found == pytest.approx(sum(grad.sum() for grad in right).item(), rel=2e-2)
    model.zero_grad()
    mean_square(model, given).backward(create_graph=True)
    for parameter, grad in zip(parameters, after, strict=True):
        assert torch.equal(parameter.grad.full_tensor(), grad.full_tensor())


@on_each_rank(2)
def test_copies_and_inference_mode(rank):
    model = wrapped(mlp(), "1")
    twin = copy.deepcopy(model)
    x = here(rank)
    model(x).sum().backward()
    assert all(p.grad is None for p in twin.parameters())
    with torch.no_grad():
        expected = model(x).cpu()
        for parameter in model.parameters():
            parameter.zero_()
        assert torch.equal(twin(x).cpu(), expected)
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
def test_a_module_under_two_names(rank):
    layer = nn.Linear(WIDTH, WIDTH)
    plain = Computes(lambda self, x: self.b(self.a(x)), a=layer, b=layer)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    model = wrapped(plain)
    ours = whole(model, model.state_dict())
    assert ours.keys() == expected.keys() == {"a.weight", "a.bias", "b.weight", "b.bias"}
    assert all(torch.equal(ours[name], value) for name, value in expected.items())


@on_each_rank(1)
def test_torch_compile_is_refused(rank):
    x = here(rank)
    for backend in ("eager", "aot_eager", "openxla"):
        model = wrapped(mlp(), "1")
        around = torch.compile(model, backend=backend)
        raises(RuntimeError, "Sequential, which is wrapped, .* leave torch.comp", around, x)
        model(x).sum().backward()  # the remedy

        inside = wrapped(mlp(), "1")
        inside.module[1] = torch.compile(inside.module[1], backend=backend)
        raises(RuntimeError, "'1' in a wrapper is compiled by torch.compile", inside, x)
        method = mlp()
        method[2].compile(backend=backend)
        with pytest.raises(RuntimeError, match="'2' in a wrapper is compiled by torch.compile"):
            wrapped(method)(x)
    parent = nn.Sequential(nn.Tanh(), wrapped(mlp(), "1"))
    with pytest.raises(RuntimeError, match="was called inside torch.compile"):
        torch.compile(parent, backend="eager")(x)
    itself = wrapped(mlp())
    itself.compile(backend="eager")
    raises(RuntimeError, "torch.compile", itself, x)
    blocks = xla_fsdp.scan_blocks([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    with pytest.raises(RuntimeError, match="ScannedBlocks, which is wrapped, .* torch.compile"):
        torch.compile(blocks, backend="eager")(x)
    torch_xla.sync()


@on_each_rank(1)
def test_graphs_for_export_are_refused(rank):
    """torch makes them with flags and functions of the process, which ranks in threads share."""
    x = here(rank)
    for wrap in (wrapped, xla_fsdp.fully_shard, lambda layers: xla_fsdp.scan_blocks([layers[0]])):
        for call in (
            lambda model: torch.jit.trace(model, x),
            torch.jit.script,
            torch.fx.symbolic_trace,
            lambda model: make_fx(model)(x),
            lambda model: torch.export.export(model, (x,), strict=False),
            lambda model: torch.onnx.export(model, (x,), io.BytesIO(), dynamo=False),
        ):
            for around in (lambda model: model, nn.Sequential):
                model = around(wrap(mlp()))
                raises(RuntimeError, r"not wrapped, with the values .*full_state_dict", call, model)
                mean_square(model, x).backward()
    torch_xla.sync()


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("gain", torch.full((3,), 2.0))

    def forward(self, x):
        return x * self.gain


@on_each_rank(1)
def test_modules_made_by_torch_jit(rank):
    for wrap in (FSDP, xla_fsdp.fully_shard, xla_fsdp.checkpoint_module):
        plain, model = (nn.Sequential(*mlp(), torch.jit.script(Buffered())) for _ in range(2))
        model = FSDP(wrap(model)) if wrap is xla_fsdp.checkpoint_module else wrap(model)
        assert_same_backward(model, plain, rank)
        found = xla_fsdp.full_state_dict(model)
        torch.testing.assert_close(found, plain.state_dict(), rtol=0, atol=0)
    for make in (torch.jit.script, lambda layer: torch.jit.trace(layer, inputs(rank))):
        model = nn.Sequential(make(nn.Linear(WIDTH, WIDTH)))
        raises(TypeError, "'0.weight' is of a module that torch.jit made, .*ignored", FSDP, model)
        FSDP(model.to("xla"), ignored_modules=[model[0]])(here(rank))  # the remedy


@pytest.mark.parametrize("wrap", [FSDP, xla_fsdp.fully_shard])
@on_each_rank(2)
def test_gated_recurrent_units(rank, wrap):
    """torch_xla replaces nn.GRU by a loop, which it traces with tensors that have no values.

    It caches the trace by shapes: of a layer or an evaluation whose input needs no gradient.
    """

    def model(kind):
        first = nn.Linear(WIDTH, WIDTH)
        return Computes(
            lambda self, x: self.cells(self.first(x)[None])[0],
            first=first, cells=kind(WIDTH, WIDTH, 2),
        )  # fmt: skip

    torch.manual_seed(3)
    plain, ours = model(torch.nn.modules.rnn.GRU), model(nn.GRU)
    ours.load_state_dict(plain.state_dict())
    ours = wrap(ours)
    with torch.no_grad():
        ours(here(rank))
    assert_same_backward(ours, plain, rank)
    first = ours(here(rank)).square().mean()
    with torch.autocast("xla", torch.bfloat16):
        second = ours(here(rank)).square().mean()
    (first + second).backward()
    exact, rounded = torch.stack([first, second]).tolist()
    assert exact != rounded == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize("ranks", [1, 2])
@on_each_rank()
def test_torch_func_is_refused(rank):
    model, plain = wrapped(mlp(), "1"), mlp()
    x = here(rank)
    own = dict(model.named_parameters())

    def loss(one):
        return model(one).square().mean()

    def of_own(parameters):
        return torch.func.functional_call(model, parameters, (x,)).square().mean()

    # What torch knows of forward-mode is the process's, and ranks are its threads.
    alone = xr.world_size() == 1
    ones = torch.ones_like(x)
    forward_mode = lambda: torch.func.jvp(model, (x,), (ones,)), lambda: torch.func.hessian(loss)(x)
    for call in (
        *(forward_mode if alone else ()),
        lambda: torch.func.grad(loss)(x),
        lambda: torch.func.vmap(model)(x),
        lambda: torch.func.vjp(model, x),
        lambda: torch.func.jacrev(loss)(x),
        lambda: torch.func.grad(of_own)(own),
    ):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                raises(RuntimeError, "transformation of torch.func .* backward", call)
    blocks = xla_fsdp.scan_blocks([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    with pytest.raises(RuntimeError, match="transformation of torch.func"):
        torch.func.grad(lambda one: blocks(one).sum())(x)

    def of_inputs(one, device):
        given = inputs(rank).to(device).requires_grad_()
        (grad,) = torch.autograd.grad(one(given).square().mean(), given, create_graph=True)
        jacobian = torch.autograd.functional.jacobian(one, given.detach())
        made = [grad, jacobian, torch.func.vmap(lambda row: row * 2)(one(given))]
        if alone:
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(given.detach(), torch.ones_like(given))
                made.append(torch.autograd.forward_ad.unpack_dual(one(dual)).tangent)
        return [tensor.detach().cpu() for tensor in made]

    found, expected = of_inputs(model, "xla"), of_inputs(plain, "cpu")
    torch_xla.sync()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert_same_backward(model, plain, rank)


def adapted():
    return Computes(
        lambda self, x: torch.tanh(self.base(x) + self.up(self.down(x))),
        base=nn.Linear(WIDTH, WIDTH).requires_grad_(False),
        down=nn.Linear(WIDTH, 2, bias=False),
        up=nn.Linear(2, WIDTH, bias=False),
    )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(17)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(adapted() for _ in range(2))
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).requires_grad_(False)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head.weight = self.embed.weight
        self.value = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        x = self.frozen(x)
        return self.head(x), self.value(x)


UNITS = ("embed", "frozen", "head", "blocks.0", "blocks.1")


def wrap(kind, model):
    if kind in ("root", "flat"):
        return FSDP(model, flatten_parameters=kind == "flat")
    if kind == "checkpointed":
        for name in UNITS:
            xla_fsdp.checkpoint_module(model.get_submodule(name))
    if kind in ("offload", "streamed"):
        return wrapped(model, *UNITS, cpu_offload=xla_fsdp.CPUOffload(stream=kind == "streamed"))
    return wrapped(model, *UNITS, reshard_after_forward=kind != "zero2")


def two_losses(model, x, step):
    logits, value = model(x)
    logits.square().mean().backward(retain_graph=True)
    value.abs().mean().backward()


def summed_losses(model, x, step):
    logits, value = model(x)
    (logits.square().mean() + 0.5 * value.abs().mean()).backward()


def one_of_the_outputs(model, x, step):
    model(x)[step % 2].square().mean().backward()


def preferences(model, x, step):
    """Two forwards of the model and one of it without gradients, in one loss, as of DPO."""
    with torch.no_grad():
        reference = model(x)[0].sum(-1)
    chosen, rejected = model(x)[0].sum(-1), model(x.flip(-1))[0].sum(-1)
    (-F.logsigmoid(0.1 * (chosen - rejected) - reference * 0.01)).mean().backward()


def thawing(model, x, step):
    named = dict(model.named_parameters())
    for name, parameter in named.items():
        if "base" in name or "up" in name or name.startswith("value"):
            parameter.requires_grad_((len(name) + step) % 2 == 0)
    summed_losses(model, x, step)
    for name in ("blocks.0.down.weight", "embed.weight"):
        named[name].requires_grad_(step % 2 == 1)
    summed_losses(model, x * 0.5, step)
    for parameter in named.values():
        parameter.requires_grad_(True)


LOOPS = [two_losses, summed_losses, one_of_the_outputs, preferences, thawing]


@pytest.mark.parametrize(
    "ranks, kind", [(2, "root"), slow(4, "nested"), slow(2, "checkpointed"), (4, "flat")]
)
@on_each_rank(timeout=1500)
def test_mixes_train_as_in_plain_torch(rank, kind):
    trace_as_on_tpu(kind == "nested")
    for loop in LOOPS:
        if kind == "flat" and loop in (thawing, one_of_the_outputs):
            continue  # a vector is frozen, and gets a gradient, as one: docs/how-to/wrap-a-model.md
        plain, model = Model(), wrap(kind, Model())
        ours = torch.optim.SGD(model.parameters(), 0.2, 0.9)
        theirs = torch.optim.SGD(plain.parameters(), 0.2, 0.9)
        for step in range(2):
            loop(model, here(rank, step), step)
            loop(plain, inputs_of_all(step), step)
            assert_same_gradients(model, plain)
            ours.step(), theirs.step()
            ours.zero_grad(), theirs.zero_grad()
            torch_xla.sync()
        found = whole(model, model.state_dict())
        torch.testing.assert_close(found, plain.state_dict(), rtol=1e-4, atol=1e-5)


def halve(parameter):
    parameter.grad.mul_(0.5)


def hooked(model, log):
    named = dict(model.named_parameters())

    def seen(name):
        def hook(parameter):
            log.append((name, parameter.grad is not None))

        return hook

    named["head.bias"].register_post_accumulate_grad_hook(seen("head.bias"))
    named["blocks.1.up.weight"].register_post_accumulate_grad_hook(halve)
    named["value.bias"].register_hook(lambda grad: grad * 3)
    # Tied, and used by several passes: not linear, so it must get the sum of all gradients.
    named["embed.weight"].register_hook(lambda grad: grad.clamp(-0.01, 0.01))

    def halved(module, of_inputs, of_outputs):
        log.append((type(module).__name__, len(of_inputs), len(of_outputs)))
        return tuple(grad * 0.5 for grad in of_inputs)

    model.blocks[1].register_full_backward_hook(halved)
    model.head.register_full_backward_pre_hook(lambda module, grads: (grads[0] * 2,))
    model.frozen.register_forward_hook(lambda module, args, output: output * 1.5)
    model.embed.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


@on_each_rank(2)
def test_hooks_are_called_in_their_order(rank):
    """Some registered before the wrapping, some after it: the first to see a value above 0 wins."""

    def register(module, number, **options):
        def change(one):
            return torch.where(one > 0, -number * one, one)

        def every(module, given, *result):
            return tuple(map(change, given))

        module.register_forward_pre_hook(every, **options)
        module.register_forward_hook(lambda module, given, result: change(result), **options)
        module.register_full_backward_pre_hook(every, **options)
        module.register_full_backward_hook(every, **options)

    def build(wrap):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        register(model[1], 1.25)
        model[1] = wrap(model[1])
        register(model[1], 0.5)
        register(model[1], 0.75, prepend=True)
        return wrap(model)

    plain, model = build(lambda module: module), build(FSDP)
    assert_same_backward(model, plain, rank)


@pytest.mark.parametrize(
    "ranks, kind", [(2, "root"), (4, "nested"), (2, "zero2"), (2, "offload"), (2, "streamed")]
)
@on_each_rank(timeout=1500)
def test_hooks_see_and_change_what_plain_torch_gives_them(rank, kind):
    plain, model = Model(), wrap(kind, Model())
    theirs, ours = [], []
    hooked(plain, theirs), hooked(model, ours)
    for step in range(2):
        for loop in (summed_losses, preferences):
            loop(model, here(rank, step), step)
            loop(plain, inputs_of_all(step), step)
            assert_same_gradients(model, plain)

    def kinds(log):
        return sorted(str(entry[1:]) for entry in log)

    assert kinds(ours) == kinds(theirs)


@on_each_rank(2)
def test_hooks_on_what_is_reduced_at_the_end(rank):
    """Hooks on what only a backward inside ``no_sync`` reaches: called when that is reduced."""
    plain, model = Model(), wrap("nested", Model())
    for one in (plain, model):
        named = dict(one.named_parameters())
        named["value.bias"].register_hook(lambda grad: grad * 3)
        named["value.weight"].register_post_accumulate_grad_hook(halve)
    for number, hold in enumerate((model.no_sync(), contextlib.nullcontext())):
        with hold:
            one_of_the_outputs(model, here(rank), 1 - number)
    everyone = inputs_of_all()
    for number in range(2):
        one_of_the_outputs(plain, everyone, 1 - number)
    assert_same_gradients(model, plain)
    # A backward that does not reach them calls no hook: not for what is there already.
    one_of_the_outputs(model, here(rank), 0)
    one_of_the_outputs(plain, everyone, 0)
    assert_same_gradients(model, plain)
    # Also where the backward goes through an inner wrapper only.
    plain, model = mlp(), wrapped(mlp(), "1")
    model(here(rank))
    for one, x in ((plain, everyone), (model, here(rank))):
        with getattr(one, "no_sync", contextlib.nullcontext)():
            one[1](x).square().mean().backward()
        one[1](x).square().mean().backward(inputs=[one[1][0].weight])
    assert_same_gradients(model, plain)


SCALES = {"layers.1.scale", "inner.layer.scale"}


@on_each_rank(2)
def test_a_layer_of_a_unit_that_the_model_also_lists(rank):
    """As in U-Nets, whose blocks call each other and are in lists too."""

    def build(compute=lambda self, x: self.head(self.inner(self.layers[0](x)))):
        torch.manual_seed(3)
        layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        layers[1].register_buffer("scale", torch.ones(1, device="cpu"))
        inner = Computes(lambda self, x: torch.tanh(self.layer(x)) + x, layer=layers[1])
        return Computes(compute, layers=layers, inner=inner, head=nn.Linear(WIDTH, 3))

    def by_policy(model):
        def choose(module, recurse, unwrapped_params):
            return recurse or module is inner

        inner = model.inner
        return FSDP(model, auto_wrap_policy=choose, buffer_dtype=torch.bfloat16)

    def nested(wrap):
        return lambda model: wrapped(model, "inner", wrap=wrap)

    def train(model, x):
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        mean_square(model, x).backward()
        finish_step(optimizer)

    plain, x = build(), here(rank)
    train(plain, inputs_of_all())
    flat = functools.partial(FSDP, flatten_parameters=True)
    for wrap in (by_policy, *map(nested, (FSDP, flat, xla_fsdp.fully_shard))):
        model = wrap(build())
        train(model, x)
        full = xla_fsdp.full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(full, dict(plain.state_dict()))
        metadata = model.get_shard_metadata()
        members = (m for entry in metadata["parameters"].values() for m in entry["members"])
        assert {name for m in members for name in m["names"]} == {*full} - SCALES
        assert metadata["buffers"].keys() == (SCALES if wrap is by_policy else set())
        assert {name for e in make_inventory(model).entries() for name in e.names} == {*full}
        outside = wrap(build(lambda self, x: self.inner(self.layers[1](x))))
        raises(RuntimeError, r"'inner\.layer\.0\.weight', which is sharded here", outside, x)
        with torch.device("meta"):
            empty = build()
        empty = wrap(empty)
        xla_fsdp.load_full_state_dict(empty, full)
        torch.testing.assert_close(xla_fsdp.full_state_dict(empty, rank0_only=False), full)
    late = build()
    for module in (late.inner, late.layers[1], late):
        xla_fsdp.fully_shard(module)
    raises(RuntimeError, "that of 'inner.layer' and that of 'inner' around it", late, x)


@on_each_rank(2)
def test_hooks_on_what_several_units_reduce_at_the_end(rank):
    """A weight of two units that only a backward inside ``no_sync`` reaches: one call."""

    def compute(self, x, tied):
        return self.first(x) + self.second(x * 2) if tied else self.last(x)

    def build(wrap=lambda module: module):
        torch.manual_seed(3)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        layers[1].weight = layers[0].weight
        names = ("first", "second", "last")
        return wrap(Computes(compute, **dict(zip(names, map(wrap, layers), strict=True))))

    def train(model, x, hold=without_sync):
        weight = dict(model.named_parameters())["first.weight"]
        weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        for tied in (True, False):
            with hold(model) if tied else contextlib.nullcontext():
                model(x, tied).square().mean().backward()

    plain = build()
    train(plain, inputs_of_all(), contextlib.nullcontext)
    hosts = (
        functools.partial(FSDP, cpu_offload=xla_fsdp.CPUOffload(stream=how))
        for how in (False, True)
    )
    for wrap in (FSDP, xla_fsdp.fully_shard, *hosts):
        model = build(wrap)
        train(model, here(rank))
        assert_same_gradients(model, plain)


@on_each_rank(2, timeout=1500)
def test_optimizers_in_the_backward(rank):
    def prepare(model):
        for parameter in model.parameters():
            if parameter.requires_grad:
                optimizer = torch.optim.SGD([parameter], 0.1)

                def step(p, optimizer=optimizer):
                    optimizer.step()
                    optimizer.zero_grad()

                parameter.register_post_accumulate_grad_hook(step)

    for kind in ("root", "nested", "offload", "streamed"):
        plain, model = Model(), wrap(kind, Model())
        prepare(plain), prepare(model)
        for step in range(3):
            loop = preferences if step == 1 else summed_losses
            loop(model, here(rank, step), step)
            loop(plain, inputs_of_all(step), step)
            torch_xla.sync()
        found = whole(model, model.state_dict())
        torch.testing.assert_close(found, plain.state_dict(), rtol=1e-4, atol=1e-5)

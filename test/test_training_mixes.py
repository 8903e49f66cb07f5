"""Ways to train that mix forwards, losses, frozen parts and hooks: each equals plain torch.

Everything runs on the same ranks in one launch: plain torch on all ranks' data against the model
sharded over them.
"""

import contextlib

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from on_ranks import on_each_rank
from small_models import (
    WIDTH,
    Computes,
    assert_same_backward,
    assert_same_gradients,
    here,
    inputs_of_all,
    mlp,
    trace_as_on_tpu,
    whole,
    wrapped,
)
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module


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
            checkpoint_module(model.get_submodule(name))
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
    """Other parameters train in every step, in the middle of an accumulation as well."""
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
    "ranks, kind",
    [
        (2, "root"),
        pytest.param(4, "nested", marks=pytest.mark.slow),
        pytest.param(2, "checkpointed", marks=pytest.mark.slow),
        (4, "flat"),
    ],
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


@pytest.mark.parametrize("ranks, kind", [(2, "root"), (4, "nested"), (2, "zero2")])
@on_each_rank(timeout=1500)
def test_hooks_see_and_change_what_plain_torch_gives_them(rank, kind):
    plain, model = Model(), wrap(kind, Model())
    theirs, ours = [], []
    hooked(plain, theirs), hooked(model, ours)
    for step in range(2):
        summed_losses(model, here(rank, step), step)
        summed_losses(plain, inputs_of_all(step), step)
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

    for kind in ("root", "nested"):
        plain, model = Model(), wrap(kind, Model())
        prepare(plain), prepare(model)
        for step in range(3):
            summed_losses(model, here(rank, step), step)
            summed_losses(plain, inputs_of_all(step), step)
            torch_xla.sync()
        found = whole(model, model.state_dict())
        torch.testing.assert_close(found, plain.state_dict(), rtol=1e-4, atol=1e-5)

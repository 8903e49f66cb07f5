"""Activation checkpointing inside of sharded models: torch's, torch_xla's and checkpoint_module."""

import functools

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank, only_full, slow
from small_models import (
    WIDTH,
    Computes,
    assert_same_backward,
    here,
    inputs,
    mean_square,
    mlp,
    wrapped,
)
from test_freeing import live_sizes
from torch import nn
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch_xla.utils.checkpoint import checkpoint as of_torch_xla

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module, full_state_dict, fully_shard


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, unused=None, *, scale=None):
        y = F.dropout(torch.tanh(self.linear(self.norm(x))), 0.5)
        return x + (y if scale is None else y * scale)


class SelfRecomputed(Layer):
    """Recomputes itself, as Transformers' GradientCheckpointingLayer does."""

    recomputes = False

    def __call__(self, *args, **kwargs):
        if not self.recomputes:
            return super().__call__(*args, **kwargs)
        self.recomputes = False
        return checkpoint(functools.partial(super().__call__, **kwargs), *args, use_reentrant=False)


def direct(module, x):
    return module(x)


class Net(nn.Module):
    def __init__(self, call=direct):
        super().__init__()
        torch.manual_seed(0)
        self.call = call
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([SelfRecomputed() for _ in range(2)])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = self.call(layer, x)
        return x.square().mean()


def selective():
    return create_selective_checkpoint_contexts([torch.ops.aten.tanh.default])


def by_itself(layer, x):
    recomputed = layer.module if hasattr(layer, "module") else layer
    recomputed.recomputes = True
    return layer(x, scale=x.detach())


def in_a_row(layer, x):
    """As timm's checkpoint_seq does."""

    def forward(x):
        for function in (layer,):
            x = function(x)
        return x

    return checkpoint(forward, x, use_reentrant=True)


CALLS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=selective),
    "no random state": functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    "to the end": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "nested": lambda layer, x: checkpoint(CALLS["not reentrant"], layer, x, use_reentrant=False),
    "by keyword": lambda layer, x: checkpoint(layer, x=x, scale=x.detach(), use_reentrant=False),
    "by closure": lambda layer, x: checkpoint(lambda: layer(x), use_reentrant=False),
    "by its call": lambda layer, x: checkpoint(layer.__call__, x, None, use_reentrant=False),
    "by its forward": lambda layer, x: checkpoint(layer.forward, x, use_reentrant=False),
    "by partial": lambda layer, x: checkpoint(
        functools.partial(layer, scale=x.detach()), x, use_reentrant=False
    ),
    "by itself": by_itself,
    "in a row": in_a_row,
    # As torchtitan and litgpt do.
    "by a wrapper": lambda layer, x: checkpoint_wrapper(layer, CheckpointImpl.NO_REENTRANT)(x),
    "composable": lambda layer, x: composable(layer)(x),
    "checkpoint_module": lambda layer, x: checkpoint_module(layer)(x),
    "nested checkpoint_module": lambda layer, x: checkpoint_module(
        nn.Sequential(checkpoint_module(layer))
    )(x),
}
SCALED = "by keyword", "by partial", "by itself"


def gradients_of(rank, call, shard, device):
    model = shard(Net(call))
    xm.set_rng_state(11, str(device))
    with torch.autocast("xla", torch.bfloat16):
        loss = model(inputs(rank).to(device))
    loss.backward()
    after = torch.rand(3, device=device)
    return [t.cpu() for t in [loss, after, *(p.grad for p in model.parameters())]]


def in_place(model):
    return wrapped(model, "layers.0", "layers.1", wrap=fully_shard)


@pytest.mark.parametrize("sharding", ["one unit", slow("in place"), only_full("each layer")])
@on_each_rank(2)
def test_calls_inside_of_sharded_models(rank, sharding):
    shard = {
        "one unit": wrapped,
        "each layer": lambda model: wrapped(model, "layers.0", "layers.1"),
        "in place": in_place,
    }[sharding]
    device = torch_xla.device()
    plain = gradients_of(rank, direct, shard, device)
    scaled = gradients_of(rank, lambda layer, x: layer(x, scale=x.detach()), shard, device)
    for name, call in CALLS.items():
        if name == "composable" and sharding != "one unit":
            continue  # torch wants it before the layer is sharded
        try:
            found = gradients_of(rank, call, shard, device)
        except RuntimeError as error:
            raise AssertionError(f"the call {name!r} raised") from error
        expected = scaled if name in SCALED else plain
        message = functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found, expected, rtol=3e-2, atol=5e-3, msg=message)


WAYS = {
    "unchanged": lambda model: None,
    "checkpoint_module": lambda model: [checkpoint_module(layer) for layer in model.layers],
    "torch": lambda model: setattr(model, "call", CALLS["not reentrant"]),
    "torch's wrapper": lambda model: apply_activation_checkpointing(
        model, check_fn=lambda m: isinstance(m, nn.Sequential)
    ),
}


def temporaries(cache, way):
    def block():
        return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def step():
        model = Net()
        model.first, model.layers = nn.Identity(), nn.ModuleList(block() for _ in range(4))
        WAYS[way](model)
        model = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(8192, 512).to("xla")).backward()
        optimizer.step()

    found = xla_fsdp.plan(step, "v3-8", ranks=[0], cache=cache, progress=False)
    return found.memory.temporaries / 2**20


@pytest.mark.slow
def test_temporaries_are_those_of_checkpoint_module(elsewhere, tmp_path):
    """The figures are in docs/how-to/activation-checkpointing.md."""
    without, own, *others = (elsewhere(temporaries, str(tmp_path), way) for way in WAYS)
    assert own < 0.6 * without
    assert others == [pytest.approx(own, rel=0.03)] * 2, (without, own, others)


def units_inside(model):
    model.layers = nn.ModuleList(map(FSDP, model.layers))
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, FSDP))
    return FSDP(model)


def units_outside(model, shard=None):
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Layer))
    return shard(model) if shard else wrapped(model, "layers.0", "layers.1")


def composed_in_place(model):
    for layer in model.layers:
        composable(layer)
    return in_place(model)


WRAPPINGS = {
    "units in recomputed layers": units_inside,
    "recomputed layers in units": units_outside,
    "in place": functools.partial(units_outside, shard=in_place),
    "composed in place": composed_in_place,
}


@pytest.mark.slow
@on_each_rank(2)
def test_states_have_the_names_and_values_of_the_module(rank, folder):
    device = torch_xla.device()

    def trained(shard):
        model = shard(Net())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in range(2):
            xm.set_rng_state(7 + step, str(device))
            optimizer.zero_grad()
            model(inputs(rank, step).to(device)).backward()
            optimizer.step()
            torch_xla.sync()
        return model, optimizer

    def full(model, optimizer):
        state = xla_fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        moments = {f"{name}: {key}": t for name, own in state.items() for key, t in own.items()}
        return full_state_dict(model, rank0_only=False) | moments

    plain = trained(wrapped)
    expected = full(*plain)
    assert set(Net().state_dict()) < set(expected)
    for name, shard in WRAPPINGS.items():
        model, optimizer = trained(shard)
        found, message = full(model, optimizer), functools.partial("{}: {}".format, name)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3, msg=message)
        assert set(model.state_dict()) == set(Net().state_dict())
        shards = model.get_shard_metadata()["parameters"] if "in place" not in name else {}
        assert "_checkpoint_wrapped_module" not in str(shards)
        xla_fsdp.load_full_state_dict(model, full_state_dict(plain[0], rank0_only=False))
        state = xla_fsdp.full_optim_state_dict(*plain, rank0_only=False)
        xla_fsdp.load_full_optim_state_dict(model, optimizer, state)
        path = f"{folder}/{name}"
        xla_fsdp.save_checkpoint(path, model, optimizer, step=1)
        xla_fsdp.load_checkpoint(path, *plain)
        xla_fsdp.load_checkpoint(path, model, optimizer)
        model.load_state_dict(model.state_dict())
        for one in (plain, (model, optimizer)):
            torch.testing.assert_close(full(*one), expected, rtol=0, atol=0)


def scanned(call, wrap=lambda module: module):
    inner = wrap(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    return Computes(lambda self, x: x + self.call(self.inner, x), call=call, inner=inner)


@on_each_rank(2)
def test_checkpoints_in_scanned_blocks(rank):
    def trained(around, device, *block):
        torch.manual_seed(0)
        blocks = around([scanned(*block) for _ in range(3)])
        # One process has the rows of both ranks.
        rows = [inputs(one) for one in ((rank,) if device.type == "xla" else (0, 1))]
        blocks(torch.cat(rows).to(device)).square().mean().backward()
        torch.optim.SGD(blocks.parameters(), lr=1.0).step()
        return blocks

    expected = trained(lambda blocks: nn.Sequential(*blocks), torch.device("cpu"), direct)
    ways = {name: (CALLS[name],) for name in ("reentrant", "not reentrant", "selective", "nested")}
    ways["torch_xla"] = (of_torch_xla,)
    ways["checkpoint_module"] = (direct, xla_fsdp.checkpoint_module)
    ways["wrapper"] = (direct, checkpoint_wrapper)
    for way, block in ways.items():
        found = trained(xla_fsdp.scan_blocks, torch_xla.device(), *block)
        state, message = full_state_dict(found), functools.partial("{}: {}".format, way)
        if rank == 0:
            torch.testing.assert_close(state, expected.state_dict(), msg=message)


@on_each_rank(2)
def test_activations_and_inputs_are_not_kept(rank):
    wide = 64 * WIDTH
    counts = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Linear(wide, WIDTH))
        model = wrapped(nn.Sequential(checkpoint_module(layers) if checkpointed else layers), "0")
        torch_xla.sync()
        loss = mean_square(model, here(rank))
        activation = inputs(rank).shape[0] * wide
        counts.append(sum(size == activation for size in live_sizes(torch_xla.device())))
        loss.backward()
        torch_xla.sync()
    assert counts[0] > 0 and counts[1] == 0

    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    model = wrapped(nn.Sequential(*map(checkpoint_module, layers)))
    x = torch.randn(7, WIDTH)  # a size of its own
    loss = model(x.to("xla")).square().mean()
    loss.backward()
    model.zero_grad()
    assert x.numel() not in live_sizes(torch_xla.device())


def calling(how):
    """Calls two of its layers by torch_xla's checkpoint, which runs a nested backward, or directly;
    and uses a parameter of one besides."""

    def compute(self, x):
        foreign = how != "own around units" and x.device.type == "xla"
        for layer in self.layers[:2]:
            x = of_torch_xla(layer, x) if foreign else layer(x)
        x = self.layers[2](x)
        return x * self.layers[0].bias.sum() if how == "foreign in a unit" else x

    return nn.Sequential(Computes(compute, layers=mlp()))


@pytest.mark.parametrize("how", ["own around units", "foreign around units", "foreign in a unit"])
@on_each_rank(2)
def test_checkpoints_and_units(rank, how):
    plain, model = calling(how), calling(how)
    units = ["0"] if how == "foreign in a unit" else ["0.layers.0", "0.layers.1"]
    model = wrapped(model, *units)
    if how == "own around units":
        for layer in model.module[0].layers[:2]:
            checkpoint_module(layer)
    for _ in range(2):
        loss_of = lambda one, x: mean_square(one, x.requires_grad_())  # noqa: E731
        assert_same_backward(model, plain, rank, loss_of)


def shares(self, x):
    if self.kind == "updated in place":
        self.table.values.mul_(2.0)
    if self.kind == "updated by another name":
        self.alias[0].mul_(2.0)
    if self.kind == "assigned":
        self.table.values = self.table.values * 2.0
    if self.kind == "batch norm":
        x = self.own(x) * self.own.running_var.clone()
    if self.kind == "dropout":
        x = nn.functional.dropout(x, 0.5, self.training)
    if self.kind == "drawn on the host":
        x = x * (torch.rand(WIDTH) > 0.5).float().to(x.device)
    return torch.tanh(self.linear(x) * self.table.values)


KINDS = (
    "only read", "updated in place", "assigned", "batch norm", "dropout", "drawn on the host"
)  # fmt: skip


def tables(kind, recomputed):
    torch.manual_seed(0)
    table = Computes(lambda self, x: x * self.values)
    table.register_buffer("values", torch.linspace(0.5, 1.5, WIDTH))
    first, linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    own = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else None
    layer = Computes(shares, linear=linear, kind=kind, own=own, table=table, alias=[])

    def compute(self, x):
        x = self.first(x)
        # What autograd saves here must not be updated in place by the layer.
        x = self.table(x) if "updated" not in kind else x
        return self.layer(x)

    layer = checkpoint_module(layer) if recomputed else layer
    return Computes(compute, table=table, first=first, layer=layer)


@pytest.mark.parametrize("sharding", ["class", "in place", "none"])
@on_each_rank(2)
def test_random_numbers_modes_and_buffers_are_those_of_the_forward(rank, sharding):
    device = torch.device("cpu") if sharding == "none" else torch_xla.device()
    shard = {"none": lambda model: model, "class": wrapped, "in place": fully_shard}[sharding]
    for kind in KINDS:
        found = []
        for recomputed in (False, True):
            model = shard(tables(kind, recomputed).to(device))
            torch.manual_seed(11)
            xm.set_rng_state(11)
            drawn = []
            for step in range(2):
                loss = model(inputs(rank, step).to(device)).square().mean()
                model.eval()
                loss.backward()
                model.train()
                drawn += [torch.rand(3), torch.rand(3, device=device)]
            torch_xla.sync()
            tensors = [*drawn, *(p.grad for p in model.parameters()), *model.buffers()]
            found.append([tensor.cpu() for tensor in tensors])
        torch.testing.assert_close(*found, msg=functools.partial("{}: {}".format, kind))
    model = tables("updated by another name", True).to(device)
    model.layer.alias = [model.table.values]
    with pytest.raises(RuntimeError, match="its buffer 'values', of a Computes, a second time"):
        model(inputs(rank).to(device)).sum().backward()


@on_each_rank(2)
def test_a_forward_that_changes_is_an_error(rank):
    calls = []

    def changing(self, x):
        calls.append(0)
        return torch.tanh(self.linear(x)) if len(calls) % 2 else self.linear(x).detach()

    layer = Computes(changing, linear=nn.Linear(WIDTH, WIDTH))
    model = wrapped(nn.Sequential(checkpoint_module(layer)), "0")
    x = here(rank).requires_grad_()
    with pytest.raises(RuntimeError, match="recomputation of Computes saved .* must compute the"):
        model(x).sum().backward()
    with torch.no_grad():
        assert model(x).shape == x.shape

"""torch's own activation checkpointing inside sharded models: by ``torch.utils.checkpoint``."""

import functools
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank
from test_special_uses import WIDTH, inputs, trace_as_on_tpu, wrapped
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
from xla_fsdp import (
    full_optim_state_dict,
    full_state_dict,
    fully_shard,
    load_full_optim_state_dict,
    load_full_state_dict,
)


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
        function = functools.partial(super().__call__, **kwargs)
        return checkpoint(function, *args, use_reentrant=False)


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


def by_partial(layer, x):
    return checkpoint(functools.partial(layer, scale=x.detach()), x, use_reentrant=False)


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


def with_kept_module(layer, x):
    """As torchtitan and litgpt do: by torch's wrapper around the layer."""
    return checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)(x)


CALLS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=selective),
    "no random state": functools.partial(checkpoint, use_reentrant=False, preserve_rng_state=False),
    "to the end": functools.partial(checkpoint, use_reentrant=False, early_stop=False),
    "nested": lambda layer, x: checkpoint(CALLS["not reentrant"], layer, x, use_reentrant=False),
    "by keyword": lambda layer, x: checkpoint(layer, x=x, scale=x.detach(), use_reentrant=False),
    "by closure": lambda layer, x: checkpoint(lambda: layer(x), use_reentrant=False),
    # As diffusers and Transformers do.
    "by its call": lambda layer, x: checkpoint(layer.__call__, x, None, use_reentrant=False),
    "by its forward": lambda layer, x: checkpoint(layer.forward, x, use_reentrant=False),
    "by partial": by_partial,
    "by itself": by_itself,
    "in a row": in_a_row,
    "by a wrapper": with_kept_module,
    "composable": lambda layer, x: composable(layer)(x),
    "checkpoint_module": lambda layer, x: xla_fsdp.checkpoint_module(layer)(x),
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
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def called(rank, sharding):
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
        for one, other in zip(found, scaled if name in SCALED else plain, strict=True):
            torch.testing.assert_close(
                one, other, rtol=3e-2, atol=5e-3, msg=lambda m, name=name: f"{name}: {m}"
            )


@pytest.mark.parametrize(
    "sharding",
    [
        "one unit",
        pytest.param("in place", marks=pytest.mark.slow),
        pytest.param("each layer", marks=pytest.mark.full),
    ],
)
def test_calls_inside_of_sharded_models(run_ranks, sharding):
    run_ranks(called, 2, sharding)


@on_each_rank(1)
def test_recomputation_is_kept_apart_from_the_forward(rank, size, folder):
    """What the recomputed layers of one unit are tied to, by how they are recomputed."""
    trace_as_on_tpu()

    def found(call, wrap=lambda layer: layer):
        net = Net(call)
        net.layers = nn.ModuleList(map(wrap, net.layers))
        model = wrapped(net)
        torch_xla.sync()
        model(inputs(rank).to(torch_xla.device())).backward()
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([p.grad for p in model.parameters()])
        return sorted(re.findall(r"= (\(.*\)) opt-barrier\(", hlo))

    def tied(barriers):
        rest = list(barriers)
        for one in found(direct):
            rest.remove(one)
        return rest

    own = tied(found(direct, xla_fsdp.checkpoint_module))
    # Of each layer the input, and a gradient.
    assert len(own) == 2 and all(one.count("f32[2,6]") == 2 for one in own)
    assert tied(found(CALLS["reentrant"])) == own
    others = tied(found(CALLS["not reentrant"]))
    # The gradient with which the backward of the unit began.
    assert len(others) == 2 and all(one.count("f32[") == 2 for one in others)


def unchanged(model):
    pass


def by_torch(model):
    model.call = CALLS["not reentrant"]


def by_torchs_wrapper(model):
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Sequential))


def by_checkpoint_module(model):
    for layer in model.layers:
        xla_fsdp.checkpoint_module(layer)


def temporaries(cache, recompute):
    def block():
        return nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512))

    def step():
        model = Net()
        model.first, model.layers = nn.Identity(), nn.ModuleList(block() for _ in range(4))
        recompute(model)
        model = wrapped(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(8192, 512).to("xla")).backward()
        optimizer.step()

    found = xla_fsdp.plan(step, "v3-8", ranks=[0], cache=cache, progress=False)
    return found.memory.temporaries / 2**20


@pytest.mark.slow
def test_temporaries_are_those_of_checkpoint_module(elsewhere, tmp_path):
    """The figures are in docs/how-to/activation-checkpointing.md."""
    ways = (unchanged, by_checkpoint_module, by_torch, by_torchs_wrapper)
    without, own, *others = (elsewhere(temporaries, str(tmp_path), way) for way in ways)
    assert own < 0.6 * without
    assert others == [pytest.approx(own, rel=0.03)] * 2, (without, own, others)


def is_layer(module):
    return isinstance(module, Layer)


def units_inside(model):
    model.layers = nn.ModuleList(map(FSDP, model.layers))
    apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, FSDP))
    return FSDP(model)


def units_outside(model, impl=CheckpointImpl.NO_REENTRANT):
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrap, check_fn=is_layer)
    return wrapped(model, "layers.0", "layers.1")


def applied_in_place(model):
    apply_activation_checkpointing(model, check_fn=is_layer)
    return in_place(model)


def composed_in_place(model):
    for layer in model.layers:
        composable(layer)
    return in_place(model)


WRAPPINGS = {
    "units in recomputed layers": units_inside,
    "recomputed layers in units": units_outside,
    "reentrant": functools.partial(units_outside, impl=CheckpointImpl.REENTRANT),
    "in place": applied_in_place,
    "composed in place": composed_in_place,
}


@pytest.mark.slow
@on_each_rank(2)
def test_states_have_the_names_of_the_module(rank, size, folder):
    """Training and states have the numbers and the names of a model that is not recomputed."""
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
        state = full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        moments = {f"{name}: {key}": t for name, own in state.items() for key, t in own.items()}
        return full_state_dict(model, rank0_only=False) | moments

    plain = trained(wrapped)
    expected = full(*plain)
    assert set(Net().state_dict()) < set(expected)
    for name, shard in WRAPPINGS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of the reentrant way
            model, optimizer = trained(shard)
        for key, value in full(model, optimizer).items():
            torch.testing.assert_close(
                value, expected[key], rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
            )
        assert set(model.state_dict()) == set(Net().state_dict())
        shards = model.get_shard_metadata()["parameters"] if "in place" not in name else {}
        assert "_checkpoint_wrapped_module" not in str(shards)
        load_full_state_dict(model, full_state_dict(plain[0], rank0_only=False))
        state = full_optim_state_dict(*plain, rank0_only=False)
        load_full_optim_state_dict(model, optimizer, state)
        path = f"{folder}/{name}"
        xla_fsdp.save_checkpoint(path, model, optimizer, step=1)
        xla_fsdp.load_checkpoint(path, *plain)
        xla_fsdp.load_checkpoint(path, model, optimizer)
        model.load_state_dict(model.state_dict())
        for one in (plain, (model, optimizer)):
            for key, value in full(*one).items():
                torch.testing.assert_close(value, expected[key], rtol=0, atol=0)


class Scanned(nn.Module):
    def __init__(self, call, wrap=lambda module: module):
        super().__init__()
        self.call = call
        self.inner = wrap(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def forward(self, x):
        return x + self.call(self.inner, x)


@on_each_rank(2)
def test_checkpoints_in_scanned_blocks(rank, size, folder):
    """Scanned blocks are computed again as a whole, whatever else they would have recomputed."""

    def trained(around, device, *block):
        torch.manual_seed(0)
        blocks = around([Scanned(*block) for _ in range(3)])
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
        state = full_state_dict(found, rank0_only=False)
        assert set(state) == set(expected.state_dict())
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(
                state[name], value, msg=lambda m, way=way, name=name: f"{way}, {name}: {m}"
            )

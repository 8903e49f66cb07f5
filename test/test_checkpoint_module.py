"""checkpoint_module: the same numbers, less memory, and nothing left behind."""

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank
from test_freeing import live_sizes
from test_special_uses import (
    WIDTH,
    assert_same_backward,
    assert_same_gradients,
    inputs,
    inputs_of_all,
    mlp,
    wrapped,
)
from torch import nn

from xla_fsdp import checkpoint_module, fully_shard


@on_each_rank(2)
def test_activations_are_not_kept(rank):
    wide = 64 * WIDTH
    counts = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Linear(wide, WIDTH))
        model = wrapped(nn.Sequential(checkpoint_module(layers) if checkpointed else layers), "0")
        torch_xla.sync()
        loss = model(inputs(rank).to(torch_xla.device())).square().mean()
        activation = inputs(rank).shape[0] * wide
        counts.append(sum(size == activation for size in live_sizes(torch_xla.device())))
        loss.backward()
        torch_xla.sync()
    assert counts[0] > 0 and counts[1] == 0


@on_each_rank(2)
def test_inputs_are_not_kept_by_the_loss(rank):
    """Pending tensors as large as the layers' inputs, with the loss still held."""
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    model = wrapped(nn.Sequential(*map(checkpoint_module, layers)))
    x = inputs(rank)
    loss = model(x.to(torch_xla.device())).square().mean()
    loss.backward()
    model.zero_grad()
    assert x.numel() not in live_sizes(torch_xla.device())


@on_each_rank(3)
def test_nested_checkpoints(rank):
    plain, model = mlp(), mlp()
    for name in ("1.0", "1", ""):
        checkpoint_module(model.get_submodule(name))
    model = wrapped(model, "1")
    assert_same_backward(model, plain, rank)


class Calling(nn.Module):
    """Calls two of its layers by torch_xla's checkpoint, which runs a nested backward, or directly;
    and uses a parameter of one besides."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layers = how, mlp()

    def forward(self, x):
        from torch_xla.utils.checkpoint import checkpoint

        foreign = self.how != "own around units" and x.device.type == "xla"
        for layer in self.layers[:2]:
            x = checkpoint(layer, x) if foreign else layer(x)
        x = self.layers[2](x)
        return x * self.layers[0].bias.sum() if self.how == "foreign in a unit" else x


@pytest.mark.parametrize("how", ["own around units", "foreign around units", "foreign in a unit"])
@on_each_rank(2)
def test_checkpoints_and_units(rank, how):
    plain, model = nn.Sequential(Calling(how)), nn.Sequential(Calling(how))
    units = ["0"] if how == "foreign in a unit" else ["0.layers.0", "0.layers.1"]
    model = wrapped(model, *units)
    if how == "own around units":
        for layer in model.module[0].layers[:2]:
            checkpoint_module(layer)
    for _ in range(2):
        model(inputs(rank).to(torch_xla.device()).requires_grad_()).square().mean().backward()
        everyone = inputs_of_all().requires_grad_()
        plain(everyone).square().mean().backward()
    assert_same_gradients(model, plain)


class Shared(nn.Module):
    """Computes with a table that others use too, in the way that ``kind`` says."""

    def __init__(self, table, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind
        self.own = nn.BatchNorm1d(WIDTH) if kind == "batch norm" else None
        self.table = table  # a module with a buffer
        self.alias = []

    def forward(self, x):
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


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("values", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x):
        return x * self.values


class Tables(nn.Module):
    def __init__(self, kind, recomputed):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.first = Table(), nn.Linear(WIDTH, WIDTH)
        layer = Shared(self.table, kind)
        self.layer = checkpoint_module(layer) if recomputed else layer
        self.kind = kind

    def forward(self, x):
        x = self.first(x)
        # What autograd saves here must not be updated in place by the layer.
        x = self.table(x) if "updated" not in self.kind else x
        return self.layer(x)


@pytest.mark.parametrize("sharding", ["class", "in place", "none"])
@on_each_rank(2)
def test_random_numbers_modes_and_buffers_are_those_of_the_forward(rank, sharding):
    device = torch.device("cpu") if sharding == "none" else torch_xla.device()
    shard = {"none": lambda model: model, "class": wrapped, "in place": fully_shard}[sharding]
    for kind in KINDS:
        found = []
        for recomputed in (False, True):
            model = shard(Tables(kind, recomputed).to(device))
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
        for plain, recomputed in zip(*found, strict=True):
            torch.testing.assert_close(plain, recomputed, msg=lambda m, kind=kind: f"{kind}: {m}")
    model = Tables("updated by another name", True).to(device)
    model.layer.alias = [model.table.values]
    with pytest.raises(
        RuntimeError, match="changed its buffer 'values', of a Table, a second time"
    ):
        model(inputs(rank).to(device)).sum().backward()


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return torch.tanh(self.linear(x)) if self.calls % 2 else self.linear(x).detach()


@on_each_rank(2)
def test_a_forward_that_changes_is_an_error(rank):
    model = wrapped(nn.Sequential(checkpoint_module(Changing())), "0")
    x = inputs(rank).to(torch_xla.device()).requires_grad_()
    with pytest.raises(RuntimeError, match="recomputation of Changing saved .* must compute the"):
        model(x).sum().backward()
    with torch.no_grad():
        assert model(x).shape == x.shape

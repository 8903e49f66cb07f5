"""What users do with scanned blocks beyond calling them: right, or refused with a remedy."""

import functools

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank
from small_models import Computes
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import scan_blocks

WIDTH = 24  # all ranks have a part of the matrices


class Block(nn.Module):
    """What ``also(block, x, y)`` does besides is a block's own business."""

    def __init__(self, number=0, also=None):
        super().__init__()
        torch.manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.also = also

    def forward(self, x, *further):
        y = x + self.down(torch.tanh(self.up(x)))
        more = None if self.also is None else self.also(self, x, y, *further)
        return y if more is None else y * more


class Net(nn.Module):
    def __init__(self, blocks, outside=None):
        super().__init__()
        torch.manual_seed(9)
        self.first, self.blocks = nn.Linear(WIDTH, WIDTH), blocks
        self.table = nn.Parameter(torch.ones(WIDTH))
        self.outside = outside

    def forward(self, x):
        more = 0.0 if self.outside is None else self.outside(self)
        return self.blocks(self.first(x)).square().mean() + more


def scanned(also=None, outside=None):
    return FSDP(Net(scan_blocks(Block(number, also) for number in range(3)), outside))


def inputs(rank):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(rank)).to("xla")


def refused(model, rank, kind, text):
    """In the forward or in the backward, whose graph alone tells of gradients."""
    with pytest.raises(kind, match=text):
        model(inputs(rank)).backward()
    model.zero_grad()


def parameters_in_a_forward_around(rank):
    norm = lambda net: net.blocks.module.up.weight.norm()  # noqa: E731
    for penalty in (lambda net: sum(p.norm() for p in net.parameters()), norm):
        text = "needs parameter 'blocks.up.weight', which is sharded here.* contains several"
        refused(scanned(outside=penalty), rank, RuntimeError, text)
    nets = [
        scanned(outside=lambda net, factor=factor: factor * net.blocks.module.up.weight.abs().sum())
        for factor in (0.0, 2.0)
    ]
    values = [net(inputs(rank)) for net in nets]
    (weight,) = (p for n, p in nets[0].named_parameters() if n.endswith("up.weight"))
    full = weight.full_tensor().abs().sum()
    torch.testing.assert_close((values[1] - values[0]).cpu(), 2 * full.cpu(), rtol=1e-3, atol=1e-3)


def stores(name, value_of, block, x, y):
    setattr(block, name, value_of(y))


def what_a_block_would_lose(rank):
    held = []

    def closure(block, x, y):
        return held[0]

    def hands_over(net):
        held[:] = [net.table.exp()]
        return 0.0

    outside = "outside of the block that needs a gradient, computed from 'table'.*pass it as an arg"
    refused(scanned(closure, hands_over), rank, ValueError, outside)
    held[0] = held[0].detach()
    scanned(closure, lambda net: net.table.sum())(inputs(rank)).backward()

    kept = "Block stores a computed tensor in 'kept'"
    for name, value_of, text in (
        ("kept", lambda y: [y.square().mean()], kept),
        ("kept", lambda y: y.detach(), kept),
        ("seen", lambda y: y.square().mean(), "its buffer 'seen' a value that needs a gradient"),
    ):
        also = functools.partial(stores, name, value_of)
        refused(scanned(also), rank, ValueError, text)

    def constant(block, x, y):
        if not hasattr(block, "mask"):
            block.mask = torch.full((WIDTH,), 0.5, device=x.device)
        return block.mask

    for _ in range(2):
        scanned(constant)(inputs(rank)).backward()

    for also, seen in (
        (lambda block, x, y, seen: seen.insert(0, 1), [0]),
        (lambda block, x, y, seen: seen.append(y), []),
        (lambda block, x, y, seen: seen.update(last=y.detach()), {}),
        (lambda block, x, y, seen: seen.add_(1), torch.zeros((), dtype=torch.int32, device="xla")),
    ):
        model = scan_blocks([Block(number, also) for number in range(3)])
        with pytest.raises(ValueError, match="forward of Block changes one of its arguments"):
            model(inputs(rank), seen)
        torch_xla.sync()


def parameters_that_change(rank):
    def clamped(block, x, y):
        with torch.no_grad():
            block.up.weight.clamp_(-0.1, 0.1)

    def assigned(block, x, y):
        block.down.bias.data = block.down.bias * 2

    for also, name in (clamped, "up.weight"), (assigned, "down.bias"):
        text = f"the forward changed its parameter 'blocks.{name}'"
        refused(scanned(also), rank, RuntimeError, text)
    for in_place in (True, False):
        model = scanned()
        loss = model(inputs(rank))
        weight = model.blocks.module.up.weight
        with torch.no_grad():
            (weight if in_place else weight.data).mul_(0.5)
        with pytest.raises(RuntimeError, match="'blocks.up.weight' was changed between a forward"):
            loss.backward()


def what_came_after_building(rank):
    model = scanned()
    model.blocks.module.up = nn.Linear(WIDTH, WIDTH).to("xla")
    refused(model, rank, RuntimeError, "'blocks.(0.)?up.weight' is not the shard")
    model = scanned()
    with pytest.raises(RuntimeError, match="needs parameter '.*up.weight', which is sharded"):
        nn.utils.parametrizations.weight_norm(model.blocks.module.up)
    model = scanned()
    model.blocks.module.up.register_forward_hook(lambda module, given, made: made * 2)
    refused(model, rank, ValueError, "module 'up' of a block has hooks")


def modes_of_the_forward(rank):
    def drops():
        gain, drop = nn.Parameter(torch.ones(WIDTH)), nn.Dropout(0.5)
        return Computes(dropped, gain=gain, drop=drop)

    def dropped(self, x):
        return self.drop(x * self.gain)

    model = scan_blocks([drops(), drops()])
    x = torch.ones(2, WIDTH, device="xla", requires_grad=True)
    y = model(x)
    model.eval()  # to look at something else, before the backward
    y.sum().backward()
    assert not model.module.drop.training
    assert torch.equal(x.grad.cpu(), y.detach().cpu())


def second_derivatives(rank):
    model, x = scanned(), inputs(rank).requires_grad_()
    text = "of the scanned blocks 'blocks', .* no second derivative"
    for asked in (list(model.blocks.parameters()), [x]):
        grads = torch.autograd.grad(model(x), asked, create_graph=True)
        with pytest.raises(RuntimeError, match=text):
            sum(grad.square().sum() for grad in grads).backward()
    model.zero_grad()


def hooks_on_shards(rank):
    model, seen = scanned(), []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda grad, name=name: seen.append(name))
    model(inputs(rank)).backward()
    assert sorted(seen) == sorted(dict(model.named_parameters()).keys() - {"table"})


@on_each_rank(2)
def test_each_is_right_or_refused(rank):
    parameters_in_a_forward_around(rank)
    what_a_block_would_lose(rank)
    parameters_that_change(rank)
    what_came_after_building(rank)
    modes_of_the_forward(rank)
    second_derivatives(rank)
    hooks_on_shards(rank)

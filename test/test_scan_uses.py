"""Uses of scanned blocks beyond calling them, and ``keep``: right, or refused with a remedy."""

import functools

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank, raises
from small_models import Computes
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import defer_init, scan_blocks
from xla_fsdp.layers import scaled_dot_product_attention

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
        raises(ValueError, "forward of Block changes one of its", model, inputs(rank), seen)
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
        raises(RuntimeError, "'blocks.up.weight' was changed between a forward", loss.backward)


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


def a_buffer_of_all_blocks_before_one_of_each(rank):
    class Counts(nn.Module):
        def __init__(self, table):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(WIDTH))
            self.register_buffer("table", table)
            self.register_buffer("seen", torch.zeros(2))

        def forward(self, x):
            self.seen += 1
            return x * self.gain + self.table

    table = torch.ones(WIDTH)
    model = scan_blocks([Counts(table) for _ in range(3)])
    model(inputs(rank)).sum().backward()
    assert [model.state_dict()[f"{number}.seen"].tolist() for number in range(3)] == [[1, 1]] * 3


def a_block_without_values_is_named(rank):
    model = scan_blocks([nn.Linear(WIDTH, WIDTH, device=d) for d in ("cpu", "meta")],
                        param_init_fn=defer_init)  # fmt: skip
    refused(model, rank, RuntimeError, "called before '1.weight', '1.bias' had values")


def second_derivatives(rank):
    model, x = scanned(), inputs(rank).requires_grad_()
    text = "of the scanned blocks 'blocks', .* no second derivative"
    for asked in (list(model.blocks.parameters()), [x]):
        grads = torch.autograd.grad(model(x), asked, create_graph=True)
        raises(RuntimeError, text, sum(grad.square().sum() for grad in grads).backward)
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
    a_buffer_of_all_blocks_before_one_of_each(rank)
    a_block_without_values_is_named(rank)
    second_derivatives(rank)
    hooks_on_shards(rank)


WIDE, DEPTH, LENGTH = 128, 3, 128
KEPT = ("attention", "inner.up", "out")


class Attending(nn.Module):
    """Calls one module twice, changes an output that is kept in place, and drops at random."""

    def __init__(self, implementation):
        super().__init__()
        self.implementation = implementation
        self.qkv = nn.Linear(WIDE, 3 * WIDE)
        self.out = nn.Linear(WIDE, WIDE)
        self.inner = nn.ModuleDict({"up": nn.Linear(WIDE, WIDE)})

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(
            q, k, v, is_causal=True, implementation=self.implementation
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        up = self.inner["up"](x)
        up.relu_()
        return x + F.dropout(self.inner["up"](up), 0.1)


def gradients(keep, implementation="math", **options):
    torch.manual_seed(1)
    blocks = (Attending(implementation) for _ in range(DEPTH))
    scanned = scan_blocks(blocks, keep=keep, **options)
    xm.set_rng_state(7)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, LENGTH, WIDE, generator=generator).to("xla").requires_grad_()
    y = scanned(x)
    y.float().square().mean().backward()
    with torch.no_grad():
        again = scanned(x)
    found = y.detach(), again, x.grad, *(p.grad for p in scanned.parameters())
    return [one.cpu() for one in found]


@on_each_rank(2)
def test_gradients_are_those_without(rank):
    plain = gradients(())
    assert all(one.abs().max() > 0 for one in plain[:3])
    both = {"prefetch": True, "reshard_after_forward": 2}
    for keep, options in ((KEPT, {}), (["out"], both), (KEPT, both)):
        torch.testing.assert_close(gradients(keep, **options), plain, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@on_each_rank(1)
def test_gradients_are_those_without_by_the_kernel(rank):
    found = gradients(KEPT, "kernel"), gradients((), "kernel"), gradients((), "math")
    for ours, again, plain in zip(*found, strict=True):
        torch.testing.assert_close(ours, again, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)


@on_each_rank(1)
def test_values_of_the_forward_are_taken(rank):
    calls = []

    def counting(self, x):
        calls.append(0)
        return x * self.gain * len(calls)  # 1 in the forward, 2 in the recomputation

    slopes = []
    for keep in ((), ("inner",)):
        calls.clear()
        inner = Computes(counting, gain=nn.Parameter(torch.ones(4)))
        squares = Computes(lambda self, x: self.inner(x).square(), inner=inner)
        blocks = scan_blocks([squares], keep=keep)
        x = torch.full((4,), 3.0).to("xla").requires_grad_()
        blocks(x).sum().backward()
        slopes.append(x.grad.cpu()[0].item())
        assert len(calls) == 2
    # d/dx of (c x)^2 with c = 2 is 2 c x c; what is kept has c = 1, its graph c = 2.
    assert slopes == [24.0, 12.0]


@on_each_rank(1)
def test_wrong_names_are_refused(rank):
    def takes(self, x):
        return self.pair(x)[0] + self.idle.weight.sum()

    x = torch.ones(4).to("xla").requires_grad_()
    for keep, match in (
        ("idle", r"must be names, such as \('idle',\)"),
        (["iddle"], "keep='iddle' is not a submodule of the blocks.*attention, idle"),
        (["idle"], "keep='idle', but the forward of a block does not call"),
        (["attention"], "does not call scaled_dot_product_attention of xla_fsdp"),
        (["pair"], "keep='pair', but Computes returns tuple instead of a"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            pair = Computes(lambda self, x: (x, x))
            scan_blocks([Computes(takes, pair=pair, idle=nn.Linear(4, 4))], keep=keep)(x)

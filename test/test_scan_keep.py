"""Scanned blocks whose backward takes values from the forward instead of computing them again."""

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank
from small_models import Computes
from test_scan import Model
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel, scan_blocks
from xla_fsdp.layers import scaled_dot_product_attention

WIDTH, DEPTH, LENGTH = 128, 3, 128
KEPT = ("attention", "inner.up", "out")


class Block(nn.Module):
    """Calls one module twice, changes an output that is kept in place, and drops at random."""

    def __init__(self, implementation):
        super().__init__()
        self.implementation = implementation
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.ModuleDict({"up": nn.Linear(WIDTH, WIDTH)})

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
    blocks = (Block(implementation) for _ in range(DEPTH))
    scanned = scan_blocks(blocks, keep=keep, **options)
    xm.set_rng_state(7)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, LENGTH, WIDTH, generator=generator).to(torch_xla.device()).requires_grad_()
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
    """The values themselves: a module whose recomputation would give others."""
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
        x = torch.full((4,), 3.0).to(torch_xla.device()).requires_grad_()
        blocks(x).sum().backward()
        slopes.append(x.grad.cpu()[0].item())
        assert len(calls) == 2
    # d/dx of (c x)^2 with c = 2 is 2 c x c; what is kept has c = 1, its graph c = 2.
    assert slopes == [24.0, 12.0]


@on_each_rank(2)
def test_in_a_model(rank):
    found = []
    for keep in ((), ("up", "down", "norm")):
        torch.manual_seed(3)
        model = Model(lambda blocks, keep=keep: scan_blocks(blocks, keep=keep))
        model = XlaFullyShardedDataParallel(model)
        x = torch.ones(2, 4, 5).to(torch_xla.device())
        model(x).square().sum().backward()
        found.append([p.grad.cpu() for p in model.parameters() if p.grad is not None])
        assert model.state_dict()["blocks.1.count"].item() == 1
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-7)


@on_each_rank(1)
def test_wrong_names_are_refused(rank):
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    def takes(self, x):
        return self.pair(x)[0] + self.idle.weight.sum()

    x = torch.ones(4).to(torch_xla.device()).requires_grad_()
    for keep, match in (
        ("idle", r"must be names, such as \('idle',\)"),
        (["iddle"], "keep='iddle' is not a submodule of the blocks.*attention, idle"),
        (["idle"], "keep='idle', but the forward of a block does not call"),
        (["attention"], "does not call scaled_dot_product_attention of xla_fsdp"),
        (["pair"], "keep='pair', but Pair returns tuple instead of a"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            scan_blocks([Computes(takes, pair=Pair(), idle=nn.Linear(4, 4))], keep=keep)(x)

"""Linear layers into and out of heads: values, gradients and state of ``nn.Linear``."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

WIDTH, HEADS, DIM = 12, 3, 8


class Attention(nn.Module):
    """A block whose projections are those of :mod:`xla_fsdp.layers.heads`, or ``nn.Linear``."""

    def __init__(self, apart, bias=True):
        super().__init__()
        from xla_fsdp.layers import FromHeads, ToHeads

        self.apart = apart
        into, out = nn.Linear, nn.Linear
        if apart:
            into = functools.partial(ToHeads, heads=HEADS)
            out = functools.partial(FromHeads, heads=HEADS)
        self.q = into(WIDTH, HEADS * DIM, bias=bias)
        self.k = into(WIDTH, HEADS * DIM, bias=bias)
        self.out = out(HEADS * DIM, WIDTH, bias=bias)

    def forward(self, x):
        q, k = self.q(x), self.k(x)
        if not self.apart:
            q, k = (y.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for y in (q, k))
        mixed = (q @ k.transpose(-2, -1)).softmax(-1) @ k
        return x + self.out(mixed if self.apart else mixed.transpose(1, 2).flatten(2))


def trained(around, device, apart, bias=True, dtype=torch.float32):
    torch.manual_seed(1)
    blocks = around(Attention(apart, bias) for _ in range(2))
    optimizer = torch.optim.SGD(blocks.parameters(), lr=0.1)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float32)
    x = x.to(device, dtype).requires_grad_()
    for _ in range(2):
        blocks(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"x": x.grad.cpu(), **{name: v.cpu() for name, v in blocks.state_dict().items()}}


def require_same(ours, theirs, rtol=1e-5):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.dtype == ours[name].dtype
        torch.testing.assert_close(ours[name], value, rtol=rtol, atol=rtol / 10, msg=name)


def on_ranks(rank):
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module, scan_blocks

    def singly(blocks):
        wrapped = (XlaFullyShardedDataParallel(checkpoint_module(block)) for block in blocks)
        return nn.Sequential(*wrapped)

    device = torch_xla.device()
    for around in (scan_blocks, singly):
        ours, theirs = (trained(around, device, apart) for apart in (True, False))
        assert theirs["x"].abs().max() > 0
        require_same(ours, theirs)
    kept = functools.partial(scan_blocks, keep=("q", "out"))
    require_same(trained(kept, device, True, bias=False), trained(kept, device, False, bias=False))


def test_the_same_as_linear_layers(run_ranks):
    run_ranks(on_ranks, 2)


def test_without_xla():
    def plainly(blocks):
        return nn.Sequential(*blocks)

    ours, theirs = (trained(plainly, "cpu", apart) for apart in (True, False))
    require_same(ours, theirs)


def test_heads_must_divide():
    from xla_fsdp.layers import FromHeads, ToHeads

    for kind in (ToHeads, FromHeads):
        with pytest.raises(ValueError, match="heads must divide 12 features, got 5"):
            kind(12, 12, 5)
        with pytest.raises(ValueError, match="got 0"):
            kind(12, 12, 0)

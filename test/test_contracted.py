"""``layers.contracted``: what ``F.linear`` computes, of parts of a weight, and their gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Parts(nn.Module):
    """Three parts of one weight, one by one; ``contract``: by the package's function."""

    def __init__(self, contract: bool):
        super().__init__()
        self.contract = contract
        self.qkv = nn.Linear(6, 12)

    def forward(self, x):
        from xla_fsdp.layers import contracted

        product = contracted if self.contract else F.linear
        parts = zip(self.qkv.weight.split(4), self.qkv.bias.split(4), strict=True)
        q, k, v = (product(x, *part) for part in parts)
        return q * k.tanh() + product(v, self.qkv.weight[:4, :4])


def gradients(device, contract, wrap=lambda module: module):
    torch.manual_seed(1)
    model = wrap(Parts(contract))
    x = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(2)).to(device)
    x.requires_grad_()
    y = model(x)
    y.square().sum().backward()
    return [one.cpu() for one in (y.detach(), x.grad, *(p.grad for p in model.parameters()))]


def same(rank):
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel

    device = torch_xla.device()
    ours, theirs = (gradients(device, how, XlaFullyShardedDataParallel) for how in (True, False))
    assert theirs[1].abs().max() > 0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_the_same_as_linear(run_ranks):
    run_ranks(same, 2)


def test_without_xla():
    for one, other in zip(gradients("cpu", True), gradients("cpu", False), strict=True):
        assert torch.equal(one, other)

"""``layers.einsum``: what ``torch.einsum`` computes, and its gradients, without flattening."""

from __future__ import annotations

import pytest
import torch
from torch import nn

# Equation and the sizes of both factors.
CONTRACTIONS = [
    ("bsw,hdw->bhsd", (2, 3, 8), (2, 4, 8)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("bhqk,bhkd->bqhd", (2, 3, 4, 6), (2, 3, 6, 5)),
    ("bhsd,whd->bsw", (2, 2, 3, 4), (8, 2, 4)),
    ("ab,cb->ca", (3, 4), (5, 4)),
    ("ab,ab->ba", (3, 4), (3, 4)),
    ("a,b->ba", (3,), (4,)),
    ("ab,ab->", (3, 4), (3, 4)),
    (" a b , b c -> a c ", (3, 4), (4, 5)),
    ("ab,bc->ac", (0, 4), (4, 5)),
]
# Those of torch: a letter alone, twice, none stated, any.
TORCHS = [
    ("ab,bc->c", (3, 4), (4, 5)),
    ("aab,bc->ac", (3, 3, 4), (4, 5)),
    ("ab,bc", (3, 4), (4, 5)),
    ("...b,bc->...c", (2, 3, 4), (4, 5)),
]


def differentiated(einsum, equation, x, y):
    """The product, gradients of both, and one of a gradient's square."""
    x, y = x.requires_grad_(), y.requires_grad_()
    product = einsum(equation, x, y)
    if equation in (equation for equation, *_ in TORCHS):  # torch_xla's has one gradient
        return [product.detach(), *torch.autograd.grad(product.square().sum(), (x, y))]
    grads = torch.autograd.grad(product.square().sum(), (x, y), create_graph=True)
    (second,) = torch.autograd.grad(grads[0].square().sum(), (y,))
    return [one.detach() for one in (product, *grads, second)]


def same(rank):
    import torch_xla

    from xla_fsdp.layers import einsum

    torch.manual_seed(1)
    for equation, *sizes in CONTRACTIONS + TORCHS:
        x, y = (torch.randn(size) for size in sizes)
        ours = differentiated(einsum, equation, x.to("xla"), y.to("xla"))
        torch_xla.sync()
        theirs = differentiated(torch.einsum, equation, x.clone(), y.clone())
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-4)
    x, y = torch.ones(3, 4, device="xla"), torch.ones(5, 6, device="xla")
    for equation, contracted in (("ab,cd->abcd", True), ("ab,cd->ac", False), ("ab,cd", False)):
        made = einsum(equation, x.requires_grad_(), y)
        assert (type(made.grad_fn).__name__ == "ProductBackward") is contracted, equation
    for wrong in ("ab,bc->ac", "ab,bc->c", "abc,cbd->ad"):
        with pytest.raises(ValueError, match=f"einsum.*{wrong}"):
            einsum(wrong, x, y)


def test_the_same_as_torch(run_ranks):
    run_ranks(same, 1)


class Parts(nn.Module):
    """Heads by parts of a fused weight."""

    def __init__(self, einsum):
        super().__init__()
        self.einsum = einsum
        self.qkv = nn.Linear(6, 12)

    def forward(self, x):
        parts = zip(self.qkv.weight.split(4), self.qkv.bias.split(4), strict=True)
        q, k, v = (
            self.einsum("bsw,hdw->bhsd", x, weight.view(2, 2, 6)) + bias.view(2, 1, 2)
            for weight, bias in parts
        )
        scores = self.einsum("bhqd,bhkd->bhqk", q, k)
        return self.einsum("bhqk,bhkd->bqhd", scores.tanh(), v)


def wrapped(rank):
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel
    from xla_fsdp.layers import einsum

    def gradients(product, device, wrap):
        torch.manual_seed(1)
        model = wrap(Parts(product))
        x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(2)).to(device)
        y = model(x.requires_grad_())
        y.square().sum().backward()
        torch_xla.sync()
        whole = [p.grad.cpu() for p in model.parameters()]
        return y.detach().cpu(), x.grad.cpu(), whole

    y, x, shards = gradients(einsum, "xla", XlaFullyShardedDataParallel)
    plain_y, plain_x, whole = gradients(torch.einsum, "cpu", lambda module: module)
    torch.testing.assert_close(y, plain_y)
    torch.testing.assert_close(x, plain_x)
    return shards, whole


def test_parts_of_a_sharded_weight(run_ranks):
    (first, whole), (second, _) = run_ranks(wrapped, 2)
    for one, other, full in zip(first, second, whole, strict=True):
        gathered = torch.cat([one.flatten(), other.flatten()])[: full.numel()]
        torch.testing.assert_close(gathered.view_as(full), full)


def test_off_xla():
    from xla_fsdp.layers import einsum

    x, y = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(einsum("ab,bc->ac", x, y), torch.einsum("ab,bc->ac", x, y))

"""``layers.einsum`` and ``layers.softmax``: values and gradients of torch, in faster forms."""

import re
from unittest import mock

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel
from xla_fsdp.layers import einsum, softmax

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
    x, y = x.requires_grad_(), y.requires_grad_()
    product = einsum(equation, x, y)
    if equation in (equation for equation, *_ in TORCHS):  # torch_xla's has one gradient
        return [product.detach(), *torch.autograd.grad(product.square().sum(), (x, y))]
    grads = torch.autograd.grad(product.square().sum(), (x, y), create_graph=True)
    (second,) = torch.autograd.grad(grads[0].square().sum(), (y,))
    return [one.detach() for one in (product, *grads, second)]


@on_each_rank(1)
def test_einsum_is_that_of_torch(rank):
    torch.manual_seed(1)
    for equation, *sizes in CONTRACTIONS + TORCHS:
        x, y = (torch.randn(size) for size in sizes)
        ours = differentiated(einsum, equation, x.to("xla"), y.to("xla"))
        torch_xla.sync()
        theirs = differentiated(torch.einsum, equation, x.clone(), y.clone())
        torch.testing.assert_close([one.cpu() for one in ours], theirs, rtol=1e-4, atol=1e-4)
    x, y = torch.ones(3, 4, device="xla"), torch.ones(5, 6, device="xla")
    for equation, contracted in (("ab,cd->abcd", True), ("ab,cd->ac", False), ("ab,cd", False)):
        made = einsum(equation, x.requires_grad_(), y)
        assert (type(made.grad_fn).__name__ == "ProductBackward") is contracted, equation
    for wrong in ("ab,bc->ac", "ab,bc->c", "abc,cbd->ad"):
        with pytest.raises(ValueError, match=f"einsum.*{wrong}"):
            einsum(wrong, x, y)


class Parts(nn.Module):
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


@on_each_rank(2)
def test_parts_of_a_sharded_weight(rank):
    def gradients(product, device, wrap):
        torch.manual_seed(1)
        model = wrap(Parts(product))
        x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(2)).to(device)
        y = model(x.requires_grad_())
        y.square().sum().backward()
        torch_xla.sync()
        return y.detach().cpu(), x.grad.cpu(), [p.grad for p in model.parameters()]

    y, x, shards = gradients(einsum, "xla", XlaFullyShardedDataParallel)
    found = y, x, [shard.full_tensor().cpu() for shard in shards]
    plain_y, plain_x, plain = gradients(torch.einsum, "cpu", lambda module: module)
    torch.testing.assert_close(found, (plain_y, plain_x, plain))


def as_on(kind):
    """As on chips of a kind; ``None``: as it is."""
    own = xm.xla_device_kind
    return mock.patch.object(xm, "xla_device_kind", lambda device: kind or own(device))


def first_and_second(softmax, x, dim):
    x = x.requires_grad_()
    weight = torch.linspace(-1, 1, x.numel()).view(x.shape).to(x)
    y = softmax(x, dim)
    (grad,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.float().square().sum(), x)
    return y.detach(), grad.detach(), second


@pytest.mark.parametrize("kind", [None, "TPU v5", "TPU v6 lite"])
@on_each_rank(1)
def test_softmax_is_that_of_torch(rank, kind):
    torch.manual_seed(3)
    # Gradients are differences of numbers up to 1. In bfloat16 those of gradients, torch's as well,
    # say nothing.
    close = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float64: 1e-14}
    for shape, dim in (((3, 5, 7), -1), ((3, 5, 7), 1), ((4,), 0), ((2, 0), 1)):
        for dtype, bound in close.items():
            x = 5 * torch.randn(shape, dtype=dtype)
            with as_on(kind):
                ours = first_and_second(softmax, x.to(torch_xla.device()), dim)
                torch_xla.sync()
            theirs = first_and_second(torch.softmax, x.double(), dim)
            compared = slice(2 if dtype == torch.bfloat16 else None)
            for one, other in zip(ours[compared], theirs[compared], strict=True):
                assert one.dtype == dtype
                torch.testing.assert_close(one.cpu().double(), other, rtol=bound, atol=bound)
    with as_on(kind):
        hidden = softmax(torch.tensor([[0.0, -torch.inf], [-torch.inf] * 2]).to("xla"))
        torch_xla.sync()
        with pytest.raises((IndexError, RuntimeError), match="out of range"):
            softmax(torch.ones(2, 2, device="xla"), 2)
    expected = torch.tensor([[1.0, 0.0], [torch.nan] * 2])
    torch.testing.assert_close(hidden.cpu(), expected, equal_nan=True)


@on_each_rank(1)
def test_one_number_a_row_is_computed_once(rank):
    def text(kind):
        x = torch.ones(2, 3, 4, device="xla", requires_grad=True)
        with as_on(kind):
            y = softmax(x)
            (grad,) = torch.autograd.grad((y * y).sum(), x)
        return torch_xla._XLAC._get_xla_tensors_hlo([grad])

    texts = [text(kind) for kind in ("CPU", "TPU v5", "TPU v6 lite")]
    barriers = [re.findall(r"\S+ opt-barrier\(", text) for text in texts]
    assert [len(some) for some in barriers] == [0, 1, 1]
    assert all("f32[2,3,1]" in some[0] for some in barriers[1:])


def test_other_devices_compute_as_torch():
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(einsum("ab,bc->ac", x, y), torch.einsum("ab,bc->ac", x, y))
    assert torch.equal(softmax(x, 0), torch.softmax(x, 0))

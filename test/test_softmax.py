"""``layers.softmax``: torch's softmax and gradients, in the form that a TPU computes faster."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch


def as_on(kind):
    """As on chips of a kind; ``None``: as it is."""
    import torch_xla.core.xla_model as xm

    def of_every_device(device):
        return kind

    if kind is None:
        of_every_device = xm.xla_device_kind
    return mock.patch.object(xm, "xla_device_kind", of_every_device)


def first_and_second(softmax, x, dim):
    """The result, a gradient, and a gradient of a gradient."""
    x = x.requires_grad_()
    weight = torch.linspace(-1, 1, x.numel()).view(x.shape).to(x)
    y = softmax(x, dim)
    (grad,) = torch.autograd.grad((y * weight).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.float().square().sum(), x)
    return y.detach(), grad.detach(), second


def same(rank, kind):
    import torch_xla

    from xla_fsdp.layers import softmax

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
    torch.testing.assert_close(
        hidden.cpu(), torch.tensor([[1.0, 0.0], [torch.nan] * 2]), equal_nan=True
    )


@pytest.mark.parametrize("kind", [None, "TPU v5", "TPU v6 lite"])
def test_the_same_as_torch(run_ranks, kind):
    run_ranks(same, 1, kind)


def traced(rank):
    """The text of a backward on each kind."""
    import torch_xla

    from xla_fsdp.layers import softmax

    def text(kind):
        x = torch.ones(2, 3, 4, device="xla", requires_grad=True)
        with as_on(kind):
            y = softmax(x)
            (grad,) = torch.autograd.grad((y * y).sum(), x)
        return torch_xla._XLAC._get_xla_tensors_hlo([grad])

    return [text(kind) for kind in ("CPU", "TPU v5", "TPU v6 lite")]


def test_one_number_a_row_is_computed_once(run_ranks):
    (texts,) = run_ranks(traced, 1)
    barriers = [re.findall(r"\S+ opt-barrier\(", text) for text in texts]
    assert [len(some) for some in barriers] == [0, 1, 1]
    assert all("f32[2,3,1]" in some[0] for some in barriers[1:])


def test_off_xla():
    x = torch.randn(3, 4)
    from xla_fsdp.layers import softmax

    assert torch.equal(softmax(x, 0), torch.softmax(x, 0))

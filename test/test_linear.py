"""Linear layers inside a wrapped model: contracted without flattening, and still a linear layer."""

import contextlib
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from test_special_uses import trace_as_on_tpu
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm


def fsdp(module):
    """Wrapped as on a TPU."""
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    trace_as_on_tpu()
    return FSDP(module)


def device():
    import torch_xla

    return torch_xla.device()


SHAPES = [(5, 8), (2, 5, 8), (2, 3, 5, 8), (2, 1, 2, 3, 8), (8,), (0, 5, 8)]


@contextlib.contextmanager
def keeping(keep=True):
    """As on a chip on which inputs of narrowing layers are kept."""
    from xla_fsdp.tpu.chips import V6E

    with mock.patch("xla_fsdp.layers.linear.chip_of", lambda kind: V6E if keep else None):
        yield


def values_and_gradients(rank, bias, keep):
    import torch_xla

    for shape in SHAPES:
        torch.manual_seed(0)
        plain = nn.Linear(8, 6, bias=bias)
        model = nn.Linear(8, 6, bias=bias)
        model.load_state_dict(plain.state_dict())
        model = fsdp(model)
        x = torch.randn(shape)
        ours, expected = (t.requires_grad_() for t in (x.to(device()), x.clone()))
        with keeping(keep):
            y = model(ours)
        y.square().sum().backward()
        z = plain(expected)
        z.square().sum().backward()
        torch_xla.sync()
        close = dict(rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(y.cpu(), z, **close)
        torch.testing.assert_close(ours.grad.cpu(), expected.grad, **close)
        for name, parameter in plain.named_parameters():
            shard = dict(model.named_parameters())[name]
            torch.testing.assert_close(shard.grad.full_tensor().cpu(), parameter.grad, **close)


@pytest.mark.parametrize("bias,keep", [(True, False), (False, False), (True, True)])
def test_values_and_gradients(run_ranks, bias, keep):
    run_ranks(values_and_gradients, 1, bias, keep)


def barriers(rank, inner, outer):
    """How many the forward of a linear layer puts around its input."""
    import torch_xla

    with keeping():
        model = fsdp(nn.Linear(inner, outer))
        torch_xla.sync()
        counts = []
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                x = torch.ones(2, 3, inner).to(device()) * 2
                hlo = torch_xla._XLAC._get_xla_tensors_hlo([model(x)])
            counts.append(len(re.findall(rf"f32\[2,3,{inner}\]\S* get-tuple-element", hlo)))
            torch_xla.sync()
    return counts


def test_only_what_a_layer_narrows_is_kept_and_only_for_a_backward(run_ranks):
    (narrowing,), (widening,) = (run_ranks(barriers, 1, *sizes) for sizes in ((8, 4), (4, 8)))
    assert narrowing[0] == narrowing[1] + 1
    assert widening[0] == widening[1]


def barriers_of_gradients(rank, inner, outer, recomputed):
    """How many the backward puts around the gradient of what a linear layer returns, where weights
    count as large and where they do not; and what it gives."""
    import torch_xla

    from xla_fsdp import checkpoint_module

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(inner, outer))
    state, counts, gradients = plain.state_dict(), [], []
    for large in (1, 1 << 21):
        with keeping(), mock.patch("xla_fsdp.layers.linear.LARGE", large):
            block = nn.Sequential(nn.Linear(inner, outer))
            block.load_state_dict(state)
            model = fsdp(checkpoint_module(block) if recomputed else block)
            torch.manual_seed(1)
            x = torch.randn(2, 3, inner).to(device()).requires_grad_()
            torch_xla.sync()
            model(x).square().sum().backward()
            wanted = [*(p.grad for p in model.parameters()), x.grad]
            hlo = torch_xla._XLAC._get_xla_tensors_hlo(wanted)
            counts.append(len(re.findall(rf"f32\[2,3,{outer}\]\S* get-tuple-element", hlo)))
            gradients.append(x.grad.cpu())
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    return counts


@pytest.mark.parametrize(
    "inner,outer,recomputed,more", [(8, 4, True, 1), (8, 4, False, 0), (4, 8, True, 0)]
)
def test_a_recomputed_block_uses_what_a_layer_narrows_first(
    run_ranks, inner, outer, recomputed, more
):
    ((large, small),) = run_ranks(barriers_of_gradients, 1, inner, outer, recomputed)
    assert large == small + more


def contraction(rank):
    """The backward of a three-dimensional input reshapes no activation."""
    import torch_xla

    model = fsdp(nn.Linear(128, 256))
    x = torch.randn(4, 8, 128).to(device()).requires_grad_()
    torch_xla.sync()
    model(x).square().sum().backward()
    weight = dict(model.named_parameters())["weight"]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([weight.grad, x.grad])
    torch_xla.sync()
    return hlo


def test_nothing_is_flattened(run_ranks):
    (hlo,) = run_ranks(contraction, 1)
    assert "[32,128]" not in hlo and "[32,256]" not in hlo


class Queries(nn.Module):
    """A parameter that goes into a linear layer as it is."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 5, 8))
        self.narrow = nn.Linear(8, 4)

    def forward(self, x):
        return self.narrow(self.queries).sum() + x.sum()


def saved_parameters(rank, kind, *shape):
    """Which tensors of a forward autograd keeps, and whether as recipes."""
    from xla_fsdp.sharding import gathering as recipe

    found, search = [], recipe.recipe_of

    def noting(tensor):
        result = search(tensor)
        found.append((tuple(tensor.shape), result is not None))
        return result

    with keeping(), mock.patch.object(recipe, "recipe_of", noting):
        fsdp(nn.Sequential(fsdp(kind())))(torch.ones(shape).to(device()))
    return found


def test_a_parameter_is_not_kept(run_ranks):
    (found,) = run_ranks(saved_parameters, 1, Queries, 1)
    assert ((1, 5, 8), True) in found and ((1, 5, 8), False) not in found


def own_forward(rank):
    """What users put on a module stays there, and is what computes."""
    model = fsdp(nn.Sequential(nn.Linear(4, 4)))
    layer = model.module[0]
    layer.forward = own = lambda input: input * 0 + 7
    assert model(torch.ones(2, 3, 4).to(device())).cpu().eq(7).all()
    assert layer.forward is own


def called_by_keyword(rank):
    class ByKeyword(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 3)

        def forward(self, x):
            return self.inner(input=x)

    assert fsdp(ByKeyword())(torch.ones(2, 5, 4).to(device())).shape == (2, 5, 3)


def parametrized(rank):
    """A parametrization computes its weight once a forward, as ever."""
    torch.manual_seed(0)
    plain = spectral_norm(nn.Linear(6, 6))
    torch.manual_seed(0)
    model = fsdp(spectral_norm(nn.Linear(6, 6)))
    x = torch.randn(2, 3, 6)
    for _ in range(3):
        ours, expected = model(x.to(device())).cpu(), plain(x)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def after_an_exception(rank):
    model = fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)))
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 3, 4).to(device()))
    assert "forward" not in model.module[0].__dict__


def precision(rank):
    """Full float32 precision is passed on."""
    import torch_xla
    import torch_xla.backends

    before = torch_xla.backends.get_mat_mul_precision()
    torch_xla.backends.set_mat_mul_precision("highest")
    try:
        y = fsdp(nn.Linear(4, 4))(torch.ones(2, 3, 4).to(device()))
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([y])
    finally:
        torch_xla.backends.set_mat_mul_precision(before)
    assert "operand_precision={highest,highest}" in hlo


CHECKS = [own_forward, called_by_keyword, parametrized, after_an_exception, precision]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_it_is_still_the_users_layer(run_ranks, check):
    run_ranks(check, 1)


def twice_differentiable(rank, keep):
    torch.manual_seed(0)
    weight, bias = torch.randn(1, 4), torch.randn(1)
    inner = nn.Linear(4, 1)
    with torch.no_grad():
        inner.weight.copy_(weight), inner.bias.copy_(bias)
    model = fsdp(inner)
    x = torch.randn(2, 3, 4)
    found = []
    for function, leaf in (
        (model, x.to(device()).requires_grad_()),
        (lambda t: F.linear(t, weight, bias), x.clone().requires_grad_()),
    ):
        with keeping(keep):
            y = function(leaf)
        (grad,) = torch.autograd.grad(y.tanh().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), leaf)
        found.append(second.cpu())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("keep", [False, True])
def test_gradients_of_gradients(run_ranks, keep):
    run_ranks(twice_differentiable, 1, keep)

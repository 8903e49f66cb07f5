"""Linear layers inside a wrapped model: contracted without flattening, and still a linear layer."""

import contextlib
import copy
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from on_ranks import on_each_rank
from small_models import Computes, trace_as_on_tpu
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module, full_state_dict, scan_blocks
from xla_fsdp.sharding import gathering as recipe
from xla_fsdp.tpu.chips import V6E


def fsdp(module):
    trace_as_on_tpu()
    return FSDP(module)


SHAPES = [(5, 8), (2, 5, 8), (2, 3, 5, 8), (2, 1, 2, 3, 8), (8,), (0, 5, 8)]


@contextlib.contextmanager
def keeping(keep=True):
    """As on a chip on which inputs of narrowing layers are kept."""
    with mock.patch("xla_fsdp.layers.linear.chip_of", lambda kind: V6E if keep else None):
        yield


@pytest.mark.parametrize("bias,keep", [(True, False), (False, False), (True, True)])
@on_each_rank(1)
def test_values_gradients_and_gradients_of_gradients(rank, bias, keep):
    for shape in SHAPES:
        torch.manual_seed(0)
        plain = nn.Linear(8, 6, bias=bias)
        model, x = fsdp(copy.deepcopy(plain)), torch.randn(shape)
        found = []
        for one, leaf in ((model, x.to("xla")), (plain, x)):
            leaf.requires_grad_()
            with keeping(keep):
                y, again = one(leaf), one(leaf)
            y.square().sum().backward()
            (slope,) = torch.autograd.grad(again.tanh().sum(), leaf, create_graph=True)
            (second,) = torch.autograd.grad(slope.square().sum(), leaf)
            torch_xla.sync()
            grads = [p.grad.full_tensor() if one is model else p.grad for p in one.parameters()]
            found.append([t.detach().cpu() for t in (y, leaf.grad, second, *grads)])
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def barriers(inner, outer):
    with keeping():
        model = fsdp(nn.Linear(inner, outer))
        torch_xla.sync()
        counts = []
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                x = torch.ones(2, 3, inner).to("xla") * 2
                hlo = torch_xla._XLAC._get_xla_tensors_hlo([model(x)])
            counts.append(len(re.findall(rf"f32\[2,3,{inner}\]\S* get-tuple-element", hlo)))
            torch_xla.sync()
    return counts


@on_each_rank(1)
def test_only_what_a_layer_narrows_is_kept_and_only_for_a_backward(rank):
    narrowing, widening = barriers(8, 4), barriers(4, 8)
    assert narrowing[0] == narrowing[1] + 1
    assert widening[0] == widening[1]


@pytest.mark.parametrize(
    "inner,outer,recomputed,more", [(8, 4, True, 1), (8, 4, False, 0), (4, 8, True, 0)]
)
@on_each_rank(1)
def test_a_recomputed_block_uses_what_a_layer_narrows_first(rank, inner, outer, recomputed, more):
    """How many the backward puts around the gradient of what a linear layer returns, where weights
    count as large and where they do not; and what it gives."""
    torch.manual_seed(0)
    state, counts, gradients = nn.Sequential(nn.Linear(inner, outer)).state_dict(), [], []
    for large in (1, 1 << 21):
        with keeping(), mock.patch("xla_fsdp.layers.linear.LARGE", large):
            block = nn.Sequential(nn.Linear(inner, outer))
            block.load_state_dict(state)
            model = fsdp(checkpoint_module(block) if recomputed else block)
            torch.manual_seed(1)
            x = torch.randn(2, 3, inner).to("xla").requires_grad_()
            torch_xla.sync()
            model(x).square().sum().backward()
            wanted = [*(p.grad for p in model.parameters()), x.grad]
            hlo = torch_xla._XLAC._get_xla_tensors_hlo(wanted)
            assert "[6," not in hlo  # nothing is flattened
            counts.append(len(re.findall(rf"f32\[2,3,{outer}\]\S* get-tuple-element", hlo)))
            gradients.append(x.grad.cpu())
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
    large, small = counts
    assert large == small + more


def queries():
    return Computes(
        lambda self, x: self.narrow(self.queries).sum() + x.sum(),
        queries=nn.Parameter(torch.randn(1, 5, 8)),
        narrow=nn.Linear(8, 4),
    )


def saved_parameters(kind, *shape):
    found, search = [], recipe.recipe_of

    def noting(tensor):
        result = search(tensor)
        found.append((tuple(tensor.shape), result is not None))
        return result

    with keeping(), mock.patch.object(recipe, "recipe_of", noting):
        fsdp(nn.Sequential(fsdp(kind())))(torch.ones(shape).to("xla"))
    return found


@on_each_rank(1)
def test_forwards_of_the_user_and_calls_by_keyword(rank):
    x = torch.ones(2, 3, 4).to("xla")
    model = fsdp(nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)))
    with pytest.raises(RuntimeError):
        model(x)
    layer = model.module[0]
    assert "forward" not in vars(layer)  # an exception leaves nothing behind
    layer.forward = own = lambda input: input * 0 + 7
    model.module[1].forward = lambda input: input
    assert model(x).cpu().eq(7).all() and layer.forward is own

    class ByKeyword(nn.Linear):
        def forward(self, x):
            return super().forward(input=x)

    assert fsdp(ByKeyword(4, 3))(x).shape == (2, 3, 3)


@on_each_rank(1)
def test_a_parametrization_computes_once_a_forward(rank):
    torch.manual_seed(0)
    plain = spectral_norm(nn.Linear(6, 6))
    torch.manual_seed(0)
    model = fsdp(spectral_norm(nn.Linear(6, 6)))
    x = torch.randn(2, 3, 6)
    for _ in range(3):
        ours, expected = model(x.to("xla")).cpu(), plain(x)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@on_each_rank(1)
def test_full_float32_precision_is_passed_on(rank):
    import torch_xla.backends

    before = torch_xla.backends.get_mat_mul_precision()
    torch_xla.backends.set_mat_mul_precision("highest")
    try:
        y = fsdp(nn.Linear(4, 4))(torch.ones(2, 3, 4).to("xla"))
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([y])
    finally:
        torch_xla.backends.set_mat_mul_precision(before)
    assert "operand_precision={highest,highest}" in hlo


class Attention(nn.Module):
    """As transformers writes it: 4 heads of 6 for queries, 2 for keys and values."""

    def __init__(self, bias=True, names=("q_proj", "k_proj", "v_proj", "o_proj"), **size):
        super().__init__()
        self.names = names
        vars(self).update(size or {"head_dim": 6})
        for name, wide in zip(names, ((16, 24), (16, 12), (16, 12), (24, 16)), strict=True):
            setattr(self, name, nn.Linear(*wide, bias=bias))

    def forward(self, x):
        q, k, v = (
            getattr(self, name)(x).view(*x.shape[:-1], -1, 6).transpose(1, 2)
            for name in self.names[:3]
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + getattr(self, self.names[3])(y.transpose(1, 2).reshape(*x.shape[:-1], -1))


@on_each_rank(1)
def test_autograd_keeps_no_parameters(rank):
    for kind, given, weights in (
        (queries, (1,), {(1, 5, 8)}),
        (Attention, (2, 5, 16), {(4, 6, 16), (2, 6, 16), (16, 4, 6)}),
    ):
        found = saved_parameters(kind, *given)
        assert {(shape, True) for shape in weights} <= set(found)
        assert not {(shape, False) for shape in weights} & set(found)


def one_step(model, x):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    y = model(x)
    y.square().mean().backward()
    optimizer.step()
    return y


@pytest.mark.parametrize(
    "how,bias,frozen",
    [("wrapped", True, False), ("checkpointed", False, True), ("scanned", True, True)],
)
@on_each_rank(2)
def test_a_step(rank, how, bias, frozen):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Sequential(Attention(bias), Attention(bias)))
    for block in plain[0]:
        block.q_proj.weight.requires_grad_(not frozen)
    blocks = copy.deepcopy(plain[0])
    if how == "scanned":
        trace_as_on_tpu()
        blocks = scan_blocks(blocks)
    elif how == "checkpointed":
        blocks = nn.Sequential(*(fsdp(checkpoint_module(block)) for block in blocks))
    model = fsdp(nn.Sequential(blocks))
    x = torch.randn(2, 5, 16)
    expected = one_step(plain, x)
    ours = one_step(model, x.to("xla"))
    torch_xla.sync()
    torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=1e-5)
    whole = full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(whole, plain.state_dict(), rtol=1e-4, atol=1e-5)


OWN = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
    "names,heads,made,taken",
    [
        (OWN, {"head_dim": 6}, True, True),
        (("query", "key", "value", "dense"), {"attention_head_size": 6}, True, True),
        (("first", "second", "third", "o_proj"), {"head_dim": 6}, False, True),
        (("q_proj", "k_proj", "v_proj", "proj"), {"head_dim": 6}, True, False),
        (OWN, {"other": 6}, False, False),
        *((OWN, {"head_dim": wrong}, False, False) for wrong in (5, 0, -6, True, "6")),
    ],
)
@on_each_rank(1)
def test_heads_are_made_and_taken_in_the_products(rank, names, heads, made, taken):
    model = fsdp(Attention(names=names, **heads))
    x = torch.randn(2, 5, 16).to("xla")
    torch_xla.sync()
    with torch.no_grad():
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([model(x)])
    torch_xla.sync()
    found = set(re.findall(r"f32\[([\d,]+)\]\S* dot\(f32\[([\d,]+)\]", hlo))
    for made_of, x_of, expected in (
        ("2,5,4,6", "2,5,16", made),
        ("2,5,24", "2,5,16", not made),
        ("2,5,16", "2,5,4,6", taken),
        ("2,5,16", "2,5,24", not taken),
    ):
        assert ((made_of, x_of) in found) == expected

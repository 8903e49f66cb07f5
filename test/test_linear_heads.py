"""Layers of attention whose outputs or inputs are heads: the same values, without a copy."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from test_linear import fsdp, saved_parameters
from test_special_uses import trace_as_on_tpu
from torch import nn


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


def one_step(model, x):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    y = model(x)
    y.square().mean().backward()
    optimizer.step()
    return y


def step_of(rank, how, bias, frozen):
    import torch_xla

    from xla_fsdp import checkpoint_module, full_state_dict, scan_blocks

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
    for name, parameter in plain.state_dict().items():
        torch.testing.assert_close(whole[name], parameter, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "how,bias,frozen",
    [("wrapped", True, False), ("checkpointed", False, True), ("scanned", True, True)],
)
def test_a_step(run_ranks, how, bias, frozen):
    run_ranks(step_of, 2, how, bias, frozen)


NAMES = [
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("query", "key", "value", "dense"),
    ("first", "second", "third", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "proj"),
]


def products(rank, names, size):
    """Shapes of products of the forward."""
    import torch_xla

    model = fsdp(Attention(names=names, **size))
    x = torch.randn(2, 5, 16).to("xla")
    torch_xla.sync()
    with torch.no_grad():
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([model(x)])
    torch_xla.sync()
    found = re.findall(r"f32\[([\d,]+)\]\S* dot\(f32\[([\d,]+)\]", hlo)
    assert found
    return {tuple(shape) for shape in found}


@pytest.mark.parametrize(
    "names,size,made,taken",
    [
        (NAMES[0], {"head_dim": 6}, True, True),
        (NAMES[1], {"attention_head_size": 6}, True, True),
        (NAMES[2], {"head_dim": 6}, False, True),
        (NAMES[3], {"head_dim": 6}, True, False),
        (NAMES[0], {"other": 6}, False, False),
        (NAMES[0], {"head_dim": 5}, False, False),
    ],
)
def test_heads_are_made_and_taken_in_the_products(run_ranks, names, size, made, taken):
    (found,) = run_ranks(products, 1, names, size)
    assert (("2,5,4,6", "2,5,16") in found) == made
    assert (("2,5,24", "2,5,16") in found) != made
    assert (("2,5,16", "2,5,4,6") in found) == taken
    assert (("2,5,16", "2,5,24") in found) != taken


def test_what_is_no_head_is_left_alone():
    from xla_fsdp.layers.linear import Heads, layers_in

    module = Attention()
    assert layers_in(module.modules()) == {
        module.q_proj: Heads(6, True), module.k_proj: Heads(6, True),
        module.v_proj: Heads(6, True), module.o_proj: Heads(6, False),
    }  # fmt: skip
    for size in (0, -6, 6.0, True, None, "6"):
        module.head_dim = size
        assert set(layers_in(module.modules()).values()) == {None}
    assert layers_in([nn.ReLU()]) == {}


def test_full_parameters_are_not_kept(run_ranks):
    (found,) = run_ranks(saved_parameters, 1, Attention, 2, 5, 16)
    weights = {(4, 6, 16), (2, 6, 16), (16, 4, 6)}
    assert {(shape, True) for shape in weights} <= set(found)
    assert not {(shape, False) for shape in weights} & set(found)

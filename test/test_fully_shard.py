"""fully_shard: its methods, and scenarios of torch's own tests of FSDP2, against plain modules."""

import copy

import pytest
import torch
import torch_xla
from in_place import (
    Layer,
    Model,
    assert_like,
    assert_like_plain,
    build,
    loss_of,
    sharded,
    tokens,
    train,
    wrapped,
)
from on_ranks import on_each_rank
from torch import nn

import xla_fsdp
from xla_fsdp import FSDPModule, checkpoint_module, fully_shard
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.sharding.sharded_parameter import ShardedParameter


def backward(model, batch):
    loss_of(model(batch), batch).backward()
    return model


def gathers(*tensors):
    """How many the program has that makes the tensors, and whatever is pending."""
    number = torch_xla._XLAC._get_xla_tensors_hlo(list(tensors)).count(" all-gather(")
    torch_xla.sync()  # one collective waits for the one before, which would be counted again
    return number


@on_each_rank(2, timeout=1500)
def test_unshard_and_reshard(rank):
    plain, model = build(), sharded()
    batch = tokens(0)
    here = batch.to("xla")
    layer, own = model.layers[0], plain.layers[0]
    shard = layer.qkv.weight
    assert shard.to_local().dim() == 1 and layer.unshard() is None
    torch.testing.assert_close(layer.qkv.weight.cpu(), own.qkv.weight)
    assert isinstance(model.layers[1].qkv.weight, ShardedParameter)
    layer.qkv.weight.square().sum().backward()
    own.qkv.weight.square().sum().backward()
    layer.reshard()
    assert layer.qkv.weight is shard
    assert_like(model, plain)
    model.zero_grad()
    plain.zero_grad()

    # A forward uses what is there; without it there is one gather of it for either.
    torch_xla.sync()
    assert layer.unshard(async_op=True).wait() is None
    total = layer.up.weight.sum()
    loss = loss_of(model(here), here)
    assert layer.qkv.weight is shard
    with_hand = gathers(loss, total)
    assert with_hand == gathers(loss_of(model(here), here)) > 0
    for one in (model, *model.layers):
        one.unshard()
    backward(model, here)
    assert_like(model, backward(plain, batch))

    # A step in between: what is kept is not used any more.
    model.set_reshard_after_backward(False)
    for one in (model, plain):
        torch.optim.SGD(one.parameters(), lr=0.5).step()
        one.zero_grad()
    backward(model, here)
    torch_xla.sync()
    loss = loss_of(model(here), here)
    assert gathers(loss) == 0  # kept from the backward
    loss.backward()
    backward(backward(plain, batch), batch)
    assert_like(model, plain)
    model.reshard()

    # What is full does not hide what is not; what is not full any more is not taken for it.
    table = model.head.weight
    for one in (layer, model):
        one.unshard()
    model.zero_grad()
    with torch.no_grad():
        shard.mul_(2)
        table.mul_(1)
        own.qkv.weight.mul_(2)
    x = torch.ones(1, 4, 8)
    torch.testing.assert_close(layer.forward(x.to("xla")).cpu(), own(x), rtol=2e-5, atol=1e-6)
    with pytest.raises(RuntimeError, match=r"Call unshard\(\) again"):
        model.encode(here)
    for one in (layer, model):
        one.reshard()
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        layer.unshard()
    assert layer.qkv.weight.requires_grad

    assert list(model.state_dict().values())[1].dim() == 1  # at rest, as torch's
    layer.unshard()
    full = xla_fsdp.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(full, plain.state_dict(), rtol=2e-5, atol=1e-6)
    layer.unshard()
    layer.qkv.weight = nn.Parameter(torch.zeros(24, 8))
    with pytest.raises(RuntimeError, match="'layers.0.qkv.weight' is not the shard"):
        layer(torch.zeros(1, 4, 8).to("xla"))
    with FSDP.summon_full_params(model, writeback=False):
        with pytest.raises(RuntimeError, match="within summon_full_params"):
            layer.unshard()


@on_each_rank(2, timeout=1500)
def test_scenarios(rank):
    batch = tokens(0)
    here = batch.to("xla")
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))

    # An inner module by itself, before the root and after; twice in one graph; frozen by then.
    plain, model = build(), sharded()
    for one, at in ((plain, x), (model, x.to("xla"))):
        one.layers[1](at).square().mean().backward()
        one.layers[0].requires_grad_(False)
        backward(one, here if one is model else batch)
        layer = one.layers[1]
        layer.forward(layer(at)).square().mean().backward()
    assert_like(model, plain)

    # Recomputation, made before and after; prefetch by hand; gradients of the inputs.
    plain = build()
    for before in (True, False):
        model = build()
        for layer in model.layers:
            fully_shard(checkpoint_module(layer) if before else layer)
            if not before:
                checkpoint_module(layer)
        fully_shard(model, reshard_after_forward=True)
        model.set_modules_to_forward_prefetch([model.layers[0]])
        model.layers[1].set_modules_to_backward_prefetch([model.layers[0]])
        backward(model, here)
        plain.zero_grad()
        assert_like(model, backward(plain, batch))

    # A hook that computes a parameter of others, as weight_norm has it, and one of the user's.
    def normed():
        torch.manual_seed(1)
        first = torch.nn.utils.weight_norm(nn.Linear(8, 8))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(8, 3))

    plain, model = normed(), normed()
    shapes = []
    for one in (plain, model):
        if one is model:
            fully_shard(one[0])
            fully_shard(one)
            one[2].register_forward_hook(lambda m, args, out: shapes.append(m.weight.shape))
        one(x if one is plain else x.to("xla")).square().mean().backward()
    assert_like(model, plain)
    assert shapes == [(3, 8)]
    assert type(model[1:]) is nn.Sequential and isinstance(model, FSDPModule)

    # In wrappers of the class, and around them; copies; dtypes of outputs and inputs.
    plain = backward(build(), batch)
    inner = build()
    fully_shard(inner.layers[0])
    assert_like(backward(FSDP(inner), here), plain)
    outer = build()
    outer.layers[0] = FSDP(outer.layers[0])
    fully_shard(outer.layers[1])
    fully_shard(outer)
    twin = copy.deepcopy(outer)
    assert_like(backward(twin, here), plain)
    assert all(grad is None for grad in (p.grad for p in outer.parameters()))
    narrow = torch.bfloat16
    layer = fully_shard(
        Layer(), mp_policy=xla_fsdp.MixedPrecisionPolicy(narrow, output_dtype=torch.float32)
    )
    seen = []
    layer.up.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    assert layer(x.to("xla")).dtype is torch.float32 and seen == [(narrow, narrow)]
    assert all(p.dtype is torch.float32 for p in layer.parameters())
    assert FSDP.fsdp_modules(outer) == [outer, *outer.layers]
    assert FSDP.fsdp_modules(outer, root_only=True) == [outer]


@on_each_rank(2)
def test_mixed_precision_is_that_of_the_class(rank):
    dtypes = torch.bfloat16, torch.float32
    model = sharded(mp_policy=xla_fsdp.MixedPrecisionPolicy(*dtypes))
    other = wrapped(mixed_precision=xla_fsdp.MixedPrecision(*dtypes, cast_forward_inputs=True))
    assert train(model, rank, 2) == train(other, rank, 2)
    own, expected = model.state_dict(), other.state_dict()
    assert all(torch.equal(own[name], expected[name]) for name in expected)


@on_each_rank(2, timeout=1500)
def test_trains_like_plain_torch(rank, size):
    plain = build()
    model = sharded(mesh=[0, 1], reshard_after_forward=False)
    assert isinstance(model, Model) and isinstance(model, FSDPModule)
    assert isinstance(model.layers[0], Layer) and type(model.layers[0]) is type(model.layers[1])
    for names in ("named_parameters", "named_modules"):
        assert [n for n, _ in getattr(model, names)()] == [n for n, _ in getattr(plain, names)()]
    assert list(model.state_dict()) == list(plain.state_dict())
    expected = train(plain)
    assert_like_plain(model, train(model, rank, size), expected, plain)

    plain = build()
    expected = train(plain, micro_batches=2)
    mesh = torch.arange(2).view(2, -1)
    model = sharded(mesh=mesh, offload_policy=xla_fsdp.CPUOffloadPolicy())
    model.set_requires_all_reduce(True)
    model.set_reshard_after_backward(False)
    assert_like_plain(model, train(model, rank, size, micro_batches=2), expected, plain)

    plain, model = build(), build()
    for one in (plain, model):
        one.norm.requires_grad_(False)
        one.layers[0].requires_grad_(False)
    fully_shard([*model.layers, model.head])
    ignored = set(model.norm.parameters())
    fully_shard(model, ignored_params=ignored)
    assert ignored == set(model.norm.parameters())
    xla_fsdp.register_fsdp_forward_method(model, "encode")
    found = train(model, rank, size, method="encode")
    assert_like_plain(model, found, train(plain, method="encode"), plain)

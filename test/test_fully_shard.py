"""fully_shard against plain modules: training, states, scenarios of torch's tests, what raises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from on_ranks import on_each_rank, raises, without_ranks
from planned import described
from small_models import WORDS, Block, Language, assert_same_gradients
from small_models import wrapped as in_units
from torch import nn

import xla_fsdp
from xla_fsdp import FSDPModule, MixedPrecisionPolicy, checkpoint_module, fully_shard
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.planning.tracing.step import trace_step
from xla_fsdp.planning.tracing.traced import scope_names
from xla_fsdp.sharding.sharded_parameter import ShardedParameter
from xla_fsdp.tpu.topology import resolve

SEQUENCE, BATCH = 4, 8


class Model(Language):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.blocks(self.embed(tokens) * self.scale))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens))

    def squared(self) -> torch.Tensor:
        """Computes with a parameter of its own, outside of a forward."""
        return (self.embed.weight * self.embed.weight).sum()

    def product(self) -> torch.Tensor:
        return self.embed.weight @ self.embed.weight.T


def build(seed: int = 3) -> Model:
    torch.manual_seed(seed)
    return Model()


def sharded(model: Model | None = None, /, **options: Any) -> Model:
    model = build() if model is None else model
    return in_units(model, "blocks.0", "blocks.1", wrap=fully_shard, **options)


def wrapped(**options: Any) -> nn.Module:
    return in_units(build(), "blocks.0", "blocks.1", **options)


def tokens(step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(WORDS, (BATCH, SEQUENCE), generator=generator).chunk(size)[rank]


def loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), batch.flatten())


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
    layer, own = model.blocks[0], plain.blocks[0]
    shard = layer.up.weight
    assert shard.to_local().dim() == 1 and layer.unshard() is None
    torch.testing.assert_close(layer.up.weight.cpu(), own.up.weight)
    assert isinstance(model.blocks[1].up.weight, ShardedParameter)
    layer.up.weight.square().sum().backward()
    own.up.weight.square().sum().backward()
    layer.reshard()
    assert layer.up.weight is shard
    assert_same_gradients(model, plain)
    model.zero_grad()
    plain.zero_grad()

    # A forward uses what is there; without it there is one gather of it for either.
    torch_xla.sync()
    assert layer.unshard(async_op=True).wait() is None
    total = layer.up.weight.sum()
    loss = loss_of(model(here), here)
    assert layer.up.weight is shard
    assert gathers(loss, total) == gathers(loss_of(model(here), here)) > 0
    for one in (model, *model.blocks):
        one.unshard()
    backward(model, here)
    assert_same_gradients(model, backward(plain, batch))

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
    assert_same_gradients(model, plain)
    model.reshard()

    # What is full does not hide what is not; what is not full any more is not taken for it.
    table = model.head.weight
    for one in (layer, model):
        one.unshard()
    model.zero_grad()
    with torch.no_grad():
        shard.mul_(2)
        table.mul_(1)
        own.up.weight.mul_(2)
    x = torch.ones(1, 4, 12)
    torch.testing.assert_close(layer.forward(x.to("xla")).cpu(), own(x), rtol=2e-5, atol=1e-6)
    raises(RuntimeError, r"Call unshard\(\) again", model.encode, here)
    for one in (layer, model):
        one.reshard()
    assert all(p.grad is None for p in model.parameters())
    with torch.no_grad():
        layer.unshard()
    assert layer.up.weight.requires_grad

    assert list(model.state_dict().values())[1].dim() == 1  # at rest, as torch's
    layer.unshard()
    full = xla_fsdp.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(full, plain.state_dict(), rtol=2e-5, atol=1e-6)
    layer.unshard()
    layer.up.weight = nn.Parameter(torch.zeros(7, 12))
    raises(RuntimeError, "'blocks.0.up.weight' is not the", layer, torch.zeros(1, 4, 12).to("xla"))
    with FSDP.summon_full_params(model, writeback=False):
        raises(RuntimeError, "within summon_full_params", layer.unshard)


@on_each_rank(2, timeout=1500)
def test_scenarios(rank):
    batch = tokens(0)
    here = batch.to("xla")
    x = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(0))

    # An inner module by itself, before the root and after; twice in one graph; frozen by then.
    plain, model = build(), sharded()
    for one, at in ((plain, x), (model, x.to("xla"))):
        one.blocks[1](at).square().mean().backward()
        one.blocks[0].requires_grad_(False)
        backward(one, here if one is model else batch)
        layer = one.blocks[1]
        layer.forward(layer(at)).square().mean().backward()
    assert_same_gradients(model, plain)

    # Recomputation, made before and after; prefetch by hand; gradients of the inputs.
    plain = build()
    for before in (True, False):
        model = build()
        for layer in model.blocks:
            fully_shard(checkpoint_module(layer) if before else layer)
            if not before:
                checkpoint_module(layer)
        fully_shard(model, reshard_after_forward=True)
        model.set_modules_to_forward_prefetch([model.blocks[0]])
        model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])
        backward(model, here)
        plain.zero_grad()
        assert_same_gradients(model, backward(plain, batch))

    # A hook that computes a parameter of others, as weight_norm has it, and one of the user's.
    def normed():
        torch.manual_seed(1)
        first = torch.nn.utils.weight_norm(nn.Linear(12, 12))
        return nn.Sequential(first, nn.Tanh(), nn.Linear(12, 3))

    plain, model = normed(), normed()
    shapes = []
    for one in (plain, model):
        if one is model:
            in_units(one, "0", wrap=fully_shard)
            one[2].register_forward_hook(lambda m, args, out: shapes.append(m.weight.shape))
        one(x if one is plain else x.to("xla")).square().mean().backward()
    assert_same_gradients(model, plain)
    assert shapes == [(3, 12)]
    assert type(model[1:]) is nn.Sequential and isinstance(model, FSDPModule)

    # In wrappers of the class, and around them; copies; dtypes of outputs and inputs.
    plain = backward(build(), batch)
    inner = build()
    fully_shard(inner.blocks[0])
    assert_same_gradients(backward(FSDP(inner), here), plain)
    outer = build()
    outer.blocks[0] = FSDP(outer.blocks[0])
    fully_shard(outer.blocks[1])
    fully_shard(outer)
    assert_same_gradients(backward(copy.deepcopy(outer), here), plain)
    assert all(grad is None for grad in (p.grad for p in outer.parameters()))
    narrow = torch.bfloat16
    layer = fully_shard(Block(), mp_policy=MixedPrecisionPolicy(narrow, output_dtype=torch.float32))
    seen = []
    layer.up.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    assert layer(x.to("xla")).dtype is torch.float32 and seen == [(narrow, narrow)]
    assert all(p.dtype is torch.float32 for p in layer.parameters())
    assert FSDP.fsdp_modules(outer) == [outer, *outer.blocks]


@on_each_rank(2, timeout=1500)
def test_trains_like_plain_torch(rank, size):
    plain, model = build(), build()
    for one in (plain, model):
        one.norm.requires_grad_(False)
        one.blocks[0].requires_grad_(False)
    fully_shard([*model.blocks, model.head])
    ignored = set(model.norm.parameters())
    fully_shard(model, ignored_params=ignored)
    model.set_is_last_backward(True)
    model.set_requires_all_reduce(True)
    assert ignored == set(model.norm.parameters())
    assert isinstance(model, Model) and isinstance(model, FSDPModule)
    assert isinstance(model.blocks[0], Block) and type(model.blocks[0]) is type(model.blocks[1])
    for kind in ("named_parameters", "named_modules"):
        assert [n for n, _ in getattr(model, kind)()] == [n for n, _ in getattr(plain, kind)()]
    assert list(model.state_dict()) == list(plain.state_dict())
    xla_fsdp.register_fsdp_forward_method(model, "encode")
    for one, part in ((plain, tokens(0)), (model, tokens(0, rank, size).to("xla"))):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.2)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(one.head(one.encode(part)), part).backward()
            optimizer.step()
    state = xla_fsdp.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, plain.state_dict(), rtol=2e-5, atol=2e-5)


@on_each_rank(2, timeout=1500)
def test_state_dicts_and_initialisation(rank):
    model = sharded()
    with FSDP.summon_full_params(model, writeback=False):
        assert model.head.weight is model.embed.weight
    model.load_state_dict(sharded(build(7)).state_dict())
    torch.testing.assert_close(
        xla_fsdp.full_state_dict(model, rank0_only=False), build(7).state_dict(), rtol=0, atol=0
    )

    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    assert model.apply(init) is model
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(empty[0])
    fully_shard(empty, param_init_fn=lambda module: module.to_empty(device="cpu")).apply(init)
    for one, layer in ((model, model.blocks[0].up), (empty, empty[1])):
        with FSDP.summon_full_params(one, writeback=False):
            assert layer.weight.dim() == 2 and bool((layer.weight == 0.5).all())
    plain, model = build(), build()
    model.blocks = xla_fsdp.scan_blocks(list(model.blocks))
    xla_fsdp.fully_shard(model)
    for one, batch in ((plain, tokens(0)), (model, tokens(0).to("xla"))):
        torch.optim.SGD(backward(one, batch).parameters(), lr=0.5).step()
    state = xla_fsdp.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(state, plain.state_dict(), rtol=2e-5, atol=2e-5)


@on_each_rank(2)
def test_what_is_not_possible_is_refused(rank):
    from torch.distributed.checkpoint import state_dict as torchs

    def refused(match, error=ValueError, module=None, **options):
        raises(error, match, fully_shard, nn.Linear(2, 2) if module is None else module, **options)

    refused("must be a torch.nn.Module", TypeError, module=7)
    refused("already wrapped", RuntimeError, module=fully_shard(nn.Linear(2, 2)))
    for wrong in ({"param_dtype": torch.int8}, {"reduce_dtype": torch.bfloat16},
                  {"cast_forward_inputs": 1}):  # fmt: skip
        raises(ValueError, f"PrecisionPolicy.{next(iter(wrong))}", MixedPrecisionPolicy, **wrong)
    raises(ValueError, "is wrapped", xla_fsdp.scan_blocks, [fully_shard(nn.Linear(2, 2))])
    raises(TypeError, "what xla_fsdp.fully_shard", FSDPModule)

    model = sharded()
    for method, value in {
        "set_requires_gradient_sync": 1,
        "set_requires_all_reduce": None,
        "set_reshard_after_forward": 2,
        "set_reshard_after_backward": "no",
        "unshard": 1,
        "set_gradient_divide_factor": 0,
    }.items():
        with pytest.raises(ValueError):
            getattr(model, method)(value)
    for method in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(NotImplementedError, match=method):
            getattr(model, method)(None)
    raises(RuntimeError, "needs parameter 'embed.weight'.*register_fsdp", model.product)
    torch.testing.assert_close(model.squared().cpu(), build().squared(), rtol=1e-4, atol=1e-5)
    raises(RuntimeError, "stay on", model.cpu)
    model.decode = model.blocks[0].forward  # as one that a PeftModel answers with
    with pytest.raises(AttributeError, match="Wrap with XlaFullyShardedDataParallel"):
        xla_fsdp.register_fsdp_forward_method(model, "decode")
    del model.decode
    for get, count in ((torchs.get_model_state_dict, 0), (torchs.get_optimizer_state_dict, 1)):
        for one in (model, nn.Sequential(model), FSDP(nn.Linear(2, 2)), wrapped()):
            own = [torch.optim.SGD(one.parameters(), lr=0.1)][:count]
            raises(RuntimeError, "xla_fsdp.full_state_dict", get, one, *own)


def fingerprints():
    slice = resolve("v5litepod-8")

    def step(make):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        batch = torch.zeros(2, 4, dtype=torch.long).to("xla")
        backward(model, batch).clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    dtypes, found = (torch.bfloat16, torch.float32), []
    for make in (
        lambda: sharded(mp_policy=MixedPrecisionPolicy(*dtypes)),
        lambda: wrapped(mixed_precision=xla_fsdp.MixedPrecision(*dtypes, cast_forward_inputs=True)),
    ):
        torch.manual_seed(0)
        traced = trace_step(lambda make=make: step(make), 1, slice.devices, slice)
        program = traced.program
        names = scope_names(program.hlo)
        found.append((*described(program), names, traced.bound, program.fingerprint))
    return found


@without_ranks
def test_the_program_on_a_tpu_is_that_of_the_class():
    in_place, of_class = fingerprints()
    for one, other in zip(in_place, of_class, strict=True):
        assert one == other, (one, other)
    assert any("forward[blocks.1]" in name for name in of_class[3]), of_class[3]

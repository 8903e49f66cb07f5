"""fully_shard: what goes in and out of such models, what is refused, and the program on a TPU."""

import pathlib

import pytest
import torch
import torch_xla.core.xla_model as xm
from in_place import assert_like_plain, build, sharded, train, wrapped
from on_ranks import on_each_rank
from safetensors.torch import save_file
from torch import nn
from wrappings import assert_equal

import xla_fsdp
from xla_fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.consolidate import consolidate_sharded_state_dicts


def adamw(model):
    # A large epsilon: where a gradient is all rounding error, Adam would amplify it to a full step.
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


@on_each_rank(2, timeout=1500)
def test_checkpoints_state_dicts_and_initialisation(rank, tmp_path):
    plain = build()
    whole = adamw(plain)
    first = train(plain, steps=1, optimizer=whole)
    before = {n: v.clone() for n, v in plain.state_dict().items()}
    then = train(plain, steps=1, optimizer=whole, first=1)
    for number, (make, other) in enumerate([(sharded, wrapped), (wrapped, sharded)]):
        model = make()
        optimizer = adamw(model)
        found = train(model, rank, 2, steps=1, optimizer=optimizer)
        xla_fsdp.save_checkpoint(f"{tmp_path}/{number}", model, optimizer, step=1)
        state = xla_fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)
        second = other(seed=7) if other is wrapped else sharded(build(7))
        optimizer = adamw(second)
        xla_fsdp.load_checkpoint(f"{tmp_path}/{number}", second, optimizer)
        again = xla_fsdp.full_optim_state_dict(second, optimizer, rank0_only=False)
        assert_equal(again, state)
        found += train(second, rank, 2, steps=1, optimizer=optimizer, first=1)
        assert_like_plain(second, found, first + then, plain)

    model = sharded(build(7))
    assert xla_fsdp.load_full_state_dict(model, before if rank == 0 else None).missing_keys == []
    mine = {name: value.cpu() for name, value in model.state_dict().items()}
    everyone = xm.mesh_reduce("states", mine, list)
    joined = consolidate_sharded_state_dicts(everyone, model.get_shard_metadata())
    torch.testing.assert_close(joined, before, rtol=0, atol=0)
    save_file(
        {n: v for n, v in before.items() if n != "head.weight"}, f"{tmp_path}/{rank}.safetensors"
    )
    model = sharded(build(7))
    xla_fsdp.load_weights(model, f"{tmp_path}/{rank}.safetensors")
    with FSDP.summon_full_params(model, writeback=False):
        assert torch.equal(model.layers[0].qkv.weight.cpu(), before["layers.0.qkv.weight"])
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
    for one, layer in ((model, model.layers[0].up), (empty, empty[1])):
        with FSDP.summon_full_params(one, writeback=False):
            assert layer.weight.dim() == 2 and bool((layer.weight == 0.5).all())
    plain, model = build(), build()
    model.layers = nn.ModuleList([xla_fsdp.scan_blocks(model.layers)])
    xla_fsdp.fully_shard(model)
    assert len(train(model, rank, 2, steps=1)) == 1
    state = xla_fsdp.full_state_dict(model, rank0_only=False)
    assert {n.replace("layers.0.", "layers.") for n in state} == set(plain.state_dict())


@on_each_rank(2)
def test_what_is_not_possible_is_refused(rank):
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )
    from torch.distributed.fsdp import MixedPrecisionPolicy as Theirs

    def refused(match, error=ValueError, module=None, **options):
        with pytest.raises(error, match=match):
            fully_shard(nn.Linear(2, 2) if module is None else module, **options)

    refused("mp_policy must be", mp_policy=Theirs())
    refused("must be a torch.nn.Module", TypeError, module=7)
    refused("no forward", RuntimeError, module=nn.ModuleList([nn.Linear(2, 2)]))
    refused("already wrapped", RuntimeError, module=fully_shard(nn.Linear(2, 2)))
    refused("already wrapped", RuntimeError, module=FSDP(nn.Linear(2, 2)))
    for wrong in ({"param_dtype": torch.int8}, {"reduce_dtype": torch.bfloat16},
                  {"cast_forward_inputs": 1}):  # fmt: skip
        with pytest.raises(ValueError, match=f"MixedPrecisionPolicy.{next(iter(wrong))}"):
            MixedPrecisionPolicy(**wrong)
    with pytest.raises(ValueError, match="is wrapped"):
        xla_fsdp.scan_blocks([fully_shard(nn.Linear(2, 2))])
    with pytest.raises(TypeError, match="what xla_fsdp.fully_shard"):
        FSDPModule()

    model = sharded()
    for method, value in [
        ("set_requires_gradient_sync", 1),
        ("set_requires_all_reduce", None),
        ("set_reshard_after_forward", 2),
        ("set_reshard_after_backward", "no"),
        ("set_is_last_backward", 0),
        ("unshard", 1),
        ("set_modules_to_forward_prefetch", model),
        ("set_modules_to_backward_prefetch", [model.embed]),
        ("set_gradient_divide_factor", 0),
    ]:
        with pytest.raises(ValueError):
            getattr(model, method)(value)
    for method in ("set_all_reduce_hook", "set_custom_all_gather", "set_custom_reduce_scatter"):
        with pytest.raises(NotImplementedError, match=method):
            getattr(model, method)(None)
    with pytest.raises(RuntimeError, match="needs parameter 'embed.weight'.*register_fsdp"):
        model.product()
    torch.testing.assert_close(model.squared().cpu(), build().squared(), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="stay on"):
        model.cpu()
    with pytest.raises(AttributeError, match="no method 'decode'"):
        xla_fsdp.register_fsdp_forward_method(model, "decode")
    model.decode = model.layers[0].forward  # as one that a PeftModel answers with
    with pytest.raises(AttributeError, match="Wrap with XlaFullyShardedDataParallel"):
        xla_fsdp.register_fsdp_forward_method(model, "decode")
    del model.decode
    for get in (get_model_state_dict, get_optimizer_state_dict):
        for one in (model, nn.Sequential(model), FSDP(nn.Linear(2, 2)), wrapped()):
            own = [torch.optim.SGD(one.parameters(), lr=0.1)][: get is get_optimizer_state_dict]
            with pytest.raises(RuntimeError, match="xla_fsdp.full_state_dict"):
                get(one, *own)


TRACED = """
import sys
sys.path.insert(0, {tests!r})
import torch
from in_place import VOCABULARY, loss_of, sharded, wrapped
from xla_fsdp.planning.tracing.traced import names
from xla_fsdp.planning.tracing.step import trace_step
from xla_fsdp.tpu.topology import resolve

def step(make):
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = torch.zeros(2, 4, dtype=torch.long).to("xla")
    loss_of(model(batch), batch).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()

slice = resolve("v5litepod-8")
found = []
for make in (sharded, wrapped):
    torch.manual_seed(0)
    traced = trace_step(lambda: step(make), 1, slice.devices, slice)
    found.append((traced.program.fingerprint, traced.bound, names(traced.program.hlo)))
assert found[0] == found[1], found
assert any("forward[layers.1]" in name for name in found[0][2]), found[0][2]
"""


def test_the_program_on_a_tpu_is_that_of_the_class(run_script):
    done = run_script(TRACED.format(tests=str(pathlib.Path(__file__).parent)))
    assert done.returncode == 0, done.stderr

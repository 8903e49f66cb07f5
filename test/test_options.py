"""Options: declared once, checked when they are given, the same in every entry point."""

import inspect
import re
from dataclasses import fields

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from on_ranks import on_each_rank, raises
from small_models import mlp
from torch import nn

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.integrations.lightning.wrap_settings import WrapSettings
from xla_fsdp.integrations.sharding import Sharding
from xla_fsdp.sharding.options import FULLY_SHARD, SCAN, WRAPPER, FSDPOptions, flag
from xla_fsdp.wrap import always_wrap_policy, transformer_auto_wrap_policy

FLAG = (1, TypeError, "True or False", "leave it out")
DTYPE = (torch.int8, ValueError, "torch.float32, torch.float16, torch.bfloat16", "leave it out")
FUNCTION = (3, TypeError, "a function", "leave it out")
GROUPS = ([0, 1], TypeError, "lists of ordinals", "leave it out")
NUMBER = ("1", TypeError, "a number or None", "leave it out")
IGNORED = (7, TypeError, "iterable of torch.nn.", "Pass a list")
NAMES = ("up", TypeError, "names, such as ('up',)", "Pass a list of names")
FLAGS = [one.name for one in fields(FSDPOptions) if one.metadata["check"] is flag]
# A value that is not allowed, the error, and what the message has: what is allowed, and the fix.
BAD = dict.fromkeys(FLAGS, FLAG) | {
    "reshard_after_forward": ("yes", TypeError, "True, False or a number", "leave it out"),
    "compute_dtype": DTYPE,
    "buffer_dtype": DTYPE,
    "sharding_groups": GROUPS,
    "sharding_rank": NUMBER,
    "sharding_world_size": NUMBER,
    "reduce_scatter_bucket_size_mb": NUMBER,
    "auto_wrap_policy": FUNCTION,
    "auto_wrapper_callable": FUNCTION,
    "param_init_fn": FUNCTION,
    "replication_groups": GROUPS,
    "backward_prefetch": ("pre", TypeError, "BackwardPrefetch.BACKWARD_PRE", "leave it out"),
    "sharding_strategy": ("FULL_SHARD", ValueError, "ShardingStrategy.FULL_SHARD", "Take it from"),
    "device_mesh": ([0, 7], ValueError, "each of the 2 ranks once", "1-D mesh"),
    "mixed_precision": ("bf16", ValueError, "an xla_fsdp.MixedPrecision", "leave it out"),
    "cpu_offload": (True, TypeError, "an xla_fsdp.CPUOffload", "pass xla_fsdp.CPUOffload()"),
    "ignored_modules": IGNORED,
    "ignored_parameters": IGNORED,
    "ignored_states": IGNORED,
    "collective_routes": ("fast", ValueError, "'auto' or 'default'", "leave it out"),
    "ignore": NAMES,
    "keep": NAMES,
}


def entry_points():
    return {
        WRAPPER: lambda **options: xla_fsdp.XlaFullyShardedDataParallel(mlp(), **options),
        FULLY_SHARD: lambda **options: xla_fsdp.fully_shard(mlp(), **options),
        SCAN: lambda **options: xla_fsdp.scan_blocks([nn.Linear(4, 4)], **options),
    }


def taken_by(entry):
    return list(FSDPOptions.signature(entry).parameters)


@on_each_rank(2)
def test_a_bad_value_raises_in_every_entry_point(rank):
    assert set(BAD) == {one.name for one in fields(FSDPOptions)}
    instead = {
        "mesh": [0, 1],
        "mp_policy": xla_fsdp.MixedPrecisionPolicy(torch.bfloat16),
        "offload_policy": xla_fsdp.CPUOffloadPolicy(),
        "reshard_after_forward": True,
        "ignored_params": [],
    }
    for name, (value, error, allowed, fix) in BAD.items():
        for entry, make in entry_points().items():
            with pytest.raises((ValueError, TypeError)) as caught:
                make(**{name: value})
            said = str(caught.value)
            assert name in said and repr(value) in said, said
            if name in taken_by(entry):
                assert caught.type is error, said
                assert allowed in said and fix in said, said
            elif caught.type is TypeError:
                assert f"{entry} has no option {name!r}" in said and "Its options are" in said
            else:
                advice = r"not supported by fully_shard\. (Pass (.*)|Leave it out), or"
                remedy = re.search(advice, said)
                make(**{one: instead[one] for one in (remedy[2] or "").split(" and ") if one})
    for name, advice in (
        ("use_orig_params", "Leave it out: parameters keep their names"),
        ("process_group", "Pass device_mesh or sharding_groups"),
        ("device_id", "Leave it out: the wrapper moves the module"),
        ("_shard_size_multiple", "Leave it out. Its options are"),
    ):
        raises(TypeError, advice, entry_points()[WRAPPER], **{name: 1})
    size = {"sharding_rank": rank, "sharding_world_size": 2}
    place = "this rank's index in its group"
    for options, allowed, fix in (
        ({"sharding_groups": [[0, 1]]}, "needs sharding_rank", "Pass all three"),
        ({"sharding_groups": [[0], [1]], **size}, "must have 2 ordinals", "equal size"),
        ({"sharding_groups": [[0, 0]], **size}, "twice", "Each rank must be in one group"),
        ({**size, "sharding_groups": [[0, 1]], "sharding_rank": 2}, "must be in 0..1", place),
        ({**size, "sharding_groups": [[0, 1]], "sharding_rank": 1 - rank}, "at that index", place),
        ({"sharding_rank": 1}, "need sharding_groups", "leave all three out"),
        ({"reshard_after_forward": 3}, "must divide", "one of [1, 2], or True or False"),
        ({"sharding_groups": ["01"], **size}, "must be", "got"),
        ({"sharding_groups": [[0.0, 1.9]], **size}, "must be", "got"),
        ({**size, "sharding_groups": [[0, 1]], "sharding_rank": False}, "must be", "got"),
        ({"replication_groups": []}, "must be", "got"),
    ):
        for entry in (WRAPPER, SCAN):
            with pytest.raises((TypeError, ValueError)) as caught:
                entry_points()[entry](**options)
            said = str(caught.value)
            assert all(part in said for part in (next(iter(options)), allowed, fix)), said
    for name, value, fix in (
        ("device_mesh", [0, 7], "1-D mesh"),
        *(("mp_policy", value, "Take it from xla_fsdp") for value in (0, torch.ones(2))),
        ("mp_policy", fsdp2.MixedPrecisionPolicy(), "Take it from xla_fsdp, not from torch"),
        ("offload_policy", fsdp2.CPUOffloadPolicy(), "Take it from xla_fsdp, not from torch"),
        ("shard_placement_fn", len, "Leave it out"),
        ("ignored_parameters", 7, "Pass a list"),
    ):
        own = {"device_mesh": "mesh", "ignored_parameters": "ignored_params"}.get(name, name)
        with pytest.raises((ValueError, TypeError)) as caught:
            xla_fsdp.fully_shard(mlp(), **{own: value})
        said = str(caught.value)
        assert said.startswith(own) and repr(value) in said and fix in said, said
    for value in ([3], 3):
        with pytest.raises(TypeError, match=r"ignore must be names, such as \('mlp.up',\)"):
            entry_points()[SCAN](ignore=value)
    raises(TypeError, "blocks must be an iterable of modules, got Linear", xla_fsdp.scan_blocks,
           nn.Linear(4, 4))  # fmt: skip
    raises(ValueError, "module is an empty list", xla_fsdp.fully_shard, [])
    for policy in (nn.Linear, lambda module: True, transformer_auto_wrap_policy):
        raises(TypeError, "auto_wrap_policy=.* failed for a .*Pass a policy", FSDP, mlp(),
               auto_wrap_policy=policy)  # fmt: skip
    raises(TypeError, "auto_wrapper_callable=.* must return a module, got None", FSDP, mlp(),
           auto_wrap_policy=always_wrap_policy,
           auto_wrapper_callable=lambda *args, **options: None)  # fmt: skip


@on_each_rank(2)
def test_options_are_known_removed_or_without_effect_everywhere(rank):
    for entry, make in entry_points().items():
        make(pin_layout_in_collective_ops=False, coalesce_all_gather_ops=True)
        make(reduce_scatter_bucket_size_mb=8)
        raises(
            TypeError, "no option 'compute_type'.*options are", make, compute_type=torch.bfloat16
        )
        raises(ValueError, "gather_dtype was.*compute_dtype", make, gather_dtype=torch.int8)
        if entry != FULLY_SHARD:  # it says dtypes by mp_policy
            make(compute_dtype=torch.bfloat16)


def test_integrations_check_options_before_there_are_ranks():
    for make in (Sharding, lambda options: WrapSettings(None, None, "full", options)):
        make({"compute_dtype": torch.bfloat16, "reshard_after_forward": 2})
        make({"pin_layout_in_collective_ops": False, "coalesce_all_gather_ops": True})
        with pytest.raises(
            TypeError, match="no option 'compute_type'.* compute_dtype. Its options"
        ):
            make({"compute_type": torch.bfloat16})
        raises(ValueError, "gather_dtype was.*compute_dtype", make, {"gather_dtype": torch.int8})
        for name in taken_by(WRAPPER):
            if name in ("device_mesh", "auto_wrapper_callable"):
                continue  # need ranks to be judged, or are taken out by the strategy
            value, error, allowed, _ = BAD[name]
            if name == "sharding_strategy":
                value = 7
            raises(error, re.escape(allowed), make, {name: value})
    with pytest.raises(ValueError, match="must be one of FULL_SHARD"):
        WrapSettings(None, None, "full", {"sharding_strategy": "SOME"})


def test_signatures_show_the_options():
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as InTree

    def shown(function):
        return inspect.signature(function).parameters

    ours = shown(xla_fsdp.XlaFullyShardedDataParallel)
    theirs = [one for one in shown(InTree).values() if not one.name.startswith("_")]
    same = [(one.name, one.kind, one.default) for one in list(ours.values())[: len(theirs)]]
    assert same == [(one.name, one.kind, one.default) for one in theirs]
    assert list(ours) == ["module", *taken_by(WRAPPER)]
    assert list(shown(xla_fsdp.scan_blocks)) == ["blocks", *taken_by(SCAN)]
    assert set(shown(xla_fsdp.fully_shard)) > set(taken_by(FULLY_SHARD))
    assert not any("options" in shown(one) for one in (xla_fsdp.scan_blocks, xla_fsdp.fully_shard))


@on_each_rank(2)
def test_options_go_by_position_too(rank):
    model = FSDP(mlp(), False, True, compute_dtype=torch.bfloat16)
    assert model.reshard_after_forward is False and model.flatten_parameters is True
    with pytest.raises(TypeError, match="multiple values for argument 'flatten_parameters'"):
        FSDP(mlp(), False, True, flatten_parameters=True)
    raises(TypeError, "too many positional arguments", FSDP, mlp(), *[None] * 60)


def test_every_option_is_documented():
    described = FSDPOptions.__doc__.partition("Attributes:")[2]
    for one in fields(FSDPOptions):
        assert re.search(rf"\b{one.name}\b", described), one.name

"""Full state out of sharded models and into them, against the unwrapped model."""

import weakref

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank
from test_comm_hooks import hybrid
from test_full_optimizer import go_on, sgd
from wrappings import KINDS, assert_equal, plain_zoo, stacked, zoo

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import (
    compilation_counts,
    full_state_dict,
    load_checkpoint,
    load_full_state_dict,
    save_checkpoint,
)
from xla_fsdp.checkpoint import inventory
from xla_fsdp.consolidate.errors import ModelMismatchError, OtherRankError
from xla_fsdp.ranks.rank import current_rank


def out_and_in(rank, size):
    other = plain_zoo(9).state_dict()
    wrapped = {kind: zoo(kind) for kind in KINDS}
    if size == 4:
        wrapped["hybrid"] = zoo("nested", **hybrid(rank))
    for kind, model in wrapped.items():
        state = full_state_dict(model)
        if rank:
            assert state == {}
        else:
            assert_equal(state, plain_zoo().state_dict())
            assert state["head.weight"] is state["embed.weight"]
        parameters = list(model.parameters())
        on_all = kind in ("flat", "none")
        keys = load_full_state_dict(model, other if on_all or rank == 0 else None)
        assert keys == ([], [])
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert_equal(full_state_dict(model, rank0_only=False), other)
    there = full_state_dict(wrapped["nested"], rank0_only=False, offload_to_cpu=False)
    assert all(value.device.type == "xla" for value in there.values())
    assert_equal({name: value.cpu() for name, value in there.items()}, other)


def buffers_and_stacks(rank, size):
    expected, other = stacked("plain").state_dict(), stacked("plain", 9).state_dict()
    for name in other:
        if name.endswith("count"):
            other[name] += int(name.split(".")[1])  # differs from block to block
    other["blocks.1.gain"].fill_(float("nan"))
    for kind in ("scan", "nested"):
        model = stacked(kind)
        assert_equal(full_state_dict(model, rank0_only=False), expected)
        load_full_state_dict(model, other if rank == 0 else None)
        state = full_state_dict(model, rank0_only=False)
        assert state.pop("blocks.1.gain").isnan() and len(state) == len(expected) - 1
        assert_equal(state, {n: v for n, v in other.items() if n != "blocks.1.gain"})
    # Buffers are computed with in bfloat16, and come out as they went in.
    exact = {n: v.bfloat16().to(v.dtype) if "scale" in n else v for n, v in expected.items()}
    model = stacked("scan", compute_dtype=torch.bfloat16)
    assert_equal(full_state_dict(model, rank0_only=False), exact)


def extra_and_partial(rank, size):
    class Counting(torch.nn.Linear):
        seen = 0

        def get_extra_state(self):
            return {"seen": self.seen}

        def set_extra_state(self, state):
            self.seen = state["seen"]

    model = FSDP(torch.nn.Sequential(FSDP(Counting(3, 5)), torch.nn.Linear(5, 2)))
    model[0].module.seen = 7
    state = full_state_dict(model, rank0_only=False)
    names = ["0.weight", "0.bias", "0._extra_state", "1.weight", "1.bias"]
    assert list(state) == names and state["0._extra_state"] == {"seen": 7}
    state["0._extra_state"] = {"seen": 8}
    load_full_state_dict(model, state if rank == 0 else None)
    assert model[0].module.seen == 8
    # What is missing stays, in a vector of several parameters too; floats are cast.
    for kind in ("nested", "flat"):
        model, given = zoo(kind), plain_zoo(9).state_dict()
        for name in ("position", "blocks.0.gain", "blocks.0.up.weight", "blocks.0.again.weight"):
            del given[name]
        del given["head.weight"]  # tied to one that is there
        part = {name: value.double() for name, value in given.items()}
        keys = load_full_state_dict(model, {**part, "more": torch.ones(1)}, strict=False)
        missing = ["position", "blocks.0.gain", "blocks.0.up.weight"]
        assert keys == (missing, ["more"])
        expected = {**plain_zoo().state_dict(), **given, "head.weight": given["embed.weight"]}
        assert_equal(full_state_dict(model, rank0_only=False), expected)


def few_at_a_time(rank):
    """One full parameter is there at a time, and equal shapes are gathered by one program."""

    def compiled():
        xm.rendezvous("compiled")  # counts are the process's
        count = sum(compilation_counts())
        xm.rendezvous("counted")
        return count

    def deep(depth):
        layers = [FSDP(torch.nn.Linear(33, 33)) for _ in range(depth)]
        return FSDP(torch.nn.Sequential(*layers))

    for depth in (2, 6):
        model = deep(depth)
        before = compiled()
        state = full_state_dict(model)
        load_full_state_dict(model, state or None)
        more = compiled() - before
        assert more == 0 or depth == 2
    gather, seen = inventory._gather, {number: [] for number in range(4)}

    def watched(first, value):
        own = seen[current_rank().rank]
        assert all(tensor() is None for tensor in own)
        full = gather(first, value)
        own.append(weakref.ref(full))
        return full

    xm.rendezvous("before")
    if rank == 0:
        inventory._gather = watched
    xm.rendezvous("watch")
    full_state_dict(deep(3))
    xm.rendezvous("watched")
    if rank == 0:  # ranks are threads: its function was everyone's
        inventory._gather = gather
        assert [len(own) for own in seen.values()] == [6] * 4


@pytest.mark.parametrize(
    "ranks", [4, pytest.param(1, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)]
)
def test_state_of_every_wrapping_out_and_in(run_ranks, ranks):
    def run(rank):
        out_and_in(rank, ranks)
        buffers_and_stacks(rank, ranks)
        extra_and_partial(rank, ranks)
        if ranks == 4:
            few_at_a_time(rank)
        if ranks == 1:
            go_on(rank, 1, sgd, zoo, "none", "nested", by_number=True)

    run_ranks(run, ranks)


@on_each_rank(3)
def test_what_does_not_fit_is_refused_and_changes_nothing(rank, size, folder):
    model = zoo("nested")
    good = plain_zoo(9).state_dict()

    def refuses(text, fn, *args, kind=ModelMismatchError):
        with pytest.raises(kind, match=text):
            fn(*args)

    def changed(**values):
        return {n: v for n, v in {**good, **values}.items() if v is not None}

    flawed = {
        "lacks 'position'": changed(position=None),
        "has 'more', unknown": changed(more=torch.ones(2)),
        "size mismatch for position": changed(position=torch.ones(2)),
        "'position' is torch.int64, but torch.float32 in the model": changed(
            position=good["position"].long()
        ),
        "different values": changed(**{"head.weight": good["head.weight"] + 1}),
        "'position' is not a dense": changed(position=torch.ones(5, 12, device="meta")),
        "expected torch.Tensor": changed(position=[1.0]),
    }
    for text, state in flawed.items():
        refuses(text, load_full_state_dict, model, state)  # every rank has it and finds it
        if rank == 0:
            refuses(text, load_full_state_dict, model, state)
        else:
            refuses("rank 0 could not", load_full_state_dict, model, None, kind=OtherRankError)
    only_one = good if rank == 1 else None
    refuses("None on rank 0", load_full_state_dict, model, only_one, kind=ValueError)
    refuses("must be a torch.nn.Module", full_state_dict, 3, kind=TypeError)
    assert_equal(full_state_dict(model, rank0_only=False), plain_zoo().state_dict())


@on_each_rank(2)
def test_what_is_loaded_over_changed_values_is_what_is_read_afterwards(rank, size, folder):
    other = plain_zoo(9).state_dict()
    for kind in ("nested", "flat", "none"):
        model = zoo(kind)
        for synced in (False, True):
            with torch.no_grad():
                for tensor in [*model.parameters(), *model.buffers()]:
                    tensor.mul_(0)
            if synced:
                torch_xla.sync()
            load_full_state_dict(model, other)
            assert_equal(full_state_dict(model, rank0_only=False), other)
            saved = save_checkpoint(folder, model, step=int(synced))
            fresh = zoo("none", seed=4)
            load_checkpoint(saved, fresh)
            assert_equal(full_state_dict(fresh, rank0_only=False), other)

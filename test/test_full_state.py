"""Full state of models and optimizers out of sharded ones and into them, against plain torch."""

import copy
import functools
import weakref

import pytest
import torch
import torch_xla.core.xla_model as xm
from on_ranks import finish_step, on_each_rank, raises, slow
from small_models import hybrid
from small_models import wrapped as in_units
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from wrappings import KINDS, assert_equal, mean_loss, plain_zoo, stacked, step, zoo

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import (
    compilation_counts,
    from_dcp,
    full_optim_state_dict,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    load_full_optim_state_dict,
    load_full_state_dict,
    save_checkpoint,
    to_dcp,
)
from xla_fsdp.checkpoint import inventory
from xla_fsdp.consolidate import errors
from xla_fsdp.ranks.rank import current_rank

refuses = functools.partial(raises, errors.ModelMismatchError)


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


def partial(rank, size):
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


@pytest.mark.parametrize("ranks", [4, slow(1), slow(3)])
@on_each_rank()
def test_state_of_every_wrapping_out_and_in(rank, size):
    out_and_in(rank, size)
    buffers_and_stacks(rank, size)
    partial(rank, size)
    if size == 4:
        few_at_a_time(rank)
    if size == 1:
        go_on(rank, 1, sgd, zoo, "none", "nested", by_number=True)


@on_each_rank(3)
def test_what_does_not_fit_is_refused_and_changes_nothing(rank, size, folder):
    model = zoo("nested")
    good = plain_zoo(9).state_dict()

    flawed = {
        "size mismatch for position": {"position": torch.ones(2)},
        "'position' is torch.int64, but torch.float": {"position": good["position"].long()},
        "different values": {"head.weight": good["head.weight"] + 1},
        "'position' is not a dense": {"position": torch.ones(5, 12, device="meta")},
        "expected torch.Tensor": {"position": [1.0]},
    }
    for text, wrong in flawed.items():
        state = good | wrong
        refuses(text, load_full_state_dict, model, state)  # every rank has it and finds it
        if rank == 0:
            refuses(text, load_full_state_dict, model, state)
        else:
            raises(errors.OtherRankError, "rank 0 could not", load_full_state_dict, model, None)
    only_one = good if rank == 1 else None
    raises(ValueError, "None on rank 0", load_full_state_dict, model, only_one)
    raises(TypeError, "must be a torch.nn.Module", full_state_dict, 3)
    assert_equal(full_state_dict(model, rank0_only=False), plain_zoo().state_dict())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3, weight_decay=0.0)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def nadam(parameters):
    return torch.optim.NAdam(parameters, lr=0.01, eps=1e-3)


def asgd(parameters):
    return torch.optim.ASGD(parameters, lr=0.1, t0=1)


def go_on(rank, size, make, build, first, second, by_number=False):
    """Two steps in one wrapping, then a third there, in plain torch, and in another wrapping."""
    model = build(first)
    optimizer = make(model.parameters())
    for number in range(2):
        step(model, optimizer, number, rank, size)
    state = full_state_dict(model)
    optim = full_optim_state_dict(model, optimizer)
    assert bool(state) == bool(optim) == (rank == 0)
    # Buffers that are not saved come from the seed.
    moved = build(second, seed=8 if build is zoo else 3)
    moved_optimizer = make(moved.parameters())
    plain = plain_zoo(5) if build is zoo else stacked("plain")
    plain_optimizer = make(plain.parameters())
    if rank == 0:
        plain.load_state_dict(state)
        plain_optimizer.load_state_dict(by_number_of(plain, plain_optimizer, optim))
        assert optim["param_groups"][0]["lr"] == plain_optimizer.param_groups[0]["lr"]
        given = plain_optimizer.state_dict() if by_number else optim
    else:
        given = None
    load_full_state_dict(moved, state or None)
    load_full_optim_state_dict(moved, moved_optimizer, given)
    again = full_optim_state_dict(moved, moved_optimizer)
    for name, values in again.get("state", {}).items():
        if name in optim["state"]:
            assert_equal(values, optim["state"][name])
        else:  # in a vector with others that have state
            assert all(not v.any() for v in values.values() if v.dim())
    losses = [mean_loss(step(m, o, 2, rank, size)) for m, o in
              ((model, optimizer), (moved, moved_optimizer))]  # fmt: skip
    assert abs(losses[0] - losses[1]) < 1e-6, losses
    after = [full_state_dict(m) for m in (model, moved)]
    if rank == 0:
        alone = step(plain, plain_optimizer, 2).item()
        assert abs(losses[0] - alone) < 1e-5, (losses, alone)
        for state in after:
            for name, value in plain.state_dict().items():
                if "count" not in name:
                    torch.testing.assert_close(state[name], value, rtol=1e-4, atol=2e-5)


def by_number_of(plain, plain_optimizer, optim):
    number = {name: i for i, (name, _) in enumerate(plain.named_parameters())}
    groups = copy.deepcopy(plain_optimizer.state_dict()["param_groups"])
    assert set(optim["param_groups"][0]["params"]) == set(number)
    state = {number[name]: value for name, value in optim["state"].items()}
    return {"state": state, "param_groups": groups}


@pytest.mark.parametrize(
    "case",
    [
        (adamw, zoo, "nested", "flat"),
        (adamw, stacked, "nested", "scan", True),
        slow((asgd, stacked, "scan", "nested", True)),
        slow((nadam, zoo, "flat", "dim0", True)),
    ],
    ids=lambda case: f"{case[0].__name__}-{case[2]}-{case[3]}",
)
def test_training_goes_on_in_plain_torch_and_in_another_wrapping(run_ranks, case):
    run_ranks(lambda rank: go_on(rank, 3, *case), 3)


@on_each_rank(3)
def test_optimizer_state_that_does_not_fit_is_refused_and_changes_nothing(rank, size, folder):
    model = zoo("nested")

    optimizer = adamw(model.parameters())
    step(model, optimizer, 0, rank, 3)
    state = full_optim_state_dict(model, optimizer, rank0_only=False)
    before = copy.deepcopy(state)

    def refused(text, change):
        flawed = copy.deepcopy(before)
        change(flawed)
        refuses(text, load_full_optim_state_dict, model, optimizer, flawed)

    own = "blocks.0.norm.bias"
    refused("'exp_avg'.*shape", lambda s: s["state"][own].update(exp_avg=torch.ones(3)))
    refused("has 'x'", lambda s: s["param_groups"][0]["params"].append("x"))
    refused("expected a dict with", lambda s: s.pop("state"))
    stranger = adamw([torch.ones(1)])
    state = stranger.state_dict()
    refuses("groups of", load_full_optim_state_dict, model, optimizer, state)
    refuses("1 parameters of group 0", full_optim_state_dict, model, stranger)
    assert_equal(full_optim_state_dict(model, optimizer, rank0_only=False), before)
    # Groups without parameters must be as many.
    one, two = grouped_by(model, ["all"], 0.5), grouped_by(model, ["all", "empty"], 9.0)
    state = full_optim_state_dict(model, one, rank0_only=False)
    refuses("the optimizer with the groups", load_full_optim_state_dict, model, two, state)
    assert two.param_groups[0]["lr"] == 9.0
    again = grouped_by(model, ["all"], 9.0)  # as the message says
    load_full_optim_state_dict(model, again, state)
    assert again.param_groups[0]["lr"] == 0.5

    some = next(iter(optimizer.state.values()))
    for value, what in ((torch.ones(5), "shape"), (object(), "the type")):
        some["odd"] = value
        raises(TypeError, f"'odd' of '.*' has {what}", full_optim_state_dict, model, optimizer)


@on_each_rank(3)
def test_other_ways_to_give_the_state(rank, size, folder):
    plain = plain_zoo()
    names = [name for name, _ in plain.named_parameters()]
    one = adamw(plain.parameters())
    step(plain, one, 0)
    state = {names[number]: values for number, values in one.state_dict()["state"].items()}

    def loads(model, optimizer, given):
        load_full_optim_state_dict(model, optimizer, given)
        found = full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        for name, values in state.items():
            assert_equal(found[name], values)

    # Every step of torch's own way to name states.
    model = zoo("nested")
    loads(model, adamw(model.parameters()), get_optimizer_state_dict(plain, one))
    # Numbers with names beside them, in another order; numbers of groups.
    backwards = adamw(reversed(list(plain.named_parameters())))
    given = one.state_dict()
    last = len(names) - 1
    given["state"] = {last - number: values for number, values in given["state"].items()}
    backwards.load_state_dict(given)
    reverse = adamw(reversed(list(model.parameters())))
    loads(model, reverse, backwards.state_dict())
    state_of_one = one.state_dict()
    refuses("in the order of the model", load_full_optim_state_dict, model, reverse, state_of_one)
    # Of a vector, all parameters must have taken as many steps.
    flat = zoo("flat")
    uneven = copy.deepcopy(one.state_dict())
    uneven["state"][0]["step"] += 1
    own = adamw(flat.parameters())
    refuses("'step' differs", load_full_optim_state_dict, flat, own, uneven)
    # Counters stay on the CPU, unless the optimizer computes with them on the device.
    for capturable, kind in ((False, "cpu"), (True, "xla")):
        optimizer = torch.optim.AdamW(model.parameters(), capturable=capturable)
        load_full_optim_state_dict(model, optimizer, one.state_dict() if rank == 0 else None)
        found = optimizer.state[next(model.parameters())]
        assert found["step"].device.type == kind and found["exp_avg"].device.type == "xla"
        assert optimizer.param_groups[0]["capturable"] is capturable

    # Before torch 1.12 counters were numbers, with which a step of today raises an error.
    earlier = copy.deepcopy(one.state_dict())
    for own in earlier["state"].values():
        own["step"] = int(own["step"])
    load_full_optim_state_dict(model, optimizer, earlier)
    counter = optimizer.state[next(model.parameters())]["step"]
    assert isinstance(counter, torch.Tensor) and counter.item() == 1
    optimizer.state["seen"] = 3
    for save in (full_optim_state_dict, lambda *both: save_checkpoint("x", *both, step=1)):
        raises(errors.UnsupportedValueError, "'seen', which belongs to no", save, model, optimizer)


def halve(optimizer):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)


# Whether a scheduler is attached before saving, and after it; groups.
GROUPS = {
    "without a scheduler": (False, False, ["all"]),
    "with a key of the user": (False, False, ["all", "noted"]),
    "a scheduler attached before saving, an empty group": (True, False, ["all", "empty"]),
    "a scheduler attached after saving": (False, True, ["empty", "all", "empty"]),
    "both": (True, True, ["all"]),
}


def grouped_by(model, kinds, lr):
    groups = []
    for number, kind in enumerate(kinds):
        parameters = list(model.parameters()) if kind == "all" else []
        groups.append({"params": parameters, "lr": lr / (number + 1)})
        if kind == "noted":
            groups[-1]["note"] = f"of {lr}"
    return torch.optim.AdamW(groups, lr=lr)


@on_each_rank(2)
def test_state_of_another_kind_on_one_rank(rank):
    for mine in (torch.tensor(3.0), 3), (torch.tensor(3.0), torch.tensor(3.0).bfloat16()):
        model = FSDP(torch.nn.Linear(6, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            optimizer.state[parameter]["own"] = mine[rank]
        text = "of rank 1 has state .* keys or dtypes"
        raises(errors.MetadataMismatchError, text, full_optim_state_dict, model, optimizer)


@pytest.mark.parametrize("shard", [FSDP, fully_shard])
@on_each_rank(2)
def test_options_of_groups_are_what_torch_makes_of_them(rank, size, folder, shard):
    def saved(model, kinds, before, device):
        optimizer = grouped_by(model, kinds, 0.5)
        if before:
            halve(optimizer)
        model(torch.ones(2, 6).to(device)).square().mean().backward()
        optimizer.step()
        return optimizer

    def loads(model, kinds, after, load):
        optimizer = grouped_by(model, kinds, 9.0)
        if after:
            halve(optimizer)
        load(model, optimizer)
        # Not foreach, which is as the machine that goes on wants it.
        return [
            {key: value for key, value in group.items() if key not in ("params", "foreach")}
            for group in optimizer.param_groups
        ]

    for number, (name, (before, after, kinds)) in enumerate(GROUPS.items()):
        plain = torch.nn.Linear(6, 4)
        state = saved(plain, kinds, before, "cpu").state_dict()
        expected = loads(plain, kinds, after, lambda _, own, s=state: own.load_state_dict(s))

        model, path = shard(torch.nn.Linear(6, 4)), f"{folder}/{number}"
        own = saved(model, kinds, before, "xla")
        full = full_optim_state_dict(model, own, rank0_only=False)
        to_dcp(f"{path}-dcp", model, own)
        save_checkpoint(path, model, own, step=1)
        for load in (
            lambda m, o, s=full: load_full_optim_state_dict(m, o, s),
            lambda m, o, s=full: load_full_optim_state_dict(m, o, s if rank == 0 else None),
            lambda m, o, s=state: load_full_optim_state_dict(m, o, s),
            lambda m, o, p=path: from_dcp(f"{p}-dcp", m, o, allow_pickle=True),
            lambda m, o, p=path: load_checkpoint(p, m, o),
        ):
            found = loads(shard(torch.nn.Linear(6, 4)), kinds, after, load)
            assert found == expected, (name, found)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x):
        for layer in self.children():
            x = torch.tanh(layer(x))
        return x


def swap(model):
    model.first, model.third = model.third, model.first


def rename(model):
    model.last = model.second
    del model.second


def remove(model):
    del model.second


CHANGES = (swap, rename, remove)


@pytest.mark.parametrize("form", ["wrapper", "nested", "fully_shard"])
@on_each_rank(2)
def test_names_are_those_of_the_present_modules(rank, form, folder):
    def trained(change, model, inner, device):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for changes in (None, change):
            if changes is not None:
                changes(inner)
            model(torch.ones(2, 6, device=device)).square().mean().backward()
            finish_step(optimizer)
        present = set(model.parameters())
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if p in present]
        return optimizer

    def sharded():
        inner = Layers()
        units = [] if form == "wrapper" else ["first", "second", "third"]
        shard = fully_shard if form == "fully_shard" else FSDP
        return in_units(inner, *units, wrap=shard), inner

    for change in CHANGES:
        plain, (model, inner) = Layers(), sharded()
        states = trained(change, plain, plain, "cpu").state
        named = plain.named_parameters()
        averages = {name: states[p]["exp_avg"] for name, p in named if p in states}
        optimizer = trained(change, model, inner, "xla")
        state = full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(state, dict(plain.state_dict()), rtol=1e-4, atol=1e-5)
        of_optimizer = full_optim_state_dict(model, optimizer, rank0_only=False)
        found = {name: values["exp_avg"] for name, values in of_optimizer["state"].items()}
        torch.testing.assert_close(found, averages, rtol=1e-4, atol=1e-6)
        path = f"{folder}/{change.__name__}"
        save_checkpoint(path, model, optimizer, step=1)
        again, inner = sharded()
        optimizer = trained(change, again, inner, "xla")
        load_checkpoint(path, again, optimizer)
        assert_equal(full_state_dict(again, rank0_only=False), state)
        loaded = full_optim_state_dict(again, optimizer, rank0_only=False)
        assert_equal(loaded["state"], of_optimizer["state"])

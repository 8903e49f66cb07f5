"""State of optimizers out of sharded models and into them; training goes on with it."""

import copy

import pytest
import torch
from on_ranks import on_each_rank
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from wrappings import assert_equal, mean_loss, plain_zoo, stacked, step, zoo
from zoo import Scaled

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import (
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
from xla_fsdp.consolidate.errors import ModelMismatchError, UnsupportedValueError


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
        pytest.param((asgd, stacked, "scan", "nested", True), marks=pytest.mark.slow),
        pytest.param((nadam, zoo, "flat", "dim0", True), marks=pytest.mark.slow),
    ],
    ids=lambda case: f"{case[0].__name__}-{case[2]}",
)
def test_training_goes_on_in_plain_torch_and_in_another_wrapping(run_ranks, case):
    run_ranks(lambda rank: go_on(rank, 3, *case), 3)


def full_optim_of(model, optimizer, **options):
    state = full_optim_state_dict(model, optimizer, rank0_only=False)
    for group in state["param_groups"]:
        group.update(options)
    return state


@on_each_rank(3)
def test_what_does_not_fit_is_refused_and_changes_nothing(rank, size, folder):
    model = zoo("nested")

    def refuses(text, fn, *args, kind=ModelMismatchError):
        with pytest.raises(kind, match=text):
            fn(*args)

    optimizer = adamw(model.parameters())
    step(model, optimizer, 0, rank, 3)
    state = full_optim_state_dict(model, optimizer, rank0_only=False)
    before = copy.deepcopy(state)

    def refused(text, change):
        flawed = copy.deepcopy(before)
        change(flawed)
        refuses(text, load_full_optim_state_dict, model, optimizer, flawed)

    own = "blocks.0.norm.bias"
    refused("state of 'other'", lambda s: s["state"].update(other={}))
    refused("'exp_avg'.*shape", lambda s: s["state"][own].update(exp_avg=torch.ones(3)))
    refused("lack 'betas'", lambda s: s["param_groups"][0].pop("betas"))
    refused("no group of it has 'position'", lambda s: s["param_groups"][0]["params"].pop(0))
    refused("has 'x'", lambda s: s["param_groups"][0]["params"].append("x"))
    refused("expected a dict with", lambda s: s.pop("state"))
    stranger = adamw([torch.ones(1)])
    state = stranger.state_dict()
    refuses("groups of", load_full_optim_state_dict, model, optimizer, state)
    refuses("1 parameters of group 0", full_optim_state_dict, model, stranger)
    assert_equal(full_optim_state_dict(model, optimizer, rank0_only=False), before)
    # Groups are found by name, whatever their order; how to compute is not taken over.
    named = dict(model.named_parameters())
    biases = [p for n, p in named.items() if n.endswith("bias")]
    rest = [p for n, p in named.items() if not n.endswith("bias")]
    grouped = torch.optim.AdamW([{"params": biases, "weight_decay": 0.5}, {"params": rest}])
    state = full_optim_of(model, grouped)
    refuses("different options", load_full_optim_state_dict, model, optimizer, state)
    swapped = torch.optim.AdamW([{"params": rest}, {"params": biases}], foreach=False)
    load_full_optim_state_dict(model, swapped, full_optim_of(model, grouped, foreach=True))
    assert [group["weight_decay"] for group in swapped.param_groups] == [0.01, 0.5]
    assert swapped.param_groups[0]["foreach"] is False

    # Groups without parameters must be as many.
    one, two = grouped_by(model, ["all"], 0.5), grouped_by(model, ["all", "empty"], 9.0)
    state = full_optim_state_dict(model, one, rank0_only=False)
    words = "make the optimizer with the groups"
    refuses(words, load_full_optim_state_dict, model, two, state)
    assert two.param_groups[0]["lr"] == 9.0
    again = grouped_by(model, ["all"], 9.0)  # as the message says
    load_full_optim_state_dict(model, again, state)
    assert again.param_groups[0]["lr"] == 0.5

    some = next(iter(optimizer.state.values()))
    for value, what in ((torch.ones(5), "a tensor of shape"), (object(), "of type")):
        some["odd"] = value
        words = f"'odd' of parameter '.*' is {what}"
        refuses(words, full_optim_state_dict, model, optimizer, kind=TypeError)


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
    with pytest.raises(ModelMismatchError, match="in the order of the model"):
        load_full_optim_state_dict(model, reverse, one.state_dict())
    # Of a vector, all parameters must have taken as many steps.
    flat = zoo("flat")
    uneven = copy.deepcopy(one.state_dict())
    uneven["state"][0]["step"] += 1
    with pytest.raises(ModelMismatchError, match="'step' differs"):
        load_full_optim_state_dict(flat, adamw(flat.parameters()), uneven)
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
    for refuses in (full_optim_state_dict, lambda *both: save_checkpoint("x", *both, step=1)):
        with pytest.raises(UnsupportedValueError, match="'seen', which belongs to no parameter"):
            refuses(model, optimizer)

    alone, other = FSDP(Scaled()), FSDP(Scaled(), flatten_parameters=True)
    optimizer, new = adamw(alone.parameters()), adamw(other.parameters())
    alone(torch.ones(3).to("xla")).sum().backward()
    optimizer.step()
    saved = full_optim_state_dict(alone, optimizer, rank0_only=False)
    load_full_optim_state_dict(other, new, saved)
    assert_equal(full_optim_state_dict(other, new, rank0_only=False)["state"], saved["state"])
    held = new.state[next(other.parameters())]
    assert held["step"].shape == () and held["exp_avg"].to_local().shape == (128,)


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


@pytest.mark.parametrize("shard", [FSDP, fully_shard])
def test_options_of_groups_are_what_torch_makes_of_them(run_ranks, tmp_path, shard):
    run_ranks(options_are_torchs, 2, shard, str(tmp_path))


def options_are_torchs(rank, shard, folder):
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

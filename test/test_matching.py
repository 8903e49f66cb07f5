"""The rules by which stored tensors and states find their parameters, without ranks or files."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from xla_fsdp.checkpoint.inventory import Inventory, ParameterShard, ReplicatedBuffer
from xla_fsdp.checkpoint.matching import (
    LoadedKeys,
    Number,
    OptimizerState,
    match_model,
    match_optimizer,
)
from xla_fsdp.checkpoint.optimizer_state import elementwise_keys, members_of_groups
from xla_fsdp.checkpoint.readable_tensor import ReadableTensor
from xla_fsdp.checkpoint.value_loading import load_model_values, load_optimizer_values, read_to_host
from xla_fsdp.consolidate.errors import ModelMismatchError


def stored(*values, kind=None, dtype=torch.float32) -> ReadableTensor:
    tensor = torch.tensor(values, dtype=dtype)
    return replace(ReadableTensor.from_tensor(tensor), kind=kind)


def whole(holder: nn.Parameter, *names: str) -> ParameterShard:
    return ParameterShard(
        names, tuple(holder.shape), holder.dtype, 0, holder.numel(), 0, holder, writes=True
    )


def vector(*names: str) -> tuple[nn.Parameter, list[ParameterShard]]:
    """Parameters of two elements each that are one vector, and an element of padding."""
    holder = nn.Parameter(torch.full((2 * len(names) + 1,), 7.0))
    return holder, [
        ParameterShard((name,), (2,), holder.dtype, 0, 2, 2 * number, holder, writes=True)
        for number, name in enumerate(names)
    ]


def inventory(parameters, buffers=()) -> Inventory:
    return Inventory(tuple(parameters), tuple(buffers), {}, rank=0, world_size=1)


def refused(text: str, *args, **options) -> str:
    with pytest.raises(ModelMismatchError, match=text) as caught:
        match_model(*args, **options)
    return str(caught.value)


def test_one_error_tells_all_that_does_not_fit():
    model = inventory(whole(nn.Parameter(torch.ones(2)), name) for name in "abcdefgh")
    wrong = {name: stored(1.0, 2.0, 3.0) for name in "abcdef"}
    said = refused("f.pt: 'a' has shape", model, wrong | {"x": stored(1.0)}, "f.pt")
    assert said.count("has shape [3], but [2] in the model") == 5
    assert said.endswith("; and 3 more")  # 'f', what it lacks and what it has
    fitting = {name: stored(1.0, 2.0) for name in "abcdef"}
    said = refused("lacks 'g', 'h'; has 'x'", model, fitting | {"x": None}, "f.pt")
    assert said.endswith("unknown to the model; strict=False takes what fits")
    match = match_model(model, fitting | {"x": None}, "f.pt", strict=False)
    assert match.keys == LoadedKeys(["g", "h"], ["x"]) and len(match.parameters) == 6


@pytest.mark.parametrize("same_run", [False, True])
def test_tied_names(same_run):
    model = inventory([whole(nn.Parameter(torch.ones(2)), "a", "b")])
    one = stored(0.0, float("nan"), kind="parameter")
    for offered in ({"a": one}, {"b": one}, {"a": one, "b": one}):
        match = match_model(model, offered, "f", same_run=same_run)
        assert list(match.parameters.values()) == [one]
    equal = {"a": one, "b": stored(0.0, float("nan"), kind="parameter")}
    if same_run:
        refused("'a' and 'b' were saved as two parameters", model, equal, "f", same_run=True)
    else:
        assert match_model(model, equal, "f").keys == ([], [])
        differing = {"a": one, "b": stored(-0.0, float("nan"))}
        refused("'a' and 'b' have different values", model, differing, "f")
    # Names of what is tied there, but not here.
    apart = inventory(whole(nn.Parameter(torch.ones(2)), name) for name in "ab")
    match = match_model(apart, {"a": one, "b": one}, "f", same_run=same_run)
    assert list(match.parameters.values()) == [one, one]
    refused("has 'c', unknown", apart, {"a": one, "b": one, "c": one}, "f", same_run=same_run)


def test_dtypes_and_kinds():
    parameter = whole(nn.Parameter(torch.ones(2)), "p")
    buffer = ReplicatedBuffer(("b",), torch.zeros(2, dtype=torch.bfloat16), restore=torch.float32)
    model = inventory([parameter], [buffer])
    half = {
        "p": stored(1.0, 2.0, kind="parameter", dtype=torch.bfloat16),
        "b": stored(1.0, 2.0, kind="buffer", dtype=torch.bfloat16),
    }
    assert match_model(model, half, "f").keys == ([], [])
    said = refused("'p' is torch.bfloat16, .*float32 in the model; cast=True", model, half, "f",
                   cast=False)  # fmt: skip
    assert "'b' is torch.bfloat16, but torch.float32 in the model; cast=True" in said
    said = refused("'p' is torch.bfloat16, .*; consolidate it", model, half, "f", same_run=True)
    assert "'b'" not in said  # it may have been cast for computing
    whole_numbers = half | {"b": stored(1, 2, kind="buffer", dtype=torch.int64)}
    refused("'b' is torch.int64, but torch.float32 in the model$", model, whole_numbers, "f")
    swapped = {
        "p": stored(1.0, 2.0, kind="buffer"),
        "b": stored(1.0, 2.0, kind="parameter"),
    }
    refused("'p' was saved as a buffer, but is a parameter .*; 'b' was", model, swapped, "f")
    assert match_model(model, swapped, "f", strict=False).keys == (["p", "b"], ["p", "b"])


def test_what_a_vector_lacks_stays_and_loading_is_a_change_to_autograd():
    holder, members = vector("a", "b")
    before = holder._version
    match = match_model(inventory(members), {"b": stored(1.0, 2.0)}, "f", strict=False)
    load_model_values(inventory(members), match)
    assert holder.tolist() == [7.0, 7.0, 1.0, 2.0, 7.0] and holder._version > before
    match = match_model(inventory(members), {"a": stored(3.0, 4.0), "b": stored(5.0, 6.0)}, "f")
    load_model_values(inventory(members), match)
    assert holder.tolist() == [3.0, 4.0, 5.0, 6.0, 0.0]  # padding


def test_state_that_is_one_number_is_told_from_state_of_the_elements():
    number, element = torch.tensor(1.0), torch.ones(3)
    assert elementwise_keys([("step", number, (3,)), ("exp_avg", element, (3,))]) == {"exp_avg"}
    alone = [("step", number, ()), ("exp_avg", number, ())]
    assert elementwise_keys(alone) == {"exp_avg"}
    others = [("ratio", number, ()), ("ratio", number, (3,))]
    assert elementwise_keys(others) == set()
    # No momentum yet says nothing of what it will be.
    assert elementwise_keys([("momentum", None, (3,)), ("momentum", number, ())]) == {"momentum"}


def saved(kind=None, step=1.0, groups=None, **more) -> OptimizerState:
    """Of SGD with parameters ``a`` and ``b``; of a known ``kind`` its numbers are said to be so."""
    count = torch.tensor(step)
    state = {
        name: {
            "step": count if kind is None else Number(count, on_device=False),
            "momentum_buffer": stored(*values),
        }
        for name, values in (("a", (1.0, 2.0)), ("b", (3.0, 4.0)))
    }
    options = torch.optim.SGD([torch.ones(1)], lr=0.5, momentum=0.9, foreach=True).defaults
    return OptimizerState(
        {**state, **more}, groups or [({**options, "nesterov": True}, ["a", "b"])], kind
    )


def options_of(state: OptimizerState, **changes) -> dict:
    return {**state.groups[0][0], **changes}


def sgd(*groups) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": list(each)} for each in groups], lr=0.1, foreach=False)


def fitted(optimizer, model, state):
    return match_optimizer(model, optimizer, members_of_groups(model, optimizer), state, "f")


@pytest.mark.parametrize("kind", [None, "SGD"])
def test_an_optimizer_goes_on_and_only_its_own_kind_takes_how_it_computed(kind):
    holder, members = vector("a", "b")
    model, optimizer = inventory(members), sgd([holder])
    load_optimizer_values(read_to_host(fitted(optimizer, model, saved(kind))))
    state = optimizer.state[holder]
    assert state["momentum_buffer"].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]
    assert state["step"].shape == () and state["step"] == 1.0
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.5 and group["nesterov"] is True
    assert group["foreach"] is (kind == "SGD")


def test_groups_of_the_same_run_must_be_the_same_and_others_agree_in_their_options():
    first, second = (nn.Parameter(torch.ones(2)) for _ in range(2))
    model = inventory([whole(first, "a"), whole(second, "b")])
    one = saved()
    split = saved(groups=[(options_of(one), ["a"]), (options_of(one), ["b"])])
    differing = saved(groups=[(options_of(one), ["a"]), (options_of(one, lr=1.0), ["b"])])
    known = [saved("SGD", groups=each.groups) for each in (one, split, differing)]
    apart, together, reverse = sgd([first], [second]), sgd([first, second]), sgd([second], [first])
    for optimizer in (apart, together, reverse):
        fitted(optimizer, model, one)
        fitted(optimizer, model, split)
    assert [g["lr"] for g in fitted(reverse, model, differing).groups] == [1.0, 0.5]
    assert [g["lr"] for g in fitted(reverse, model, known[2]).groups] == [1.0, 0.5]
    for optimizer, state, text in (
        (together, differing, r"group 0 .* in several groups, \[0, 1\], which have different"),
        (together, known[1], "group 0 of the optimizer .* is not a group of the checkpoint"),
        (apart, known[0], "group 1 of the optimizer .* is not a group of the checkpoint"),
        (apart, saved("Adam"), "with optimizer Adam, but this optimizer is SGD"),
        (sgd([first]), one, "has state of 'b', which the optimizer does not have"),
        (apart, saved(groups=[(options_of(one), ["a"])]), "no group of it has 'b'"),
        (apart, saved(groups=[({"lr": 1.0}, ["a", "b"])]), "lack .*'momentum'.* of another kind"),
        (sgd([nn.Parameter(torch.ones(3))]), one, r"1 parameters of group 0 .* of shape \[3\]"),
    ):
        with pytest.raises(ModelMismatchError, match=text):
            fitted(optimizer, model, state)


@pytest.mark.parametrize("kind", [None, "SGD"])
def test_parameters_in_one_vector_must_have_one_state(kind):
    holder, members = vector("a", "b")
    model, optimizer = inventory(members), sgd([holder])
    number = torch.tensor(2.0) if kind is None else Number(torch.tensor(2.0), on_device=False)
    none = None if kind is None else Number(None)
    buffer = {"momentum_buffer": stored(3.0, 4.0)}
    double = {"momentum_buffer": stored(3.0, 4.0, dtype=torch.float64)}
    step = saved(kind).state["b"]["step"]
    for state, text in (
        ({"step": number, **buffer}, "'a' and 'b' are stored as one tensor .* but 'step' differs"),
        (buffer, "'a' and 'b' .* but have state"),
        ({"step": step, "momentum_buffer": none}, r"'momentum_buffer' of 'b' must be a tensor"),
        ({"step": step, **double}, "dtypes .'torch.float32', 'torch.float64'., .* one tensor"),
    ):
        with pytest.raises(ModelMismatchError, match=text):
            fitted(optimizer, model, saved(kind, b=state))
    # One that never had a gradient has no state, and gets zeros.
    own = saved(kind)
    del own.state["b"]
    load_optimizer_values(fitted(optimizer, model, own))
    assert optimizer.state[holder]["momentum_buffer"].tolist() == [1.0, 2.0, 0.0, 0.0, 0.0]

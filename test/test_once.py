"""What is traced once: the first time, for each shape; and that nothing else changes by it."""

import copy

import pytest
import torch
from test_special_uses import gradients, inputs, mlp, run, trace_as_on_tpu, wrapped


def world():
    from xla_fsdp.world import World

    return World.current()


def counted(world):
    """A :class:`Once`, a function to call with it, and the list of its calls."""
    from xla_fsdp.once import Once

    calls = []
    constant = torch.full((2,), 3.0).to(world.device)

    def function(given):
        calls.append([tuple(tensor.shape) for tensor in given])
        given[0].add_(1)  # stays inside
        return [given[-1] * 2 + constant[0], given[0]]

    return Once(world), function, calls


def traced_once():
    """In a process without ranks, as on a TPU."""
    once, function, calls = counted(world())
    assert world().as_on_tpu
    x, unused, y = (torch.arange(n).float().to(world().device) for n in (4, 2, 3))
    for _ in range(3):
        doubled, more = once("f", function, [x, unused, y], "key")
        assert more.cpu().tolist() == [1, 2, 3, 4] and doubled.cpu().tolist() == [3, 5, 7]
        assert x.cpu().tolist() == [0, 1, 2, 3]
    assert len(calls) == 1
    once("f", function, [x, unused, y], "another key")
    once("f", function, [x, unused, y[:2]], "key")
    once("f", function, [x, unused, y.double()], "key")
    assert len(calls) == 4
    copy.deepcopy(once)("f", function, [x, unused, y], "key")
    assert len(calls) == 5
    doubled[:2].zero_()  # a tensor like any other
    assert doubled.cpu().tolist() == [0, 0, 7]


def test_a_function_is_traced_once_for_each_shape(elsewhere):
    elsewhere(traced_once)


def names():
    """Where collectives are named, every call is."""
    import torch_xla

    once, function, calls = counted(world())
    x = torch.ones(3).to(world().device)
    torch_xla._XLAC._set_ir_debug(True)
    for _ in range(2):
        once("f", function, [x], "key")
    torch_xla._XLAC._set_ir_debug(False)
    assert len(calls) == 2


def test_names_are_traced_anew(elsewhere):
    elsewhere(names)


def directly(rank):
    once, function, calls = counted(world())
    x = torch.ones(3).to(world().device)
    for _ in range(2):
        once("f", function, [x], "key")
    assert len(calls) == 2


def test_cpu_ranks_trace_as_ever(run_ranks):
    run(run_ranks, directly)


def steps_of_one_process():
    """Gathers and reductions of later steps come out of what the first step traced."""
    import torch_xla

    plain, model = mlp(), wrapped(mlp(), "1")
    traced = []
    wire = model._unit.wire
    wire.reduce = lambda *args, reduce=wire.reduce: traced.append(1) or reduce(*args)
    for step in range(3):
        for one in (plain, model):
            one.zero_grad()
        x = inputs(0, step)
        loss = model(x.to(torch_xla.device())).square().mean()
        expected = plain(x).square().mean()
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            grad = ours.grad.cpu()[: theirs.numel()].view_as(theirs)
            torch.testing.assert_close(grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert len(traced) == 1


def test_later_steps_use_what_the_first_one_traced(elsewhere):
    elsewhere(steps_of_one_process)


def same_on_ranks(rank, options):
    import torch_xla

    found = []
    for as_on_tpu in (False, True):
        if as_on_tpu:
            trace_as_on_tpu()
        model = wrapped(mlp(), "1", **options)
        x = inputs(rank).to(torch_xla.device())
        with model.no_sync():
            model(x).square().mean().backward()
        model(x).square().mean().backward()
        found.append(gradients(model))
    for name, grad in found[0].items():
        torch.testing.assert_close(found[1][name], grad, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"flatten_parameters": True},
        {"shard_param_on_dim_0": True},
        {"compute_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_values_are_those_of_cpu_ranks(run_ranks, options):
    run(run_ranks, same_on_ranks, options)

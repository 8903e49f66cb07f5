"""What is traced once: the first time, for each shape; and that nothing else changes by it."""

import copy
from unittest import mock

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank, slow, without_ranks
from small_models import inputs, mlp, wrapped
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import xlac
from xla_fsdp.collectives.world import World
from xla_fsdp.sharding import trace_cache as module
from xla_fsdp.sharding.trace_cache import TraceCache


def counted(world):
    calls = []
    constant = torch.full((2,), 3.0).to(world.device)

    def function(given):
        calls.append([tuple(tensor.shape) for tensor in given])
        given[0].add_(1)  # stays inside
        return [given[-1] * 2 + constant[0], given[0]]

    return TraceCache(world), function, calls


@without_ranks
def test_a_function_is_traced_once_for_each_shape():
    once, function, calls = counted(World.current())
    assert World.current().as_on_tpu
    x, unused, y = (torch.arange(n).float().to("xla") for n in (4, 2, 3))
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


@without_ranks
def test_a_program_under_way_does_not_disturb():
    """What it makes may get its memory between two looks of torch_xla: seen once in many runs."""
    made = []

    class Context:
        def __init__(self, name):
            self.real = original(name)
            made.append(name)

        def __getattr__(self, name):
            return getattr(self.real, name)

        def device_parameter_id_tensor_mapping(self):
            if len(made) == 1:
                raise RuntimeError("Check failed: param_id.has_value(): Parameter ID must exist")
            return self.real.device_parameter_id_tensor_mapping()

    original = xlac.LoweringContext
    once, function, calls = counted(World.current())
    x, y = (torch.arange(n).float().to("xla") for n in (4, 3))
    with mock.patch.object(xlac, "LoweringContext", Context):
        doubled, _ = once("f", function, [x, y], "key")
    assert made == ["f", "f"] and len(calls) == 1
    assert doubled.cpu().tolist() == [3, 5, 7]


@without_ranks
def test_what_is_old_or_traced_anew_each_time_is_not_kept():
    once, function, calls = counted(World.current())
    for length in range(2, 2 + 2 * module._MAX_CACHED):
        once("f", function, [torch.ones(length).to("xla")], "key")
    assert len(once._known) == module._MAX_CACHED
    calls.clear()
    once("f", function, [torch.ones(1 + 2 * module._MAX_CACHED).to("xla")], "key")
    assert not calls

    once, function, calls = counted(World.current())
    torch_xla._XLAC._set_ir_debug(True)
    x = torch.ones(2).to("xla")
    for _ in range(2):
        once("f", function, [x], "key")
    torch_xla._XLAC._set_ir_debug(False)  # tests share the process
    assert len(calls) == 2 and not once._known


@without_ranks
def test_a_unit_without_elements():
    model = FSDP(nn.Sequential(nn.Linear(4, 3), FSDP(nn.Linear(3, 0))))
    x = torch.ones(2, 4).to("xla")
    for _ in range(2):
        model(x).sum().backward()
        assert model(x).cpu().shape == (2, 0)


TRAINS = """
import sys
import torch, torch_xla
from torch import nn
from torch_xla.experimental import eager_mode
from xla_fsdp import XlaFullyShardedDataParallel as FSDP

eager_mode(sys.argv[1] == "eager")
torch.manual_seed(0)
plain = nn.Sequential(nn.Embedding(10, 6), nn.Linear(6, 3))
torch.manual_seed(0)
model = FSDP(nn.Sequential(FSDP(nn.Embedding(10, 6)), nn.Linear(6, 3)))
ids = torch.arange(8).view(2, 4)
for _ in range(2):
    model(ids.to("xla")).square().sum().backward()
    plain(ids).square().sum().backward()
    torch_xla.sync()
for ours, theirs in zip(model.parameters(), plain.parameters()):
    grad = ours.grad.cpu()[: theirs.numel()].view_as(theirs)
    torch.testing.assert_close(grad, theirs.grad, rtol=0.05, atol=0.05)
print("equal")
"""


TYPES = ("XLA_USE_32BIT_LONG", "XLA_USE_BF16")


@pytest.mark.parametrize("setting", ["eager", *(slow(s) for s in TYPES), ""])
def test_settings_of_torch_xla(run_script, setting):
    """In eager mode nothing can be traced; others change the types that tensors have on devices."""
    env = {"PJRT_DEVICE": "CPU", **({setting: "1"} if setting.isupper() else {})}
    done = run_script(TRAINS, setting or "plain", env=env)
    assert done.stdout.endswith("equal\n"), done.stderr


@on_each_rank(2)
def test_cpu_ranks_trace_as_ever(rank):
    once, function, calls = counted(World.current())
    x = torch.ones(3).to("xla")
    for _ in range(2):
        once("f", function, [x], "key")
    assert len(calls) == 2


@without_ranks
def test_later_steps_use_what_the_first_one_traced():
    plain, model = mlp(), wrapped(mlp(), "1")
    traced = []
    comms = model._unit.comms
    trace = comms.trace_reductions
    comms.trace_reductions = lambda *args: traced.append(1) or trace(*args)
    for step in range(3):
        for one in (plain, model):
            one.zero_grad()
        x = inputs(0, step)
        loss = model(x.to("xla")).square().mean()
        expected = plain(x).square().mean()
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss.cpu(), expected, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            grad = ours.grad.cpu()[: theirs.numel()].view_as(theirs)
            torch.testing.assert_close(grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert len(traced) == 1

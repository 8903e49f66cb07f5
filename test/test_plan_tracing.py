"""Tracing a step as a rank of a slice that is not there."""

import functools
import gc
import os
import re
import weakref
from unittest import mock

import psutil
import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from on_ranks import raises, without_ranks
from planned import described, training_step
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as InTree

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.planning.records import Schedule
from xla_fsdp.planning.reporting.advice import warnings
from xla_fsdp.planning.tracing import simulated_rank
from xla_fsdp.planning.tracing import step as traced_step
from xla_fsdp.planning.tracing.live import LiveTensors
from xla_fsdp.planning.tracing.step import trace_step


def _model(fsdp=FSDP, width=256, blocks=2):
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(blocks)]
    return fsdp(nn.Sequential(*[fsdp(part) for part in parts]))


def _step(fsdp=FSDP, end="return", steps=1, optimizer=torch.optim.AdamW, lr=1e-3):
    """A training step; ``end`` says how it ends: "return", "sync" or "item"."""

    def step():
        model = _model(fsdp)
        stepper = optimizer(model.parameters(), lr=lr)
        for _ in range(steps):
            x = torch.randn(4, 256).to("xla")
            loss = (model(x) - x).square().mean()
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            if end == "sync":
                torch_xla.sync()
            elif end == "item":
                loss.item()
        return loss

    return step


def _elements(traced):
    return sum(unit.elements for unit in traced.units)


@without_ranks
def test_every_end_of_a_step_gives_the_same_program():
    programs = {
        trace_step(_step(end=end, steps=steps), 0, 8).fingerprint
        for end, steps in (("return", 1), ("sync", 1), ("sync", 3), ("item", 3))
    }
    assert len(programs) == 1


@without_ranks
def test_our_ranks_share_a_program_and_the_in_tree_ones_do_not():
    for fsdp, programs in ((FSDP, 1), (InTree, 3)):
        found = {trace_step(_step(fsdp), rank, 8).fingerprint for rank in (0, 1, 7)}
        assert len(found) == programs


@without_ranks
def test_state_exists_and_is_donated():
    for optimizer, a_parameter in (
        (torch.optim.SGD, 0),
        (functools.partial(torch.optim.SGD, momentum=0.9), 1),
        (torch.optim.AdamW, 2),
        (torch.optim.Adagrad, 1),
    ):
        program = trace_step(_step(optimizer=optimizer), 0, 8).program
        names = [program.arguments[number] for number in program.donated]
        parameters = {f"{i}.0.{kind}" for i in range(2) for kind in ("weight", "bias")}
        assert parameters <= set(names), names
        assert sum(" of " in name for name in names) == 4 * a_parameter
        assert len(names) == len(set(names)) == 4 * (1 + a_parameter)
        assert len(set(program.donated.values())) == len(names)


@without_ranks
def test_what_was_there_before_is_untouched():
    model = nn.Linear(16, 16).to("xla")
    stepper = torch.optim.Adam(model.parameters(), lr=0.5)
    x = torch.ones(2, 16).to("xla")

    def step():
        torch.randn(3)
        loss = model(x).square().sum()
        loss.backward()
        stepper.step()
        stepper.zero_grad(set_to_none=False)
        stepper.param_groups[0]["lr"] = 0.01
        torch_xla.sync()

    def values():
        state = [value for one in stepper.state.values() for value in one.values()]
        tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *state]
        return [tensor.detach().cpu().clone() for tensor in tensors]

    trace_step(step, 0, 8)
    assert not stepper.state and model.weight.grad is None
    for _ in range(2):  # state of the optimizer, then gradients
        stepper.step()
        model(x).sum().backward()
    torch_xla.sync()
    pending = x * 3
    with torch.inference_mode():
        inference = x * 4
    before, random = values(), torch.get_rng_state()
    programs = [trace_step(step, 0, 8).program for _ in range(2)]
    assert programs[0].donated == programs[1].donated and len(programs[0].donated) == 8
    assert torch.equal(torch.get_rng_state(), random) and stepper.param_groups[0]["lr"] == 0.5
    assert len(before) == 10 and all(map(torch.equal, values(), before))
    for value, expected in ((pending, 3.0), (inference, 4.0)):
        assert torch.equal(value.cpu(), torch.full((2, 16), expected))
    with pytest.raises(RuntimeError, match="already"):
        trace_step(lambda: trace_step(step, 0, 8), 0, 8)


@without_ranks
def test_tensors_on_the_host_are_untouched():
    """A plan that was made before must not change training, nor the next plan."""
    model, head = nn.Linear(16, 16).to("xla"), nn.Linear(2, 2)
    average = torch.optim.swa_utils.AveragedModel(model)  # counts its updates on the host
    counts = [torch.tensor(0), torch.zeros(2, 3).t(), torch.full((2,), float("nan"))]
    for number, count in enumerate(counts):
        head.register_buffer(f"count{number}", count)
    before = [count.clone() for count in counts]

    def step():
        model(torch.ones(2, 16).to("xla")).sum().backward()
        head(torch.ones(2)).sum().backward()
        average.update_parameters(model)
        for count in counts:
            count.data.nan_to_num_().add_(1)

    programs = {trace_step(step, 0, 8).program.fingerprint for _ in range(2)}
    assert len(programs) == 1 and average.n_averaged == 0 and head.weight.grad is None
    for count, value in zip(counts, before, strict=True):
        assert torch.allclose(count, value, equal_nan=True)


class _Normalize(nn.Module):
    def forward(self, images):
        return (images.float() / 255 - 0.5) / 0.2


@without_ranks
def test_what_is_computed_before_the_first_call_belongs_to_the_program():
    """Where the model existed before the step, or before a sync in it."""
    images = torch.randint(0, 255, (8, 16), dtype=torch.uint8).to("xla")
    updated = torch.zeros(4, device="xla")
    torch_xla.sync()

    def program(build, when, inside=False):
        model = build() if when == "before" else None

        def step():
            mine, normalize = model or build(), _Normalize()
            if when == "synced":
                torch_xla.sync()
            stepper = torch.optim.SGD(mine.parameters(), lr=0.1)
            for _ in range(2):
                updated.add_(1)
                if inside:
                    nn.Sequential(normalize, mine)(images).sum().backward()
                else:
                    mine(normalize.forward(images)).sum().backward()
                stepper.step()
                torch_xla.sync()

        traced = trace_step(step, 0, 1).program
        assert 0 in traced.donated or inside, "what is updated in place before the call"
        return described(traced)[2]

    for build, cases in (
        (
            lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)).to("xla"),
            ("before", "synced"),
        ),
        (lambda: FSDP(nn.Sequential(FSDP(nn.Linear(16, 8)), nn.GELU())), ("before", "built")),
    ):
        expected = program(build, "synced", inside=True)
        for when in cases:
            assert program(build, when) == expected, (build, when)


@without_ranks
def test_state_that_a_step_makes_once_is_an_argument():
    """Averages, banks, float32 weights: the second program of a loop, or parameters of an optimizer
    that the step makes."""
    model = nn.Linear(16, 8).bfloat16().to("xla")
    x = torch.ones(4, 16, dtype=torch.bfloat16).to("xla")
    torch_xla.sync()

    def averages():
        return [parameter.detach().float() for parameter in model.parameters()], None

    def masters():
        made, _ = averages()
        return made, torch.optim.AdamW(made, lr=0.1)

    def program(make, steps, outside):
        state, optimizer = make() if outside else (None, None)
        torch_xla.sync()

        def step():
            values, stepper = (state, optimizer) if outside else make()
            own = stepper or torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(steps):
                model(x).float().sum().backward()
                if stepper:
                    for value, parameter in zip(values, model.parameters(), strict=True):
                        value.grad = parameter.grad.float()
                own.step()
                model.zero_grad()
                with torch.no_grad():
                    for value, parameter in zip(values, model.parameters(), strict=True):
                        if stepper:
                            parameter.copy_(value)
                        else:
                            value.lerp_(parameter.float(), 0.1)
                if steps > 1:
                    torch_xla.sync()
            return values, stepper  # still live

        traced = trace_step(step, 0, 1).program
        return len(traced.arguments), len(traced.donated)

    for make, steps in ((averages, 3), (masters, 3), (masters, 1)):
        assert program(make, steps, outside=False) == program(make, steps, outside=True)


@without_ranks
def test_views_from_outside_are_no_outputs():
    """A sync does not compute a view, even if its base is updated."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).to("xla")
    weight, mean = model[0].weight, model[1].running_mean
    stepper = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(3, 4).to("xla")

    def step():
        model(x).square().sum().backward()
        stepper.step()

    alone, same = (trace_step(step, 0, 1).program for _ in range(2))
    for make in (
        lambda: [torch.arange(24.0).to("xla")[2:7]],
        lambda: [nn.Parameter(x.new_ones(24)[2:7]), x.new_ones(24).view(6, 4)[2:4].data],
        lambda: [one.view(3, 4) for one in nn.Parameter(x.new_ones(24)).split([12, 12])],
        lambda: [weight.detach()[2:5], mean[1:3], weight.t(), mean.expand(2, 6)[0], mean.detach()],
    ):
        views = make()
        values = [view.cpu() for view in make()]
        program = trace_step(step, 0, 1).program
        assert len(program.donated) == len(alone.donated) == 7
        assert described(program)[2] == described(same)[2]
        for view, value in zip(views, values, strict=True):
            assert torch.equal(view.cpu(), value)


@without_ranks
def test_frozen_objects_are_found():
    """Python's garbage collector does not list what ``gc.freeze`` froze."""

    def plan(freeze):
        freeze()
        model = nn.Linear(16, 16).to("xla")
        model.me = [model]  # only the garbage collector frees it
        stepper = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.ones(2, 16).to("xla")
        freeze()

        def step():
            model(x).sum().backward()
            stepper.step()

        return trace_step(step, 0, 1).program, weakref.ref(model)

    plans = [plan(freeze) for freeze in (lambda: None, gc.freeze)]
    gc.collect()
    assert [model() for _, model in plans] == [None, None]
    programs = [program for program, _ in plans]
    assert sorted(programs[0].donated) and programs[0].fingerprint == programs[1].fingerprint


@without_ranks
def test_reads_leave_the_rest_of_the_step_alone():
    """Guards against NaN, losses that are logged, masks: the program stays the whole step."""

    def step(read):
        def run():
            model = _model()
            stepper = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(2):
                loss = model(torch.randn(4, 256).to("xla")).square().mean()
                if read:
                    assert loss.item() == 0.0  # nothing runs: zeros
                    if not torch.isfinite(loss).all() or torch.isnan(loss):
                        raise RuntimeError("not finite")
                loss.backward()
                if not read or torch.isfinite(loss):
                    stepper.step()
                stepper.zero_grad()
                del loss
                torch_xla.sync()

        return trace_step(run, 0, 8)

    plain, with_reads = step(False), step(True)
    assert len(with_reads.reads) == 4 and with_reads.has_optimizer
    assert all("test_plan_tracing.py" in read for read in with_reads.reads)
    assert len(with_reads.program.donated) == len(plain.program.donated) == 8

    def masked():
        model = _model()
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        out = model(torch.randn(4, 256).to("xla"))
        chosen = out[out > 0]
        assert chosen.shape == (4 * 256,)  # as many as there can be
        chosen.sum().backward()
        stepper.step()

    traced = trace_step(masked, 0, 8)
    assert len(traced.sized_by_data) == 1 and "test_plan_tracing.py" in traced.sized_by_data[0]
    assert not traced.reads and not traced.untrained and traced.trained == 4


class Recurrent(nn.GRU):
    def forward(self, x):
        return super().forward(x)[0]


@without_ranks
def test_recurrent_cells():
    """torch_xla's kernel traces the cell with tensors that have no values."""
    step = training_step(lambda: Recurrent(8, 8, batch_first=True).to("xla"), 4, 3, 8)
    assert len(trace_step(step, 0, 1).program.donated) == 4


@without_ranks
def test_experts_that_values_choose_are_all_planned():
    class Experts(nn.Module):
        def __init__(self, choose):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.unused = nn.Linear(8, 8)
            self.choose = choose

        def forward(self, x):
            chosen = nn.functional.one_hot(x.abs().argmax(-1) % 3, 3).T  # experts x tokens
            out = torch.zeros_like(x)
            for number in self.choose(chosen.sum(-1)):
                (tokens,) = torch.where(chosen[number])
                out = out.index_add(0, tokens, self.experts[number](x[tokens]))
            return out

    def step(choose):
        return training_step(lambda: FSDP(Experts(choose)), 4, 8)

    traced = trace_step(step(lambda hits: (hits > 0).nonzero()[:, 0].tolist()), 0, 4)
    assert traced.untrained == ("unused.weight", "unused.bias") and traced.trained == 8
    assert len(set(traced.sized_by_data)) == 2  # nonzero and where
    said = list(warnings(Schedule(0, (), (), (), (), 0), traced, 1, (0,), 0.5))
    assert any("2 of 8 parameters" in one and "unused.weight" in one for one in said)
    assert any("depends on values" in one and "test_plan_tracing.py" in one for one in said)
    traced = trace_step(step(lambda hits: (hits > 0).nonzero(as_tuple=True)[0].tolist()), 0, 4)
    assert traced.untrained == ("unused.weight", "unused.bias")
    # A value that was changed is not known.
    assert trace_step(step(lambda hits: (hits > 0).nonzero()[:, 0].add_(0).tolist()), 0, 4).reads
    traced = trace_step(step(lambda hits: [0]), 0, 4)
    assert "experts.2.bias" in traced.untrained and len(traced.untrained) == 6


@without_ranks
def test_steps_without_end_say_where():
    def spins():
        flag = torch.zeros(1).to("xla") + 1
        while not (flag * 2).item():
            pass

    def never_syncs():
        model = nn.Linear(2, 2).to("xla")
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.ones(1, 2).to("xla")).sum().backward()
            stepper.step()

    for step, words in ((spins, "read 50 values"), (never_syncs, r"torch_xla.sync\(\)")):
        with (
            mock.patch.object(simulated_rank, "_MANY_READS", 50),
            mock.patch.object(traced_step, "_MANY_CALLS", 50),
            pytest.raises(RuntimeError, match=words) as info,
        ):
            trace_step(step, 0, 8)
        assert "test_plan_tracing.py" in str(info.value)
    assert trace_step(_step(), 0, 8).has_optimizer  # the next one is planned


@without_ranks
def test_parameters_that_step_themselves():
    """An optimizer that is none of torch's: tracing stops at its first step all the same."""
    steps = []

    def step():
        model = _model()
        for _ in range(5):
            model(torch.randn(4, 256).to("xla")).sum().backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.sub_(0.1 * p.grad)
                    p.grad = None
            steps.append(1)
            torch_xla.sync()

    traced = trace_step(step, 0, 8)
    assert len(steps) == 1 and traced.has_optimizer and len(traced.program.donated) == 4


@without_ranks
def test_micro_batches_are_counted_and_a_forward_alone_is_a_program_too():
    def accumulation():
        model = _model()
        stepper = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            torch_xla.sync()
            model(torch.randn(4, 256).to("xla")).sum().backward()
        stepper.step()

    def forward():
        with torch.no_grad():
            out = _model()(torch.randn(4, 256).to("xla"))
            torch_xla.sync()
            out.cpu()

    assert trace_step(accumulation, 0, 8).programs_before == 3
    traced = trace_step(forward, 0, 8)
    assert not traced.has_optimizer and _elements(traced) == 2 * (256 * 256 + 256)


@without_ranks
def test_errors_of_the_step_come_out_and_leave_nothing_behind():
    from torch.optim.optimizer import _global_optimizer_pre_hooks

    import xla_fsdp.sharded_module  # noqa: F401  # registers a hook, which stays

    hooks, environment, seen = dict(_global_optimizer_pre_hooks), dict(os.environ), []

    def fail():
        seen.append((xr.global_ordinal(), xr.world_size()))
        _step()()
        raise KeyError("mine")

    raises(KeyError, "mine", trace_step, fail, 5, 64)
    raises(ValueError, "traced nothing", trace_step, lambda: None, 0, 8)
    assert seen == [(5, 64)] and (xr.global_ordinal(), xr.world_size()) == (0, 1)
    assert dict(os.environ) == environment
    assert not torch_xla._XLAC._get_ir_debug()
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert dict(_global_optimizer_pre_hooks) == hooks and len(hooks) == 1
    x = torch.ones(3).to("xla")
    assert (x + 1).sum().item() == 6.0  # the runtime still runs


@pytest.mark.slow
@without_ranks
def test_large_parameters_take_up_no_memory():
    """25 GB on one device: shards, and twice as much optimizer state, however the model is made."""
    import copy

    class Drawn(nn.Linear):
        def reset_parameters(self):  # as models of transformers do it
            self.weight.data.normal_(0.0, 0.02)
            self.bias.data.zero_()

    ways = {
        "plain": lambda: nn.Linear(16384, 16384),
        "drawn": lambda: Drawn(16384, 16384),
        "copied": lambda: copy.deepcopy(nn.Linear(16384, 16384)),
        "converted": lambda: nn.Linear(16384, 16384).double().to(torch.float32),
        "moved": lambda: nn.Linear(16384, 16384).to("xla"),
        "meta": lambda: nn.Linear(16384, 16384, device="meta"),
    }

    def step(way, scanned=False, **options):
        fsdp = functools.partial(FSDP, compute_dtype=torch.bfloat16, **options)
        blocks = [ways[way]() for _ in range(6)]
        if scanned:
            model = fsdp(nn.Sequential(xla_fsdp.scan_blocks(blocks, compute_dtype=torch.bfloat16)))
        else:
            model = fsdp(nn.Sequential(*map(fsdp, blocks)))
        stepper = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.randn(64, 16384).to("xla")).sum().backward()
        stepper.step()

    offload = {"cpu_offload": xla_fsdp.CPUOffload()}
    process = psutil.Process()
    mapped = process.memory_info().vms
    programs = set()
    for way, options in (
        *((w, {}) for w in ways),
        ("plain", offload),
        ("plain", {"scanned": True}),
    ):
        traced = trace_step(functools.partial(step, way, **options), 0, 1)
        assert _elements(traced) == 6 * (16384**2 + 16384)
        peak = _peak_bytes()
        assert peak < 2 << 30, (way, options, peak)
        if not options:
            programs.add(traced.fingerprint)
    assert len(programs) == 1
    gc.collect()
    assert process.memory_info().vms - mapped < 4 << 30, "the pages of a model are still mapped"


def _peak_bytes():
    """The most memory that this process ever had, without that of its parent before the start."""
    with open("/proc/self/status") as file:
        return 1024 * int(next(line.split()[1] for line in file if line.startswith("VmHWM")))


@without_ranks
def test_values_from_outside_survive():
    torch.manual_seed(0)
    outer, table = nn.Linear(512, 512), torch.arange(1 << 17)
    before = outer.weight.detach().clone()
    seen = []

    def step():
        half = outer.weight.detach().to(torch.bfloat16)
        seen.append((half, outer.weight.data.clone(), torch.zeros(1 << 17) + 1))
        sent = table.to("xla")
        seen.append(sent.cpu())
        seen.append(outer.weight.detach().to("xla", torch.bfloat16).cpu())
        return _step()()

    trace_step(step, 0, 8)
    (half, copied, ones), read, read_half = seen
    assert torch.equal(half, before.bfloat16()) and torch.equal(copied, before)
    assert torch.equal(outer.weight, before) and torch.equal(ones, torch.ones(1 << 17))
    assert torch.equal(read, table) and torch.equal(read_half, half)


@without_ranks
def test_an_initialization_that_leaves_something_out_is_noticed():
    class Forgetful(nn.Linear):
        def reset_parameters(self):
            nn.init.zeros_(self.weight)

    def step():
        model = FSDP(Forgetful(512, 512, device="meta"))
        model(torch.ones(4, 512).to("xla")).sum().backward()

    raises(RuntimeError, "does not initialize its parameter 'bias'", trace_step, step, 0, 8)


@without_ranks
def test_other_threads_make_tuples_meanwhile():
    """Who looks through all objects holds those that a thread is about to make, too."""
    import threading
    import time

    failed, over = [], threading.Event()

    def work():
        try:
            while not over.is_set():
                # Ten are made room for, so that the tuple is resized, some time after it began.
                tuple(sum(range(200)) for _ in range(3000))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    live, until = LiveTensors(), time.monotonic() + 1.5
    while time.monotonic() < until and not failed:
        live.all()
    over.set()
    for thread in threads:
        thread.join()
    live.close()
    assert not failed


RUNTIME = """
import sys
import torch_xla
sys.path.insert(0, sys.argv[1])
from test_plan_tracing import _step
from xla_fsdp.planning.tracing.step import trace_step
run = _step(lambda module: module.to("xla"), end="sync", steps=3)
run()
torch_xla.sync(wait=True)
print(len(trace_step(run, 0, 1).program.donated))
"""


def test_donates_what_the_runtime_donates(run_script, tmp_path):
    """The same step, run by torch_xla, which states its donations in the program it compiles."""
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    env = {"PJRT_DEVICE": "CPU", "XLA_FLAGS": dump}
    done = run_script(RUNTIME, os.path.dirname(__file__), env=env, code=0)
    programs = [path.read_text() for path in tmp_path.glob("*before_optimizations.txt")]
    heads = [re.search(r"buffer_donor=\{(.*?)\}, entry", text) for text in programs]
    # 4 parameters with two moments each, in the steps after the first.
    assert max(len(re.findall(r"\(\d+, \{\}\)", head[1])) for head in heads if head) == 12
    assert int(done.stdout.split()[-1]) == 12

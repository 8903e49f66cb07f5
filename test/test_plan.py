"""``xla_fsdp.plan`` on the real TPU compiler. Slices of v3 compile quickest."""

import functools
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch
from conftest import ROOT
from on_ranks import without_ranks
from planned import training_step
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as InTree

import xla_fsdp
from xla_fsdp import ShardingStrategy, XlaFullyShardedDataParallel, plan
from xla_fsdp.compiled.host_options import HostOptions
from xla_fsdp.planning.compiling import compiler
from xla_fsdp.planning.compiling.compiler import Target
from xla_fsdp.planning.compiling.plan_cache import CompiledStep, PlanCache
from xla_fsdp.planning.compiling.progress import Progress
from xla_fsdp.planning.records import CompilerMemory
from xla_fsdp.planning.tracing.traced import TracedProgram
from xla_fsdp.tpu.chips import DCN_LATENCY

V3, V5E = "v3-8", "v5e:2x4"


def _step(name="ours", width=512, rows=64, blocks=2):
    def step():
        kind = InTree if name == "in-tree" else XlaFullyShardedDataParallel
        fsdp = functools.partial(kind, compute_dtype=torch.bfloat16)
        parts = [
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in range(blocks)
        ]
        model = fsdp(nn.Sequential(*map(fsdp, parts)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        x = torch.randn(rows, width).to("xla")
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@without_ranks
def test_a_report(cache):
    step = _step()
    report = plan(step, V3, cache=cache, progress=False, title="two blocks")
    with mock.patch.object(Target, "_run", side_effect=AssertionError("compiled again")):
        again = plan(step, V3, cache=cache, progress=False, title="two blocks")
        path = os.path.join(cache, "measured.json")
        xla_fsdp.Calibration("v3", link_bandwidth=41e9, matrix_flops=0.97 * 123e12 / 2).save(path)
        slower = plan(step, V3, cache=cache, progress=False, calibration=path)
    assert again.from_cache and not report.from_cache
    assert again.schedule == report.schedule and again.memory == report.memory
    # Half the speed of products and of links: the same program, twice the compute.
    assert slower.schedule == report.schedule and slower.fits
    assert slower.timing.compute == pytest.approx(2 * report.timing.compute)
    assert report.timing.collective < slower.timing.collective < 2 * report.timing.collective
    assert any("41 GB/s a link (published: 82)" in note for note in slower.notes)
    ours = f"would be {1.01e3 * report.timing.step:,.1f} ms here"
    assert [ours in note for note in (report.notes[-1], slower.notes[-1])] == [True, False]
    with pytest.raises(xla_fsdp.CalibrationError, match="measured.json is of v3; the plan is for"):
        plan(step, V5E, cache=cache, progress=False, calibration=path)
    assert report.fits and report.executables == 1 and report.ranks_traced == (0, 1, 7)
    assert report.devices == 8 and report.chip == "v3" and report.compile_seconds > 0

    memory, schedule = report.memory, report.schedule
    parameters = 4 * 512 * 1024 + 2 * 1024 + 2 * 512
    # Parameter and two moments, float32, an eighth each, and the batch; small shards are padded.
    state = 3 * 4 * parameters // 8
    batch = 64 * 512 * 4
    assert state + batch <= memory.arguments <= 1.05 * (state + batch)
    assert state <= memory.aliased <= 1.05 * state
    assert 0 <= memory.outputs - memory.aliased < 4096  # the loss, and the table of outputs
    assert max(schedule.curve) == pytest.approx(memory.peak, rel=0.005)
    assert sum(b.bytes for b in schedule.live_at_peak()) == max(schedule.curve)
    arguments = [b for b in schedule.buffers if b.category == "argument"]
    assert {(b.born, b.dies) for b in arguments} == {(0, schedule.length - 1)}
    names = {b.name for b in arguments}
    assert {"0.0.weight", "exp_avg of 1.2.bias", "exp_avg_sq of 0.2.weight"} <= names

    gathers = [c for c in schedule.collectives if c.kind == "all-gather"]
    assert {c.module for c in gathers} >= {"0.small_parameters", "1.small_parameters"}
    assert {c.phase for c in schedule.collectives} == {"forward", "backward"}
    assert {op.phase for op in schedule.ops} >= {"forward", "backward", "optimizer"}
    # Eight gathers of weights but one: nobody needs the first weight in the backward, since a batch
    # has no gradient. Biases are sent padded. All gradients are reduced in one all-reduce.
    weights, biases = 7 * 2 * 512 * 1024, 4 * 4096
    reduced = 2 * 2 * (4 * 512 * 1024 + 4096)
    assert report.wire_bytes == (weights + biases + reduced) * 7 // 8
    assert report.bound_wire_bytes == 3 * 2 * parameters * 7 // 8
    assert report.timing.step == report.timing.compute + report.timing.exposed > 0
    # 6 N per row, both blocks being units of their own.
    assert report.timing.model_flops == pytest.approx(6 * 4 * 512 * 1024 * 64, rel=0.01)
    # The compiler's is of the time when it ran, also if its result is from the cache.
    assert report.planner_host_memory > 2**28
    assert again.compiler_host_memory == report.compiler_host_memory > 2**28
    # Most of HBM is free. Blocks that gather in bfloat16 already send no fewer bytes with it.
    suggested = " ".join(report.suggestions)
    assert "times the batch of a device" in suggested and "compute_dtype" not in suggested
    text = str(report)
    assert text.startswith("FITS") and "two blocks" in text
    assert report.warnings[0].startswith("gradients of 0 are reduced by a full all-reduce")
    report.save(os.path.join(cache, "plan.json"))
    assert xla_fsdp.Report.load(os.path.join(cache, "plan.json")) == report


@pytest.mark.slow
@without_ranks
def test_a_step_that_does_not_fit(cache):
    def step():
        model = nn.Sequential(nn.Linear(8, 65536), nn.Tanh(), nn.Linear(65536, 8))
        model = XlaFullyShardedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.zeros(300000, 8).to("xla")).square().sum().backward()
        optimizer.step()

    report = plan(step, V3, cache=cache, progress=False, ranks=[0])
    assert not report.fits and "78643200000" in report.refusal
    assert report.verdict.startswith("DOES NOT FIT") and report.headroom < -1
    assert "f32[300000,65536]" in str(report)
    report.plot(os.path.join(cache, "no.png"))
    assert os.path.getsize(os.path.join(cache, "no.png")) > 10_000


@without_ranks
def test_wrong_arguments(cache):
    ranks = [({"ranks": r}, ValueError, "from 0 to 7") for r in ([8], [-1], [], [True], ["0"], 3)]
    for given, error, message in (
        ({"topology": "v3-9"}, xla_fsdp.UnknownTopologyError, "v3-8"),
        ({"step": None}, TypeError, "step must be a function"),
        *ranks,
        ({"compiler_options": "--a=1"}, TypeError,
         "compiler_options must have values by name.*got '--a=1'"),
        ({"cache": 3}, TypeError, "cache must be True, False or a folder, got 3"),
        ({"compiler_options": {"xla_tpu_sliced_prefetch_max_slices": "perhaps"}}, ValueError,
         "Illegal value 'perhaps' .*sliced_prefetch_max_slices"),
        ({"launcher": "jax"}, ValueError, "launcher must be one of xla_fsdp, torch_xla, other"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            plan(**{"step": _step(), "topology": V3, **given})
    with mock.patch.object(compiler.importlib.util, "find_spec", lambda name: None):
        with pytest.raises(xla_fsdp.MissingExtraError, match=r"pip install 'xla_fsdp\[plan\]'"):
            plan(_step(), V3)
    for name, message in (
        ("xla_no_such_flag", "names xla_no_such_flag, which .* leave"),
        ("--xla_tpu_sliced_prefetch_max_slices", "write names without dashes"),
    ):
        with pytest.raises(ValueError, match=message):
            with pytest.warns(UserWarning, match=f"does not know {name}"):
                plan(_step(), V3, compiler_options={name: "1"})


@pytest.mark.slow
@without_ranks
def test_the_in_tree_class(cache):
    """With the compiler's own defaults, not the options of a TPU host: 2.67 times the bound."""
    options = {"xla_tpu_sliced_prefetch_max_slices": "4"}
    kept = dict(cache=cache, progress=False, compiler_options=options, launcher="other")
    report = plan(_step("in-tree"), V5E, ranks=[0, 7], **kept)
    assert report.wire_bytes == 29_417_520 and round(report.wire_ratio, 2) == 2.67
    synchronous = [c for c in report.schedule.collectives if not c.asynchronous]
    assert len(synchronous) == len(report.schedule.collectives) == 24
    assert report.bound_wire_bytes == 11_026_176 and report.executables == 2
    cycles = sum(op.cycles * op.times for op in report.schedule.ops)
    assert cycles == pytest.approx(299_585, rel=0.01)
    assert report.memory.temporaries == pytest.approx(3_016_192, rel=0.01)
    warnings = " ".join(report.warnings)
    assert "gradients of 0" in warnings and "full all-reduce" in warnings


@pytest.mark.slow
@without_ranks
def test_planned_on_two_slices(cache):
    """Hybrid, as by default: gathers stay within a slice, shards of gradients are summed between
    the two. Sharded over all: everything crosses as well."""
    schedules, parameters = [], 2 * 512 * 512
    for hybrid, options in (
        (True, {}),
        (True, {"device_mesh": [[0, 1, 2, 3], [4, 5, 6, 7]]}),
        (True, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}),
        (False, {"sharding_strategy": ShardingStrategy.FULL_SHARD}),
    ):

        def model(options=options):
            layers = nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512)
            return XlaFullyShardedDataParallel(nn.Sequential(*layers), **options)

        step = training_step(model, 64, 512)
        report = plan(step, "2xv5litepod-4", cache=cache, progress=False, ranks=[0, 7])
        schedules.append(report.schedule)
        assert report.fits and report.devices == 8 and report.executables == 1
        collectives = report.schedule.collectives
        across = [c for c in collectives if c.across_slices]
        assert all(c.asynchronous and c.done > c.index for c in across)
        assert {c.groups for c in across} == {((0, 4), (1, 5), (2, 6), (3, 7))}
        sent = sum(c.wire_bytes * c.times for c in across)
        if hybrid:
            assert {c.kind for c in across} == {"all-reduce"}
            assert sent == pytest.approx(4 * parameters / 4, rel=0.05)
        else:
            # Two gathers and two reductions of weights, half a shard of four each.
            assert {c.kind for c in across} == {"all-gather", "reduce-scatter"}
            assert sent == pytest.approx(2 * 4 * parameters / 4 / 2, rel=0.01)
        within = [c for c in collectives if not c.across_slices]
        assert within and all(set(sum(c.groups, ())) <= set(range(4)) for c in within)
        assert "between slices" in str(report) and "3.125 GB/s" in str(report)
        assert report.timing.collective > 2 * DCN_LATENCY
    assert schedules[0] == schedules[1] == schedules[2] != schedules[3]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return str(tmp_path_factory.mktemp("plans"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "signal, words",
    [
        ("SIGSEGV", ["exit status -11 (a crash): plan with compiler='0.0.51', or change its "
                     "options one by one with", "--xla_tpu_enable_flash_attention=true')"]),
        ("SIGKILL", ["exit status -9 (killed, perhaps by a system out of memory): use scan_blocks, "
                     "plan fewer blocks, or use a machine with more memory. Its output: "]),
    ],
)  # fmt: skip
@without_ranks
def test_a_crash_of_the_compiler_names_a_remedy(tmp_path, signal, words):
    child = tmp_path / "crashing_child.py"
    child.write_text(
        "import os, signal\n"
        "print('registers and a stack', flush=True)\n"
        f"os.kill(os.getpid(), signal.{signal})"
    )
    program_file = compiler.compile_child.program_file
    crashing = SimpleNamespace(__file__=str(child), program_file=program_file)
    options = {"xla_tpu_enable_flash_attention": "true"}
    with mock.patch.object(compiler, "compile_child", crashing):
        with pytest.raises(xla_fsdp.CompileError) as info:
            plan(_step(), V3, cache=False, progress=False, ranks=[0], compiler_options=options)
    message = str(info.value)
    for part in ("libtpu 0.0.21 gave no result for v3-8, ", *words):
        assert part in message
    output = message.rpartition("Its output: ")[2]
    assert Path(output).read_text() == "registers and a stack\n"
    Path(output).unlink()


PLAN = """
import signal
from test_plan import _step
from xla_fsdp import plan
signal.signal(signal.SIGINT, signal.default_int_handler)
plan(_step(blocks=8), "v3-8", cache=False, ranks=[0])
"""


def compiles(process):
    try:
        return any("compile_child" in word for word in process.cmdline())
    except psutil.Error:  # it has ended
        return False


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_plan_that_is_ended_leaves_nothing_behind(tmp_path, how):
    """Python acts upon no SIGTERM: the compiler notices that its parent is gone."""
    env = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": f"{ROOT}:{ROOT}/test"}
    env.pop("PJRT_DEVICE", None)  # set by importing torch_xla
    plan = psutil.Popen([sys.executable, "-c", PLAN], stderr=subprocess.DEVNULL, env=env)
    while not (compilers := [child for child in plan.children() if compiles(child)]):
        assert plan.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    plan.send_signal(how)
    assert plan.wait() == -how
    assert psutil.wait_procs(compilers, timeout=60)[1] == []
    assert list(tmp_path.glob("xla_fsdp_plan_*")) == []


def test_a_damaged_plan_counts_as_missing(tmp_path):
    memory = CompilerMemory(1, 2, 3, 4, 5, 6)
    step = CompiledStep("key", b"\x80traced", b"scheduled", "buffers", memory, "", 1.5, True, 2e9)
    cache = PlanCache.at(tmp_path)
    cache.write(step)
    assert cache.read("key") == step
    path = tmp_path / "key.json.gz"
    whole = path.read_bytes()
    right = cache.read("key")
    for number in range(0, len(whole), 5):
        for other in (whole[number] ^ 1, whole[number] ^ 0x80, 0, 255):
            path.write_bytes(whole[:number] + bytes([other]) + whole[number + 1 :])
            assert cache.read("key") in (None, right)
        path.write_bytes(whole[:number])
        assert cache.read("key") is None
    record = json.loads(gzip.decompress(whole))
    wrong = [None, 5, [], {}, "x", [None, 1], "[" * 100_000]
    wrong += [{**record, name: [1]} for name in record]
    wrong += [{**record, "memory": {**record["memory"], "code": "many"}}]
    wrong += [{**record, "key": "another"}]
    for one in wrong:
        text = one if isinstance(one, str) else json.dumps(one)
        path.write_bytes(gzip.compress(text.encode()))
        assert cache.read("key") is None, one


def test_a_fault_after_compiling_does_not_lose_the_result(tmp_path, monkeypatch):
    compiled = []

    def compile(self, key, *_):
        compiled.append(key)
        return CompiledStep(key, b"traced", b"", "", None, "refused", 1.0, False, None)

    monkeypatch.setattr(compiler.Target, "_compile", compile)
    target = compiler.Target.of("v5litepod-8", None, "xla_fsdp", None, tmp_path, Progress(None))
    given = TracedProgram(b"", {}, ()), HostOptions("")
    for _ in range(2):
        found = target.compile(*given)
        with pytest.raises(ValueError, match="not an HLO module"):
            assert found.flops
    assert found.from_cache and len(compiled) == 1


@pytest.mark.slow
def test_the_example_plans_itself(tmp_path, script_server, refused, monkeypatch):
    monkeypatch.delenv("XLA_FSDP_COMPILERS", raising=False)
    script = ROOT / "examples/train_mnist.py"
    flags = ["--plan=v3-8", "--plan_report=plan.png", "--plan_report=plan.html"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    done = script_server.run([script, *flags], cwd=tmp_path, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("FITS") and "MNIST network" in done.stdout
    assert {path.name for path in tmp_path.glob("*.*")} == {"plan.png", "plan.html"}
    refused(
        "train_mnist",
        (["--plan=v3-9"], "Did you mean v3-8"),
        (["--plan=v3-8", "--plan_report=x.txt"], ".json, .png or .html"),
        (["--plan="], "must name a slice"),
        (["--plan=v3-8", "--plan_report=no/x.png"], "give a file name in a writable folder"),
        (["--plan=v3-8", "--calibration=."], "--calibration=.: Is a directory"),
        (["--plan=tpu7x-8"], "plan_compiler install"),
    )

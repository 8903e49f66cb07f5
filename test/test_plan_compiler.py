"""The compiler of a plan: which one it is, how it is installed, and errors where it is none."""

import json
import os
import re
import sys
from functools import partial
from unittest import mock

import pytest
import torch
from on_ranks import raises, without_ranks
from planned import training_step
from processes import run_command, shell_script
from test_topology import check_slices
from torch import nn

from xla_fsdp import CompileError, UnusableCompilerError, plan, plan_compiler
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.compiled.host_options import HostOptions
from xla_fsdp.layers import scaled_dot_product_attention
from xla_fsdp.plan_compiler import COMMAND, TESTED, find_compiler, install
from xla_fsdp.planning.compiling.compile_child import Names, _leave_out_tilings
from xla_fsdp.planning.compiling.compiler import Target
from xla_fsdp.planning.compiling.plan_cache import PlanCache
from xla_fsdp.planning.compiling.progress import Progress
from xla_fsdp.planning.tracing.traced import PartitionedProgram
from xla_fsdp.tpu.chips import CHIPS
from xla_fsdp.tpu.topology import resolve

OWN = find_compiler().versions["libtpu"]


def interpreter(folder, script):
    folder.mkdir(parents=True, exist_ok=True)
    return shell_script(folder / "python", script)


def says(tmp_path, folder="env", **found):
    text = json.dumps({"jax": "1", "jaxlib": "1", "python": "3.99", "library": "/x.so", **found})
    return interpreter(tmp_path / folder / "bin", f"echo '{text}'")


class TestFinding:
    def test_the_default_is_this_environment(self):
        raises(TypeError, "a version of libtpu, a folder or an interpreter", find_compiler, 51)
        found = find_compiler()
        assert found.python == sys.executable and found.library.endswith("libtpu.so")
        assert found.versions["libtpu"] == "0.0.21" and found.versions["jax"] == "0.7.1"
        assert found == find_compiler(sys.executable) == find_compiler("0.0.21")

    def test_the_newest_tested_that_is_installed_is_the_default(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XLA_FSDP_COMPILERS", str(tmp_path))
        for version in ("0.0.51", "0.0.21", "9.9.9"):
            says(tmp_path / version, folder="", libtpu=version)
        assert next(iter(TESTED)) == "0.0.51"
        assert find_compiler().versions["libtpu"] == "0.0.51"
        assert find_compiler("9.9.9").versions["libtpu"] == "9.9.9"  # not tested, but named

    def test_a_folder_and_an_interpreter(self, tmp_path):
        path = says(tmp_path, libtpu="0.0.60")
        for named in (path, str(path), tmp_path / "env", str(tmp_path / "env")):
            found = find_compiler(named)
            assert found.python == str(path) and found.library == "/x.so"
            assert list(found.versions) == ["jaxlib", "libtpu", "jax", "python"]
        told = plan_compiler.changed_environment(found.environment)
        assert told["TPU_LIBRARY_PATH"] == "/x.so" and "PYTHONPATH" not in told

    @pytest.mark.parametrize(
        ("wanted", "message"),  # a list is what an interpreter runs, a mapping what it says
        [
            ("0.0.51", rf"compiler='0.0.51' is not installed: {COMMAND}$"),
            ("0.0.33", r"'0.0.33' is not installed and was not tested: pass one of 0.0.51, "),
            ("libtpu-51", r"compiler='libtpu-51' is no file: .*tested: 0.0.51, 0.0.21"),
            ("/tmp", r"compiler='/tmp' has no bin/python: .* --folder PATH$"),
            ("/etc/passwd", r"/etc/passwd does not run as a Python interpreter \(.*denied"),
            (["echo gone >&2; exit 3"], r"exit status 3 \(gone\): install one"),
            (["echo hello"], r"does not run as a Python interpreter"),
            ({"libtpu": ""}, "has no libtpu: install one"),
            ({"jax": "", "jaxlib": "", "libtpu": "1"}, "has no jax, jaxlib: install one"),
            ({"libtpu": "1", "library": ""}, "has no libtpu.so"),
        ],
    )
    def test_what_is_none(self, tmp_path, wanted, message):
        if isinstance(wanted, list):
            wanted = interpreter(tmp_path, *wanted)
        elif isinstance(wanted, dict):
            wanted = says(tmp_path, **wanted)
        with pytest.raises(UnusableCompilerError, match=message) as info:
            find_compiler(wanted)
        assert "\n" not in str(info.value) and COMMAND in str(info.value)

    def test_a_real_interpreter_without_the_compiler(self, tmp_path):
        run_command(sys.executable, "-m", "venv", "--without-pip", tmp_path / "empty")
        with pytest.raises(UnusableCompilerError, match="has no jax, jaxlib, libtpu"):
            find_compiler(tmp_path / "empty")

    def test_a_refusal_of_the_compiler_names_the_slice(self):
        find_compiler().require_knows(CHIPS["v6e"])
        told = plan_compiler.refusal_of("0.0.51", "v6e:2x4", "no\nsuch")
        assert told.endswith("for v6e:2x4 (no such): name another slice")


class TestInstalling:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"version": "0.0.1"}, "'0.0.1' of libtpu was not tested: pass one of 0.0.51, 0.0.21"),
            ({"python": "/bin/false"}, r"venv failed with /bin/false \(no message\)"),
            ({"folder": ".", "python": "/bin/false"}, "venv failed"),
            ({"folder": ""}, "--folder is empty"),
            ({"python": "/no/python"}, r"/no/python does not run .*another --python"),
        ],
    )
    def test_what_fails(self, tmp_path, monkeypatch, options, message):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(UnusableCompilerError, match=message) as info:
            install(**{"folder": tmp_path / "new", **options})
        assert "\n" not in str(info.value)
        assert not any(tmp_path.iterdir())  # nothing half made

    def test_a_user_without_a_home_folder(self, monkeypatch, capsys):
        for name in ("HOME", "XDG_CACHE_HOME", "XLA_FSDP_COMPILERS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(os, "getuid", lambda: 2**31 - 9)
        assert plan_compiler.main(["install"]) == 2  # made a folder that was called "~"
        assert "set HOME or XDG_CACHE_HOME" in capsys.readouterr().err

    def test_a_folder_of_something_else(self, tmp_path):
        (tmp_path / "notes").write_text("keep")
        with pytest.raises(UnusableCompilerError, match="is no virtual environment: pass another"):
            install(folder=tmp_path)

    @pytest.mark.slow
    def test_pip_fails(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        said = r"pip install jax==0.12.0.1 libtpu==0.0.51"
        raises(UnusableCompilerError, said, install, folder=tmp_path / "new", python=sys.executable)
        assert not any(tmp_path.iterdir())

    def test_one_that_is_there_stays(self, tmp_path):
        path = says(tmp_path, libtpu="0.0.51")
        assert install(folder=tmp_path / "env") == tmp_path / "env"
        assert path.exists()

    def test_the_command(self, tmp_path, capsys, monkeypatch):
        assert plan_compiler.main(["show"]) == 0
        assert f"libtpu {OWN}" in capsys.readouterr().out
        assert plan_compiler.main(["install", "--version", "1.1"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: version '1.1'") and err.count("\n") == 1
        monkeypatch.setattr(
            plan_compiler, "find_compiler", mock.Mock(side_effect=KeyboardInterrupt)
        )
        assert plan_compiler.main(["show"]) == 130


def step(width=1024):
    def model():
        fsdp = partial(FSDP, compute_dtype=torch.bfloat16)
        return fsdp(nn.Sequential(*(fsdp(nn.Linear(width, width)) for _ in range(2))))

    return training_step(model, 16, width)


class Attention(nn.Linear):
    def forward(self, x):
        q, k, v = super().forward(x).unflatten(-1, (3, 8, 128)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, implementation="kernel")
        return mixed.transpose(1, 2).flatten(2)


def attention():
    return FSDP(Attention(1024, 3 * 1024), compute_dtype=torch.bfloat16)


@without_ranks
def test_tilings_that_say_nothing():
    """Kernels lose an attribute of jaxlib 0.12 that is empty, and keep one that is not."""
    jax = Names()
    text = """func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{
      %0 = stablehlo.custom_call @tpu_custom_call(%x) {{result_tilings = {}}}
        : (tensor<4xf32>) -> tensor<4xf32>
      return %0 : tensor<4xf32>
    }}"""
    for tilings, stays in (("[[], []]", False), ("[[8, 128]]", True)):
        with jax.make_ir_context():
            module = jax.ir.Module.parse(text.format(tilings))
            _leave_out_tilings(jax.ir, module)
            assert ("result_tilings" in str(module)) == stays and "tpu_custom_call" in str(module)


@without_ranks
def test_one_line_for_what_cannot_compile(tmp_path):
    text = b"module { func.func @main() { return } }"
    program = PartitionedProgram(text, "nothing", False, 8, (), {}, 1, 4, 1.0)

    def refused(name, compiler):
        target = Target(resolve(name), compiler, "xla_fsdp", {}, PlanCache(None), Progress(None))
        with pytest.raises(UnusableCompilerError) as info:
            target.compile(program, HostOptions(""))
        assert "\n" not in str(info.value)
        return str(info.value)

    found = find_compiler()
    message = refused("tpu7x-8", found)
    assert re.search(r"0.0.21 does not compile for tpu7x-8 \(tpu7x:2x2x1\) \(.*TPU7x", message)
    assert message.endswith(f"plan with compiler='0.0.51', after: {COMMAND}")
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax/__init__.py").touch()
    moved = plan_compiler.Compiler(
        found.python, found.versions, found.library, {"PYTHONPATH": str(tmp_path)}
    )
    message = refused("v6e-8", moved)
    assert re.search(r"jax 0.7.1 of .* has no jax\.experimental\.topologies\.get_topology", message)
    assert message.endswith(f"install a tested release: {COMMAND}")
    with pytest.raises(UnusableCompilerError, match="is not installed"):
        plan(step(), "v6e-8", compiler="0.0.51")
    message = f"for tpu7x: plan with compiler='0.0.51', after: {COMMAND}"
    with pytest.raises(UnusableCompilerError, match=f"libtpu 0.0.21 does not compile {message}$"):
        plan(step(), "tpu7x-8")


@pytest.mark.full
@without_ranks
def test_an_installed_compiler_plans_the_same_program(installed, tmp_path):
    newest, cache = installed, tmp_path
    found = find_compiler(installed)
    assert found.versions["libtpu"] == "0.0.51" and found.versions["jax"] == TESTED["0.0.51"].jax
    listed = run_command(found.python, "-m", "pip", "list").stdout
    assert "jax" in listed and "torch" not in listed
    assert [one.name for one in installed.parent.iterdir()] == ["0.0.51"]

    def report(name, compiler):
        return plan(step(), name, compiler=compiler, cache=cache, progress=False, ranks=[0])

    compilers = {"0.0.21": "0.0.21", "0.0.51": newest}
    found = {version: report("v6e-8", compiler) for version, compiler in compilers.items()}
    for version, one in found.items():
        assert one.fits and one.versions["libtpu"] == version and f"libtpu {version}" in str(one)
        assert one.versions["jax"] == TESTED[version].jax and one.timing.step > 0
        assert one.versions["python"].startswith(TESTED[version].python)
    old, new = found.values()
    assert new.memory.arguments == old.memory.arguments
    assert new.timing.model_flops == old.timing.model_flops
    assert {c.asked or c.kind for c in new.schedule.collectives} >= {"all-gather"}
    assert new.wire_bytes == pytest.approx(old.wire_bytes, rel=0.03)

    ironwood = report("tpu7x:2x2x1", newest)
    assert ironwood.fits and ironwood.devices == 8 and ironwood.chip == "tpu7x"
    assert ironwood.memory.arguments == new.memory.arguments
    assert ironwood.timing.model_flops == new.timing.model_flops
    offloaded = [c for c in ironwood.schedule.collectives if c.emitter == "SparseCore"]
    assert offloaded and all(c.asynchronous and c.group_size == 8 for c in offloaded)
    # Nobody needs the first weight in the backward: one gather of two blocks' is dropped.
    assert 0.8 < ironwood.wire_bytes / ironwood.bound_wire_bytes < 1.1
    assert 0 < ironwood.timing.compute < 1e-3
    assert report("tpu7x:2x2x1", newest).from_cache

    # A kernel, written by jax 0.7.1 in this process, is read by both.
    kernels = {
        version: plan(
            training_step(attention, 2, 1024, 1024), "v6e-8", compiler=one, cache=cache, ranks=[0]
        )
        for version, one in compilers.items()
    }
    for one in kernels.values():
        assert one.fits and sum(op.work == "kernel" for op in one.schedule.ops) >= 3
    old, new = kernels.values()
    assert new.timing.model_flops == old.timing.model_flops

    with pytest.raises(CompileError) as info:
        plan(step(256), "v6e-8", compiler=newest, cache=cache, ranks=[0])
    message = str(info.value)
    assert "\n" not in message and "plan with compiler='0.0.21'" in message
    assert message.startswith("libtpu 0.0.51 gave no result for v6e-8, exit status -")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return install("0.0.51", tmp_path_factory.mktemp("compilers") / "0.0.51")


@pytest.mark.full
def test_libtpu_describes_the_slices_of_tpu7x(installed):
    found = find_compiler(installed)
    slices = ("tpu7x-8", "tpu7x-32", "tpu7x-128", "tpu7x-512")
    check_slices(slices, found.python, plan_compiler.changed_environment(found.environment))

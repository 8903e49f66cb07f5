"""Shared by all tests: ranks to run functions on, and scripts in processes of their own."""

import gc
import json
import os
import signal
import tempfile
from concurrent.futures import ProcessPoolExecutor
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import pytest
from processes import import_for_good
from script_server import ScriptServer

pytest_plugins = ["xla_fsdp.testing"]

# Tests compile many programs and run each a few times: compile them quickly. Each program is
# generated as one module instead of 32, and in the order in which it needs least memory.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false "
    "--xla_cpu_parallel_codegen_split_count=1 "
    "--xla_cpu_enable_concurrency_optimized_scheduler=false",
)
# Programs that this run has compiled are there for all its ranks, and gone with it: no run depends
# on an earlier one. Workers of pytest-xdist inherit the folder of the process they are of.
if "TEST_PROGRAMS" not in os.environ:
    _programs = tempfile.TemporaryDirectory(prefix="programs-", ignore_cleanup_errors=True)
    os.environ["TEST_PROGRAMS"] = _programs.name
    os.environ["TEST_PROCESS"] = str(os.getpid())
# Plans of tests are made by the libtpu of this environment, whatever else is installed.
os.environ["XLA_FSDP_COMPILERS"] = os.path.join(os.environ["TEST_PROGRAMS"], "compilers")
# One process more than processors: tests wait for launchers, time limits and disks.
os.environ.setdefault("PYTEST_XDIST_AUTO_NUM_WORKERS", str(min(4, (os.cpu_count() or 1) + 1)))
# Small tensors: the threads of torch would mostly wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what it runs in the background with Ctrl-C ignored, and that is inherited: the
# tests that interrupt a process would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"

# Files that take longest, of `make test` or of `make test-slow`. They start first: no process is
# left alone with one at the end.
LONG = """test_example_images test_peers test_scan test_hf_combinations test_parity
test_hf_trainer test_lightning_table test_plan test_verifying test_example_mnist
test_hf_accelerate test_optim test_checkpoint_faults
test_checkpoint_elastic test_engine_combinations test_hf_pairs test_offload test_lightning
test_compile_cache test_consolidate_crash test_launch_failures test_strategy test_example_gpt
test_summon test_random_state test_checkpoint_crash test_launch test_packaging
test_schedule test_optim_bfloat16 test_spawned test_attention
test_torch_checkpoint test_testing_fixture test_hf_loading test_slices test_tuning
test_example_llama test_unsharded test_optim_8bit test_freeing test_hf_models test_comm_hooks
test_scan_carries test_sharded_parameter test_full_state test_batch_norm test_watchdog
test_plan_tracing""".split()


# What test modules import, and what they are made of, stays: no collection need look through it.
gc.disable()


def pytest_configure():
    from xla_fsdp.testing import keep_programs  # a plugin: not before pytest has loaded it

    keep_programs(os.environ["TEST_PROGRAMS"])


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items):
    place = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="session")
def script_server():
    """One for all workers of pytest-xdist."""
    folder = os.path.join(os.environ["TEST_PROGRAMS"], "scripts")
    return ScriptServer(folder, "torch_xla.core.xla_model", "torchvision")


@pytest.fixture(scope="session")
def plain_server():
    """The same for scripts that are to work where there is no torch_xla."""
    folder = os.path.join(os.environ["TEST_PROGRAMS"], "plain-scripts")
    return ScriptServer(folder, "torchvision", "safetensors.torch")


@pytest.fixture(scope="session")
def cache_of_examples(tmp_path_factory):
    """Where examples keep their programs, for each other."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def run_example(tmp_path, script_server, plain_server, cache_of_examples):
    """``run_example(script, *flags, timeout=1500, **environment)``: in an empty folder, the way a
    user does, and with the programs that examples have compiled in this run."""

    def run(script, *flags, timeout=1500, **environment):
        cache = {"XDG_CACHE_HOME": str(cache_of_examples)}
        environment = {**os.environ, **cache, **environment}
        own = any("compilation_cache" in flag or "profile_steps" in flag for flag in flags)
        if script.startswith("train") and not own:
            flags = (*flags, f"--compilation_cache={cache_of_examples / 'programs'}")
        server = plain_server if script == "evaluate.py" else script_server
        return server.run(
            [EXAMPLES / script, *flags], cwd=tmp_path, env=environment, timeout=timeout,
            python=plain_server.python,
        )  # fmt: skip

    return run


@pytest.fixture
def run_script(tmp_path, script_server):
    """``run_script(text, *args, env={}, timeout=1500)``: Python in a process of its own, which ends
    with ``code``, or with any for None."""

    def run(text, *args, env=None, timeout=1500, cwd=None, code=None):
        path = tmp_path / "script.py"
        path.write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_THREAD_POOL_SIZE", "NPROC"):
            environment.pop(name, None)
        environment.update(env or {})
        done = script_server.run([path, *args], cwd=cwd, env=environment, timeout=timeout)
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def common(monkeypatch):
    """The helpers of the examples: ``common.script`` imports that module, and ``common.digits`` one
    that lies beside the scripts. Two scripts give flags the same names: of those that define flags
    a process can import one, see test_example_gpt.py."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    class Helpers:
        def __getattr__(self, name):
            beside = (EXAMPLES / f"{name}.py").exists()
            return import_module(name if beside else f"common.{name}")

    return Helpers()


@pytest.fixture
def refused(run_script, tmp_path):
    """``refused(module, (flags, words), ...)``: each ends in one line with the words, and code 2.
    All in one process: an example takes seconds to import. Returns what they print besides."""

    def check(module, *cases):
        done = run_script(
            "import contextlib, importlib, io, json, sys\n"
            "_, folder, module, cases = sys.argv\n"
            "sys.path.insert(0, folder)\n"
            "from absl import flags\n"
            "from common import script\n"
            "main = importlib.import_module(module).main\n"
            "found = []\n"
            "for case in json.loads(cases):\n"
            "    for name in flags.FLAGS:\n"
            "        flags.FLAGS[name].unparse()\n"
            "    flags.FLAGS.unparse_flags()\n"
            "    sys.argv, said, told = [module, *case], io.StringIO(), io.StringIO()\n"
            "    try:\n"
            "        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(told):\n"
            "            script.run(main)\n"
            "    except SystemExit as end:\n"
            "        found.append((end.code, said.getvalue(), told.getvalue()))\n"
            "print(json.dumps(found))\n",
            EXAMPLES, module, json.dumps([flags for flags, _ in cases]),
            env={"XDG_CACHE_HOME": str(tmp_path / "cache")}, cwd=tmp_path,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert len(found) == len(cases)
        for (given, words), (code, said, _) in zip(cases, found, strict=True):
            assert code == 2 and words in said and said.count("\n") == 1, (given, code, said)
        return "".join(told for _, _, told in found)

    return check


@pytest.fixture(scope="session")
def forks():
    """``forks(fn, *args)`` runs a function of a test module in a process that may fork: everything
    is imported there, and no thread ever started."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result(timeout=900)


@pytest.fixture(scope="session")
def elsewhere():
    """``elsewhere(fn, *args)`` runs a function of a test module in a process without ranks."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=import_for_good) as pool:
        yield lambda fn, *args: pool.submit(fn, *args).result()

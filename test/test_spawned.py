"""Ranks in processes of their own, as on TPU: torch_xla starts the processes, here on the CPU."""

import os
import signal
import subprocess
import sys
import time

import pytest
from on_ranks import only_full

# Two processes, each a world of its own for XLA: no CPU has collectives between processes. The one
# that does not fail waits as long as a collective would. It is the one started last that fails, of
# which the pool of processes does not always know; here it never does.
SCRIPT = """
import os, sys, time
from types import SimpleNamespace

class Local(Exception):
    def __init__(self, message, code):
        super().__init__(message, code)
        self.message, self.code = message, code

class NotPortable(Exception):
    def __init__(self, lock):
        super().__init__("no", lock)

def train(rank, how, folder):
    if how != "well":
        with open(os.path.join(folder, str(os.getpid())), "w"):
            pass
        while len(os.listdir(folder)) < 2:  # both are there
            time.sleep(0.01)
        if how != "wait" and os.getpid() == max(map(int, os.listdir(folder))):
            fail(how)
        time.sleep(3600)
    sys.exit(0)

def fail(how):
    import threading
    if how == "kill":
        os.kill(os.getpid(), 9)
    if how == "full":
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if how == "lock":
        raise NotPortable(threading.Lock())
    raise Local("no such image", 2)

if __name__ == "__main__":
    from concurrent.futures.process import _ExecutorManagerThread as Pool
    from torch_xla._internal import pjrt
    import xla_fsdp
    from xla_fsdp.ranks import spawned
    if len(sys.argv) < 4:  # how they start is no matter: 14 s of imports less
        import torch.multiprocessing as processes
        get_context = processes.get_context
        processes.get_context = lambda way: get_context("fork")
    pjrt.plugins.using_dynamic_plugins = lambda: True
    count = 1 if sys.argv[1] == "well" else 2
    plugin = {"physical_chip_count": lambda: count, "configure_multiprocess": lambda *of: None}
    pjrt.plugins.default = lambda: SimpleNamespace(**plugin)
    class First(dict):
        def values(self):
            return list(super().values())[:1]
    wait = Pool.wait_result_broken_or_wakeup
    def wait_for_the_first(pool):
        processes, pool.processes = pool.processes, First(pool.processes)
        try:
            return wait(pool)
        finally:
            pool.processes = processes
    Pool.wait_result_broken_or_wakeup = wait_for_the_first
    try:
        spawned.run_spawned(train, sys.argv[1:3])
    except xla_fsdp.RankError as error:
        cause = error.__cause__
        print(type(cause).__name__, getattr(cause, "code", None), error.rank)
        print(error)
    except KeyboardInterrupt:
        print("interrupted")
    for name in os.listdir(sys.argv[2]):
        try:
            os.kill(int(name), 0)
        except ProcessLookupError:
            continue
        print("left behind:", name)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "processes").mkdir()
    return tmp_path / "processes"


@pytest.mark.parametrize(
    ("how", "start", "first", "words"),
    [
        ("raise", (), "Local 2 0", "raised Local: ('no such image', 2)\n\nTraceback"),
        only_full("raise", ("spawn",), "Local 2 0", ""),
        ("lock", (), "BrokenProcessPool None 0", "raised NotPortable: ('no', <unlocked"),
        ("kill", (), "BrokenProcessPool None None", "ended without a report"),
        ("full", (), "BrokenProcessPool None None", "ended without a report: look above"),
    ],
)
def test_one_that_fails_ends_all(run_script, folder, how, start, first, words):
    done = run_script(SCRIPT, how, folder, *start, env={"PJRT_DEVICE": "CPU"}, code=0)
    assert done.stdout.splitlines()[0] == first
    assert words in done.stdout and "left behind" not in done.stdout
    # What could not be reported is printed.
    assert ("Local: ('no such image', 2)" in done.stderr) == (how == "full")


@pytest.mark.slow
def test_an_interrupt_ends_all(tmp_path, folder):
    (tmp_path / "script.py").write_text(SCRIPT)
    started = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), "wait", str(folder)],
        env={**os.environ, "PJRT_DEVICE": "CPU"}, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        while started.poll() is None and len(os.listdir(folder)) < 2:
            time.sleep(0.1)
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does
        assert started.communicate(timeout=900)[0] == "interrupted\n"
        assert started.returncode == 0
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()


def test_a_rank_may_end_itself_well(run_script, folder):
    done = run_script(SCRIPT, "well", folder, env={"PJRT_DEVICE": "CPU"})
    assert done.returncode == 0 and done.stdout == "", done.stderr


def test_what_a_notebook_defines_is_refused_on_a_tpu(run_script):
    # Its main module has no file.
    script = "import xla_fsdp\ndel __file__\ndef train(rank): pass\nxla_fsdp.launch(train)"
    done = run_script(script, env={"PJRT_DEVICE": "TPU"})
    told = "RuntimeError: train is defined in a notebook or in an interactive session"
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(told)

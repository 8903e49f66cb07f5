"""A rank that is a process and hangs is named, with the stacks of all, and ends the others."""

import os
import re

import pytest
from processes import ended

# Two processes as torch_xla starts them, but forked, which saves imports. No CPU has collectives
# between processes: in the place of XLA's sync stands one that waits for the other rank, as a
# program with a collective does.
SCRIPT = """
import ctypes, functools, os, sys, time
from types import SimpleNamespace
import torch_xla
import torch_xla.runtime as xr
from torch_xla._internal import pjrt
import xla_fsdp
from xla_fsdp.ranks import spawned

met, folder = 0, sys.argv[2]

def meet(*_, **__):
    global met
    met += 1
    rank = int(os.environ["PJRT_LOCAL_PROCESS_RANK"])
    open(os.path.join(folder, f"met-{met}-{rank}"), "w").close()
    while not os.path.exists(os.path.join(folder, f"met-{met}-{1 - rank}")):
        time.sleep(0.01)

def read_images(how):
    if how == "lock":
        ctypes.PyDLL(None).sleep(3600)  # keeps the interpreter's lock
    time.sleep(2.0 if how == "slow" else 3600)

def train(_, how):
    open(os.path.join(folder, f"pid-{os.getpid()}"), "w").close()
    torch_xla.sync()
    if os.environ["PJRT_LOCAL_PROCESS_RANK"] == "1":
        read_images(how)
    torch_xla.sync()

torch_xla._XLAC._xla_step_marker = meet
xr.world_size = lambda: 2  # a CPU process is a world of 1
xr.global_ordinal = lambda: int(os.environ["PJRT_LOCAL_PROCESS_RANK"])
torch_xla.launch = functools.partial(torch_xla.launch, start_method="fork")
pjrt.plugins.using_dynamic_plugins = lambda: True
pjrt.plugins.default = lambda: SimpleNamespace(
    physical_chip_count=lambda: 2, configure_multiprocess=lambda *_: None
)
pjrt._merge_replica_results = dict
try:
    spawned.run(train, sys.argv[1:2], 5.0)
except xla_fsdp.RankTimeoutError as error:
    print(error)
    sys.exit(1)
print("done")
"""


@pytest.fixture
def run(run_script, tmp_path):
    """``run(how)`` runs the script; no rank outlives it."""

    def here(how):
        ranks = tmp_path / "ranks"
        ranks.mkdir()
        done = run_script(SCRIPT, how, ranks, env={"PJRT_DEVICE": "CPU"}, timeout=120)
        for name in os.listdir(ranks):
            if name.startswith("pid-"):
                assert ended(name.removeprefix("pid-"))
        return done

    return here


def test_a_rank_that_reads_for_ever_is_named(run):
    done = run("data")
    assert done.returncode == 1, done.stderr
    first, *rest = done.stdout.splitlines()
    expected = "ranks have waited for 5 s (the timeout given to launch) for one that did not come:"
    assert first == expected
    assert re.match(
        r"  rank 0: torch_xla.sync\(\), at \S+script.py:\d+ in train, for \d+ s", rest[0]
    )
    assert re.match(
        r"  rank 1: running, at \S+script.py:\d+ in read_images \(after 1 wait", rest[1]
    )
    stacks = done.stdout.split("Stacks of ")
    assert [part.partition(":")[0] for part in sorted(stacks[1:])] == ["rank 0", "rank 1"]
    assert "in read_images" in done.stdout.split("Stacks of rank 1")[1].split("Stacks of")[0]
    assert "in meet" in done.stdout.split("Stacks of rank 0")[1].split("Stacks of")[0]


def test_one_that_keeps_the_interpreters_lock_too(run):
    done = run("lock")
    assert done.returncode == 1, done.stderr
    assert "no sign of life for" in done.stdout
    own = done.stdout.split("Stacks of rank 1")[1].split("Stacks of")[0]
    assert "script.py" in own and "in read_images" in own


def test_one_that_is_slow_is_waited_for(run):
    done = run("slow")
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([9, 7], "ranks 7, 9")],
)
def test_many_ranks_are_told_in_short(numbers, text):
    from xla_fsdp.ranks.watchdog import _ranks

    assert _ranks(numbers) == text

"""Ranks in processes that hang: which one, and where, in one report; and none without need."""

import json
import re

import pytest

from xla_fsdp.ranks.watchdog import waits
from xla_fsdp.ranks.watchdog.report import RankPlace, report
from xla_fsdp.ranks.watchdog.settings import WatchSettings, settings

# Ranks in processes wait for each other in files, in a function that has its file in torch_xla's
# folder: no CPU has collectives between processes.
WAITING = """
import ctypes, json, multiprocessing, os, queue, signal, socket, sys, threading, time
import torch, torch_xla
import torch_xla.runtime as xr
from pathlib import Path
from xla_fsdp.ranks.channel import served
from xla_fsdp.ranks.watchdog.watch import watched

folder = Path(sys.argv[1])
waiting = '''
def all_reduce(path, size):
    while len(list(path.parent.glob(path.name + ".*"))) < size:
        time.sleep(0.02)
'''
exec(compile(waiting, os.path.join(os.path.dirname(torch_xla.__file__), "waiting.py"), "exec"))

def with_pythons_lock(name):
    file = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(file, True)
    ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)
"""

# Three processes, forked, each a world of its own for XLA.
PROCESSES = """
SIZE = 3

def collective(rank, name):
    (folder / f"{name}.{rank}").touch()
    all_reduce(folder / name, SIZE)

def step(rank, name):
    torch_xla.sync()
    collective(rank, name)

def until_told(name):
    while not (folder / f"{name}-over").exists():
        time.sleep(0.05)

def in_host_code(name):
    until_told(name)

def in_data(name):
    batches = queue.Queue()
    threading.Thread(target=lambda: (until_told(name), batches.put(1)), daemon=True).start()
    batches.get()

def train(rank):
    for number in range(2):
        step(rank, f"first{number}")
    for hangs, where in ((1, in_host_code), (2, in_data), (0, with_pythons_lock)):
        if rank == hangs:
            where(where.__name__)
        step(rank, where.__name__)
        torch_xla.sync()
    if rank != 1:
        collective(rank, "left out")
    else:
        until_told("left out")
        collective(rank, "left out")
    for number in range(10):  # slow, and in no hurry
        time.sleep(0.3 if rank else 0.01)
        step(rank, f"slow{number}")
    os.write(2, b"all were slow\\n")  # at once: print writes the end of the line by itself
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    step(rank, "killed")

def process(rank, write):
    os.dup2(write, 2)
    xr.world_size, xr.global_ordinal = lambda: SIZE, lambda: rank
    watched(train, 3.0)(rank)

def main():
    read, write = os.pipe()
    os.mkfifo(folder / "with_pythons_lock")
    keep = os.open(folder / "with_pythons_lock", os.O_RDWR)
    context = multiprocessing.get_context("fork")
    with served():
        ranks = [context.Process(target=process, args=(rank, write)) for rank in range(SIZE)]
        for rank in ranks:
            rank.start()
        os.close(write)
        told, lines = [], os.fdopen(read)
        for name in ("in_host_code", "in_data", "with_pythons_lock", "left out", "killed"):
            text = ""
            while not text.endswith("\\n\\n"):
                line = lines.readline()
                assert line, text
                text += line
            told.append(text)
            if name == "with_pythons_lock":
                os.write(keep, b"1")
            (folder / f"{name}-over").touch()
        for rank in ranks:
            rank.kill()
            rank.join()
    print(json.dumps(told))

main()
"""


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_no_other(run_script, tmp_path):
    (tmp_path / "there").mkdir()
    done = run_script(
        WAITING + PROCESSES, tmp_path / "there", env={"PJRT_DEVICE": "CPU"}, timeout=200
    )
    assert done.returncode == 0, done.stderr
    host, data, lock, left_out, killed = json.loads(done.stdout)

    assert "s (timeout=3); behind the others: rank 1, running, at " in host
    assert re.search(r"\n  ranks 0, 2: waiting for the device or other ranks, at .*\.py:\d+", host)
    assert "in until_told, after 2 steps\nstack of rank" in host  # of both, or caught elsewhere
    assert "until_told(name)" in host and "in all_reduce" in host and "in main" not in host
    assert "behind the others: rank 2, waiting at a queue, at " in data
    assert re.search(r"  thread Thread-\d+ .*: .*\.py:\d+ in until_told\n", data)
    # What its own thread could not tell while another one watched in its place.
    assert re.search(
        r"silent: rank 0, no sign of life for at least \d+ s, at .* with_pythons_lock, a", lock
    )
    assert "stack of rank 0, process " in lock and ", line " in lock and "in train\n" in lock
    # As many steps as the others, and then another place.
    assert "not waiting like the others: rank 1, running, at " in left_out
    assert killed.count("all were slow\n") == 3, "and nothing was told of that"
    assert re.search(r"silent: rank 0, no sign of life for at least \d+ s, after", killed)
    assert "  its process has ended\n" in killed
    for text in (data, left_out):
        assert text.startswith("xla_fsdp: ranks make progress again, ")


# Two ranks of one process, as on TPU v2 and v3, and a collective of XLA's.
PAIR = """
import functools, sys, time
import torch, torch_xla
import torch_xla.core.xla_model as xm
import xla_fsdp
from xla_fsdp.ranks import spawned
from xla_fsdp.ranks.watchdog.watch import watched

def train(rank):
    x = torch.ones(2, device="xla")
    torch_xla.sync()
    if rank == 1:
        next_batch()
    xm.all_reduce(xm.REDUCE_SUM, x).sum().item()

def next_batch():
    time.sleep(3600)

torch_xla.launch = functools.partial(torch_xla.launch, start_method="fork")
try:
    spawned.run(watched(train, 600.0), ())
except xla_fsdp.RankTimeoutError as error:
    print(error.rank, error)
"""


def test_ranks_are_ended_if_that_is_asked_for(run_script):
    env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "XLA_FSDP_WATCHDOG": "1.5,end"}
    done = run_script(PAIR, env=env, timeout=200)
    assert done.returncode == 0, done.stderr
    words = r"1 no rank has made progress for \d+ s \(timeout=1.5\); not waiting like the others: "
    assert re.match(
        words + r"rank 1, running, at .* in next_batch, after \d steps. All", done.stdout
    )
    assert "rank 0: waiting for the device or other ranks, at " in done.stderr
    assert "time.sleep(3600)" in done.stderr and ".sum().item()" in done.stderr


ALONE = """
import time
import torch_xla
import torch_xla.runtime as xr
from xla_fsdp.ranks.channel import served
from xla_fsdp.ranks.watchdog.watch import watched

xr.world_size, xr.global_ordinal = lambda: 2, lambda: 0

def without_a_store(rank):
    time.sleep(0.5)
    return "returned"

def losing_it(rank):
    torch_xla.sync()
    time.sleep(0.5)
    serving.__exit__(None, None, None)
    time.sleep(4)

print(watched(without_a_store, 1.0)(0))
serving = served()
serving.__enter__()
watched(losing_it, 1.0)(0)
"""


def test_without_a_store_nobody_watches_and_when_it_is_lost_each_itself(run_script):
    done = run_script(ALONE, env={"PJRT_DEVICE": "CPU"}, timeout=200)
    assert done.returncode == 0 and done.stdout == "returned\n", done.stderr
    said = done.stderr
    words = "xla_fsdp: no watchdog for rank 0, so a hang is not reported: these 2 ranks have no sto"
    assert words in said
    assert re.search(r"rank 0 has made no progress for \d+ s. The other ranks are unknown", said)
    assert "in losing_it\n    time.sleep(4)\n" in said


def test_what_is_compiled_is_work(monkeypatch):
    counts = {}
    now, processor = iter(range(100)), iter([0.0] * 8 + [0.9, 1.8])
    monkeypatch.setattr(waits, "_counter", lambda name: counts.get(name, 0))
    monkeypatch.setattr(waits.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(waits.time, "process_time", lambda: next(processor))
    progress = waits.Progress()

    def look(**more):
        counts.update(more)
        return progress.look()

    assert look() == (0, 0, "")
    assert look(CreateCompileHandles=2) == (0, 0, "")  # not by a sync
    assert look(MarkStep=1, UncachedCompile=1) == (1, 0, "compiling")
    assert look() == (1, 1, "compiling")
    assert look(CreateCompileHandles=3) == (1, 0, "")
    assert look(MarkStep=2) == (2, 0, "")
    assert look() == (2, 1, "")
    assert look(ExecuteComputation=1) == (2, 0, "")
    assert look() == (2, 1, "computing")
    assert look() == (2, 2, "computing")
    assert WatchSettings(600.0, False).patience(0, False) == 2400.0
    assert WatchSettings(600.0, False).patience(1, True) == 2400.0
    assert WatchSettings(600.0, False).patience(1, False) == 600.0


def place(rank, steps=7, what=waits.DEVICE, where="a.py:1 in f", **more):
    given = {"silent": 0.0, "stack": "  one\n", "ended": False, "process": f"process {rank}"}
    return RankPlace(rank, steps, what=what, where=where, **{**given, **more})


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ([place(5, what="raised KeyError: 3", ended=True), place(6, 1)], "by an exception: rank 5"),
        (
            [place(5, silent=9.0), place(6, 1)],
            "silent: rank 5, no sign of life for at least 9 s; waiting",
        ),
        ([place(5, 6), place(6, 6, "running")], "behind the others: rank 6, running, at a.py:1"),
        ([place(5, 6), place(6, 6)], "behind the others: ranks 5-6, waiting"),
        ([place(5, 8), place(6, 7, "its function returned", ended=True)], "already: rank 6, its"),
        ([place(5, 8), place(6, 7, "running")], "not waiting like the others: rank 6, running"),
        (
            [place(5, where="b.py:2 in g"), place(6)],
            "at another place than the others: rank 5, waiting",
        ),
        ([place(5), place(6)], "all have made the same progress, and no rank differs"),
    ],
)
def test_who_is_named(odd, words):
    head, text, _ = report([*map(place, range(5)), *odd], 700.4, 600.0)
    assert head.startswith("no rank has made progress for 700 s (timeout=600); ")
    assert words in head
    assert re.match(r"  ranks 0-(4|4, 6|6): waiting for the device or other ranks, at a.py:1", text)
    assert text.count("  one\n") == 1, "equal stacks are told once"
    lost = [place(rank, silent=9.0 if rank > 3 else 0.0) for rank in range(8)]
    two = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert "silent: ranks 4-7, all of slice 1, no sign of" in report(lost, 1.0, 1.0, two)[0]
    assert "silent: ranks 4-6, no sign of" in report(lost[:7], 1.0, 1.0, two)[0]
    many = [place(rank, stack=f"{rank}" * 6_000) for rank in range(100)]
    assert len(report(many, 1.0, 1.0)[1]) < 201_000


def test_what_may_be_asked_for(monkeypatch):
    for said, expected in (
        ("", WatchSettings(600.0, False)),
        ("off", None),
        ("end", WatchSettings(600.0, True)),
        ("900, end", WatchSettings(900.0, True)),
        ("1e3", WatchSettings(1000.0, False)),
    ):
        monkeypatch.setenv("XLA_FSDP_WATCHDOG", said)
        assert settings(600.0) == expected
    assert WatchSettings(600.0, False).beat == 5.0
    for said in ("0", "-1", "nan", "inf", "on", "900,stop", "end,900", "send"):
        monkeypatch.setenv("XLA_FSDP_WATCHDOG", said)
        with pytest.raises(ValueError, match=f"XLA_FSDP_WATCHDOG='{said}': allowed are off, a pos"):
            settings(600.0)

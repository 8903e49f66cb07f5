"""Ranks in processes that hang: which one it is, and where, in one report; and none without need."""

import json

import pytest

from xla_fsdp.ranks.watchdog import waits
from xla_fsdp.ranks.watchdog.report import Place, report
from xla_fsdp.ranks.watchdog.settings import Settings, settings

# Three processes, forked, each a world of its own for XLA: no CPU has collectives between
# processes, so they wait for each other in a function that has its file in torch_xla's folder.
PROCESSES = """
import ctypes, json, multiprocessing, os, queue, signal, sys, threading, time
import torch, torch_xla
import torch_xla.runtime as xr
from pathlib import Path
from xla_fsdp.ranks.channel import served
from xla_fsdp.ranks.watchdog.watch import watched

SIZE = 3
folder = Path(sys.argv[1])
waiting = '''
def all_reduce(path, size):
    while len(list(path.parent.glob(path.name + ".*"))) < size:
        time.sleep(0.02)
'''
exec(compile(waiting, os.path.join(os.path.dirname(torch_xla.__file__), "waiting.py"), "exec"))

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

def with_pythons_lock(name):
    file = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(file, True)
    ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)

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
    print("all were slow", file=sys.stderr, flush=True)
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    step(rank, "killed")

def process(rank, write):
    os.dup2(write, 2)
    xr.world_size, xr.global_ordinal = lambda: SIZE, lambda: rank
    watched(train, 2.0)(rank)

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


def test_a_rank_that_hangs_is_named_and_no_other(run_script, tmp_path):
    (tmp_path / "there").mkdir()
    done = run_script(PROCESSES, tmp_path / "there", env={"PJRT_DEVICE": "CPU"}, timeout=200)
    assert done.returncode == 0, done.stderr
    for text in json.loads(done.stdout):
        print(text[:1200])
    print(done.stderr)
    assert 0


LAUNCHED = """
import sys, time
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

if __name__ == "__main__":
    try:
        spawned.run(watched(train, 600.0), ())
    except xla_fsdp.RankTimeoutError as error:
        print(error.rank, error)
"""


def test_two_ranks_of_a_process(run_script, tmp_path):
    env = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "2", "XLA_FSDP_WATCHDOG": "1.5,end"}
    done = run_script(LAUNCHED, env=env, timeout=200)
    print(done.stdout, done.stderr)
    assert 0

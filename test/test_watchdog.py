"""Ranks in processes that hang: which one, and where, in one report; and none without need."""

import json
import re

import pytest
from on_ranks import raises
from processes import free_port

from xla_fsdp import launch
from xla_fsdp.ranks.watchdog import waits
from xla_fsdp.ranks.watchdog.hang_report import RankStatus, hang_text
from xla_fsdp.ranks.watchdog.watch_settings import WatchSettings, watch_settings

HEAD = """
import ctypes, functools, json, multiprocessing, os, queue, signal, sys, threading, time
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
import xla_fsdp
from pathlib import Path
from xla_fsdp.ranks import channel, launch, spawned
from xla_fsdp.ranks.channel import served
from xla_fsdp.ranks.watchdog import watch
from xla_fsdp.ranks.watchdog.watch import watched

def next_batch():
    time.sleep(3600)
"""
# Ranks in processes wait for each other in files, in a function that has its file in torch_xla's
# folder: no CPU has collectives between processes.
WAITING = """
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

def with_pythons_lock(name):
    file = os.open(folder / name, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(file, True)
    ctypes.PyDLL(None).read(file, ctypes.create_string_buffer(1), 1)

def one_report(lines, head=""):
    text = ""  # on a busy machine also of starts that took longer than the timeout
    while not text.endswith("\\n\\n") or head not in text:
        line = lines.readline()
        assert line, text
        text += line
    return text

ends = {}

def begin(lock, *targets):
    read, ends["write"] = os.pipe()
    os.mkfifo(folder / lock)
    key = os.open(folder / lock, os.O_RDWR)
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=target, args=args) for target, *args in targets]
    for process in processes:
        process.start()
    os.close(ends["write"])
    return os.fdopen(read), key, processes

def watch_as(rank):
    os.dup2(ends["write"], 2)
    xr.world_size, xr.global_ordinal = lambda: SIZE, lambda: rank
    watched(train, 3.0)(rank)
"""


@pytest.fixture
def run(run_script, tmp_path):
    """``run(script, **environment)``: the script, with a folder for it, has ended well."""

    def run_in_folder(script, **environment):
        (tmp_path / "there").mkdir()
        env = {"PJRT_DEVICE": "CPU", **environment}
        return run_script(HEAD + script, tmp_path / "there", env=env, code=0)

    return run_in_folder


# Three processes, forked, each a world of its own for XLA.
PROCESSES = """
SIZE = 3

def until_told(name):
    while not (folder / f"{name}-over").exists():
        time.sleep(0.05)

def in_data(name):
    batches = queue.Queue()
    threading.Thread(target=lambda: (until_told(name), batches.put(1)), daemon=True).start()
    batches.get()

def train(rank):
    for number in range(2):
        step(rank, f"first{number}")
    for hangs, where in ((1, until_told), (2, in_data), (0, with_pythons_lock)):
        if rank == hangs:
            where(where.__name__)
        step(rank, where.__name__)
        torch_xla.sync()
    if rank == 1:
        until_told("left out")
    collective(rank, "left out")
    for number in range(10):  # slow, and in no hurry
        time.sleep(0.3 if rank else 0.01)
        step(rank, f"slow{number}")
    os.write(2, b"all were slow\\n")  # at once: print writes the end of the line by itself
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    step(rank, "killed")

def main():
    lock, told = "with_pythons_lock", []
    with served():
        lines, key, ranks = begin(lock, *((watch_as, rank) for rank in range(SIZE)))
        for name in ("until_told", "in_data", lock, "left out", "killed"):
            told.append(one_report(lines))
            if name == lock:
                os.write(key, b"1")
            (folder / f"{name}-over").touch()
        for rank in ranks:
            rank.kill()
            rank.join()
    print(json.dumps(told))

main()
"""


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_no_other(run):
    host, data, lock, left_out, killed = json.loads(run(WAITING + PROCESSES).stdout)

    assert "s (timeout=3); behind the others: rank 1, running, at " in host
    assert re.search(r"\n  ranks 0, 2: waiting for the device or other ranks, at .*\.py:\d+", host)
    assert "in until_told, after 2 steps\nstack of rank" in host  # of both, or caught elsewhere
    assert "where(where.__name__)" in host and "in all_reduce" in host and "in main" not in host
    assert "behind the others: rank 2, waiting at a queue, at " in data
    assert re.search(r"  thread Thread-\d+ .*: .*\.py:\d+ in until_told\n", data)
    # What its own thread could not tell while another one watched in its place.
    silent = r"silent: rank 0, no sign of life for at least \d+ s, "
    assert re.search(silent + "at .* with_pythons_lock, a", lock)
    assert "stack of rank 0, process " in lock and ", line " in lock and "in train\n" in lock
    assert "not waiting like the others: rank 1, running, at " in left_out
    assert killed.count("all were slow\n") == 3, "and nothing was told of that"
    assert re.search(silent + "after", killed)
    assert "  its process has ended\n" in killed
    for text in (data, left_out):
        assert text.startswith("xla_fsdp: ranks make progress again, ")


# Two ranks of one process, as on TPU v2 and v3, and a collective of XLA's.
PAIR = """
def train(rank):
    x = torch.ones(2, device="xla")
    torch_xla.sync()
    if rank == 1:
        next_batch()
    xm.all_reduce(xm.REDUCE_SUM, x).sum().item()

torch_xla.launch = functools.partial(torch_xla.launch, start_method="fork")
try:
    spawned.run_spawned(watched(train, 600.0), ())
except xla_fsdp.RankTimeoutError as error:
    print(error.rank, error)
"""


def test_ranks_are_ended_if_that_is_asked_for(run):
    done = run(PAIR, CPU_NUM_DEVICES="2", XLA_FSDP_WATCHDOG="5,end")
    words = r"1 no rank has made progress for \d+ s \(timeout=5\); not waiting like the others: "
    words += r"rank 1, running, at .* in next_batch, after \d steps. All"
    assert re.match(words, done.stdout)
    assert "rank 0: waiting for the device or other ranks, at " in done.stderr
    assert "time.sleep(3600)" in done.stderr and ".sum().item()" in done.stderr


ALONE = """
xr.world_size, xr.global_ordinal = lambda: 2, lambda: 0

def without_a_store(rank):
    time.sleep(0.5)
    return "returned"

def losing_it(rank):
    torch_xla.sync()
    time.sleep(0.5)
    serving.__exit__(None, None, None)
    time.sleep(8)

print(watched(without_a_store, 1.0)(0))
serving = served()
serving.__enter__()
watched(losing_it, 1.0)(0)
"""


def test_without_a_store_nobody_watches_and_when_it_is_lost_each_itself(run):
    done = run(ALONE)
    assert done.stdout == "returned\n"
    said = done.stderr
    words = "xla_fsdp: no watchdog for rank 0, so a hang is not reported: these 2 ranks have no sto"
    assert words in said
    assert re.search(r"rank 0 has made no progress for \d+ s. The other ranks are unknown", said)
    assert "in losing_it\n    time.sleep(8)\n" in said


# torchrun's own agent, which forks the two workers. XLA has no collectives between them on a CPU.
TORCHRUN = """
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

def train(rank):
    for number in range(3):
        torch_xla.sync()
    if rank == 1:
        next_batch()
    while True:
        time.sleep(0.1)

def worker():
    xr.world_size = lambda: int(os.environ["WORLD_SIZE"])
    xr.global_ordinal = lambda: int(os.environ["RANK"])
    launch.dist.init_process_group = lambda *given, **more: None  # asks for the TPU
    xla_fsdp.launch(train)

config = LaunchConfig(
    min_nodes=1, max_nodes=1, nproc_per_node=2, start_method="fork", rdzv_backend="c10d",
    rdzv_endpoint="localhost:0", run_id="watched", max_restarts=0, monitor_interval=0.2,
)
try:
    elastic_launch(config, worker)()
except Exception as error:
    print(type(error).__name__)
"""


def test_workers_of_torchrun_are_watched_through_its_store(run):
    done = run(TORCHRUN, XLA_FSDP_WATCHDOG="5,end")
    assert done.stdout == "ChildFailedError\n", done.stderr
    assert "no watchdog for rank" not in done.stderr
    words = r"xla_fsdp: no rank has made progress for \d+ s \(timeout=5\); .*"
    assert re.search(words, done.stderr), done.stderr
    assert re.search(r"  rank 1: running, at .* in next_batch, after 3 steps", done.stderr)
    assert re.search(r"stack of rank 1, process \d+", done.stderr)
    assert "time.sleep(3600)" in done.stderr
    assert done.stderr.count("RankTimeoutError: no rank has made progress") == 2  # both are ended


# Two hosts: launchers in process groups of their own, which meet at a port of the first, and whose
# processes cannot signal each other's. Ranks wait for each other in files.
HOSTS = """
SIZE = 4

def train(rank):
    for number in range(3):
        step(rank, f"first{number}")
    if rank == 3:
        with_pythons_lock("lock")
    for number in range(10_000):
        step(rank, f"then{number}")

def process(host, rank):
    watch._host_identity = lambda: f"host {host}"
    watch_as(rank)

def launcher(host):
    os.setsid()
    channel._hosts = lambda: (["127.0.0.1", "127.0.0.1"], host)
    with channel.served():
        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=process, args=(host, 2 * host + n)) for n in (0, 1)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()

def main():
    lines, key, hosts = begin("lock", (launcher, 1), (launcher, 0))  # the second first
    try:
        told = [one_report(lines, "silent: rank 3")]
        os.write(key, b"1")
        time.sleep(2)
        os.killpg(hosts[0].pid, signal.SIGKILL)
        told.append(one_report(lines, "silent: ranks 2-3"))
    finally:
        for host in hosts:
            try:
                os.killpg(host.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            host.join()
    print(json.dumps(told))

main()
"""


@pytest.mark.slow
def test_ranks_of_several_hosts_are_watched_together(run):
    with free_port() as port:
        done = run(WAITING + HOSTS, XLA_FSDP_STORE_PORT=str(port))
    hangs, lost = json.loads(done.stdout)
    # Only its neighbour, rank 2, can get the stack of a rank that holds Python's lock.
    assert re.search(r"silent: rank 3, no sign of life for at least \d+ s, at .* with_pyth", hangs)
    assert re.search(r"\n  ranks 0-2: waiting for the device or other ranks, at ", hangs)
    assert re.search(r"stack of rank 3, process \d+ of .*:\n", hangs) and "in train\n" in hangs
    assert "ranks make progress again, " in lost
    assert re.search(r"silent: ranks 2-3, no sign of life for at least \d+ s, after", lost)
    assert re.search(r"\n  ranks 0-1: waiting for the device or other ranks, at ", lost)
    assert not re.search(r"stack of ranks? [23]", lost)  # there is nobody who could ask them


def test_what_is_compiled_is_work(monkeypatch):
    counts = {}
    now, processor = iter(range(100)), iter([0.0] * 8 + [0.9, 1.8])
    monkeypatch.setattr(waits, "_counter", lambda name: counts.get(name, 0))
    monkeypatch.setattr(waits.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(waits.time, "process_time", lambda: next(processor))
    progress = waits.ProcessProgress()
    for more, expected in (
        ({}, (0, 0, "")),
        ({"CreateCompileHandles": 2}, (0, 0, "")),  # not by a sync
        ({"MarkStep": 1, "UncachedCompile": 1}, (1, 0, "compiling")),
        ({}, (1, 1, "compiling")),
        ({"CreateCompileHandles": 3}, (1, 0, "")),
        ({"MarkStep": 2}, (2, 0, "")),
        ({}, (2, 1, "")),
        ({"ExecuteComputation": 1}, (2, 0, "")),
        ({}, (2, 1, "computing")),
        ({}, (2, 2, "computing")),
    ):
        counts.update(more)
        assert progress.look() == expected
    watched = WatchSettings(600.0, False)
    waited = [watched.patience(*given) for given in ((0, False), (1, True), (1, False))]
    assert waited == [2400.0, 2400.0, 600.0]


def place(rank, steps=7, what=waits.DEVICE, where="a.py:1 in f", **more):
    given = {"silent": 0.0, "stack": "  one\n", "ended": False, "process": f"process {rank}"}
    return RankStatus(rank, steps, what=what, where=where, **{**given, **more})


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ([place(5, what="raised KeyError: 3", ended=True), place(6, 1)], "by an exception: rank 5"),
        ([place(5, silent=9.0), place(6, 1)], "silent: rank 5, no sign of life for at least 9 s; "),
        ([place(5, 6), place(6, 6, "running")], "behind the others: rank 6, running, at a.py:1"),
        ([place(5, 6), place(6, 6)], "behind the others: ranks 5-6, waiting"),
        ([place(5, 8), place(6, 7, "its function returned", ended=True)], "already: rank 6, its"),
        ([place(5, 8), place(6, 7, "running")], "not waiting like the others: rank 6, running"),
        ([place(5, where="b.py:2 in g"), place(6)], "at another place than the others: rank 5, wa"),
        ([place(5), place(6)], "all have made the same progress, and no rank differs"),
    ],
)
def test_who_is_named(odd, words):
    head, text, _ = hang_text([*map(place, range(5)), *odd], 700.4, 600.0)
    assert head.startswith("no rank has made progress for 700 s (timeout=600); ")
    assert words in head
    assert re.match(r"  ranks 0-(4|4, 6|6): waiting for the device or other ranks, at a.py:1", text)
    assert text.count("  one\n") == 1, "equal stacks are told once"


def test_a_slice_is_named_as_a_whole_and_long_reports_are_cut():
    lost = [place(rank, silent=9.0 if rank > 3 else 0.0) for rank in range(8)]
    two = ((0, 1, 2, 3), (4, 5, 6, 7))
    assert "silent: ranks 4-7, all of slice 1, no sign of" in hang_text(lost, 1.0, 1.0, two)[0]
    assert "silent: ranks 4-6, no sign of" in hang_text(lost[:7], 1.0, 1.0, two)[0]
    many = [place(rank, stack=f"{rank}" * 6_000) for rank in range(100)]
    assert len(hang_text(many, 1.0, 1.0)[1]) < 201_000
    # The stacks of the ranks that hang come first: the rest of a long text is omitted.
    behind = place(100, steps=6, stack="behind\n")
    assert "stack of rank 100, process 100:\nbehind\n" in hang_text([*many, behind], 1.0, 1.0)[1]


def test_what_may_be_asked_for(monkeypatch):
    for said, expected in (
        ("", WatchSettings(600.0, False)),
        ("off", None),
        ("end", WatchSettings(600.0, True)),
        ("1e3, end", WatchSettings(1000.0, True)),
    ):
        monkeypatch.setenv("XLA_FSDP_WATCHDOG", said)
        assert watch_settings(600.0) == expected
    assert WatchSettings(600.0, False).beat == 5.0
    for said in ("0", "-1", "nan", "inf", "on", "900,stop", "end,900", "send"):
        monkeypatch.setenv("XLA_FSDP_WATCHDOG", said)
        wrong = f"XLA_FSDP_WATCHDOG='{said}': allowed are off, a positive"
        raises(ValueError, wrong, watch_settings, 600.0)
    raises(ValueError, wrong, launch, print)  # on a CPU, too

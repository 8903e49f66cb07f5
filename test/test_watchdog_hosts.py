"""Ranks that hang under torchrun and on several hosts: named, through the store that they have."""

import json
import re

import pytest
from test_watchdog import WAITING

# torchrun's own agent, which forks the two workers. XLA has no collectives between them on a CPU.
TORCHRUN = """
import os, time
import torch_xla
import torch_xla.runtime as xr
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
import xla_fsdp
from xla_fsdp.ranks import launch

def train(rank):
    for number in range(3):
        torch_xla.sync()
    if rank == 1:
        next_batch()
    while True:
        time.sleep(0.1)

def next_batch():
    time.sleep(3600)

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


def test_workers_of_torchrun_are_watched_through_its_store(run_script):
    env = {"PJRT_DEVICE": "CPU", "XLA_FSDP_WATCHDOG": "1.5,end"}
    done = run_script(TORCHRUN, env=env, timeout=200)
    assert done.returncode == 0 and done.stdout == "ChildFailedError\n", done.stderr
    assert "no watchdog for rank" not in done.stderr
    words = r"xla_fsdp: no rank has made progress for \d+ s \(timeout=1.5\); .*"
    assert re.search(words, done.stderr), done.stderr
    assert re.search(r"  rank 1: running, at .* in next_batch, after 3 steps", done.stderr)
    assert re.search(r"stack of rank 1, process \d+", done.stderr)
    assert "time.sleep(3600)" in done.stderr
    assert done.stderr.count("RankTimeoutError: no rank has made progress") == 2  # both are ended


# Two hosts: launchers in process groups of their own, which meet at a port of the first, and whose
# processes cannot signal each other's. Ranks wait for each other in files.
HOSTS = """
from xla_fsdp.ranks import channel
from xla_fsdp.ranks.watchdog import watch

ends = {}

def step(rank, name):
    torch_xla.sync()
    (folder / f"{name}.{rank}").touch()
    all_reduce(folder / name, 4)

def train(rank):
    for number in range(3):
        step(rank, f"first{number}")
    if rank == 3:
        with_pythons_lock("lock")
    for number in range(10_000):
        step(rank, f"then{number}")

def process(host, rank):
    os.dup2(ends["write"], 2)
    watch._host = lambda: f"host {host}"
    xr.world_size, xr.global_ordinal = lambda: 4, lambda: rank
    watched(train, 3.0)(rank)

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

def until_told(lines, head):
    text = ""  # on a busy machine also of starts that took longer than the timeout
    while not text.endswith("\\n\\n") or head not in text:
        line = lines.readline()
        assert line, text
        text += line
    return text

def main():
    read, ends["write"] = os.pipe()
    os.mkfifo(folder / "lock")
    keep = os.open(folder / "lock", os.O_RDWR)
    with socket.create_server(("127.0.0.1", 0)) as free:
        os.environ[channel._PORT_VARIABLE] = str(free.getsockname()[1])
    fork = multiprocessing.get_context("fork")
    hosts = [fork.Process(target=launcher, args=(host,)) for host in (1, 0)]  # the second first
    for host in hosts:
        host.start()
    os.close(ends["write"])
    try:
        lines = os.fdopen(read)
        told = [until_told(lines, "silent: rank 3")]
        os.write(keep, b"1")
        time.sleep(2)
        os.killpg(hosts[0].pid, signal.SIGKILL)
        told.append(until_told(lines, "silent: ranks 2-3"))
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
def test_ranks_of_several_hosts_are_watched_together(run_script, tmp_path):
    (tmp_path / "there").mkdir()
    done = run_script(WAITING + HOSTS, tmp_path / "there", env={"PJRT_DEVICE": "CPU"}, timeout=200)
    assert done.returncode == 0, done.stderr
    hangs, lost = json.loads(done.stdout)
    # Only its neighbour, rank 2, can get the stack of a rank that holds Python's lock.
    assert re.search(r"silent: rank 3, no sign of life for at least \d+ s, at .* with_pyth", hangs)
    assert re.search(r"\n  ranks 0-2: waiting for the device or other ranks, at ", hangs)
    assert re.search(r"stack of rank 3, process \d+ of .*:\n", hangs) and "in train\n" in hangs
    assert "ranks make progress again, " in lost
    assert re.search(r"silent: ranks 2-3, no sign of life for at least \d+ s, after", lost)
    assert re.search(r"\n  ranks 0-1: waiting for the device or other ranks, at ", lost)
    assert not re.search(r"stack of ranks? [23]", lost)  # there is nobody who could ask them

"""A machine that is taken away: all ranks save at one step, end with code 75, and go on from it."""

import functools
import os
import queue
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from conftest import EXAMPLES
from processes import comes, ended
from safetensors.torch import load_file
from web_server import Server, answering

import xla_fsdp
from xla_fsdp.pods import preemption
from xla_fsdp.pods.metadata_server import notice
from xla_fsdp.pods.preemption import _Agreement, poll_metadata_server
from xla_fsdp.ranks.channel import Channel

# The example as it is, in a process that gets SIGTERM in the middle of a step of one rank.
MNIST = f"""
import os, signal, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_mnist
from common import meters, script

last, trace = int(sys.argv.pop(1)), meters.Meters.step

def step(self, *loss):
    trace(self, *loss)
    if (self.epoch, self._step, self.rank) == (1, last, 1):
        os.kill(os.getpid(), signal.SIGTERM)

meters.Meters.step = step
script.run(train_mnist.main)
"""


@pytest.mark.slow
def test_a_run_that_is_taken_away_goes_on_where_it_was(run_script, tmp_path):
    flags = ["--num_devices=2", "--num_epochs=1", "--max_steps=6", "--fake_data"]
    flags += ["--no_ckpt_consolidation"]

    def run(code, last, *more):
        env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
        return run_script(MNIST, last, *flags, *more, cwd=tmp_path, env=env, code=code)

    run(0, 0, "--ckpt_prefix=whole")
    taken = run(75, 3, "--ckpt_prefix=taken")
    assert "Traceback" not in taken.stderr and "epoch 1" not in taken.stderr
    assert "saved and ended after" in taken.stderr
    run(0, 0, "--ckpt_prefix=taken", "--resume")
    for file in sorted((tmp_path / "whole/step-00000001").glob("rank-*")):
        expected, found = load_file(file), load_file(tmp_path / "taken/step-00000001" / file.name)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if not name.startswith("rank/rng."):  # moves on with every program: there was one more
                # Batch statistics were averaged once more, which is the same but for rounding.
                rounding = 1e-6 if ".running_" in name else 0.0
                assert (found[name].double() - value.double()).abs().max() <= rounding, name


# Ranks in processes, as on TPU, but forked, which saves imports. Nothing but the agreement holds
# them together.
SPAWNED = """
import functools, os, signal, sys, time
from types import SimpleNamespace
import torch_xla
import torch_xla.runtime as xr
from torch_xla._internal import pjrt
import xla_fsdp
from xla_fsdp.ranks import spawned

def train(_, how, folder):
    rank = int(os.environ["PJRT_LOCAL_PROCESS_RANK"])
    xr.world_size, xr.global_ordinal = lambda: 2, lambda: rank  # a CPU process is a world of 1
    steps = 0
    with xla_fsdp.Preemption(3.0 if how == "stuck" else 60.0) as preempted:
        while True:
            steps += 1
            time.sleep(0.004 if rank else 0.005)
            if steps == 10:
                open(os.path.join(folder, str(rank)), "w").close()
                while len(os.listdir(folder)) < 2:
                    time.sleep(0.01)
            if steps == 20 and rank:
                os.kill(os.getpid() if how == "one rank" else os.getppid(), signal.SIGTERM)
            if preempted():
                assert preempted(), "still true when it is asked once more"
                print(f"rank {rank} saves {steps}", flush=True)
                if how == "stuck" and rank:
                    time.sleep(3600)
                preempted.exit()

torch_xla.launch = functools.partial(torch_xla.launch, start_method="fork")
pjrt.plugins.using_dynamic_plugins = lambda: True
pjrt.plugins.default = lambda: SimpleNamespace(
    physical_chip_count=lambda: 2, configure_multiprocess=lambda *_: None
)
pjrt._merge_replica_results = dict  # both are rank 0 of their world
spawned.run_spawned(train, sys.argv[1:])
"""


@pytest.fixture
def there(tmp_path):
    (tmp_path / "there").mkdir()
    return tmp_path / "there"


@pytest.mark.parametrize("whom", ["launcher", "one rank", "stuck"])
def test_processes_save_the_same_step(run_script, there, whom):
    done = run_script(SPAWNED, whom, there, env={"PJRT_DEVICE": "CPU"}, timeout=900, code=75)
    lines = sorted(done.stdout.splitlines())
    assert [line.rpartition(" ")[0] for line in lines] == ["rank 0 saves", "rank 1 saves"]
    assert len({line.split()[-1] for line in lines}) == 1
    if whom == "stuck":
        assert "rank 1 has not ended within 3 s, so its process is ended now" in done.stderr
        assert "in train\n" in done.stderr  # where it slept
    else:
        assert "Traceback" not in done.stderr and "SIGTERM on rank " in done.stderr


CARELESS = """
import multiprocessing, os, signal, sys, threading, time
from pathlib import Path
from xla_fsdp.ranks import spawned

def rank(folder):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as in a process that is spawned
    Path(folder, f"{os.getpid()}.0").touch()
    time.sleep(3600)

child = multiprocessing.get_context("fork").Process(target=rank, args=(sys.argv[1],))
child.start()
with spawned._ending_all(Path(sys.argv[1])):
    while not os.listdir(sys.argv[1]):
        time.sleep(0.01)
    print(child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    child.join()
print("went on")
"""


def test_without_preemption_a_signal_ends_all(run_script, there):
    done = run_script(CARELESS, there, timeout=900, code=-signal.SIGTERM)
    assert ended(done.stdout)  # and nothing was printed after the number


def test_ranks_agree_however_they_run(tmp_path):
    draw = random.Random(0)
    for size in (1, 2, 5):
        store, stops, barrier = dist.HashStore(), {}, threading.Barrier(size)
        agreements = [_Agreement(Channel(rank, size, store, False), id) for rank in range(size)]
        speaker = draw.randrange(size)

        # Ranks are never more than a step apart, as collectives keep them.
        def run(rank, agreements=agreements, barrier=barrier, stops=stops, speaker=speaker):
            for step in range(1, 10_000):
                barrier.wait(600)
                time.sleep(0.001 * (rank + 1))
                if step == 20 and rank == speaker:
                    agreements[rank].request_stop("it goes")
                if agreements[rank].reached():
                    stops[rank] = step
                    return
            raise AssertionError("never reached")

        with ThreadPoolExecutor(size) as pool:
            list(pool.map(run, range(size)))
        for agreement in agreements:
            agreement.close()
        assert len(stops) == size and len(set(stops.values())) == 1, stops
        assert all(one.notice == f"it goes on rank {speaker}" for one in agreements)


def test_a_notice_counts_after_the_store_was_lost():
    class Lost:
        def check(self, keys):
            raise RuntimeError("closed")

    heard = []
    agreement = _Agreement(Channel(0, 2, Lost(), False), heard.append)
    time.sleep(0.2)
    agreement.request_stop("SIGTERM")
    assert comes(lambda: heard)
    agreement.close()
    assert heard == ["SIGTERM; then the ranks' store was lost (closed)"]


google = functools.partial(answering, Metadata_Flavor="Google")


@pytest.fixture
def metadata():
    """A metadata server. ``said``: key to value, or to a function that answers."""

    def answer(handler, over):
        said = server.said.get(handler.path.rpartition("/")[2], google(status=404))
        (google(said.encode()) if isinstance(said, str) else said)(handler, over)

    with Server(answer) as server:
        server.said = {"maintenance-event": "NONE", "preempted": "FALSE"}
        yield server


def test_a_maintenance_event_is_a_notice(metadata, monkeypatch):
    monkeypatch.setattr(preemption, "_SECONDS_BETWEEN_QUESTIONS", 0.05)
    monkeypatch.setenv("GCE_METADATA_HOST", metadata.host)
    with xla_fsdp.Preemption() as preempted:
        while len(metadata.asked) < 4:
            assert not preempted()
            time.sleep(0.01)
        metadata.said["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
        assert comes(preempted)
        word = "maintenance-event TERMINATE_ON_HOST_MAINTENANCE on rank 0"
        assert preempted.reason == word
        with pytest.raises(SystemExit) as end:
            preempted.exit()
    assert end.value.code == 75 and end.value.reason == word
    asked = {(path, headers["Metadata-Flavor"]) for path, headers in metadata.asked}
    keys = ("maintenance-event", "preempted")
    assert asked == {(f"/computeMetadata/v1/instance/{key}", "Google") for key in keys}


def drip(before, piece):
    """An answer that goes on for ever, a piece at a time, each of them in time."""
    return answering(before, None, piece, 0.05)


HEAD = b"HTTP/1.0 200 OK\r\nMetadata-Flavor: Google\r\n"


def test_what_a_metadata_server_may_say(metadata):
    for said, found in (
        (metadata.said, [None, None]),
        ({"preempted": "TRUE\n"}, [None, "TRUE"]),
        ({"maintenance-event": "SOON", "preempted": "true" + "x" * 100_000}, [None, None]),
    ):
        metadata.said = said
        keys = ("maintenance-event", "preempted")
        assert [notice(metadata.host, key, timeout=300) for key in keys] == found
    for answer in (
        google(b"TRUE", 302, Location="http://127.0.0.1:1/"),
        google(b"TRUE", 503),
        answering(b"TRUE", Metadata_Flavor="Other"),
        google(b"TRUE", Content_Length="9"),
        google(b"TRUE", Content_Length="4096000000"),
        answering(b"\0" * 70_000, None),
        lambda handler, over: over.wait(1.0),
        drip(b"", b"H"),
    ):
        metadata.said = {"preempted": answer}
        with pytest.raises(OSError):
            notice(metadata.host, "preempted", timeout=0.3)


@pytest.mark.parametrize("before", ["FALSE", google(b"", 503)])
def test_one_answer_that_never_ends_does_not_hide_the_other(metadata, monkeypatch, before):
    monkeypatch.setattr(preemption, "_SECONDS_BETWEEN_QUESTIONS", 0.01)
    impatient = functools.partial(notice, timeout=0.1)
    monkeypatch.setattr(preemption.metadata_server, "notice", impatient)
    metadata.said["maintenance-event"] = drip(HEAD + b"\r\n", b"T")
    metadata.said["preempted"] = before
    heard, over = queue.Queue(), threading.Event()
    threading.Thread(target=poll_metadata_server, args=(metadata.host, heard.put, over)).start()
    assert comes(lambda: sum(path.endswith("preempted") for path, _ in metadata.asked) >= 2)
    metadata.said["preempted"] = "TRUE"
    assert heard.get(timeout=600) == "preempted TRUE"
    over.set()


def test_wrong_use_is_told():
    for grace in (0, -1, True, "25", float("inf")):
        with pytest.raises(ValueError, match="grace must be a positive number of seconds, got"):
            xla_fsdp.Preemption(grace)
    for signals in (15, (999,), "TERM", (signal.SIGTERM, signal.SIGKILL)):
        with pytest.raises(ValueError, match="signals must be signals that a process can handle"):
            xla_fsdp.Preemption(signals=signals)
    for host in (5, "http://metadata.google.internal"):  # was never heard, silently
        with pytest.raises(ValueError, match="must be HOST or HOST:PORT, without http://"):
            xla_fsdp.Preemption(metadata_server=host)
    with xla_fsdp.Preemption() as preempted, pytest.raises(RuntimeError, match="without a notice"):
        preempted.exit()


def test_a_handler_in_python_still_runs():
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append("python"))
    try:
        with xla_fsdp.Preemption() as preempted:
            os.kill(os.getpid(), signal.SIGTERM)
            assert comes(preempted)
        os.kill(os.getpid(), signal.SIGTERM)  # nobody listens any more
        assert heard == ["python"] * 2
    finally:
        signal.signal(signal.SIGTERM, before)

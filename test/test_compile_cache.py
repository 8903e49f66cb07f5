"""Programs compiled by one process, loaded by the next."""

import errno
import json
import os
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from processes import comes

import xla_fsdp
from xla_fsdp import xlac
from xla_fsdp.compiled import cache

# What a start of this prints: losses of all ranks, wrapped singly and scanned; counts; errors.
TRAINING = """
import json, os, sys
import torch
from torch import nn
import xla_fsdp

folder, activation = sys.argv[1:]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(getattr(torch, activation)(self.up(x)))

def train(rank):
    import torch_xla

    losses = []
    for scanned in (False, True):
        torch.manual_seed(0)
        if scanned:
            blocks = xla_fsdp.scan_blocks(Block() for _ in range(2))
        else:
            blocks = nn.Sequential(*map(xla_fsdp.XlaFullyShardedDataParallel, (Block(), Block())))
        model = nn.Sequential(nn.Linear(8, 8), blocks).to(torch_xla.device())
        model = xla_fsdp.XlaFullyShardedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            batch = torch.arange(32.0).reshape(4, 8).cos() * (rank + 1)
            optimizer.zero_grad()
            loss = model(batch.to(torch_xla.device())).square().mean()
            loss.backward()
            optimizer.step()
            torch_xla.sync()
            losses.append(loss.item().hex())
    return losses

if __name__ == "__main__":
    xla_fsdp.enable_compilation_cache(folder)
    found = {"folder": str(xla_fsdp.enable_compilation_cache(folder))}
    assert not any("PERSISTENT_CACHE" in name for name in os.environ)
    found["losses"] = xla_fsdp.launch(train, num_devices=2)
    for name, where in (("other", folder + "/other"), ("late", folder)):
        try:
            xla_fsdp.enable_compilation_cache(where)
        except RuntimeError as error:
            found[name] = str(error)
        os.environ.pop("XLA_FSDP_COMPILATION_CACHE", None)
    print(json.dumps({**found, **xla_fsdp.compilation_counts()._asdict()}))
"""


def kept(folder):
    return sorted(path for path in folder.glob("*/*") if path.is_file() and path.suffix == "")


PLAIN = """
import json, torch, xla_fsdp

def add(rank):
    return (torch.ones(3).to("xla") * 2).sum().item()

if __name__ == "__main__":
    assert xla_fsdp.launch(add, num_devices=1) == [6.0]
    print(json.dumps(xla_fsdp.compilation_counts()))
"""


def test_nothing_is_kept_by_default(run_script, tmp_path):
    folder, variable = tmp_path / "cache", "XLA_FSDP_COMPILATION_CACHE_FOLDER"
    done = run_script(PLAIN, env={"XDG_CACHE_HOME": str(folder), variable: "none"}, code=0)
    compiled, loaded = json.loads(done.stdout)
    assert compiled > 0 and not loaded and not folder.exists()
    done = run_script(PLAIN, env={variable: str(folder)}, code=1)
    assert not folder.exists()
    assert f"{variable}={folder} has no effect any more" in done.stderr
    assert "call xla_fsdp.enable_compilation_cache(folder) before launch" in done.stderr
    remedy = PLAIN.replace("    assert", "    xla_fsdp.enable_compilation_cache()\n    assert", 1)
    run_script(remedy, env={variable: str(folder), "XDG_CACHE_HOME": str(tmp_path)}, code=0)
    assert kept(tmp_path / "xla_fsdp/compiled")  # the default


def test_workers_of_this_suite_keep_programs_where_conftest_says(run_ranks):
    def count(rank, length):
        assert torch.ones(length).to("xla").sum().item() == length
        return xla_fsdp.compilation_counts().compiled

    folder = Path(os.environ["TEST_PROGRAMS"])
    length = 1000 + os.getpid() % 1000  # of a program that no other test needs
    before, (compiled,) = kept(folder), run_ranks(count, 1, length)
    assert compiled > 0
    assert comes(lambda: len(kept(folder)) > len(before))  # a worker looks every second


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_trains_the_same(run_script, tmp_path):
    folder = tmp_path / "programs"

    def start(activation="relu"):
        done = run_script(TRAINING, folder, activation, code=0)
        assert "Failed to deserialize" not in done.stderr
        assert not list(folder.glob("*/run-*"))
        return json.loads(done.stdout)

    first = start()
    assert first["folder"] == str(folder)
    assert first["compiled"] > 0 and first["cached"] == 0
    assert "call it in the main program before launch" in first["late"]
    assert f"in {folder} already" in first["other"]
    programs = kept(folder)
    # Ranks may both compile what has no collectives in it.
    assert 0 < len(programs) <= first["compiled"]

    second = start()
    # Both may load one at the same moment.
    assert second["compiled"] == 0 and second["cached"] >= len(programs)
    assert second["losses"] == first["losses"]
    assert kept(folder) == programs

    # A flipped byte, a half and an empty program; the rest of a process that was killed; others'.
    large, half, empty = sorted(programs, key=lambda path: path.stat().st_size)[-3:]
    data = bytearray(large.read_bytes())
    data[-len(data) // 10] ^= 0x55
    large.write_bytes(data)
    half.write_bytes(half.read_bytes()[: half.stat().st_size // 2])
    empty.write_bytes(b"")
    dead = large.parent / f"run-{cache._host_name()}-{2**22 + 1}-abc"
    dead.mkdir()
    (dead / "17").write_bytes(b"half a")
    (large.parent / "17").write_bytes(b"not ours")
    third = start()
    # Both ranks may compile a damaged one.
    assert third["compiled"] >= 3 and third["cached"] >= len(programs) - 3
    assert third["losses"] == first["losses"]
    again = {path.name.partition("-")[0] for path in kept(folder)} - {"17"}
    assert again == {path.name.partition("-")[0] for path in programs}

    # The same shapes, another function in the body of the scan.
    other = start("tanh")
    assert other["compiled"] > 0
    for mine, theirs in zip(sum(other["losses"], []), sum(first["losses"], []), strict=True):
        assert mine != theirs


SPAWNING = """
import os, sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
import xla_fsdp

NAME = "XLA_FSDP_COMPILATION_CACHE"

def multiply(rank):
    import torch, torch_xla

    ones = torch.ones(3, 3).to(torch_xla.device())
    value = (ones @ ones).sum().item()
    return value, *xla_fsdp.compilation_counts()

if __name__ == "__main__":
    xla_fsdp.enable_compilation_cache(sys.argv[1])
    from xla_fsdp.compiled.cache import in_spawned_processes
    fn = in_spawned_processes(multiply)
    started_here, os.environ[NAME] = os.environ[NAME], f"{os.getppid()}:/folder"
    assert in_spawned_processes(multiply) is multiply  # not of its parent
    os.environ[NAME] = started_here
    for _ in range(2):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            print(*pool.submit(fn, 0).result())
"""


@pytest.mark.slow
def test_ranks_in_processes_of_their_own_use_it(run_script, tmp_path):
    done = run_script(SPAWNING, tmp_path / "pro:grams", env={"PJRT_DEVICE": "CPU"}, code=0)
    assert done.stdout.splitlines() == ["27.0 1 0", "27.0 0 1"]
    assert len(kept(tmp_path / "pro:grams")) == 1


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """``opened(limit)``: another process's view of one store; ended with the test."""
    runs = []
    # Files are kept when a test says so: on a slow machine the second would be over at any time.
    monkeypatch.setattr(cache, "_SECONDS_BETWEEN_LOOKS", 3600.0)

    def open_session(limit=1 << 30, began=lambda: True):
        place = tmp_path.resolve() / "store"
        runs.append(cache.open_session(place, "cpu-1", {"a": "b"}, limit, began))
        return runs[-1]

    yield open_session
    for run in runs:
        run.end()


def seen(run):
    return {path.name: path.read_bytes() for path in run.folder.iterdir()}


def ended_with(run, content):
    """``run``, in which torch_xla has written a program."""
    (run.folder / "123").unlink(missing_ok=True)
    (run.folder / "123").write_bytes(content)
    run.end()
    return run


def refuse(*args, **kwargs):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


class TestStore:
    def test_a_file_is_kept_once_it_is_closed(self, opened):
        run = opened()
        with open(run.folder / "123", "wb") as file:
            file.write(b"half")
            file.flush()
            run.keep_new()
            assert seen(opened()) == {}
            file.write(b", whole")
        run.keep_new()
        # The first process is still there, or was killed.
        assert seen(opened()) == {"123": b"half, whole"}

    def test_a_start_after_one_that_died_loading_loads_nothing(self, opened, tmp_path, monkeypatch):
        monkeypatch.setattr(cache, "_SECONDS_BETWEEN_LOOKS", 0.1)
        ended_with(opened(), b"deadly")
        kind, began = tmp_path / "store/cpu-1", threading.Event()
        second = opened(began=began.is_set)
        assert len(list(kind.glob("loading-*"))) == 1
        began.set()
        assert comes(lambda: not list(kind.glob("loading-*")))
        second.end()
        (kind / f"loading-{cache._host_name()}-4194305").touch()  # no process has this number
        (kind / "loading-elsewhere-4194305").touch()
        with pytest.warns(UserWarning, match="ended before its first program was loaded"):
            third = opened()
        assert seen(third) == {}
        ended_with(third, b"compiled again")
        assert seen(opened()) == {"123": b"compiled again"}

    def test_what_torch_xla_could_not_load_is_replaced(self, opened):
        assert not ended_with(opened(), b"not a program").folder.exists()
        ended_with(opened(), b"a program")
        assert seen(opened()) == {"123": b"a program"}

    def test_two_processes_may_write_the_same_program(self, opened):
        first, second = opened(), opened()
        (first.folder / "123").write_bytes(b"compiled here")
        (second.folder / "123").write_bytes(b"and there")
        first.keep_new()
        second.keep_new()
        assert seen(opened()) == {"123": b"and there"}
        assert seen(first) == {"123": b"compiled here"}

    def test_a_full_disk_keeps_nothing(self, opened, monkeypatch):
        run = opened()
        usage = shutil.disk_usage(run.folder)._replace(free=4096)
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
        ended_with(run, b"cut o")
        assert seen(opened()) == {}

    def test_the_oldest_programs_make_room(self, opened, tmp_path):
        run = opened()
        for age in range(5):
            (run.folder / f"10{age}").write_bytes(bytes(1000))
            os.utime(run.folder / f"10{age}", (1e9 - age, 1e9 - age))
        old = tmp_path / "store/cpu-0/7-1000-" / "x"
        old.parent.mkdir(parents=True)
        old.write_bytes(b"not ours, not counted")
        run.end()
        assert seen(opened(limit=3500)).keys() == {"100", "101", "102"}
        assert len(list((tmp_path / "store/cpu-1").glob("10*"))) == 3 and old.exists()

    def test_a_file_system_without_hard_links(self, opened, monkeypatch):
        monkeypatch.setattr(os, "link", refuse)
        ended_with(opened(), b"whole")
        assert seen(opened()) == {"123": b"whole"}


class TestRefusals:
    @pytest.fixture
    def enable(self, monkeypatch):
        """The function, in a process whose runtime has not started."""
        monkeypatch.setenv("PJRT_DEVICE", "CPU")
        for name in ("runtime_has_started", "compilation_cache_exists"):
            monkeypatch.setattr(xlac, name, lambda: False)
        monkeypatch.setattr(cache, "repair_client", lambda platform: None)
        monkeypatch.setattr(cache.xr, "initialize_cache", lambda path, readonly: None)
        monkeypatch.setattr(cache.xr, "get_num_cached_compilation_graph", lambda: 0)
        return cache.enable_compilation_cache

    @pytest.mark.parametrize(
        "error, words",
        [
            (OSError, r"cannot be kept in .*Read-only.*name a folder"),
            (PermissionError, "anybody can put programs there"),
            (ValueError, "path must name a folder"),
            (NotImplementedError, "PJRT_DEVICE=CUDA are not kept"),
        ],
    )
    def test_a_folder_that_cannot_be_used(self, enable, monkeypatch, tmp_path, error, words):
        if error is OSError:
            monkeypatch.setattr(cache.tempfile, "mkstemp", refuse)
        elif error is PermissionError:
            tmp_path.chmod(0o777)
        elif error is NotImplementedError:
            monkeypatch.setenv("PJRT_DEVICE", "CUDA")
        with pytest.raises(error, match=words):
            enable("" if error is ValueError else tmp_path)

    def test_another_torch_xla(self, monkeypatch):
        monkeypatch.setattr(cache, "version", lambda package: "2.10.0")
        with pytest.raises(NotImplementedError, match="torch_xla 2.10.0, not torch_xla 2.9"):
            cache.repair_client("CPU")
        with pytest.raises(NotImplementedError, match="0 symbols _no_such_function, expected one"):
            xlac.symbols_of(["_no_such_function"])

    def test_each_client_is_as_expected(self):
        for platform in ("CPU", "TPU", "CPU", "TPU"):
            cache.repair_client(platform)


VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_USE_Z", "TPU_MEGACORE")


def test_programs_of_another_kind_are_not_used(monkeypatch):
    kind = cache.describe_kind
    before = kind("CPU", "0 of 1")
    assert before == kind("CPU", "1 of 2") and kind("TPU", "0 of 1") != kind("TPU", "1 of 2")
    for change in (
        *(partial(monkeypatch.setenv, name, "--x") for name in VARIABLES),
        partial(monkeypatch.setattr, cache, "installed_versions", lambda *of: {"python": "0"}),
        partial(monkeypatch.setattr, cache, "_processor", lambda: "another"),
    ):
        change()
        assert kind("CPU", "0 of 1") != before
        monkeypatch.undo()

"""Whatever ends a consolidation, and wherever: the old result or the new one, and a next run.

As a script, ``test_consolidate_crash.py SCENARIO STRIDE FOLDER``: kills runs at every STRIDE-th
call and at the last ones, and checks what is left each time. A process of its own, since it forks.
"""

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from consolidating import run_cli
from faulty_disk import CALLS, CHANGES, Boundaries, fill_disk, in_child, kill
from sharded_files import small_checkpoint, write_checkpoint

from xla_fsdp.consolidate import OutputError, consolidate_checkpoint, reshard_checkpoint
from xla_fsdp.consolidate.format.local import FolderLock, LocalStore
from xla_fsdp.consolidate.stream.plan import RECORD

# By name: what is written, whether something was there before, whether folders can be swapped.
SCENARIOS = {
    "safetensors file": (dict(save_path="m.safetensors"), True, True),
    "torch file": (dict(save_path="m.pth"), True, True),
    "new folder": (dict(save_path="out", optimizer=True, max_shard_size="4KB"), False, True),
    "folder": (dict(save_path="out", optimizer=True, max_shard_size="4KB"), True, True),
    "folder, no swap": (dict(save_path="out", optimizer=True), True, False),
    "reshard": (dict(save_path="out", world_size=2), True, True),
    "reshard, no swap": (dict(save_path="out", world_size=2), True, False),
}


class Scenario:
    """A folder with two checkpoints; the result of the first is to be replaced by the second's."""

    def __init__(self, name, folder):
        self.options, self.existing, self.swaps = SCENARIOS[name]
        self.folder = Path(folder)
        small_checkpoint(self.folder / "old", seed=1)
        small_checkpoint(self.folder / "new", seed=2)
        self.snapshots = {}
        for which in ("old", "new"):
            self.fresh()
            self.run(which)
            self.snapshots[which] = self.content()
        assert self.snapshots["old"] != self.snapshots["new"]

    @property
    def target(self):
        return self.folder / "work" / self.options["save_path"]

    def run(self, which):
        options = {**self.options, "save_path": self.target}
        write = reshard_checkpoint if "world_size" in options else consolidate_checkpoint
        no_swap = mock.patch.object(LocalStore, "exchange", return_value=False)
        with contextlib.nullcontext() if self.swaps else no_swap:
            return write(self.folder / which, **options)

    def boundaries(self, at=0, happen=None, **options):
        return Boundaries(str(self.folder / "work"), at, happen, **options)

    def fresh(self):
        shutil.rmtree(self.folder / "work", ignore_errors=True)
        (self.folder / "work").mkdir()

    def prepare(self):
        self.fresh()
        old = self.snapshots["old"] if self.existing else None
        if isinstance(old, dict):
            self.target.mkdir()
            for name, data in old.items():
                (self.target / name).write_bytes(data)
        elif old is not None:
            self.target.write_bytes(old)

    def steps(self, stride, only=CALLS):
        """Numbers of the calls of a run: every ``stride``-th, and the last twelve."""
        self.prepare()
        with self.boundaries(only=only) as calls:
            self.run("new")
        last = calls.count + 1
        return sorted({*range(1, last, stride), *range(last - 12, last)})

    def content(self):
        if self.target.is_dir():
            return {path.name: path.read_bytes() for path in self.target.iterdir()}
        return self.target.read_bytes() if self.target.exists() else None

    def check_old_or_new(self):
        found = self.content()
        allowed = [self.snapshots["new"], self.snapshots["old"] if self.existing else None]
        if self.existing and not self.swaps:
            allowed.append(None)  # for a moment; the next run repairs it
        assert found in allowed, self.leftovers()

    def leftovers(self):
        return sorted(path.name for path in (self.folder / "work").iterdir())

    def check_next_run(self):
        result = self.run("new")
        assert self.content() == self.snapshots["new"]
        assert self.leftovers() == [self.target.name]
        return result


def kill_at_steps(scenario, stride):
    steps, resumed, up_to_date = scenario.steps(stride), 0, 0
    for number in steps:
        scenario.prepare()

        def work(number=number):
            with scenario.boundaries(number, kill):
                scenario.run("new")

        assert in_child(work) == signal.SIGKILL, number
        scenario.check_old_or_new()
        result = scenario.check_next_run()
        resumed += bool(result.resumed)
        up_to_date += result.up_to_date
    print(len(steps), resumed, up_to_date)


# Some system calls of two scenarios, every sixth of each, and every one.
RUNS = [
    *(pytest.param(name, 20, id=name) for name in ("reshard, no swap", "torch file")),
    *(pytest.param(n, 6, id=f"{n}, every sixth", marks=pytest.mark.slow) for n in SCENARIOS),
    *(pytest.param(n, 1, id=f"{n}, every step", marks=pytest.mark.full) for n in SCENARIOS),
]


@pytest.mark.parametrize(("name", "stride"), RUNS)
def test_killed(plain_server, name, stride, tmp_path):
    script = [__file__, name, stride, tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = plain_server.run(script, cwd=tmp_path, env=environment, timeout=1500)
    assert done.returncode == 0, done.stderr
    steps, resumed, up_to_date = map(int, done.stdout.split())
    assert steps > 6
    # A run that had finished a file, or all, was continued.
    assert resumed > 0 and up_to_date > 0


@pytest.mark.parametrize("forever", [False, True], ids=["once", "from then on"])
@pytest.mark.parametrize(("name", "stride"), RUNS)
def test_disk_full(name, stride, forever, tmp_path):
    scenario = Scenario(name, tmp_path)
    for number in scenario.steps(stride, CHANGES):
        scenario.prepare()
        try:
            with scenario.boundaries(number, fill_disk, only=CHANGES, forever=forever) as calls:
                scenario.run("new")
        except OutputError as error:
            assert "No space left" in str(error) and str(tmp_path / "work") in str(error)
            scenario.check_old_or_new()
        else:
            # The result was in place; what could not be removed is left to the next run.
            assert scenario.content() == scenario.snapshots["new"] and calls.count >= number
        scenario.check_next_run()


def interrupt(_name):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("happen", "raised"), [(fill_disk, OutputError), (interrupt, KeyboardInterrupt)]
)
def test_failure_before_anything_is_finished_leaves_nothing(tmp_path, happen, raised):
    small_checkpoint(tmp_path / "ckpt")
    for number in range(1, 8):
        fault = Boundaries(str(tmp_path), number, happen, only=("mkdir", "write", "pwrite"))
        with pytest.raises(raised), fault:
            consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "m.safetensors")
        assert os.listdir(tmp_path) == ["ckpt"]


def test_finished_files_are_kept(tmp_path):
    """Those whose bytes are still right; the others are written again."""
    small_checkpoint(tmp_path / "ckpt")
    options = dict(max_shard_size="1KB", optimizer=True)
    with Boundaries(str(tmp_path), 0, None, only=CHANGES) as calls:
        consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "whole", **options)
    expected = {path.name: path.read_bytes() for path in (tmp_path / "whole").iterdir()}

    before_the_end = Boundaries(str(tmp_path), calls.count - 3, fill_disk, only=CHANGES)
    with pytest.raises(OutputError), before_the_end:
        consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "out", **options)
    (partial,) = tmp_path.glob(".out.*.partial")
    files = sorted(partial.glob("model-*"))
    assert len(files) > 3
    for file, change in zip(files, (b"\1", b""), strict=False):
        data = file.read_bytes()
        file.write_bytes(data[:-1] + change)
    (partial / "stray").write_bytes(b"")
    result = consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "out", **options)
    assert result.resumed == len(files) + 1 - 2  # and that of the optimizer
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == expected


@pytest.mark.parametrize("name", ["m.safetensors", "m.pth", "out", "ranks"])
def test_the_result_is_up_to_date_until_a_bit_is_flipped(tmp_path, name):
    small_checkpoint(tmp_path / "ckpt")

    def run():
        if name == "ranks":
            return reshard_checkpoint(tmp_path / "ckpt", 2, tmp_path / name)
        return consolidate_checkpoint(tmp_path / "ckpt", tmp_path / name)

    run()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run().up_to_date
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    for path in sorted([tmp_path / name] if "." in name else (tmp_path / name).iterdir()):
        right = path.read_bytes()
        step = max(len(right) // 12, 1)
        for at in [*range(0, len(right), step), len(right) - 1]:
            path.write_bytes(right[:at] + bytes([right[at] ^ 4]) + right[at + 1 :])
            if path.name == RECORD:
                try:
                    assert not run().up_to_date
                except OutputError:  # no longer known to be ours
                    path.write_bytes(right)
            elif name == "m.pth" and run().up_to_date:
                # Fields of the zip that nobody reads: dates, padding. Everything else is the same.
                assert torch.load(path, weights_only=True)["model"].keys()
                path.write_bytes(right)
            elif name != "m.pth":
                assert not run().up_to_date
            assert path.read_bytes() == right


def test_other_options_and_other_saves_replace(tmp_path):
    small_checkpoint(tmp_path / "one", seed=1)
    small_checkpoint(tmp_path / "two", seed=2)
    path = tmp_path / "m.safetensors"
    for name, dtype, known in [
        ("one", None, False),
        ("one", "bfloat16", False),
        ("two", "bfloat16", False),
        ("two", "bfloat16", True),
    ]:
        assert consolidate_checkpoint(tmp_path / name, path, dtype=dtype).up_to_date == known
    # An optimizer file of the same shapes that has nothing of its own but the values.
    for number in (1, 2):
        state = {"w": {"m": torch.ones(2) * number}}
        optimizer = {"groups": [{"params": ["w"]}], "state": state}
        source = tmp_path / str(number)
        write_checkpoint(source, {"w": torch.ones(2)}, optimizer)
        consolidate_checkpoint(source, tmp_path / "out", format="pth", optimizer=True)
        found = torch.load(tmp_path / "out" / "optimizer.pth", weights_only=True)
        assert found["state"]["w"]["m"].tolist() == [number] * 2


def test_two_runs_at_once(tmp_path):
    """The second one is refused, and leaves what the first is writing alone. What earlier runs with
    other options have left is removed."""
    small_checkpoint(tmp_path / "ckpt")
    target = tmp_path / "m.pth"
    other = tmp_path / ".m.pth.0123456789abcdef.partial"
    other.mkdir()
    (other / "m.pth").write_bytes(b"half")
    consolidate_checkpoint(tmp_path / "ckpt", target)
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "m.pth"]
    target.unlink()
    # To learn the name of the folder, which is not removed, as if the run was killed.
    with pytest.raises(OutputError), mock.patch.object(LocalStore, "remove"):
        with Boundaries(str(tmp_path), 7, fill_disk, only=CHANGES):
            consolidate_checkpoint(tmp_path / "ckpt", target)
    (partial,) = tmp_path.glob(".m.pth.*.partial")
    lock = FolderLock(str(partial))
    try:
        with pytest.raises(OutputError, match="another run is writing"):
            consolidate_checkpoint(tmp_path / "ckpt", target)
        result = consolidate_checkpoint(tmp_path / "ckpt", target, dtype="float16")
        assert not result.up_to_date and partial.exists()
    finally:
        lock.close()
    consolidate_checkpoint(tmp_path / "ckpt", target)
    assert sorted(os.listdir(tmp_path)) == ["ckpt", "m.pth"]


@pytest.mark.parametrize(
    ("save_path", "make", "said"),
    [
        ("m.pth", lambda p: p.symlink_to("elsewhere"), "symbolic link"),
        ("out", lambda p: p.symlink_to("."), "symbolic link"),
        ("m.pth", lambda p: p.symlink_to("ckpt/manifest.json"), "would overwrite the input"),
        ("out", lambda p: p.symlink_to("ckpt"), "would overwrite the input"),
        ("m.pth", lambda p: os.link(p.parent / "ckpt" / "manifest.json", p), "would overwrite"),
        ("ckpt", lambda p: None, "would overwrite the input"),
        ("m.pth", lambda p: p.mkdir(), "is a directory"),
        ("m.pth", lambda p: os.mkfifo(p), "not a regular file"),
        ("out", lambda p: p.write_bytes(b""), "is a file, expected a folder"),
        ("no/m.pth", lambda p: None, "does not exist"),
        ("no/m.pth", lambda p: p.parent.touch(), "no cannot be read: Not a directory"),
        ("..", lambda p: None, "does not name"),
        ("gs://b/m.pth", lambda p: None, "local paths only"),
    ],
)
def test_places_that_are_refused(tmp_path, capsys, monkeypatch, save_path, make, said):
    monkeypatch.chdir(tmp_path)
    small_checkpoint(tmp_path / "ckpt")
    make(tmp_path / save_path)
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    code, out, err = run_cli(capsys, "--ckpt_prefix", "ckpt", "--save_path", save_path)
    assert (code, out) == (2, [])
    assert err[-1].startswith("OutputError: ") and said in err[-1]
    assert {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")} == before


@pytest.mark.parametrize("reshard", [False, True])
def test_a_folder_with_other_things_is_not_replaced(tmp_path, reshard):
    small_checkpoint(tmp_path / "ckpt")
    small_checkpoint(tmp_path / "training", seed=3)

    def run(target):
        if reshard:
            return reshard_checkpoint(tmp_path / "ckpt", 2, target)
        return consolidate_checkpoint(tmp_path / "ckpt", target, format="pth", dtype="float16")

    with pytest.raises(OutputError, match="did not write"):
        run(tmp_path / "training")
    (tmp_path / "empty").mkdir()
    run(tmp_path / "empty")
    consolidate_checkpoint(tmp_path / "training", tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    with pytest.raises(OutputError, match="'tokenizer.json', which this command did not write"):
        run(tmp_path / "out")
    (tmp_path / "out" / "tokenizer.json").unlink()
    run(tmp_path / "out")


def test_disk_known_to_be_too_small(tmp_path, monkeypatch):
    small_checkpoint(tmp_path / "ckpt")
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 100}))
    for run in (
        lambda: consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "out"),
        lambda: reshard_checkpoint(tmp_path / "ckpt", 2, tmp_path / "out"),
    ):
        with pytest.raises(OutputError, match="100 are free"):
            run()
    assert os.listdir(tmp_path) == ["ckpt"]


if __name__ == "__main__":
    kill_at_steps(Scenario(sys.argv[1], sys.argv[3]), int(sys.argv[2]))

"""Whatever happens during a save: the old checkpoint loads or the new one, and the next save works.

Processes are killed at every boundary by a fork of a process that has everything imported.
"""

import contextlib
import errno
import gc
import os
from pathlib import Path

import checkpoint_files as files
import fsspec
import pytest
from checkpoint_files import read_value, save
from faulty_disk import Boundaries, Interrupting, Stopped, in_child, kill
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.spec import AbstractBufferedFile

from xla_fsdp.consolidate.errors import OutputError
from xla_fsdp.consolidate.format import folders
from xla_fsdp.consolidate.format.local import LocalStore
from xla_fsdp.consolidate.format.reader import latest_checkpoint
from xla_fsdp.consolidate.format.remote import RemoteStore


def assert_whole(root, allowed) -> float:
    value = read_value(root)
    assert value in allowed, (value, allowed)
    assert read_value(latest_checkpoint(root)) == value
    store, folder = files.saving.open_store(root)
    for place in folders.list_folders(store, folder):
        if folders.has_manifest(store, f"{folder}/{place.name}"):
            read_value(f"{root}/{place.name}")
    return value


def interrupt_everywhere(root, interrupted, at=1, stride=1):
    """Step 1 is there, and ``interrupted(folder, at)``, another save, ends at its ``at``-th
    operation, and at later ones, until it says that it did not. How many there are, and how often
    each of the two was there afterwards."""
    seen = {1.0: 0, 2.0: 0}
    while True:
        run = f"{root}/[{at}]*"
        save(run, 1, 1.0, world=2)
        hit = interrupted(run, at)
        seen[assert_whole(run, (1.0, 2.0))] += 1
        save(run, 9, 9.0, world=2, keep_last=1)
        assert read_value(run) == 9.0, at
        store, folder = files.saving.open_store(run)
        assert store.list(folder) == ["step-00000009"], at
        if not hit:
            return at, seen
        at += stride


def _kill_everywhere(root, second, keep_last, at, stride):
    def killed(run, at):
        def work():
            with Boundaries(run, at, kill):
                save(run, second, 2.0, world=2, keep_last=keep_last)

        return in_child(work)

    return interrupt_everywhere(root, killed, at, stride)


# Saving a step again is the same until it is complete.
@pytest.mark.parametrize(
    "second, keep_last, begin, stride",
    [
        pytest.param(2, 1, 1, 3, marks=pytest.mark.slow),
        pytest.param(1, None, 40, 3, marks=pytest.mark.slow),
        pytest.param(2, 1, 1, 1, marks=pytest.mark.full),
        pytest.param(1, None, 40, 1, marks=pytest.mark.full),
    ],
)
def test_killed_at_every_system_call(forks, tmp_path, second, keep_last, begin, stride):
    count, seen = forks(_kill_everywhere, str(tmp_path), second, keep_last, begin, stride)
    assert count > 50 and seen[2.0] > 5 / stride and seen[1.0] > (42 - begin) / stride


@pytest.mark.parametrize("code", [errno.ENOSPC, pytest.param(errno.EIO, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*is complete, but an older checkpoint could not be removed")
def test_an_error_of_every_system_call(tmp_path, code):
    def failed(run, at):
        happened, raised = [], False

        def fail(name):
            happened.append(name)
            raise OSError(code, os.strerror(code))

        with Boundaries(run, at, fail):
            try:
                save(run, 2, 2.0, world=2, keep_last=1)
            except OutputError as error:
                raised = True
                assert run in str(error) and os.strerror(code) in str(error)
        assert raised or read_value(run) == 2.0, (at, happened)
        return happened

    interrupt_everywhere(tmp_path, failed)


def test_a_failed_close_closes_no_file_of_another_thread(tmp_path, monkeypatch):
    store = LocalStore()
    output = store.create(str(tmp_path / "one"))
    with monkeypatch.context() as patch:

        def fail(_descriptor):
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(os, "fsync", fail)
        with pytest.raises(OutputError, match="Input/output error"):
            output.close()
    other = store.create(str(tmp_path / "two"))  # gets the number of the one before
    output.discard()
    other.write(b"whole")
    other.close()
    assert (tmp_path / "two").read_bytes() == b"whole"


def test_things_of_others_are_neither_read_nor_removed(tmp_path):
    root = str(tmp_path)
    names = "step-00000007 step-000000008 step-00000009.1 step-٠٠٠٠٠٠٠٩ .step-1.partial"
    foreign = names.split()
    assert not any(map(folders.parse_folder_name, [*foreign[1:], "step-00000001\n"]))
    for name in foreign:
        os.mkdir(f"{root}/{name}")
        Path(root, name, "weights").write_text("precious")
    Path(root, "step-00000099").write_text("a file")
    save(root, 5, 5.0)
    save(root, 6, 6.0, keep_last=1)
    assert read_value(root) == 6.0 and latest_checkpoint(root).endswith("step-00000006")
    assert sorted(os.listdir(root)) == sorted([*foreign, "step-00000099", "step-00000006"])


def test_removing_a_link_leaves_what_it_points_to(tmp_path):
    root, archive = str(tmp_path / "run"), str(tmp_path / "archive")
    save(archive, 1, 1.0)
    os.mkdir(root)
    os.symlink(f"{archive}/step-00000001", f"{root}/step-00000001")
    assert read_value(root) == 1.0
    save(root, 2, 2.0, keep_last=1)
    assert os.listdir(root) == ["step-00000002"] and read_value(archive) == 1.0


def test_latest_while_a_newer_one_takes_its_place(tmp_path, monkeypatch):
    """It must not say that there is none: a run would start from the beginning."""
    root = str(tmp_path)
    save(root, 1, 1.0)
    real, calls = folders.find_newest, []

    def newest(store, path, step=None):
        place = real(store, path, step)
        if not calls:
            calls.append(save(root, 2, 2.0, keep_last=1))
        return place

    monkeypatch.setattr(folders, "find_newest", newest)
    assert latest_checkpoint(root) == f"{root}/step-00000002"


def test_a_leftover_that_cannot_be_removed_does_not_block_the_next_save(tmp_path, monkeypatch):
    root = str(tmp_path)
    files.begin(root, 1, 1.0)
    (leftover,) = os.listdir(root)
    real = LocalStore.remove

    def remove(self, path):
        if path.endswith(leftover):
            raise OutputError(f"{path}: cannot be written: Device or resource busy")
        real(self, path)

    monkeypatch.setattr(LocalStore, "remove", remove)
    with pytest.warns(UserWarning, match=f"{leftover}.*busy"):
        save(root, 1, 2.0)
    assert read_value(root) == 2.0
    monkeypatch.undo()
    save(root, 2, 3.0, keep_last=1)
    assert os.listdir(root) == ["step-00000002"]


def test_two_jobs_in_one_folder(tmp_path):
    """The second takes the first one's files for leftovers: that one fails, nothing is mixed."""
    one, two = files.begin(tmp_path, 1, 1.0), files.begin(tmp_path, 1, 2.0)
    with pytest.raises(OutputError):
        one[0].write()
    two[0].commit([incomplete.write() for incomplete in two])
    assert read_value(tmp_path) == 2.0


def test_two_saves_in_one_folder_of_an_object_store():
    root = "memory://two-saves"
    one = files.begin(root, 1, 1.0)
    written = [incomplete.write() for incomplete in one]
    save(root, 2, 2.0)
    with pytest.raises(OutputError, match="step-00000001: another save into the same folder"):
        one[0].commit(written)
    assert read_value(root) == 2.0


@contextlib.contextmanager
def _interrupted(monkeypatch, at, error):
    count = []

    def happen(name, path):
        count.append(name)
        if len(count) == at:
            raise error(f"injected at {name}")

    real_open, real_rm = files.saving.open_store, MemoryFileSystem.rm_file

    def opened(path, *args):
        store, folder = real_open(path, *args)
        return Interrupting(store, happen), folder

    def rm_file(self, path):
        happen("rm_file", path)
        return real_rm(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(files.saving, "open_store", opened)
        patch.setattr(MemoryFileSystem, "rm_file", rm_file)
        yield count


@pytest.mark.parametrize(
    "second, error",
    [
        (2, Stopped),
        pytest.param(1, OutputError, marks=pytest.mark.slow),
        pytest.param(1, Stopped, marks=pytest.mark.slow),
        pytest.param(2, OutputError, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.*is complete, but an older checkpoint could not be removed")
def test_an_object_store_interrupted_at_every_change(monkeypatch, error, second):
    def interrupted(run, at):
        with _interrupted(monkeypatch, at, error) as count:
            with contextlib.suppress(Stopped, OutputError):
                save(run, second, 2.0, keep_last=1)
        return at <= len(count)

    root = f"memory://interrupted-{error.__name__}-{second}"
    count, seen = interrupt_everywhere(root, interrupted)
    assert all(seen.values()) and count > 40


def test_a_warning_that_is_an_error_does_not_cost_the_checkpoint(monkeypatch):
    root = "memory://warning"
    save(root, 1, 1.0)

    def fail(store, folder):
        raise OutputError(f"{folder}: cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(folders, "remove_checkpoint", fail)
        save(root, 2, 2.0, keep_last=1)  # pytest makes errors of warnings
    assert read_value(root) == 2.0


def test_folders_of_others_in_an_object_store_are_not_removed():
    memory = fsspec.filesystem("memory")
    memory.pipe("/shared/step-00000007/weights", b"precious")
    memory.pipe("/shared/step-00000008/rank-00000-of-00001.safetensors", b"cut short")
    save("memory://shared", 1, 1.0)
    assert memory.exists("/shared/step-00000007/weights")
    assert not memory.exists("/shared/step-00000008/rank-00000-of-00001.safetensors")
    assert read_value("memory://shared") == 1.0


def test_a_discarded_object_does_not_appear_when_it_is_freed(monkeypatch):
    """fsspec closes, that is uploads, buffered files when they are freed."""
    uploaded = []

    class File(AbstractBufferedFile):
        def _initiate_upload(self):
            pass

        def _upload_chunk(self, final=False):
            uploaded.append(self.buffer.getvalue())
            return True

    monkeypatch.setattr(
        MemoryFileSystem, "_open", lambda self, path, mode, **_: File(self, path, mode)
    )
    store = RemoteStore(MemoryFileSystem(), "memory")
    output = store.create("/discarded")
    output.write(b"half")
    output.discard()
    del output
    gc.collect()
    assert not uploaded
    output = store.create("/written")
    output.write(b"whole")
    output.close()
    assert uploaded == [b"whole"]

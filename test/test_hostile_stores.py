"""Object stores that are slow, fail, cut short, lie about sizes and names, or show what was."""

import threading
import time
import tracemalloc
from unittest import mock

import checkpoint_files as files
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import xla_fsdp
from xla_fsdp.checkpoint.loading import retry_while_missing
from xla_fsdp.consolidate import CheckpointError, consolidate_checkpoint
from xla_fsdp.consolidate.errors import (
    CheckpointNotFoundError,
    CorruptFileError,
    IncompleteCheckpointError,
    MissingRankError,
    UnreadableFileError,
)
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint
from xla_fsdp.consolidate.format.remote import RemoteStore

RANK_1 = "rank-00001-of-00003.safetensors"


class Lying(MemoryFileSystem):
    """Objects in memory, of which the store says and sends whatever ``lies`` does.

    A lie is called with the true answer and the path.
    """

    protocol = "lying"
    cachable = False

    @classmethod
    def begin(cls):
        fsspec.register_implementation("lying", cls, clobber=True)
        cls.store, cls.pseudo_dirs, cls.lies = {}, [""], {}

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(str(path).replace("lying://", "memory://"))

    def _answer(self, what, path, found):
        lie = self.lies.get(what)
        return found if lie is None else lie(found, path)

    def info(self, path, **more):
        return self._answer("info", path, super().info(path, **more))

    def cat_file(self, path, start=None, end=None, **more):
        return self._answer("cat_file", path, super().cat_file(path, start, end, **more))

    def ls(self, path, detail=True, **more):
        found = super().ls(path, detail=detail, **more)
        return found if detail else self._answer("ls", path, found)

    def isdir(self, path):
        return self._answer("isdir", path, super().isdir(path))


@pytest.fixture
def store():
    Lying.begin()

    def tell(**lies):
        Lying.lies = lies

    tell.root = "lying://bucket/run"
    files.save(tell.root, 1, 1.0)
    files.save(tell.root, 2, 2.0)
    assert files.read_value(tell.root) == 2.0
    yield tell
    Lying.begin()


def of(name, lie):
    return lambda found, path: lie(found) if path.endswith(name) else found


def raising(error):
    def lie(found, path):
        raise error

    return lie


def reads(store, tmp_path):
    yield lambda: files.read_value(store.root)
    yield lambda: consolidate_checkpoint(store.root, tmp_path / "out.safetensors")


def refused(store, tmp_path, kind, words, **lies):
    """Reading and consolidating raise that error, which names the file, and leave nothing."""
    store(**lies)
    for read in reads(store, tmp_path):
        with pytest.raises(CheckpointError, match=words) as caught:
            read()
        assert type(caught.value) is kind, caught.value
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert not list(tmp_path.iterdir())


PIECES = {
    "half": (lambda data: data[: len(data) // 2], UnreadableFileError, f"{RANK_1}: ends at byte"),
    "all of it": (lambda data: data * 3, UnreadableFileError, f"{RANK_1}: the store sent .* but"),
    "zeros": (lambda data: bytes(len(data)), CorruptFileError, f"{RANK_1}: bytes 0 to .* not th"),
    "no bytes": (lambda data: None, UnreadableFileError, f"{RANK_1}: .* sent a NoneType, exp"),
}


@pytest.mark.parametrize("what", PIECES)
def test_what_is_sent_is_not_what_was_saved(store, tmp_path, what):
    lie, kind, words = PIECES[what]
    refused(store, tmp_path, kind, words, cat_file=of(RANK_1, lie))
    # Of a manifest whose end is another the save never ended.
    wrong = IncompleteCheckpointError if what == "zeros" else UnreadableFileError
    refused(store, tmp_path, wrong, "manifest.json", cat_file=of("manifest.json", lie))


SIZES = [-1, 7, 1 << 29, 1 << 62, None, 1.5, True]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", [RANK_1, "manifest.json"])
def test_sizes_that_are_not_true(store, tmp_path, name, size):
    store(info=of(name, lambda about: {**about, "size": size}))
    tracemalloc.start()
    try:
        folder = f"{store.root}/step-00000002"
        direct = lambda: consolidate_checkpoint(folder, tmp_path / "out.pth")  # noqa: E731
        for read in (*reads(store, tmp_path), direct):
            with pytest.raises(CheckpointError, match=name):
                read()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_names_that_lead_elsewhere_or_to_nothing(store, tmp_path):
    def lie(found, path):
        outside = [f"{path}/..", "..", "/", "", "/etc/step-00000009", "C:\\step-00000008"]
        outside += [f"{path}/../../other/step-00000007", "step-00000006/../x"]
        return [*found, *found, *outside, f"{path}/step-{'9' * 20}", f"{path}/step-00000005"]

    asked = []

    def seen(found, path):
        asked.append(path)
        return found

    store(ls=lie, info=seen, cat_file=seen)
    assert files.read_value(store.root) == 2.0
    assert xla_fsdp.latest_checkpoint(store.root) == f"{store.root}/step-00000002"
    consolidate_checkpoint(store.root, tmp_path / "out.safetensors")
    assert asked and all(path.startswith("/bucket/run") and ".." not in path for path in asked)


def test_listings_of_what_was(store, tmp_path):
    def without(*names):
        return lambda found, path: [one for one in found if not one.endswith(names)]

    # The newest is not there yet: the one before, whole. Nothing yet: said so.
    store(ls=without("step-00000002"))
    assert files.read_value(store.root) == 1.0
    missing = f"{RANK_1}: is missing. The manifest lists 3 files, and 1 of them"
    refused(store, tmp_path, MissingRankError, missing, ls=without(RANK_1))
    nothing = {"ls": without(""), "isdir": lambda *_: 0}
    refused(store, tmp_path, CheckpointNotFoundError, "bucket/run", **nothing)
    store(ls=of("run", lambda found: [*found, "/bucket/run/step-00000003"]))
    assert files.read_value(store.root) == 2.0
    gone = f"/bucket/run/step-00000002/{RANK_1}"
    del Lying.store[gone]
    stale = of("00002", lambda found: [*found, gone])
    refused(store, tmp_path, CheckpointNotFoundError, f"{RANK_1}: does not exist", ls=stale)


FAILURES = OSError(5, "Input/output error"), RuntimeError("HTTP 503\nmore"), EOFError()


@pytest.mark.parametrize(
    ("what", "lie"),
    [
        *((what, raising(each)) for what in ("info", "cat_file", "ls") for each in FAILURES),
        ("ls", lambda found, path: None),
        ("ls", lambda found, path: [b"x", 3]),
    ],
)
def test_a_store_that_fails(store, tmp_path, what, lie):
    refused(store, tmp_path, UnreadableFileError, "cannot be read: ", **{what: lie})


def test_a_store_that_hangs_is_given_up(store, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FSDP_STORE_SECONDS", "0.2")
    over = threading.Event()

    def hang(found, path):
        over.wait(600)
        return found

    words = r"cannot be read: no answer within 0.2 s \(XLA_FSDP_STORE_SECONDS"
    began = time.monotonic()
    for what in ("cat_file", "ls", "info"):
        refused(store, tmp_path, UnreadableFileError, words, **{what: hang})
    assert time.monotonic() - began < 300
    monkeypatch.setenv("XLA_FSDP_STORE_SECONDS", "300")
    store(cat_file=lambda data, path: (time.sleep(0.05), data)[1])
    assert files.read_value(store.root) == 2.0
    for wrong in ("0", "-1", "nan", "inf", "soon"):
        monkeypatch.setenv("XLA_FSDP_STORE_SECONDS", wrong)
        refused(store, tmp_path, UnreadableFileError, "expected a positive number of seconds")
    over.set()


def test_messages_hold_no_secrets(store, tmp_path):
    class Closed(MemoryFileSystem):
        protocol = "closed"
        cachable = False

        def __init__(self, **more):
            raise PermissionError("https://u:hunter2@host/x?sig=hunter2 says no")

        @staticmethod
        def _get_kwargs_from_urls(path):
            return {}

    fsspec.register_implementation("closed", Closed, clobber=True)
    with pytest.raises(UnreadableFileError, match="^closed://...@host/run.* cannot be opened: P"):
        consolidate_checkpoint("closed://u:hunter2@host/run?sig=hunter2", tmp_path / "x.pth")
    error = OSError("GET https://u:hunter2@host/x?X-Sig=hunter2&y=1 gave 403")
    store(cat_file=raising(error))
    with pytest.raises(UnreadableFileError, match="https://...@host/x.... gave 403") as caught:
        files.read_value(store.root)
    assert "hunter2" not in str(caught.value)


def test_nothing_outside_is_removed():
    files = mock.Mock()
    files.find = lambda path: [f"{path}/rank", "/other/x", f"{path}/../precious", f"{path}2/x"]
    RemoteStore(files, "lying").remove("/bucket/[run]")
    files.rm_file.assert_called_once_with("/bucket/[run]/rank")


def test_a_load_waits_for_listings_that_are_late(store):
    late = [RANK_1, RANK_1, ("rank", "manifest.json")]

    def lie(found, path):
        gone = late.pop() if late else "nothing"
        return [one for one in found if not one.rpartition("/")[2].startswith(gone)]

    store(ls=lie)
    found = retry_while_missing(lambda: ShardedCheckpoint(f"{store.root}/step-00000002"))
    assert not late and files.value_in(found) == 2.0

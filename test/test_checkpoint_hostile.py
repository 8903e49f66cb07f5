"""Hostile files raise an error that names them, and nothing in them is executed."""

import json
import os
import pickle
import tracemalloc
from pathlib import Path

import checkpoint_files as files
import pytest
from checkpoint_files import forged, forged_header, seal, unsplit
from consolidating import Harmful

from xla_fsdp.consolidate import errors
from xla_fsdp.consolidate.format import values
from xla_fsdp.consolidate.format.container import read_container
from xla_fsdp.consolidate.format.digests import digest
from xla_fsdp.consolidate.format.local import LocalStore
from xla_fsdp.consolidate.format.manifest import NAME, load_manifest
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint, latest_checkpoint
from xla_fsdp.consolidate.format.strict import read_json

HUGE = 10**4000
DEEP = 100_000


@pytest.fixture
def folder(tmp_path):
    return Path(files.save(tmp_path, 5, 5.0))


def refused(folder, kind=errors.CheckpointError, name="") -> errors.CheckpointError:
    with pytest.raises(kind) as caught:
        ShardedCheckpoint(folder).verify()
    assert str(folder) in str(caught.value) and name in str(caught.value)
    assert len(str(caught.value)) < 1000
    return caught.value


def container_of(data: bytes):
    return read_container(lambda begin, end: data[begin:end], len(data), "file")


def described(**tensors) -> bytes:
    return unsplit(tensors, bytes(8))


def entry(dtype="F32", shape=(2,), data_offsets=(0, 8), **more):
    return {"dtype": dtype, "shape": shape, "data_offsets": data_offsets, **more}


GOOD = entry()
BAD_CONTAINERS = {
    "header longer than the file": (100).to_bytes(8, "little") + b"{}",
    "header that is a list": unsplit(b"[]", b""),
    "metadata that are no strings": unsplit(b'{"__metadata__":{"a":1}}', b""),
    "metadata that are null": unsplit(b'{"__metadata__":null}', b""),
    "a tensor that is a number": described(a=1),
    "a tensor without a shape": described(a={"dtype": "F32", "data_offsets": [0, 8]}),
    "a tensor with something more": described(a=entry(more=1)),
    "unknown dtype": described(a=entry("F31")),
    "dtype that is a list": described(a=entry(["F32"])),
    "offsets of floats": described(a=entry(data_offsets=(0.0, 8.0))),
    "three offsets": described(a=entry(data_offsets=(0, 8, 8))),
    "offsets beyond the end": described(a=entry(shape=(3,), data_offsets=(0, 12))),
    "offsets too far apart": described(a=entry(shape=(1,))),
    "overlapping tensors": described(a=GOOD, b=entry(shape=(1,), data_offsets=(4, 8))),
    "a gap in the middle": described(a=entry("U8", (1,), (0, 1)), b=entry("U8", (4,), (4, 8))),
    "nothing at the end": described(a=entry(shape=(1,), data_offsets=(0, 4))),
    "seven bytes": bytes(7),
}


@pytest.mark.parametrize("what", BAD_CONTAINERS)
def test_container(what):
    refused = errors.InvalidMetadataError, errors.UnreadableFileError
    with pytest.raises(refused, match="^file: ") as caught:
        container_of(BAD_CONTAINERS[what])
    assert len(str(caught.value)) < 500


BAD_JSON = {
    "no UTF-8": (b'{"\xff\xfe": 1}', "not valid JSON"),
    "a byte order mark": (b"\xef\xbb\xbf{}", "not valid JSON"),
    "nested lists": (b"[" * DEEP + b"]" * DEEP, "nested"),
    "two values": (b"{}{}", "not valid JSON"),
    "a key twice": (b'{"a":1,"a":1}', "'a' occurs twice"),
    "half of a surrogate pair": (b'{"a":"\\ud800"}', "not valid JSON"),
    "half of a pair as a key": (b'{"\\uDC00":1}', "not valid JSON"),
    "a number of 5000 digits": (b'{"a":' + b"9" * 5000 + b"}", "not valid JSON"),
    "NaN": (b'{"a":NaN}', "not valid JSON"),
    "a number beyond all floats": (b'{"a":-1e999}', "not valid JSON"),
}


@pytest.mark.parametrize(("text", "words"), BAD_JSON.values(), ids=BAD_JSON)
def test_text_that_is_not_strict_json(text, words):
    for read in (
        lambda: container_of(unsplit(text, b"")),
        lambda: load_manifest(seal(text), "file"),
    ):
        with pytest.raises(errors.InvalidMetadataError, match=f"^file: .*{words}") as caught:
            read()
        assert len(str(caught.value)) < 500


# Each means two elements, or none, to those who multiply without looking.
BAD_SHAPES = [
    *(2, [-2, -1], [2.0], [True, 2], [2**62, 4], [HUGE, 0], [2**62, 2**62, 0]),
    [1] * 64 + [2],
]


@pytest.mark.parametrize("shape", BAD_SHAPES, ids=lambda shape: f"{shape!s:.20}")
def test_shapes_in_a_container_a_value_and_a_manifest(folder, shape):
    size = 0 if isinstance(shape, list) and shape[-1] == 0 else 8
    with pytest.raises(errors.InvalidMetadataError, match="^file: .*(must be lists|not a JSON)"):
        container_of(unsplit({"a": entry("F32", shape, (0, size))}, bytes(size)))
    with pytest.raises(errors.InvalidMetadataError, match="^label: .*is not a shape"):
        values.decode(tensor("U8", shape, "AAA=" if size else ""), "label")
    with forged(folder) as body:
        body["parameters"][0].update(shape=shape)
    refused(folder, errors.InvalidMetadataError, NAME)


def test_a_good_container_is_read():
    assert container_of(described(a=GOOD)).entries["a"].shape == (2,)
    assert read_json(rb'"\ud83d\ude00"', "x") == "\U0001f600"


def test_the_header_is_not_read_before_its_length_is_known_to_be_possible():
    asked = []

    def read(begin, end):
        asked.append((begin, end))
        return b"\xff" * (end - begin)

    with pytest.raises(errors.UnreadableFileError):
        read_container(read, 1 << 60, "file")
    assert asked == [(0, 8)]


WRONG = [None, True, -1, 1.5, HUGE, 2**63, "", "../x", [], {}, [None], [[]], {"": None}, "\ud800"]
# What is allowed to be anything, as far as reading the manifest goes.
FREE = {"scheduler", "extra"}


def _places(value):
    """Every list and dict in a JSON value, with each of its keys."""
    keys = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if key not in FREE and isinstance(value[key], (dict, list)):
            yield from _places(value[key])


def _loads_or_refuses(body) -> bool:
    data = seal(json.dumps(body).encode())
    try:
        load_manifest(data, "manifest")
    except (errors.InvalidMetadataError, errors.CorruptFileError) as error:
        assert str(error).startswith("manifest: ") and len(str(error)) < 1000
        return False
    return True


def test_a_manifest_with_a_wrong_value_anywhere(folder):
    body, accepted = files.read_body(folder), set()
    assert _loads_or_refuses(body)
    for inner, key in list(_places(body)):
        if inner is body:
            field = key
        right = inner[key]
        for wrong in WRONG:
            inner[key] = wrong
            if _loads_or_refuses(body) and wrong != right:
                accepted.add((field, repr(wrong)[:20]))
        inner.pop(key)
        assert not _loads_or_refuses(body) or inner is not body, key
        if isinstance(inner, dict):
            inner[key] = right
        else:
            inner.insert(key, right)
    for field in ("format", "version", "world_size", "files", "parameters", "buffers"):
        kinds = {kind for name, kind in accepted if name == field}
        # An empty list of buffers is fine; a shape may be [].
        assert kinds <= {"[]", "{}", "''", "'../x'", "'\\ud800'"}, (field, kinds)
    assert not {kind for name, kind in accepted if name in ("files", "format", "version")}


def of_weight(body):
    return body["optimizer"]["state"]["weight"]


# Changes of the manifest that contradict its other fields, or that no tensor or file can have.
BODIES = {
    "a parameter as a buffer": lambda body: body["buffers"].append(body["parameters"][0]),
    "a name twice": lambda body: body["parameters"][0]["names"].append("bias"),
    "state of nothing": lambda body: body["optimizer"]["state"].update(unknown=of_weight(body)),
    "a group twice": lambda body: body["optimizer"]["groups"].append(
        body["optimizer"]["groups"][0]
    ),
    "a group of nothing": lambda body: body["optimizer"]["groups"][0]["parameters"].append("x"),
    "a reserved option": lambda body: body["optimizer"]["groups"][0]["options"].update(params=[]),
    "a key with a slash": lambda body: of_weight(body)["sharded"].update({"a/b": "F32"}),
    "state of both kinds": lambda body: of_weight(body)["single"].update(exp_avg={"value": 1}),
    "a bare single value": lambda body: of_weight(body)["single"].update(step=1),
}


@pytest.mark.parametrize("change", BODIES.values(), ids=BODIES)
def test_a_manifest_that_contradicts_itself(folder, change):
    with forged(folder) as body:
        change(body)
    refused(folder, errors.InvalidMetadataError, NAME)


@pytest.mark.parametrize(
    "begins",
    ["", "null", '{"weight":-1}', '{"weight":true}', '{"weight":1.0}',
     '{"weight":99999999999999999999}'],
)  # fmt: skip
def test_where_pieces_begin(folder, begins):
    with forged_header(folder, 1) as header:
        header["__metadata__"]["begins"] = begins
    refused(folder, name="rank-00001")


def tensor(dtype, shape, data, **more):
    return {"$": "tensor", "of": {"dtype": dtype, "shape": shape, "data": data, **more}}


BAD_VALUES = {
    "unknown kind": {"$": "object", "of": "os.system"},
    "nothing in it": {"$": "tuple"},
    "float": {"$": "float", "of": "1"},
    "bytes": {"$": "bytes", "of": "*"},
    "tuple of a string": {"$": "tuple", "of": "ab"},
    "set of lists": {"$": "set", "of": [[]]},
    "set with an item twice": {"$": "set", "of": [1, 1]},
    "dict of strings": {"$": "dict", "of": ["ab"]},
    "dict of triples": {"$": "dict", "of": [[1, 2, 3]]},
    "tensor of a list": {"$": "tensor", "of": []},
    "tensor of an unknown dtype": tensor("X", [], ""),
    "tensor with too little": tensor("F32", [1], ""),
    "tensor with something more": tensor("U8", [3], "AAAA", more=1),
}


@pytest.mark.parametrize("what", BAD_VALUES)
def test_value(what):
    with pytest.raises(errors.InvalidMetadataError, match="^label: ") as caught:
        values.decode(BAD_VALUES[what], "label")
    assert len(str(caught.value)) < 400


def test_deep_values():
    nested, tagged = 1, 1
    for _ in range(400):
        nested, tagged = [nested], {"$": "tuple", "of": [tagged]}
    for value in (nested, tagged):
        with pytest.raises(errors.InvalidMetadataError, match="deep"):
            values.decode(value, "label")
    endless = []
    endless.append(endless)
    for value in (nested, endless):
        with pytest.raises(errors.UnsupportedValueError, match="deep"):
            values.encode(value, "extra")
    # What can be written can be read, also from deeper in the stack.
    value = {}
    for _ in range(values.MAX_DEPTH - 1):
        value = {(1,): value}
    text = json.dumps(values.encode(value, "extra")).encode()

    def deeper(depth):
        return deeper(depth - 1) if depth else values.decode(read_json(text, "x"), "x")

    assert deeper(100) == value


@pytest.mark.parametrize("what", ["number", "text", "key", "item"])
def test_values_that_could_be_saved_but_not_loaded(what):
    half = "\ud800"  # of a pair
    value = {"number": 10**5000, "text": half, "key": {half: 1}, "item": [half]}[what]
    with pytest.raises(errors.UnsupportedValueError, match="^extra|^a key of extra"):
        values.encode({"it": value}, "extra")


@pytest.mark.parametrize("name", [NAME, "rank-00001-of-00003.safetensors"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_pickle_is_not_executed(folder, tmp_path, name, adapted):
    data = pickle.dumps(Harmful(tmp_path / "executed"))
    (folder / name).write_bytes(seal(data) if adapted and name == NAME else data)
    if adapted and name != NAME:
        with forged(folder):
            pass
    refused(folder, name=name)
    with pytest.raises(errors.CheckpointError):
        latest_checkpoint(folder.parent)
        ShardedCheckpoint(folder).file(1)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", [NAME, "rank-00001-of-00003.safetensors"])
def test_a_gigantic_file_is_not_read(folder, name):
    for size in (1 << 40, 1 << 30):
        os.truncate(folder / name, 0)
        os.truncate(folder / name, size)
        tracemalloc.start()
        refused(folder, errors.CorruptFileError, name)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


OTHER_KINDS = {
    "pipe": os.mkfifo,
    "folder": os.mkdir,
    "link": lambda path: path.symlink_to("elsewhere"),
}


@pytest.mark.parametrize("name", [NAME, "rank-00001-of-00003.safetensors"])
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_something_else_in_place_of_a_file(folder, name, kind):
    (folder / name).rename(folder / "elsewhere")
    OTHER_KINDS[kind](folder / name)
    error = refused(folder, errors.UnreadableFileError, name)
    assert "symbolic link" in str(error) or "link" not in kind


def test_a_pipe_that_takes_the_place_of_a_file_while_it_is_read(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(errors.UnreadableFileError, match="pipe"):
        LocalStore().read_into(str(folder / "pipe"), 0, memoryview(bytearray(8)))


def test_digests_are_those_of_xxh3():
    assert digest(b"") == "2d06800538d394c2"  # as published

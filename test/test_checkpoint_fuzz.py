"""Every parser of a checkpoint, fed with anything: what was written comes back, else a named error.

A few seconds by default, always the same examples; others, for ten minutes on two cores, with::

    FUZZ_EXAMPLES=10000 python -m pytest test/test_checkpoint_fuzz.py
"""

import json
import math
import os
import shutil
from collections import Counter, OrderedDict
from pathlib import Path

import checkpoint_files as files
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sharded_files import everything

from xla_fsdp.consolidate.errors import CheckpointError, UnsupportedValueError
from xla_fsdp.consolidate.format import values
from xla_fsdp.consolidate.format.container import dump_header, read_container
from xla_fsdp.consolidate.format.dtypes import DTYPES, tensor_bytes
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint
from xla_fsdp.consolidate.format.strict import read_json, write_json

EXAMPLES = os.environ.get("FUZZ_EXAMPLES")
fuzz = settings(
    max_examples=int(EXAMPLES or 100),
    derandomize=not EXAMPLES,
    deadline=None,  # other work on the machine is no failure
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


texts = st.text(max_size=8) | st.sampled_from(["$", "of", "\ud800", "a\udfffb", "\0", "é\n"])
numbers = st.integers() | st.floats() | st.sampled_from([2**62, 2**63, -(2**64), 10**400, -0.0])
tensors = st.builds(
    lambda dtype, shape, data: torch.frombuffer(
        bytearray(data[:1]) * math.prod(shape) * dtype.itemsize, dtype=dtype
    ).reshape(shape)
    if math.prod(shape)
    else torch.empty(shape, dtype=dtype),
    st.sampled_from([dtype for dtype in DTYPES.values() if dtype is not torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
    st.binary(min_size=1, max_size=1),
)
hashable = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
anything = st.recursive(
    hashable | tensors,
    lambda inner: st.lists(inner, max_size=3)
    | st.lists(inner, max_size=3).map(tuple)
    | st.sets(hashable, max_size=3)
    | st.dictionaries(texts, inner, max_size=3)
    | st.dictionaries(hashable, inner, max_size=3)
    | st.dictionaries(st.just("$"), inner, max_size=1)
    | st.dictionaries(hashable, inner, max_size=3).map(OrderedDict)
    | st.dictionaries(hashable, st.integers(), max_size=3).map(Counter),
    max_leaves=12,
)


def same(one, other) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (one.dtype, one.shape) == (other.dtype, other.shape) and bytes(
            tensor_bytes(one.reshape(-1))
        ) == bytes(tensor_bytes(other.reshape(-1)))
    if isinstance(one, float):
        return math.isnan(one) and math.isnan(other) or repr(one) == repr(other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, set):
        return same(sorted(one, key=repr), sorted(other, key=repr))
    return one == other


@fuzz
@example({float("nan"), float("inf")})
@example({float("nan"): 1, -0.0: {"$": ()}})
@example({"\udc80": 1})
@given(anything)
def test_values_come_back(value):
    try:
        encoded = values.encode(value, "value")
    except UnsupportedValueError as error:
        assert "UTF-8" in str(error)  # half of a surrogate pair
        return
    assert same(values.decode(read_json(write_json(encoded), "value"), "value"), value)


kinds = st.sampled_from([*values._KINDS, "x", "$"])
names = st.sampled_from(["$", "of", "dtype", "shape", "data", "names", "a/b", "", "é"])
scalars = st.none() | st.booleans() | numbers | st.text(max_size=3) | names


def nested(depth: int, of) -> object:
    for level in range(depth):
        of = [of] if level % 2 else {"$": "tuple", "of": [of]}
    return of


json_values = st.recursive(
    scalars | kinds | st.sampled_from([*DTYPES, "AAAA", "nan"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(names, inner, max_size=4)
    | st.builds(lambda kind, of: {"$": kind, "of": of}, kinds, inner)
    | st.builds(lambda kind, of: {"$": kind, "of": [of, of]}, kinds, inner)
    | st.builds(nested, st.integers(0, 700), inner)
    | st.builds(
        lambda *parts: {
            "$": "tensor",
            "of": dict(zip(("dtype", "shape", "data"), parts, strict=True)),
        },
        st.sampled_from([*DTYPES]),
        st.lists(st.sampled_from([0, 1, 2, 3, -3, 2**40, 2**62, 2**63, True]), max_size=3) | inner,
        st.sampled_from(["", "AAAA", "AAAAAAAA", "*"]) | inner,
    ),
    max_leaves=8,
)


@fuzz
@example({"$": "dict", "of": ["ab"]})
@example({"$": "tensor", "of": {"dtype": "U8", "shape": [2**62, 2**62, 0], "data": ""}})
@given(json_values)
def test_any_json_is_a_value_or_refused(value):
    try:
        decoded = values.decode(value, "value")
    except CheckpointError:
        return
    try:
        encoded = values.encode(decoded, "value")
    except UnsupportedValueError:  # such as a large number in a JSON file of somebody else
        return
    assert same(values.decode(encoded, "value"), decoded)


tokens = st.sampled_from(
    [b"{", b"}", b"[", b"]", b'"', b":", b",", b"null", b"true", b"NaN", b"-Infinity", b"1e999"]
    + [b"-0", b"9" * 30, b"9" * 5000, b'"\\ud800"', b"\\u0000", b'"a":', b"\xff", b" ", b"[" * 2000]
)


@fuzz
@example(b'"\\ud800"')
@example(b'{"a":1,"\\u0061":2}')
@given(st.lists(tokens | st.binary(max_size=4), max_size=12).map(b"".join))
def test_any_bytes_are_json_or_refused(data):
    try:
        value = read_json(data, "file")
    except CheckpointError as error:
        assert str(error).startswith("file: ") and len(str(error)) < 400
        return
    assert same(read_json(write_json(value), "file"), value)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
tensor_names = st.text(min_size=1, max_size=5).filter(lambda name: name != "__metadata__")
tensor_lists = st.lists(
    st.tuples(tensor_names, st.sampled_from([*DTYPES]), shapes),
    max_size=5,
    unique_by=lambda tensor: tensor[0],
)
metadata = st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=3)


@fuzz
@given(tensor_lists, metadata)
def test_containers_come_back(tensors, about):
    header = dump_header(tensors, about)
    sizes = [DTYPES[dtype].itemsize * math.prod(shape) for _, dtype, shape in tensors]
    data = header + bytes(sum(sizes))
    found = read_container(lambda begin, end: data[begin:end], len(data), "file")
    assert found.metadata == about and len(header) % 8 == 0
    described = [(name, each.dtype, each.shape) for name, each in found.entries.items()]
    assert described == tensors
    assert [each.end - each.begin for each in found.entries.values()] == sizes
    from safetensors.torch import load

    if not any(dtype.startswith(("C", "F8")) for _, dtype, _ in tensors):
        assert {n: tuple(t.shape) for n, t in load(data).items()} == {n: s for n, _, s in tensors}


# offset, bytes taken out, bytes put in: where the offset falls is scaled to the length.
edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 4), tokens | st.binary(max_size=4)),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, changes) -> bytes:
    for where, take, put in changes:
        at = int(where * len(data))
        data = data[:at] + put + data[at + take :]
    return data


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Path(files.save(tmp_path_factory.mktemp("fuzz"), 5, 5.0))


# Changes of a JSON value at a random place, by a seed for where.
json_edits = st.lists(
    st.tuples(st.integers(0, 10**6), scalars | json_values), min_size=1, max_size=2
)


def edit_json(value, seed, new):
    """``value`` with something in it, that ``seed`` chooses, replaced."""
    if not isinstance(value, (dict, list)) or not value or seed % 7 == 6:
        return new
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = keys[seed % len(keys)]
    if seed % 11 == 10:
        rest = list(value.items()) if isinstance(value, dict) else list(value)
        del rest[seed % len(keys)]
        return type(value)(rest)
    changed = value.copy()
    changed[key] = edit_json(value[key], seed // len(keys), new)
    return changed


@fuzz
@given(rank=st.integers(-1, 2), changes=json_edits, bytewise=edits, how=st.integers(0, 2))
def test_a_forged_checkpoint_is_refused_or_whole(checkpoint, rank, changes, bytewise, how):
    folder = checkpoint.parent.parent / "forged" / checkpoint.name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(checkpoint, folder)
    try:
        if rank < 0:
            body = files.read_body(folder)
            for seed, new in changes:
                body = edit_json(body, seed, new)
            files.write_body(folder, body)
        else:
            with files.forged_file(folder, rank) as parts:
                if how == 0:
                    for seed, new in changes:
                        parts[0] = edit_json(parts[0], seed, new)
                elif how == 1:
                    parts[0] = edited(json.dumps(parts[0]).encode(), bytewise)
                else:
                    parts[1] = edited(parts[1], bytewise)
    except ValueError:  # a number too long for Python to write
        return
    try:
        opened = ShardedCheckpoint(folder)
        everything(opened)
        values.decode(opened.manifest.extra, "extra")
    except CheckpointError as error:
        assert str(folder) in str(error) or str(error).startswith("extra")
        assert len(str(error)) < 1500

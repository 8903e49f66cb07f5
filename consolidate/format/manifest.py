"""Reads and writes the manifest, the file that makes a folder a checkpoint.

``consolidate/README.md`` defines its content.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from ..errors import CorruptFileError, UnsupportedValueError
from .digests import DIGEST_LENGTH, chunk_bytes, digest
from .rank_file import FileRecord
from .store import Store, read
from .strict import Fields, read_json, write_json

NAME = "manifest.json"
FORMAT, VERSION = "xla_fsdp", 2
MAX_BYTES = 1 << 30
# Keys of torch's parameter groups that are not options.
NOT_OPTIONS = ("params", "param_names")
_HEAD, _MIDDLE, _TAIL = b'{"digest": "', b'", "manifest":\n', b"}\n"
_SEALED = re.compile(re.escape(_HEAD) + b"(.{16})" + re.escape(_MIDDLE) + b"(.*)}\n", re.DOTALL)


@dataclass(frozen=True)
class Tensor:
    """A parameter or buffer of the unsharded model.

    Attributes:
        names: its dotted name, then the names of tensors tied to it.
        dtype: a name of safetensors, such as ``"F32"``.
        restore: the original dtype of a buffer that was cast for computing.
    """

    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    restore: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class State:
    """The optimizer state of one parameter.

    Attributes:
        sharded: dtypes, by key (``"exp_avg"``), of the tensors that have the parameter's shape.
        single: the other values by key (``"step"``), encoded.
    """

    sharded: Mapping[str, str]
    single: Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """A parameter group: first names of parameters, and encoded options (``"lr"``)."""

    parameters: tuple[str, ...]
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Optimizer:
    kind: str
    groups: tuple[Group, ...]
    state: Mapping[str, State]


@dataclass(frozen=True)
class ShardingRule:
    """Which rank stores which elements of a parameter: ``spans`` in ``consolidate/README.md``.

    ``offset``: index of the parameter's first element in a vector of several parameters.
    """

    first: int
    step: int
    chunk: int
    offset: int

    def pieces(self, numel: int, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yields ``(begin, end, rank)`` of pieces that overlap a range of ``numel`` elements."""
        if begin >= end:
            return
        for i in range(
            (begin + self.offset) // self.chunk, (end - 1 + self.offset) // self.chunk + 1
        ):
            low, high = i * self.chunk - self.offset, (i + 1) * self.chunk - self.offset
            yield max(low, 0), min(high, numel), self.first + i * self.step

    def range_of_rank(self, rank: int, numel: int) -> tuple[int, int]:
        """The range of ``numel`` elements that ``rank`` stores, ``(0, 0)`` if none."""
        i, remainder = divmod(rank - self.first, self.step)
        begin, end = max(i * self.chunk - self.offset, 0), (i + 1) * self.chunk - self.offset
        return (
            (begin, min(end, numel))
            if i >= 0 and not remainder and begin < min(end, numel)
            else (0, 0)
        )


@dataclass(frozen=True)
class Manifest:
    """The description of one save.

    Attributes:
        parameters, buffers: by first name.
        files: in rank order.
        scheduler, extra, extra_state: encoded by ``values``.
        sharding_rules: by parameter. ``None``: only the headers of the files say who stores what.
    """

    save_id: str
    step: int
    world_size: int
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    files: tuple[FileRecord, ...]
    optimizer: Optimizer | None = None
    scheduler: Any = None
    extra: Any = None
    extra_state: Mapping[str, Any] | None = None
    sharding_rules: Mapping[str, ShardingRule] | None = None

    def identity(self, rank: int) -> dict[str, str]:
        return {
            "format": FORMAT,
            "version": str(VERSION),
            "save_id": self.save_id,
            "step": str(self.step),
            "rank": str(rank),
            "world_size": str(self.world_size),
        }


def file_name(rank: int, world_size: int) -> str:
    return f"rank-{rank:05d}-of-{world_size:05d}.safetensors"


def parameter_key(name: str) -> str:
    return f"parameter/{name}"


def buffer_key(name: str) -> str:
    return f"buffer/{name}"


def state_key(key: str, name: str) -> str:
    return f"state/{key}/{name}"


def dump_manifest(manifest: Manifest) -> bytes:
    """Raises UnsupportedValueError if the manifest is too large."""
    body: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "parameters": [_dump_tensor(tensor) for tensor in manifest.parameters.values()],
        "buffers": [_dump_tensor(tensor) for tensor in manifest.buffers.values()],
        "optimizer": manifest.optimizer and asdict(manifest.optimizer),
        "scheduler": manifest.scheduler,
        "extra": manifest.extra,
        "extra_state": manifest.extra_state,
    }
    if manifest.sharding_rules is not None:
        body["spans"] = {name: astuple(rule) for name, rule in manifest.sharding_rules.items()}
    body["files"] = [vars(file) for file in manifest.files]
    data = write_json(body)
    sealed = _HEAD + digest(data).encode() + _MIDDLE + data + _TAIL
    if len(sealed) > MAX_BYTES:
        raise UnsupportedValueError(
            f"the manifest of step {manifest.step} has {len(sealed)} bytes, but can have at most "
            f"{MAX_BYTES}. Save large values of extra as parameters or buffers of the model."
        )
    return sealed


def is_begun(store: Store, path: str) -> bool:
    """Whether a file begins like a manifest. Checked before a large file is read."""
    return store.size(path) >= len(_HEAD) and read(store, path, 0, len(_HEAD)) == _HEAD


def is_ended(store: Store, path: str) -> bool:
    """Whether a manifest is complete. Some stores show files that are being written."""
    size = store.size(path)
    return size >= len(_TAIL) and read(store, path, size - len(_TAIL), size) == _TAIL


def load_manifest(data: bytes, label: str, files: Sequence[FileRecord] = ()) -> Manifest:
    """Raises CorruptFileError if the digest differs, InvalidMetadataError for other defects.

    ``files``: the records of a manifest that was written without them.
    """
    found = Fields(read_json(_body(data, label), label), label)
    found.require_format(FORMAT, VERSION)
    save_id, world_size = found.text("save_id"), found.integer("world_size", least=1)
    parameters, buffers = (
        [_read_tensor(each) for each in found.objects(kind)] for kind in ("parameters", "buffers")
    )
    by_name = {tensor.name: tensor for tensor in parameters}
    names = [name for tensor in parameters + buffers for name in tensor.names]
    if len(set(names)) != len(names):
        found.fail("two parameters or buffers have the same name")
    listed = found.objects("files")
    files = (*files, *(load_file(each, rank, world_size) for rank, each in enumerate(listed)))
    if len(files) != world_size:
        found.fail(f"lists {len(files)} files, expected one for each of {world_size} ranks")
    optimizer, extra_state = None, found.json("extra_state")
    if found.json("optimizer") is not None:
        optimizer = _read_optimizer(found.child("optimizer"), by_name)
    if extra_state is not None and not isinstance(extra_state, dict):
        found.fail("extra_state must be an object")
    return Manifest(
        save_id=save_id,
        step=found.integer("step"),
        world_size=world_size,
        parameters=by_name,
        buffers={tensor.name: tensor for tensor in buffers},
        files=files,
        optimizer=optimizer,
        scheduler=found.json("scheduler"),
        extra=found.json("extra"),
        extra_state=extra_state,
        sharding_rules=_read_rules(found, by_name) if "spans" in found else None,
    )


def _body(data: bytes, label: str) -> bytes:
    match = _SEALED.fullmatch(data)
    if match is None or digest(match[2]).encode() != match[1]:
        raise CorruptFileError(
            f"{label}: its bytes are not those that were saved (truncated, changed, or not a "
            "manifest). Use another checkpoint."
        )
    return match[2]


def _read_rules(found: Fields, parameters: Mapping[str, Tensor]) -> dict[str, ShardingRule]:
    stated, rules = found.mapping("spans"), {}
    for name in parameters:
        numbers = stated.get(name)
        if (
            not isinstance(numbers, list)
            or len(numbers) != 4
            or not all(type(n) is int and 0 <= n < 1 << 62 for n in numbers)
            or 0 in numbers[1:3]
        ):
            found.fail(
                f"the span of {name!r:.120} is {numbers!r:.80}, expected four numbers from 0, and "
                "step and chunk from 1"
            )
        rules[name] = ShardingRule(*numbers)
    return rules


def _dump_tensor(tensor: Tensor) -> dict[str, Any]:
    return {name: value for name, value in vars(tensor).items() if value is not None}


def _read_tensor(found: Fields) -> Tensor:
    restore = found.dtype("restore") if "restore" in found else None
    return Tensor(found.names("names"), found.dtype("dtype"), found.shape("shape"), restore)


def load_file(found: Fields, rank: int, world_size: int) -> FileRecord:
    """Reads one element of ``files``."""
    name, size, digests = found.text("name"), found.integer("size"), found.text("digests")
    expected, chunk = file_name(rank, world_size), found.integer("chunk", least=1)
    if name != expected:
        found.fail(f"the file of rank {rank} is called {name!r:.80}, expected {expected}")
    if chunk != chunk_bytes(size):
        found.fail(f"{name}: chunk is {chunk}, expected {chunk_bytes(size)} for {size} bytes")
    chunks = math.ceil(size / chunk)
    if len(digests) != DIGEST_LENGTH * chunks:
        found.fail(
            f"{name}: has digests of {len(digests) // DIGEST_LENGTH} chunks, expected {chunks} "
            f"for {size} bytes"
        )
    return FileRecord(name, size, chunk, digests)


def _read_optimizer(found: Fields, parameters: Mapping[str, Tensor]) -> Optimizer:
    groups = tuple(
        Group(group.names("parameters", least=0), group.mapping("options"))
        for group in found.objects("groups")
    )
    grouped = [name for group in groups for name in group.parameters]
    if len(set(grouped)) != len(grouped):
        found.fail("a parameter is in two groups of the optimizer")
    for group in groups:
        for name in group.options:
            if name in NOT_OPTIONS:
                found.fail(f"an option of a parameter group is called {name!r}, a reserved name")
    state = {name: _read_state(each) for name, each in found.child("state").children().items()}
    for name in [*grouped, *state]:
        if name not in parameters:
            found.fail(f"the optimizer has {name!r:.120}, which is not a parameter")
    return Optimizer(found.text("kind"), groups, state)


def _read_state(found: Fields) -> State:
    dtypes = found.child("sharded")
    sharded = {key: dtypes.dtype(key) for key in dtypes}
    for key in sharded:
        if "/" in key:
            found.fail(f"the key {key!r:.80} of optimizer state has a slash")
    single = found.mapping("single")
    for key, encoded in single.items():
        if key in sharded:
            found.fail(f"the optimizer state {key!r:.80} is listed as both sharded and single")
        if not isinstance(encoded, dict) or "value" not in encoded:
            found.fail(f"state {key!r:.80} is {encoded!r:.80}, expected an object with 'value'")
    return State(sharded, single)

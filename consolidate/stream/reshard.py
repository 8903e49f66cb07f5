"""A checkpoint of another number of ranks, from the same source.

Each parameter is cut as ``xla_fsdp.sharding.layout`` cuts one that is sharded alone: rank r of M
holds elements ``[r * c, (r + 1) * c)`` of its n, where ``c = ceil(n / (M * 128)) * 128``. Loading
does not depend on that; it is what most models need, so that each rank mostly reads its own file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import CheckpointError, OptionsError
from ..format import manifest, values
from ..format.digests import digest
from ..format.dtypes import DTYPES
from ..format.fields import Fields
from ..format.manifest import Manifest, buffer_key, file_name, parameter_key, state_key
from ..format.rank_file import CheckedFile, FileRecord, widest_first, write_pieces
from ..format.reader import ShardedCheckpoint
from ..format.store import holds, read
from ..format.strict import read_json, write_json
from ..source import Source
from .disk import Disk
from .plan import RECORD
from .pump import pump
from .run import Progress, Result, open_source, silent
from .sharded import ShardedSource
from .stage import Stage
from .target import beside
from .tensors import Stored, all_of, part, pieces

LANES = 128
_DONE = "progress.json"


def reshard_checkpoint(
    path: Any,
    world_size: int,
    save_path: Any = "",
    *,
    suffix: str | None = None,
    tied: Mapping[str, str] | None = None,
    allow_unsafe_pickle: bool = False,
    progress: Callable[[str, int], Progress] = silent,
    say: Callable[[str], None] = lambda line: None,
    disk: Disk | None = None,
) -> Result:
    """Writes a checkpoint of ``world_size`` ranks into the folder ``save_path``.

    Model, buffers, optimizer, scheduler and extras of a checkpoint folder; the model and its
    buffers of per-rank torch files. What is of a single rank (random states) is left out. Atomic,
    resumable and idempotent as ``consolidate_checkpoint``, whose other arguments these are.

    Raises:
        CheckpointError: one of its subclasses, naming the file.
    """
    if type(world_size) is not int or not 1 <= world_size < 100_000:
        raise OptionsError(f"cannot reshard to {world_size!r:.40} ranks: expected 1 to 99999")
    disk = disk or Disk()
    source = open_source(path, suffix, tied=tied, allow_unsafe_pickle=allow_unsafe_pickle)
    origin = source.origin
    say(f"found {origin.world_size} ranks in {source.label}")
    prefix = os.fspath(path).rstrip("/")
    target = os.fspath(save_path).rstrip("/") or beside(prefix, f"_of_{world_size}")
    about = {"save_id": origin.save_id, "reshard": world_size, "tied": dict(tied or {})}
    identity = digest(write_json(about))
    whole = _describe(source, world_size, identity)
    stage = Stage(disk, target, identity)
    listed = [file_name(rank, world_size) for rank in range(world_size)] + [manifest.NAME]
    record = write_json({**about, "files": listed}) + b"\n"

    def is_there() -> bool:
        return _is_there(target, whole, record, disk, progress)

    def build() -> int:
        written, kept = _write(source, whole, stage, progress)
        stage.write_text(RECORD, record)
        disk.remove(stage.path(_DONE))
        stage.write_text(manifest.NAME, manifest.dump_manifest(written))
        stage.commit_folder()
        return kept

    up_to_date, kept = stage.produce(True, source.inputs, is_there, build)
    return Result(
        path=target,
        up_to_date=up_to_date,
        world_size=world_size,
        parameters=len(source.parameters),
        elements=sum(tensor.numel for tensor in source.parameters.values()),
        bytes=sum(os.path.getsize(os.path.join(target, n)) for n in os.listdir(target)),
        resumed=kept,
    )


def _describe(source: Source, world_size: int, identity: str) -> Manifest:
    """The manifest of the result, its files yet unknown."""
    if isinstance(source, ShardedSource):
        return replace(
            source.manifest, save_id=identity, world_size=world_size, files=(), spans=None
        )
    extra_state = values.encode(dict(source.extra_state), f"{source.label}: extra state")
    return Manifest(
        save_id=identity,
        step=0,
        world_size=world_size,
        parameters=source.parameters,
        buffers=source.buffers,
        files=(),
        extra_state=extra_state or None,
    )


def _tensors(
    source: Source, whole: Manifest, rank: int, begins: dict[str, int]
) -> Iterator[Stored]:
    """What one rank's file holds; ``begins`` is filled."""
    state = whole.optimizer.state if whole.optimizer is not None else {}
    for name, tensor in whole.parameters.items():
        count = -(-tensor.numel // (whole.world_size * LANES)) * LANES
        begin, end = (min(n * count, tensor.numel) for n in (rank, rank + 1))
        if begin == end:
            continue
        begins[name] = begin
        take = partial(source.read_parameter, name)
        yield part(parameter_key(name), DTYPES[tensor.dtype], begin, end, take)
        if name in state:
            for key, dtype in state[name].sharded.items():
                take = partial(source.read_state, key, name)
                yield part(state_key(key, name), DTYPES[dtype], begin, end, take)
    for name, tensor in whole.buffers.items():
        take = partial(source.read_buffer, name, rank)
        yield all_of(buffer_key(name), DTYPES[tensor.dtype], tensor.shape, take)


def _write(
    source: Source, whole: Manifest, stage: Stage, progress: Callable[[str, int], Progress]
) -> tuple[Manifest, int]:
    """The rank files into the stage; returns the manifest with them, and how many were there."""
    records = _kept(stage, whole)
    stage.keep_only([_DONE, *(record.name for record in records)])
    kept = len(records)
    stage.finished.update(record.name for record in records)
    total = _bytes(whole) - sum(record.size for record in records)
    stage.require_space(total)
    with progress("write", total) as bar:
        for rank in range(kept, whole.world_size):
            begins: dict[str, int] = {}
            tensors = list(_tensors(source, whole, rank, begins))
            metadata = {**whole.identity(rank), "begins": write_json(begins).decode()}
            with stage.writing(file_name(rank, whole.world_size)) as path:
                records.append(_write_file(stage.disk, path, tensors, metadata, bar))
            stage.write_text(_DONE, write_json({"files": manifest.dump_files(records)}))
    return replace(whole, files=tuple(records)), kept


def _write_file(
    disk: Disk,
    path: str,
    tensors: Iterable[Stored],
    metadata: Mapping[str, str],
    progress: Callable[[int], None],
) -> FileRecord:
    """The same file as ``rank_file.write_file`` writes from memory; durable when this returns."""
    tensors = widest_first(tensors)

    def feed(take: Callable[[memoryview], None]) -> None:
        def taken(piece: memoryview) -> None:
            take(piece)
            progress(len(piece))

        pump(pieces(tensors), taken)

    return write_pieces(disk, path, [tensor.described for tensor in tensors], metadata, feed)


def _bytes(whole: Manifest) -> int:
    """About how many all files take."""
    state = whole.optimizer.state if whole.optimizer is not None else {}
    size = 0
    for name, tensor in whole.parameters.items():
        dtypes = [tensor.dtype, *(state[name].sharded.values() if name in state else ())]
        size += tensor.numel * sum(DTYPES[dtype].itemsize for dtype in dtypes)
    buffers = [t.numel * DTYPES[t.dtype].itemsize for t in whole.buffers.values()]
    return size + whole.world_size * sum(buffers)


def _kept(stage: Stage, whole: Manifest) -> list[FileRecord]:
    """The files that an earlier run finished, from rank 0 on, every byte looked at."""
    path, records = stage.path(_DONE), list[FileRecord]()
    try:
        described = read_json(read(stage.disk, path, 0, stage.disk.size(path)), path)
        for record in manifest.load_files(Fields(described, path), whole.world_size):
            CheckedFile(stage.disk, stage.path(record.name), record).verify()
            records.append(record)
    except CheckpointError:
        pass  # the rest is written again
    return records


def _is_there(
    target: str,
    whole: Manifest,
    record: bytes,
    disk: Disk,
    progress: Callable[[str, int], Progress],
) -> bool:
    """Whether the target is this result already, every byte looked at."""
    if not os.path.lexists(target):
        return False
    try:
        if not holds(disk, os.path.join(target, RECORD), record):
            return False
        checkpoint = ShardedCheckpoint(target)
        if checkpoint.folder != target or replace(checkpoint.manifest, files=()) != whole:
            return False
        if len(disk.list(target)) != whole.world_size + 2:
            return False
        with progress("check", sum(file.size for file in checkpoint.manifest.files)) as bar:
            checkpoint.verify(bar)
    except CheckpointError:
        return False
    return True

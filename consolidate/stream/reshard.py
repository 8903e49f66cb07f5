"""Writes a checkpoint for another number of ranks.

Each parameter is split as ``xla_fsdp.sharding.layout`` splits a parameter that is sharded
separately: rank r of M gets the elements ``[r * c, (r + 1) * c)`` of n, with
``c = ceil(n / (M * 128)) * 128``. Loading does not require this split. But with it, most models
read mostly their own file on each rank.
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
from ..format.store import content_equals, read
from ..format.strict import read_json, write_json
from ..source import Source
from .disk import Disk
from .pump import pump
from .run import Progress, Result, open_source, silent
from .sharded import ShardedSource
from .stage import Stage
from .target import default_path
from .tensors import ResultTensor, all_of, part, pieces
from .write_plan import RECORD

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

    From a checkpoint folder, this writes parameters, buffers, optimizer, scheduler and extra; from
    per-rank torch files, parameters and buffers. Values of a single rank (random states) are not
    written. The call is atomic, resumable and idempotent like ``consolidate_checkpoint``, which
    also describes the other arguments.

    Args:
        world_size: the new number of ranks, 1 to 99999.
        save_path: default: ``path`` followed by ``_of_`` and the number of ranks.

    Raises:
        CheckpointError: a subclass of it; the message names the file.
    """
    if type(world_size) is not int or not 1 <= world_size < 100_000:
        raise OptionsError(f"cannot reshard to {world_size!r:.40} ranks: expected 1 to 99999")
    disk = disk or Disk()
    source = open_source(path, suffix, tied=tied, allow_unsafe_pickle=allow_unsafe_pickle)
    origin = source.origin
    say(f"found {origin.world_size} ranks in {source.label}")
    prefix = os.fspath(path).rstrip("/")
    target = os.fspath(save_path).rstrip("/") or default_path(prefix, f"_of_{world_size}")
    about = {"save_id": origin.save_id, "reshard": world_size, "tied": dict(tied or {})}
    identity = digest(write_json(about))
    new_manifest = _describe(source, world_size, identity)
    stage = Stage(disk, target, identity)
    listed = [file_name(rank, world_size) for rank in range(world_size)] + [manifest.NAME]
    record = write_json({**about, "files": listed}) + b"\n"

    def is_there() -> bool:
        return _is_there(target, new_manifest, record, disk, progress)

    def build() -> int:
        written, kept = _write(source, new_manifest, stage, progress)
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
    """The manifest of the result, without file records."""
    if isinstance(source, ShardedSource):
        return replace(
            source.manifest, save_id=identity, world_size=world_size, files=(), sharding_rules=None
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
    source: Source, new_manifest: Manifest, rank: int, begins: dict[str, int]
) -> Iterator[ResultTensor]:
    """The tensors of one rank's file. Adds the first element of each parameter to ``begins``."""
    state = new_manifest.optimizer.state if new_manifest.optimizer is not None else {}
    for name, tensor in new_manifest.parameters.items():
        count = -(-tensor.numel // (new_manifest.world_size * LANES)) * LANES
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
    for name, tensor in new_manifest.buffers.items():
        take = partial(source.read_buffer, name, rank)
        yield all_of(buffer_key(name), DTYPES[tensor.dtype], tensor.shape, take)


def _write(
    source: Source, new_manifest: Manifest, stage: Stage, progress: Callable[[str, int], Progress]
) -> tuple[Manifest, int]:
    """Writes the rank files into the stage.

    Returns the complete manifest, and the number of files that an earlier run had finished.
    """
    records = _read_finished_records(stage, new_manifest)
    stage.keep_only([_DONE, *(record.name for record in records)])
    kept = len(records)
    stage.finished.update(record.name for record in records)
    total = _bytes(new_manifest) - sum(record.size for record in records)
    stage.require_space(total)
    with progress("write", total) as bar:
        for rank in range(kept, new_manifest.world_size):
            begins: dict[str, int] = {}
            tensors = list(_tensors(source, new_manifest, rank, begins))
            metadata = {**new_manifest.identity(rank), "begins": write_json(begins).decode()}
            with stage.writing(file_name(rank, new_manifest.world_size)) as path:
                records.append(_write_file(stage.disk, path, tensors, metadata, bar))
            stage.write_text(_DONE, write_json({"files": manifest.dump_files(records)}))
    return replace(new_manifest, files=tuple(records)), kept


def _write_file(
    disk: Disk,
    path: str,
    tensors: Iterable[ResultTensor],
    metadata: Mapping[str, str],
    progress: Callable[[int], None],
) -> FileRecord:
    """Writes the same file as ``rank_file.write_file``, but reads the tensors in pieces."""
    tensors = widest_first(tensors)

    def feed(take: Callable[[memoryview], None]) -> None:
        def taken(piece: memoryview) -> None:
            take(piece)
            progress(len(piece))

        pump(pieces(tensors), taken)

    return write_pieces(disk, path, [tensor.described for tensor in tensors], metadata, feed)


def _bytes(new_manifest: Manifest) -> int:
    """Approximate size in bytes of all files."""
    state = new_manifest.optimizer.state if new_manifest.optimizer is not None else {}
    size = 0
    for name, tensor in new_manifest.parameters.items():
        dtypes = [tensor.dtype, *(state[name].sharded.values() if name in state else ())]
        size += tensor.numel * sum(DTYPES[dtype].itemsize for dtype in dtypes)
    buffers = [t.numel * DTYPES[t.dtype].itemsize for t in new_manifest.buffers.values()]
    return size + new_manifest.world_size * sum(buffers)


def _read_finished_records(stage: Stage, new_manifest: Manifest) -> list[FileRecord]:
    """The records of the first files, which an earlier run finished, after a check of all bytes."""
    path, records = stage.path(_DONE), list[FileRecord]()
    try:
        described = read_json(read(stage.disk, path, 0, stage.disk.size(path)), path)
        for record in manifest.load_files(Fields(described, path), new_manifest.world_size):
            CheckedFile(stage.disk, stage.path(record.name), record).verify()
            records.append(record)
    except CheckpointError:
        pass  # the other files are written again
    return records


def _is_there(
    target: str,
    new_manifest: Manifest,
    record: bytes,
    disk: Disk,
    progress: Callable[[str, int], Progress],
) -> bool:
    """Whether the target already has this result. Checks every byte."""
    if not os.path.lexists(target):
        return False
    try:
        if not content_equals(disk, os.path.join(target, RECORD), record):
            return False
        checkpoint = ShardedCheckpoint(target)
        if checkpoint.folder != target or replace(checkpoint.manifest, files=()) != new_manifest:
            return False
        if len(disk.list(target)) != new_manifest.world_size + 2:
            return False
        with progress("check", sum(file.size for file in checkpoint.manifest.files)) as bar:
            checkpoint.verify(bar)
    except CheckpointError:
        return False
    return True

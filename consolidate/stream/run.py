"""The whole way from a checkpoint to a result in its place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, OptionsError
from ..format.store import holds, join
from ..legacy.source import open_legacy
from ..source import Source
from .disk import Disk
from .options import DTYPES, Options, parse_size
from .plan import Plan, make_plan
from .sharded import ShardedSource, is_sharded
from .stage import Stage
from .target import Target, choose_target

LEGACY_SUFFIX = "*.pth"
# Told how many bytes were done since the last call.
Progress = AbstractContextManager[Callable[[int], None]]


@contextlib.contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows nothing."""
    yield lambda count: None


@dataclass(frozen=True)
class Result:
    """What was done. path: the file or folder; up_to_date: it was there already, nothing was
    written; parameters: how many, tied ones once; elements: their total; bytes: of all files;
    resumed: files kept from a run that was cut short."""

    path: str
    up_to_date: bool
    world_size: int
    parameters: int
    elements: int
    bytes: int
    resumed: int = 0


def open_source(
    path: Any,
    suffix: str | None = None,
    *,
    tied: Mapping[str, str] | None = None,
    allow_unsafe_pickle: bool = False,
) -> Source:
    """A checkpoint folder, or a folder of them (the newest), or a prefix of per-rank files.

    With ``suffix`` given, ``path`` is a prefix in any case.

    Raises:
        CheckpointError: there is none, or it is not whole.
    """
    prefix = os.fspath(path)
    if suffix is None and is_sharded(prefix):
        if tied:
            raise OptionsError(f"{prefix}: records tied weights itself; leave --tied out")
        return ShardedSource(prefix)
    return open_legacy(prefix, suffix or LEGACY_SUFFIX, tied, allow_unsafe_pickle)


def consolidate_checkpoint(
    path: Any,
    save_path: Any = "",
    *,
    suffix: str | None = None,
    format: str | None = None,
    max_shard_size: str | int | None = None,
    optimizer: bool = False,
    dtype: str | None = None,
    tied: Mapping[str, str] | None = None,
    allow_unsafe_pickle: bool = False,
    progress: Callable[[str, int], Progress] = silent,
    say: Callable[[str], None] = lambda line: None,
    disk: Disk | None = None,
) -> Result:
    """Writes the unsharded model, a few MiB in memory at a time.

    Whatever ends the run, ``save_path`` holds its old content or all of the new. A run that was cut
    short goes on where it stopped, file by file; one whose result is there already changes nothing.

    Args:
        path, suffix, tied, allow_unsafe_pickle: see :func:`open_source`. tied: {further name: name
            of a parameter}; allow_unsafe_pickle: code in per-rank torch files is executed.
        save_path: a file (``.safetensors``, ``.pth``) or a folder; by default beside ``path``.
        format: ``"safetensors"`` or ``"pth"``; by default what the name of ``save_path`` says, else
            safetensors for checkpoint folders and pth for per-rank files.
        max_shard_size: bytes, or like ``"5GB"``: several safetensors files and their index.
        optimizer: also write its state.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``: cast floating-point parameters (not
            buffers, not optimizer state).
        progress, say: are told what happens. disk: for tests.

    Raises:
        CheckpointError: one of its subclasses, naming the file; OutputError for all that goes wrong
            in writing.
    """
    prefix, disk = os.fspath(path), disk or Disk()
    source = open_source(path, suffix, tied=tied, allow_unsafe_pickle=allow_unsafe_pickle)
    say(f"found {source.found}")
    several = "--max_shard_size" if max_shard_size is not None else ""
    several = "--optimizer" if optimizer else several
    sharded = isinstance(source, ShardedSource)
    target = choose_target(prefix, sharded, os.fspath(save_path), format, several)
    if dtype is not None and dtype not in DTYPES:
        raise OptionsError(f"dtype is {dtype!r:.40}, expected one of {', '.join(DTYPES)}")
    options = Options(
        format=target.format,
        max_shard_size=None if max_shard_size is None else parse_size(max_shard_size),
        optimizer=optimizer,
        dtype=None if dtype is None else DTYPES[dtype],
        tied=dict(tied or {}),
    )
    plan = make_plan(source, options, target.name)
    up_to_date, kept = put(plan, target, source.inputs, disk, progress)
    count = len(source.parameters)
    say(f"assembled {count} parameters")
    names = [file.name for file in plan.files] + list(plan.texts)
    paths = [join(target.path, name) for name in names] if target.is_folder else [target.path]
    return Result(
        path=target.path,
        up_to_date=up_to_date,
        world_size=source.origin.world_size,
        parameters=count,
        elements=sum(tensor.numel for tensor in source.parameters.values()),
        bytes=sum(map(os.path.getsize, paths)),
        resumed=kept,
    )


def put(
    plan: Plan,
    target: Target,
    inputs: list[str],
    disk: Disk,
    progress: Callable[[str, int], Progress] = silent,
) -> tuple[bool, int]:
    """Puts a result in its place. Returns whether it was there already, and else how many of its
    files an earlier run had finished.

    Raises:
        OutputError: it cannot be written there.
    """
    stage = Stage(disk, target.path, plan.identity)

    def build() -> int:
        kept = _write(plan, stage, progress)
        if target.is_folder:
            stage.commit_folder()
        else:
            stage.commit_file(plan.files[0].name)
        return kept

    def is_there() -> bool:
        return _is_there(plan, target, disk, progress)

    return stage.produce(target.is_folder, inputs, is_there, build)


def verify_checkpoint(
    path: Any,
    *,
    suffix: str | None = None,
    allow_unsafe_pickle: bool = False,
    progress: Callable[[str, int], Progress] = silent,
) -> str:
    """Checks that a checkpoint is complete and consistent, and every byte of it; writes nothing.

    Of a checkpoint folder the digests; of per-rank torch files the CRCs of the zip files, which
    find a flipped bit, but not files of two steps. Returns a line that says what was checked.

    Raises:
        CheckpointError: one of its subclasses, naming the file.
    """
    source = open_source(path, suffix, allow_unsafe_pickle=allow_unsafe_pickle)
    with progress("verify", source.size) as bar:
        what = source.verify(bar)
    counted = f"{len(source.parameters)} parameters, {source.size} bytes"
    return f"verified {source.label}: {what}, {counted}"


def _write(plan: Plan, stage: Stage, progress: Callable[[str, int], Progress]) -> int:
    """All files of the plan into the stage; returns how many were there already."""
    stage.keep_only(file.name for file in plan.files)
    present = set(stage.disk.list(stage.folder))
    with progress("check", sum(f.nbytes for f in plan.files if f.name in present)) as bar:
        for file in plan.files:
            if file.name in present and file.finished(stage.disk, stage.path(file.name), bar):
                stage.finished.add(file.name)
    missing = [file for file in plan.files if file.name not in stage.finished]
    kept = len(stage.finished)
    for file in missing:
        stage.disk.remove(stage.path(file.name))
    stage.require_space(sum(file.nbytes for file in missing))
    with progress("write", sum(file.nbytes for file in missing)) as bar:
        for file in missing:
            with stage.writing(file.name) as path:
                file.write(stage.disk, path, bar)
    for name, data in plan.texts.items():
        stage.write_text(name, data)
    return kept


def _is_there(
    plan: Plan, target: Target, disk: Disk, progress: Callable[[str, int], Progress]
) -> bool:
    """Whether the target is this result already, every byte looked at."""
    if not os.path.lexists(target.path):
        return False
    if not target.is_folder:
        with progress("check", plan.nbytes) as bar:
            return plan.files[0].finished(disk, target.path, bar)
    names = {file.name for file in plan.files} | plan.texts.keys()
    if set(disk.list(target.path)) != names:
        return False
    try:
        for name, data in plan.texts.items():
            if not holds(disk, join(target.path, name), data):
                return False
    except CheckpointError:
        return False
    with progress("check", plan.nbytes) as bar:
        return all(file.finished(disk, join(target.path, file.name), bar) for file in plan.files)

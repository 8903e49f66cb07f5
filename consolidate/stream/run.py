"""Consolidates or verifies a checkpoint: opens it, plans the result, writes it, and replaces the
target."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ..errors import CheckpointError, OptionsError
from ..format.store import content_equals, join
from ..legacy.source import open_legacy
from ..source import Source
from .disk import Disk
from .options import DTYPES, Options, parse_size
from .sharded import ShardedSource, is_sharded
from .stage import Stage
from .target import Target, choose_target
from .write_plan import WritePlan, make_write_plan

LEGACY_SUFFIX = "*.pth"
# Called with the number of bytes since the last call.
Progress = AbstractContextManager[Callable[[int], None]]


@contextlib.contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress display that shows nothing."""
    yield lambda count: None


@dataclass(frozen=True)
class Result:
    """The result of :func:`consolidate_checkpoint` or ``reshard_checkpoint``.

    Attributes:
        path: the file or folder.
        up_to_date: whether it existed already, so that nothing was written.
        world_size: number of ranks of the checkpoint.
        parameters: number of parameters; a tied one counts once.
        elements: total number of elements of the parameters.
        bytes: total size of the files.
        resumed: number of files that an interrupted run had finished.
    """

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
    """Opens a checkpoint folder, the newest checkpoint in a folder, or per-rank torch files.

    Args:
        path: a folder, or a path prefix of per-rank files.
        suffix: glob pattern of per-rank files. If it is given, ``path`` is always a prefix.
        tied: see :func:`consolidate_checkpoint`.
        allow_unsafe_pickle: see :func:`consolidate_checkpoint`.

    Raises:
        CheckpointError: there is no checkpoint, or it is incomplete or damaged.
    """
    prefix = os.fspath(path)
    if suffix is None and is_sharded(prefix):
        if tied:
            raise OptionsError(f"{prefix}: records its tied weights. Remove --tied.")
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
    """Writes the full (unsharded) model, with a few MiB in memory at a time.

    If the run is killed, ``save_path`` has either its old content or the complete result. Calling
    this again continues with the first file that is not finished. If the result exists already,
    nothing is changed.

    Args:
        path, suffix: the checkpoint, see :func:`open_source`.
        save_path: a file (``.safetensors``, ``.pth``) or a folder. Default: ``path`` followed by
            ``_consolidated``.
        format: ``"safetensors"`` or ``"pth"``. Default: the extension of ``save_path``; without
            one, safetensors for checkpoint folders and pth for per-rank files.
        max_shard_size: number of bytes, or a size like ``"5GB"``. Writes several safetensors files
            with tensors of at most this size, and an index.
        optimizer: also write the optimizer state.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``: cast floating-point parameters (not
            buffers and not optimizer state) to this dtype.
        tied: ``{alias: parameter name}`` for tied weights that per-rank files do not record.
        allow_unsafe_pickle: read per-rank torch files even if that runs code in them.
        progress, say: functions that show the progress and messages. disk: for tests.

    Raises:
        OutputError: the result cannot be written.
        CheckpointError: a subclass of it; the message names the file.
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
    plan = make_write_plan(source, options, target.name)
    up_to_date, kept = write_result(plan, target, source.inputs, disk, progress)
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


def write_result(
    plan: WritePlan,
    target: Target,
    inputs: list[str],
    disk: Disk,
    progress: Callable[[str, int], Progress] = silent,
) -> tuple[bool, int]:
    """Writes the result and replaces the target.

    Returns whether the result existed already, and the number of files that an earlier run had
    finished.

    Raises:
        OutputError: the result cannot be written.
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
    """Checks that a checkpoint is complete and consistent, and checks every byte. Writes nothing.

    For a checkpoint folder, it compares the digests. For per-rank torch files, it compares the CRCs
    of the zip files, which detect flipped bits, but not files of different steps.

    Returns:
        A line that says what was checked.

    Raises:
        CheckpointError: a subclass of it; the message names the file.
    """
    source = open_source(path, suffix, allow_unsafe_pickle=allow_unsafe_pickle)
    with progress("verify", source.size) as bar:
        what = source.verify(bar)
    counted = f"{len(source.parameters)} parameters, {source.size} bytes"
    return f"verified {source.label}: {what}, {counted}"


def _write(plan: WritePlan, stage: Stage, progress: Callable[[str, int], Progress]) -> int:
    """Writes all files of the plan into the stage. Returns the number of files that existed."""
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
    plan: WritePlan, target: Target, disk: Disk, progress: Callable[[str, int], Progress]
) -> bool:
    """Whether the target already has this result. Checks every byte."""
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
            if not content_equals(disk, join(target.path, name), data):
                return False
    except CheckpointError:
        return False
    with progress("check", plan.nbytes) as bar:
        return all(file.finished(disk, join(target.path, file.name), bar) for file in plan.files)

"""Consolidates, reshards or verifies a checkpoint."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import MissingRankError, OptionsError, WorldSizeError
from ..format.folders import CheckpointFolder, parse_folder_name
from ..legacy.ranks import read_rank
from ..legacy.source import OUTPUT_NAME, LegacySource, open_legacy
from .options import DTYPES, PTH, Options, choose_target, default_path, parse_size
from .plan import WritePlan, make_reshard_plan, make_write_plan
from .sources import ShardedSource, Source, open_source
from .stage import ProgressContext, check_target, silent, write_result


@dataclass(frozen=True)
class Result:
    """The result of :func:`consolidate_checkpoint` or :func:`reshard_checkpoint`.

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
    progress: Callable[[str, int], ProgressContext] = silent,
    say: Callable[[str], object] = lambda line: None,
) -> Result:
    """Writes the full (unsharded) model, with a few MiB in memory at a time.

    If the run is killed, ``save_path`` has either its old content or the complete result, and the
    next call continues. If the result exists already, nothing is changed.

    Args:
        path: a checkpoint folder, a folder of them (the newest is used), or a path prefix of
            per-rank torch files.
        save_path: a file (``.safetensors``, ``.pth``) or a folder. Default: ``path`` followed by
            ``_consolidated``.
        suffix: glob pattern of per-rank files (default ``*.pth``). With it, ``path`` is a prefix.
        format: ``"safetensors"`` or ``"pth"``. Default: the extension of ``save_path``; without
            one, safetensors for checkpoint folders and pth for per-rank files.
        max_shard_size: bytes, or a size like ``"5GB"``: write several safetensors files with
            tensors of at most this size, and an index.
        optimizer: also write the optimizer state.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float32"``: cast floating-point parameters, but
            not buffers and optimizer state.
        tied: ``{alias: parameter name}`` for tied weights that per-rank files do not record.
        allow_unsafe_pickle: read per-rank torch files even if that runs code in them.
        progress, say: functions that show the progress and messages.

    Raises:
        OutputError: the result cannot be written.
        CheckpointError: a subclass; the message names the file.
    """
    source = open_source(path, suffix, tied=tied, allow_unsafe_pickle=allow_unsafe_pickle)
    say(f"found {source.found}")
    several = "--optimizer" if optimizer else "--max_shard_size" if max_shard_size else ""
    sharded = isinstance(source, ShardedSource)
    target, is_folder, chosen = choose_target(
        os.fsdecode(path), sharded, os.fsdecode(save_path), format, several
    )
    if dtype is not None and dtype not in DTYPES:
        raise OptionsError(f"dtype is {dtype!r:.40}, expected one of {', '.join(DTYPES)}")
    options = Options(
        format=chosen,
        max_shard_size=None if max_shard_size is None else parse_size(max_shard_size),
        optimizer=optimizer,
        dtype=None if dtype is None else DTYPES[dtype],
        tied=dict(tied or {}),
    )
    plan = make_write_plan(source, options, None if is_folder else os.path.basename(target))
    result = _write_plan(source, plan, target, source.world_size, progress)
    say(f"assembled {result.parameters} parameters")
    return result


def reshard_checkpoint(
    path: Any,
    world_size: int,
    save_path: Any = "",
    *,
    suffix: str | None = None,
    tied: Mapping[str, str] | None = None,
    allow_unsafe_pickle: bool = False,
    progress: Callable[[str, int], ProgressContext] = silent,
    say: Callable[[str], object] = lambda line: None,
) -> Result:
    """Writes a checkpoint of ``world_size`` ranks into the folder ``save_path``.

    It has parameters, buffers, optimizer, scheduler and extra, but no random states; from per-rank
    torch files, only parameters and buffers. See :func:`consolidate_checkpoint`.

    Args:
        world_size: the new number of ranks, 1 to 99999.
        save_path: default: ``path`` followed by ``_of_`` and the number of ranks.

    Raises:
        CheckpointError: a subclass; the message names the file.
    """
    if type(world_size) is not int or not 1 <= world_size < 100_000:
        raise OptionsError(f"cannot reshard to {world_size!r:.40} ranks: expected 1 to 99999")
    source = open_source(path, suffix, tied=tied, allow_unsafe_pickle=allow_unsafe_pickle)
    say(f"found {source.world_size} ranks in {source.label}")
    target = os.fsdecode(save_path).rstrip("/")
    target = target or default_path(os.fsdecode(path).rstrip("/"), f"_of_{world_size}")
    place, step = parse_folder_name(os.path.basename(target)), source.manifest.step
    if place is not None and place.step != step:
        raise OptionsError(
            f"{target}: is named after step {place.step}, but {source.label} is of step {step}, so "
            f"the result could not be read. Call it {CheckpointFolder(step).name}, or choose a "
            "name that is not that of a step."
        )
    plan = make_reshard_plan(source, world_size, tied or {})
    return _write_plan(source, plan, target, world_size, progress)


def _write_plan(
    source: Source,
    plan: WritePlan,
    target: str,
    world_size: int,
    progress: Callable[[str, int], ProgressContext],
) -> Result:
    up_to_date, kept = write_result(plan, target, source.inputs, progress)
    paths = [target]
    if plan.is_folder:
        paths = [os.path.join(target, name) for name in os.listdir(target)]
    return Result(
        path=target,
        up_to_date=up_to_date,
        world_size=world_size,
        parameters=len(source.parameters),
        elements=sum(tensor.numel for tensor in source.parameters.values()),
        bytes=sum(map(os.path.getsize, paths)),
        resumed=kept,
    )


def verify_checkpoint(
    path: Any,
    *,
    suffix: str | None = None,
    allow_unsafe_pickle: bool = False,
    progress: Callable[[str, int], ProgressContext] = silent,
) -> str:
    """Checks every byte of a checkpoint, and that it is complete and consistent. Writes nothing.

    The CRCs of per-rank torch files detect flipped bits, but not files of different steps. Returns
    a line that says what was checked.

    Raises:
        CheckpointError: a subclass; the message names the file.
    """
    source = open_source(path, suffix, allow_unsafe_pickle=allow_unsafe_pickle)
    with progress("verify", source.size) as bar:
        what = source.verify(bar)
    counted = f"{len(source.parameters)} parameters, {source.size} bytes"
    return f"verified {source.label}: {what}, {counted}"


def consolidate_sharded_state_dicts(
    state_dict_list: Sequence[Mapping[str, Any]],
    shard_metadata: Mapping[str, Any],
    *,
    tied: Mapping[str, str] | None = None,
) -> OrderedDict[str, Any]:
    """Rebuilds the full state_dict from the state_dicts of all ranks.

    Args:
        state_dict_list: ``model.state_dict()`` of every rank, in rank order.
        shard_metadata: ``model.get_shard_metadata()`` of any one rank.
        tied: ``{alias: parameter name}`` for tied weights, which torch_xla's own FSDP class does
            not record.

    Returns:
        The state_dict of the unsharded model. All names of a tied weight share one tensor.

    Raises:
        MissingRankError, WorldSizeError: the state_dict of a rank is missing.
        InvalidMetadataError: ``shard_metadata`` is incomplete or contradicts itself.
        ShardMismatchError: keys, shapes or dtypes do not match.
        TiedWeightError: a name in ``tied`` does not exist, or an alias is in use.
    """
    if not state_dict_list:
        raise MissingRankError("state_dict_list: is empty. Pass the state_dict of every rank.")
    ranks = []
    for index, state_dict in enumerate(state_dict_list):
        content = {"model": state_dict, "shard_metadata": shard_metadata}
        ranks.append(read_rank(content, f"state_dict_list[{index}]"))
        ranks[-1].rank = index
    world_size = ranks[0].world_size
    if len(ranks) != world_size:
        raise WorldSizeError(
            f"state_dict_list: has {len(ranks)} entries, but shard_metadata is for {world_size} "
            "ranks. Pass the state_dict of every rank."
        )
    return LegacySource(ranks, "state_dict_list", tied).state_dict()


def consolidate_sharded_model_checkpoints(
    ckpt_prefix: str,
    ckpt_suffix: str = "*.pth",
    save_path: str = "",
    save_model: bool = True,
    *,
    tied: Mapping[str, str] | None = None,
) -> tuple[OrderedDict[str, Any], str | None]:
    """Rebuilds the full state_dict from the rank files ``ckpt_prefix + ckpt_suffix``.

    Each file is ``{"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}`` and
    may have other keys. Results of earlier runs are ignored. Memory: the size of the result.

    Args:
        ckpt_prefix: path prefix of the files. It is not a pattern.
        ckpt_suffix: glob pattern of the rest of the path.
        save_path: default: ``ckpt_prefix + "_consolidated.pth"``.
        save_model: ``False`` writes no file.
        tied: see `consolidate_sharded_state_dicts`.

    Returns:
        The full state_dict, and the path of the result or None if ``save_model`` is False.

    Raises:
        CheckpointError: a subclass; the message names the file. Nothing is written.
    """
    prefix = os.fsdecode(ckpt_prefix)
    source = open_legacy(prefix, ckpt_suffix, tied)
    if not save_model:
        return source.state_dict(), None
    target = os.fsdecode(save_path) or prefix + OUTPUT_NAME
    check_target(target, False, source.inputs)  # before reading the tensors
    state_dict, options = source.state_dict(), Options(PTH, tied=dict(tied or {}))
    plan = make_write_plan(source, options, os.path.basename(target), state_dict)
    write_result(plan, target, source.inputs)
    return state_dict, target

"""``load_checkpoint``: all ranks read and check everything before anything is changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch_xla
from torch import nn

from ..collectives.random_state import DeviceRandomState, synced_device
from ..consolidate.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    InvalidMetadataError,
    MissingRankError,
    MixedSaveError,
    ModelMismatchError,
)
from ..consolidate.format import folders, values
from ..consolidate.format.dtypes import DTYPES
from ..consolidate.format.manifest import NAME, Optimizer, Tensor
from ..consolidate.format.reader import ShardedCheckpoint
from ..consolidate.format.store import join
from .contents import RNG_TORCH, RNG_XLA, require_scheduler
from .inventory import ParameterShard, make_inventory
from .matching import Number, OptimizerMatch, OptimizerState, match_model, match_optimizer
from .optimizer_state import members_of_groups
from .rank_exchange import RankExchange, wait_until
from .readable_tensor import ReadableTensor
from .value_loading import (
    iterate_new_values,
    load_optimizer_values,
    read_to_host,
    set_tensor_values,
)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """The result of :func:`load_checkpoint`.

    Attributes:
        path: the folder of the checkpoint.
        step, extra: the values that were passed to :func:`save_checkpoint`.
        world_size: the number of ranks that saved it.
    """

    path: str
    step: int
    extra: Any
    world_size: int


@dataclass
class Reader:
    """Reads a checkpoint for this rank. ``path``: its folder, as the user would write it."""

    checkpoint: ShardedCheckpoint
    exchange: RankExchange
    path: str

    @property
    def source(self) -> str:
        """The manifest, which has all values that are not tensors."""
        return join(self.checkpoint.folder, NAME)

    @property
    def same_world(self) -> bool:
        return self.checkpoint.manifest.world_size == self.exchange.size

    def tensors(self) -> dict[ReadableTensor, Tensor]:
        manifest = self.checkpoint.manifest
        found = {self.stored(each): each for each in manifest.parameters.values()}
        return found | {self._buffer(each): each for each in manifest.buffers.values()}

    def stored(self, tensor: Tensor, state: str | None = None, dtype: str = "") -> ReadableTensor:
        fill = partial(self.checkpoint.read_to, tensor.name, state)
        return ReadableTensor(tensor.shape, DTYPES[dtype or tensor.dtype], fill, kind="parameter")

    def _buffer(self, tensor: Tensor) -> ReadableTensor:
        # Buffers may differ between ranks (batch statistics).
        rank = self.exchange.rank if self.same_world else 0

        def fill(out: torch.Tensor, begin: int) -> None:
            end = begin + out.numel()
            out.copy_(self.checkpoint.read_buffer(tensor.name, begin, end, rank))

        return ReadableTensor(tensor.shape, DTYPES[tensor.dtype], fill, kind="buffer")


@dataclass
class PreparedLoad:
    result: LoadedCheckpoint
    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    extra_state: dict[nn.Module, Any]
    optimizer: OptimizerMatch | None
    scheduler: Any
    scheduler_state: Any
    rng: tuple[torch.Tensor, DeviceRandomState] | None

    def apply(self, exchange: RankExchange) -> None:
        # The scheduler first: its load_state_dict is the user's code and may raise.
        exchange.run_and_gather("load the scheduler", self._apply_scheduler)
        exchange.run_and_gather("load the checkpoint", self._apply_values)

    def _apply_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(self.scheduler_state)

    def _apply_values(self) -> None:
        set_tensor_values(self.tensors)
        for module, state in self.extra_state.items():
            module.set_extra_state(state)
        if self.optimizer is not None:
            load_optimizer_values(self.optimizer)
        torch_xla.sync()

    def restore_rng(self) -> None:
        if self.rng is not None:
            torch.set_rng_state(self.rng[0])
            self.rng[1].restore()


def prepare_load(
    reader: Reader,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    strict: bool,
    restore_rng: bool,
    weights: bool = True,
) -> PreparedLoad:
    """Matches and reads everything for ``load_checkpoint``, and changes nothing."""
    require_scheduler(scheduler, "state_dict", "load_state_dict")
    manifest, label, source = reader.checkpoint.manifest, reader.checkpoint.folder, reader.source
    for what, value, saved in (
        ("an optimizer", optimizer, manifest.optimizer),
        ("a scheduler", scheduler, manifest.scheduler),
    ):
        if value is not None and saved is None:
            raise ModelMismatchError(f"{label}: was saved without {what}. Pass None to load it.")
    inventory = make_inventory(model)
    described = reader.tensors()
    offered: dict[str, Any] = {
        name: values.decode(value, source) if name in inventory.extra_state else None
        for name, value in (manifest.extra_state or {}).items()
    }
    offered |= {name: stored for stored, about in described.items() for name in about.names}
    match = match_model(inventory, offered, label, strict, same_run=True)
    state = None
    if optimizer is not None and manifest.optimizer is not None:
        owners: dict[str, list[ParameterShard]] = {}
        for shard, stored in match.parameters.items():
            owners.setdefault(described[stored].name, []).append(shard)
        # With strict=False, model and checkpoint may each lack parameters of the other.
        groups = [
            [shard for shard in own if shard in match.parameters]
            for own in members_of_groups(inventory, optimizer)
        ]
        saved = _optimizer_state(reader, manifest.optimizer, owners)
        state = read_to_host(match_optimizer(inventory, optimizer, groups, saved, label))
    scheduler_state = values.decode(manifest.scheduler, source)
    if scheduler is not None and not isinstance(scheduler_state, dict):
        raise InvalidMetadataError(
            f"{source}: the scheduler's state is {type(scheduler_state).__name__}, expected a dict"
        )
    if scheduler is not None and strict:
        _require_alike(scheduler, scheduler_state, source)
    extra = values.decode(manifest.extra, source)
    return PreparedLoad(
        result=LoadedCheckpoint(reader.path, manifest.step, extra, manifest.world_size),
        tensors=list(iterate_new_values(inventory, match)) if weights else [],
        extra_state=match.extra_state if weights else {},
        optimizer=state,
        scheduler=scheduler,
        scheduler_state=scheduler_state,
        rng=_rng(reader) if restore_rng and reader.same_world else None,
    )


def _optimizer_state(
    reader: Reader, saved: Optimizer, owners: Mapping[str, Sequence[ParameterShard]]
) -> OptimizerState:
    """``owners``: by saved parameter, the parameters of the model to load it into."""
    parameters, source = reader.checkpoint.manifest.parameters, reader.source
    state: dict[str, dict[str, Any]] = {}
    for name, own in saved.state.items():
        for shard in owners.get(name, ()):
            each: dict[str, ReadableTensor | Number] = {}
            for key, encoded in own.single.items():
                value = values.decode(encoded["value"], source)
                each[key] = Number(value, encoded.get("on") == "device")
            for key, dtype in own.sharded.items():
                each[key] = reader.stored(parameters[name], key, dtype)
            state[shard.name] = each
    groups = [
        (
            {name: values.decode(value, source) for name, value in group.options.items()},
            [shard.name for name in group.parameters for shard in owners.get(name, ())],
        )
        for group in saved.groups
        if not group.parameters or any(name in owners for name in group.parameters)
    ]
    return OptimizerState(state, groups, saved.kind)


def _require_alike(scheduler: Any, saved: dict[str, Any], label: str) -> None:
    """Raises an error if the saved state is of another kind of scheduler; torch does not check.

    Another torch version may only add or only remove fields, so two kinds differ in both.
    """
    own = scheduler.state_dict()
    if not isinstance(own, dict):
        return
    more, less = sorted(map(str, own.keys() - saved)), sorted(map(str, saved.keys() - own))
    if more and less:
        raise ModelMismatchError(
            f"{label}: was saved with another scheduler, not {type(scheduler).__name__}: it has "
            f"{less[0]!r} and lacks {more[0]!r}. Use the scheduler that it was saved with, or "
            "strict=False."
        )


def _rng(reader: Reader) -> tuple[torch.Tensor, DeviceRandomState] | None:
    own = reader.checkpoint.file(reader.exchange.rank)
    if RNG_TORCH not in own.container.entries or RNG_XLA not in own.container.entries:
        return None
    entries = [own.container.entries[key] for key in (RNG_TORCH, RNG_XLA)]
    sizes = (8,), (16,)  # older checkpoints
    if any(entry.dtype != "U8" for entry in entries) or entries[1].shape not in sizes:
        raise InvalidMetadataError(
            f"{own.path}: the random states are {entries}, expected bytes. Load with "
            "restore_rng=False."
        )
    state, on_device = (
        own.read(key, 0, entry.numel)
        for key, entry in zip((RNG_TORCH, RNG_XLA), entries, strict=True)
    )
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        raise InvalidMetadataError(f"{own.path}: {RNG_TORCH!r}: {error!s:.120}") from None
    return state, DeviceRandomState.from_bytes(bytes(on_device.tolist()))


def load_checkpoint(
    path: str | os.PathLike,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Any = None,
    *,
    strict: bool = True,
    restore_rng: bool = True,
    missing_ok: bool = False,
    step: int | None = None,
    weights: bool = True,
) -> LoadedCheckpoint | None:
    """Loads a checkpoint that :func:`save_checkpoint` saved. Call it on every rank.

    The number of ranks and the wrapping of the model may differ from those of the save. If both are
    the same, resumed training is bit-exact, except for random states of numpy and Python, which are
    not saved. Nothing is changed before all ranks have read and checked everything. Host memory: a
    copy of this rank's shards and buffers.

    Args:
        path: the folder of a checkpoint, or a folder with several, of which the newest is loaded.
        model, optimizer, scheduler: the objects to load into. ``None`` loads no such state.
        strict: raise unless model and checkpoint have the same names. ``False`` leaves values that
            only one of them has unchanged. Shapes and dtypes must always match.
        restore_rng: restore the random states of torch and XLA, if the number of ranks is the same.
        missing_ok: return ``None`` if there is no checkpoint. Rank 0 decides for all ranks.
        step: load the last checkpoint of this step in the folder ``path``, not the newest.
        weights: load parameters and buffers. ``False`` leaves ``model`` unchanged.

    Raises:
        CheckpointNotFoundError, IncompleteCheckpointError: there is no complete checkpoint.
        CheckpointError: files are damaged, missing, or from different saves.
        ModelMismatchError: the checkpoint does not match the model or the optimizer.
        OtherRankError: another rank failed.
    """
    exchange = RankExchange()
    with synced_device():
        found = exchange.run_on_first_rank(
            "find the checkpoint", lambda: find_checkpoint(path, missing_ok, step)
        )
        if found is None:
            return None

        def read() -> PreparedLoad:
            reader = Reader(open_checkpoint(found), exchange, path=found[0])
            return prepare_load(reader, model, optimizer, scheduler, strict, restore_rng, weights)

        prepared = exchange.run_on_each_rank("read the checkpoint", read)
        prepared.apply(exchange)
    prepared.restore_rng()
    return prepared.result


def open_checkpoint(found: list[Any]) -> ShardedCheckpoint:
    """Opens what :func:`find_checkpoint` found. Raises MixedSaveError if it was replaced."""
    checkpoint = retry_while_missing(lambda: ShardedCheckpoint(found[0]))
    if checkpoint.manifest.save_id != found[1]:
        raise MixedSaveError(
            f"{found[0]}: another save replaced it while it was loaded. Load again when no process "
            "writes to this folder."
        )
    return checkpoint


def retry_while_missing(opened: Callable[[], ShardedCheckpoint]) -> ShardedCheckpoint:
    """Calls ``opened()`` for up to 30 s: network file systems show files of other hosts late."""
    found: list[ShardedCheckpoint] = []
    missing: CheckpointError | None = None

    def there() -> bool:
        nonlocal missing
        try:
            found.append(opened())
        except (CheckpointNotFoundError, MissingRankError) as error:
            missing = error
        return bool(found)

    if not wait_until(there) and missing is not None:
        raise missing
    return found[0]


def find_checkpoint(
    path: str | os.PathLike, missing_ok: bool, step: int | None
) -> list[Any] | None:
    """The folder, save id and step of the checkpoint at ``path``; ``None`` if there is none."""
    try:
        _, folder = folders.resolve_checkpoint(path, step)
    except CheckpointNotFoundError:
        if missing_ok:
            return None
        raise
    name = folder.rpartition("/")[2]
    given = os.fsdecode(path).rstrip("/") or "/"
    is_itself = step is None and given.rpartition("/")[2] == name
    shown = given if is_itself else f"{given}/{name}"
    manifest = ShardedCheckpoint(shown).manifest
    return [shown, manifest.save_id, manifest.step]

"""Reads a rank's part of a checkpoint to the host, checks it, and copies it into the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
from torch import nn

from ..collectives.random_state import DeviceRandomState
from ..consolidate.errors import InvalidMetadataError, ModelMismatchError
from ..consolidate.format import values
from ..consolidate.format.dtypes import DTYPES
from ..consolidate.format.manifest import NAME, Optimizer, Tensor, parameter_key, state_key
from ..consolidate.format.reader import ShardedCheckpoint
from ..consolidate.format.store import join
from .contents import RNG_TORCH, RNG_XLA
from .inventory import ParameterShard, make_inventory
from .matching import match_model
from .optimizer_matching import Number, OptimizerMatch, OptimizerState, match_optimizer
from .optimizers import members_of_groups
from .rank_exchange import RankExchange
from .readable_tensor import ReadableTensor
from .value_loading import (
    iterate_new_values,
    load_optimizer_values,
    read_to_host,
    set_extra_state,
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
    """Reads a checkpoint for this rank. It reads only the rank's own file if the elements match."""

    checkpoint: ShardedCheckpoint
    exchange: RankExchange

    @property
    def label(self) -> str:
        return self.checkpoint.folder

    @property
    def source(self) -> str:
        """Path of the manifest, which has all values that are not tensors."""
        return join(self.label, NAME)

    @property
    def same_world(self) -> bool:
        return self.checkpoint.manifest.world_size == self.exchange.size

    def tensors(self) -> dict[ReadableTensor, Tensor]:
        """All parameters and buffers, each with its description in the manifest."""
        manifest = self.checkpoint.manifest
        found = {self.stored(each): each for each in manifest.parameters.values()}
        return found | {self._buffer(each): each for each in manifest.buffers.values()}

    def stored(self, tensor: Tensor, state: str | None = None, dtype: str = "") -> ReadableTensor:
        """A parameter, or the optimizer state with the key ``state`` and the given dtype."""
        key = parameter_key(tensor.name) if state is None else state_key(state, tensor.name)
        own_dtype = DTYPES[dtype or tensor.dtype]

        def fill(out: torch.Tensor, begin: int) -> None:
            if self.same_world:
                own = self.checkpoint.file(self.exchange.rank)
                mine = own.begins.get(tensor.name, 0), own.length(tensor.name)
                if mine == (begin, out.numel()) and key in own.container.entries:
                    own.read_to(out, key, 0)
                    return
            self.checkpoint.read_to(out, state, tensor.name, begin)

        def read(begin: int, end: int) -> torch.Tensor:
            out = torch.empty(end - begin, dtype=own_dtype)
            fill(out, begin)
            return out

        return ReadableTensor(tensor.shape, own_dtype, read, kind="parameter", fill=fill)

    def _buffer(self, tensor: Tensor) -> ReadableTensor:
        # Buffers may differ between ranks (batch statistics). Each rank gets its own; if the number
        # of ranks has changed, all get those of rank 0.
        rank = self.exchange.rank if self.same_world else 0

        def read(begin: int, end: int) -> torch.Tensor:
            return self.checkpoint.read_buffer(tensor.name, rank).reshape(-1)[begin:end]

        return ReadableTensor(tensor.shape, DTYPES[tensor.dtype], read, kind="buffer")


@dataclass
class Prepared:
    """All new values, read to the host and checked."""

    result: LoadedCheckpoint
    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    extra_state: dict[nn.Module, Any]
    optimizer: OptimizerMatch | None
    scheduler: Any
    scheduler_state: Any
    rng: tuple[torch.Tensor, DeviceRandomState] | None

    def apply(self) -> None:
        """Copies the values into the model and the optimizer."""
        set_tensor_values(self.tensors)
        set_extra_state(self.extra_state)
        if self.optimizer is not None:
            load_optimizer_values(self.optimizer)
        torch_xla.sync()

    def apply_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(self.scheduler_state)

    def restore_rng(self) -> None:
        """Restores the random states of torch and XLA, if they were read."""
        if self.rng is not None:
            torch.set_rng_state(self.rng[0])
            self.rng[1].restore()


def prepare(
    reader: Reader,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    strict: bool,
    restore_rng: bool,
    weights: bool = True,
) -> Prepared:
    """Matches and reads everything, and changes nothing.

    Arguments and errors are those of ``load_checkpoint``.
    """
    manifest, label, source = reader.checkpoint.manifest, reader.label, reader.source
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
    if strict:
        _require_alike(scheduler, scheduler_state, source)
    extra = values.decode(manifest.extra, source)
    return Prepared(
        result=LoadedCheckpoint(label, manifest.step, extra, manifest.world_size),
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
    """The optimizer state by the names of the model.

    ``owners``: for each saved parameter, the parameters of the model to load it into.
    """
    parameters, source = reader.checkpoint.manifest.parameters, reader.source
    state: dict[str, dict[str, Any]] = {}
    for name, own in saved.state.items():
        for shard in owners.get(name, ()):
            each: dict[str, ReadableTensor | Number] = {}
            each |= {key: _number(encoded, source) for key, encoded in own.single.items()}
            for key, dtype in own.sharded.items():
                each[key] = reader.stored(parameters[name], key, dtype)
            state[shard.name] = each
    groups = [
        (
            {name: values.decode(value, source) for name, value in group.options.items()},
            [shard.name for name in group.parameters for shard in owners.get(name, ())],
        )
        for group in saved.groups
        # With strict=False, the model may have none of the parameters of a group.
        if not group.parameters or any(name in owners for name in group.parameters)
    ]
    return OptimizerState(state, groups, saved.kind)


def _number(encoded: Any, source: str) -> Number:
    if not isinstance(encoded, dict) or "value" not in encoded:
        raise ModelMismatchError(
            f"{source}: an optimizer state is {encoded!r:.80}, expected an object with 'value'"
        )
    return Number(values.decode(encoded["value"], source), encoded.get("on") == "device")


def _require_alike(scheduler: Any, saved: Any, label: str) -> None:
    """Raises an error if the saved state is of another kind of scheduler.

    torch's schedulers do not check the state that they load. Another version of torch may add or
    remove fields. If both the saved state and the scheduler have fields that the other lacks, they
    are different kinds.
    """
    if scheduler is None:
        return
    if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
        raise TypeError(
            "scheduler must have a state_dict() and a load_state_dict(), got "
            f"{type(scheduler).__name__}"
        )
    own = scheduler.state_dict()
    if isinstance(own, dict) and isinstance(saved, dict):
        more, less = sorted(map(str, own.keys() - saved)), sorted(map(str, saved.keys() - own))
        if more and less:
            raise ModelMismatchError(
                f"{label}: was saved with another scheduler, not {type(scheduler).__name__}: it "
                f"has {less[0]!r} and lacks {more[0]!r}. Use the scheduler that it was saved with, "
                "or strict=False."
            )


def _rng(reader: Reader) -> tuple[torch.Tensor, DeviceRandomState] | None:
    own = reader.checkpoint.file(reader.exchange.rank)
    if RNG_TORCH not in own.container.entries or RNG_XLA not in own.container.entries:
        return None
    entries = [own.container.entries[key] for key in (RNG_TORCH, RNG_XLA)]
    sizes = (8,), (16,)  # older checkpoints have only the seed
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

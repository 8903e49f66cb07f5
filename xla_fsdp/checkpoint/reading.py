"""What a rank reads of a checkpoint, all of it checked and on the host, and how it takes effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import nn

from ..consolidate.errors import InvalidMetadataError, ModelMismatchError
from ..consolidate.format import values
from ..consolidate.format.dtypes import DTYPES
from ..consolidate.format.manifest import NAME, State, parameter_key, state_key
from ..consolidate.format.reader import ShardedCheckpoint
from ..consolidate.format.store import join
from ..swap import fill_
from .contents import RNG_TORCH, RNG_XLA, set_device_seed
from .inventory import Held, HeldBuffer, Inventory, take_inventory
from .matching import Match, match_model, match_optimizer
from .meeting import Meeting
from .optimizers import decode_single, set_groups


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What :func:`load_checkpoint` found: the folder ``path``, ``step`` and ``extra`` as they were
    saved, and how many ranks saved it."""

    path: str
    step: int
    extra: Any
    world_size: int


@dataclass
class Reader:
    """Reads what this rank needs; out of its own file wherever it saved the same."""

    checkpoint: ShardedCheckpoint
    meeting: Meeting

    @property
    def label(self) -> str:
        return self.checkpoint.folder

    @property
    def same_world(self) -> bool:
        return self.checkpoint.manifest.world_size == self.meeting.size

    def piece(self, out: torch.Tensor, held: Held, name: str, state: str | None = None) -> None:
        """Fills the place of a parameter, or of its optimizer state, in a flat holder."""
        if not held.length:
            return
        place = out[held.at : held.at + held.length]
        if self.same_world:
            own = self.checkpoint.file(self.meeting.rank)
            key = parameter_key(name) if state is None else state_key(state, name)
            mine = own.begins.get(name, 0), own.length(name)
            if mine == (held.begin, held.length) and key in own.container.entries:
                own.read_to(place, key, 0)
                return
        self.checkpoint.read_to(place, state, name, held.begin)

    def flat(
        self,
        holder: torch.Tensor,
        named: Sequence[tuple[Held, str]],
        state: str | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A holder's new values, in its shape; zero in the padding."""
        whole = sum(held.length for held, _ in named) == holder.numel()
        flat = (torch.empty if whole else torch.zeros)(holder.numel(), dtype=dtype or holder.dtype)
        for held, name in named:
            self.piece(flat, held, name, state)
        return flat.view(holder.shape)


@dataclass
class Prepared:
    """All new values, on the host."""

    result: LoadedCheckpoint
    holders: list[tuple[nn.Parameter, torch.Tensor]]
    buffers: list[tuple[torch.Tensor, torch.Tensor]]
    extra_state: list[tuple[nn.Module, Any]]
    optimizer: torch.optim.Optimizer | None
    groups: list[dict[str, Any]]
    states: list[tuple[nn.Parameter, dict[str, Any] | None]]
    scheduler: Any
    scheduler_state: Any
    rng: tuple[torch.Tensor, int] | None

    def apply(self) -> None:
        """Moves them to where they belong."""
        with torch.no_grad():
            _assign(self.holders)
            _assign(self.buffers)
        for module, state in self.extra_state:
            module.set_extra_state(state)
        if self.optimizer is not None:
            set_groups(self.optimizer, self.groups)
            for parameter, state in self.states:
                if state is None:
                    self.optimizer.state.pop(parameter, None)
                else:
                    self.optimizer.state[parameter] = {
                        key: value() if callable(value) else value for key, value in state.items()
                    }
        torch_xla.sync()

    def apply_scheduler(self) -> None:
        if self.scheduler is not None:
            self.scheduler.load_state_dict(self.scheduler_state)

    def restore_rng(self, present: int) -> None:
        """``present``: XLA's random state to keep, if none is to be restored."""
        if self.rng is not None:
            torch.set_rng_state(self.rng[0])
        set_device_seed(present if self.rng is None else self.rng[1])


def _assign(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Gives tensors new values of the same shape; on the XLA device without a program."""
    on_device = [(tensor, value) for tensor, value in pairs if tensor.device.type == "xla"]
    for device in {tensor.device for tensor, _ in on_device}:
        here = [(tensor, value) for tensor, value in on_device if tensor.device == device]
        moved = xm.send_cpu_data_to_device([value for _, value in here], device)
        fill_([tensor for tensor, _ in here], moved)
    for tensor, value in pairs:
        if tensor.device.type != "xla":
            tensor.copy_(value)


def prepare(
    reader: Reader,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
    strict: bool,
    restore_rng: bool,
) -> Prepared:
    """Matches and reads everything, changes nothing; arguments, errors: ``load_checkpoint``."""
    manifest, label = reader.checkpoint.manifest, reader.label
    source = join(label, NAME)
    for what, value, saved in (
        ("an optimizer", optimizer, manifest.optimizer),
        ("a scheduler", scheduler, manifest.scheduler),
    ):
        if value is not None and saved is None:
            raise ModelMismatchError(f"{label}: was saved without {what}; pass none to load it")
    inventory = take_inventory(model)
    match = match_model(manifest, inventory, strict, label)
    groups, states = [], []
    if optimizer is not None:
        matched = match_optimizer(manifest.optimizer, optimizer, inventory, match, label)
        groups = [
            {name: values.decode(value, source) for name, value in group.options.items()}
            for group in matched.groups
        ]
        known = manifest.optimizer.state
        states = [
            (
                parameter,
                None
                if state is None
                else _state(reader, parameter, [pair for pair in named if pair[1] in known], state),
            )
            for parameter, (named, state) in matched.states.items()
        ]
    scheduler_state = values.decode(manifest.scheduler, source)
    if scheduler is not None and not isinstance(scheduler_state, dict):
        raise InvalidMetadataError(f"{source}: the scheduler's state is no dict")
    if strict:
        _require_alike(scheduler, scheduler_state, source)
    extra = values.decode(manifest.extra, source)
    return Prepared(
        result=LoadedCheckpoint(label, manifest.step, extra, manifest.world_size),
        holders=_holders(reader, inventory, match),
        buffers=_buffers(reader, match.buffers),
        extra_state=_extra_state(manifest.extra_state or {}, inventory, strict, label),
        optimizer=optimizer,
        groups=groups,
        states=states,
        scheduler=scheduler,
        scheduler_state=scheduler_state,
        rng=_rng(reader) if restore_rng and reader.same_world else None,
    )


def _require_alike(scheduler: Any, saved: Any, label: str) -> None:
    """torch's schedulers take over whatever they are given. Another version of torch may know more
    or fewer fields; with fields missing on either side it is another scheduler."""
    if scheduler is None:
        return
    if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
        raise TypeError(f"scheduler must have a state_dict(), got {type(scheduler).__name__}")
    own = scheduler.state_dict()
    if isinstance(own, dict) and isinstance(saved, dict):
        more, less = sorted(map(str, own.keys() - saved)), sorted(map(str, saved.keys() - own))
        if more and less:
            raise ModelMismatchError(
                f"{label}: is of another scheduler than {type(scheduler).__name__}: it has "
                f"{less[0]!r} and lacks {more[0]!r}"
            )


def _holders(
    reader: Reader, inventory: Inventory, match: Match
) -> list[tuple[nn.Parameter, torch.Tensor]]:
    found = []
    for holder, helds in inventory.by_holder().items():
        named = [(held, match.parameters[held]) for held in helds if held in match.parameters]
        if len(named) == len(helds):
            found.append((holder, reader.flat(holder, named)))
        elif named:  # the rest of the vector stays as it is
            flat = holder.detach().cpu().reshape(-1).clone()
            for held, name in named:
                reader.piece(flat, held, name)
            found.append((holder, flat.view(holder.shape)))
    return found


def _buffers(
    reader: Reader, matched: Mapping[HeldBuffer, str]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    # What ranks keep of their own (batch statistics) they get back; new ranks get rank 0's.
    rank = reader.meeting.rank if reader.same_world else 0
    whole: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for buffer, name in matched.items():
        value = reader.checkpoint.read_buffer(name, rank).to(buffer.tensor.dtype)
        if buffer.row is None:
            whole[id(buffer.tensor)] = buffer.tensor, value
        else:
            stack = whole.setdefault(
                id(buffer.tensor), (buffer.tensor, buffer.tensor.detach().cpu().clone())
            )[1]
            stack[buffer.row] = value
    return list(whole.values())


def _state(
    reader: Reader, parameter: nn.Parameter, named: Sequence[tuple[Held, str]], state: State
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, encoded in state.single.items():
        found[key] = decode_single(encoded, parameter.device, join(reader.label, NAME))
    for key, dtype in state.sharded.items():
        found[key] = _later(reader.flat(parameter, named, key, DTYPES[dtype]), parameter.device)
    return found


def _later(value: torch.Tensor, device: torch.device) -> Callable[[], torch.Tensor]:
    return lambda: value.to(device)


def _extra_state(
    saved: Mapping[str, Any], inventory: Inventory, strict: bool, label: str
) -> list[tuple[nn.Module, Any]]:
    if strict and saved.keys() != inventory.extra_state.keys():
        odd = sorted(saved.keys() ^ inventory.extra_state.keys())[0]
        raise ModelMismatchError(
            f"{label}: {odd!r} is only in the checkpoint, or only in the model"
        )
    return [
        (module, values.decode(saved[key], join(label, NAME)))
        for key, module in inventory.extra_state.items()
        if key in saved
    ]


def _rng(reader: Reader) -> tuple[torch.Tensor, int] | None:
    own = reader.checkpoint.file(reader.meeting.rank)
    if RNG_TORCH not in own.container.entries or RNG_XLA not in own.container.entries:
        return None
    entries = [own.container.entries[key] for key in (RNG_TORCH, RNG_XLA)]
    if entries[0].dtype != "U8" or (entries[1].dtype, entries[1].shape) != ("U8", (8,)):
        raise InvalidMetadataError(f"{own.path}: the random states are of {entries}")
    state, seed = own.read(RNG_TORCH, 0, entries[0].numel), own.read(RNG_XLA, 0, 8)
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        raise InvalidMetadataError(f"{own.path}: {RNG_TORCH!r}: {error!s:.120}") from None
    return state, int.from_bytes(bytes(seed.tolist()), "little")

"""Lists the tensors and values that a rank saves into its file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from ..collectives.random_state import DeviceRandomState
from ..consolidate.errors import UnsupportedValueError
from ..consolidate.format import values
from ..consolidate.format.digests import digest
from ..consolidate.format.dtypes import dtype_name, flatten_on_host
from ..consolidate.format.manifest import (
    Manifest,
    Optimizer,
    ShardingRule,
    Tensor,
    buffer_key,
    dump_manifest,
    parameter_key,
    state_key,
)
from ..consolidate.format.rank_file import FileTensor
from ..consolidate.format.strict import write_json
from ..sharding.sharded_parameter import local
from ..sharding.state import units_in
from ..sharding.user_checks import require_values
from .inventory import Inventory, ReplicatedBuffer, make_inventory
from .optimizer_state import LazyState, OptimizerStateShard, describe_optimizer

RNG_TORCH, RNG_XLA = "rank/rng.torch", "rank/rng.xla"


@dataclass(frozen=True)
class Contents:
    """One rank's part of a checkpoint.

    Attributes:
        manifest: without file records. Only rank 0 sets the scheduler, ``extra`` and extra state.
        begins: by parameter, the index of the first element that this rank saves.
    """

    manifest: Manifest
    items: Sequence[FileTensor]
    begins: Mapping[str, int]

    def agreement(self) -> list[str]:
        """Two digests that must be equal on all ranks; the second is of single state values."""
        singles: dict[str, Any] = {}
        common = replace(self.manifest, scheduler=None, extra=None, extra_state=None)
        if common.optimizer is not None:
            singles = {name: dict(s.single) for name, s in common.optimizer.state.items()}
            state = {
                name: replace(state, single=dict.fromkeys(state.single))
                for name, state in common.optimizer.state.items()
            }
            common = replace(common, optimizer=replace(common.optimizer, state=state))
        return [digest(dump_manifest(common)), digest(write_json(singles))]

    def metadata(self, rank: int) -> dict[str, str]:
        begins = write_json(dict(self.begins)).decode()
        return {**self.manifest.identity(rank), "begins": begins}

    def on_host(self) -> Contents:
        copied = [
            _in_memory(item.name, item.read(0, item.numel).clone(), item.shape)
            for item in self.items
        ]
        return replace(self, items=copied)


def require_scheduler(scheduler: Any, *methods: str) -> None:
    """Raises TypeError for a model, an optimizer, or another object without ``methods``."""
    if isinstance(scheduler, (torch.nn.Module, torch.optim.Optimizer)):
        raise TypeError(
            f"scheduler must be a learning rate scheduler, got a {type(scheduler).__name__}, whose "
            "state differs on each rank, and only that of rank 0 would be saved. Save it with its "
            "own save_checkpoint, in another folder."
        )
    missing = [name for name in methods if not hasattr(scheduler, name)]
    if scheduler is not None and missing:
        raise TypeError(
            f"scheduler must have a {missing[0]}(), got a {type(scheduler).__name__}. Pass a "
            "scheduler with that method, or None."
        )


def list_contents(
    model: Any, optimizer: Any, scheduler: Any, step: int, extra: Any, random: DeviceRandomState
) -> Contents:
    """Lists what this rank has to save. Raises TypeError, ValueError or CheckpointError."""
    inventory = make_inventory(model)
    require_values(units_in(model), "saving was called")
    first = inventory.rank == 0
    require_scheduler(scheduler, "state_dict")
    described: Optimizer | None = None
    states: list[OptimizerStateShard] = []
    if optimizer is not None:
        described, states = describe_optimizer(optimizer, inventory)
    manifest = Manifest(
        save_id="",
        step=step,
        world_size=inventory.world_size,
        parameters={
            shard.name: Tensor(shard.names, dtype_name(shard.dtype, shard.name), shard.shape)
            for shard in inventory.parameters
        },
        buffers={buffer.name: _describe_buffer(buffer) for buffer in inventory.buffers},
        files=(),
        optimizer=described,
        scheduler=values.encode(scheduler.state_dict(), "scheduler.state_dict()")
        if first and scheduler is not None
        else None,
        extra=values.encode(extra, "extra") if first else None,
        extra_state={
            key: values.encode(module.get_extra_state(), f"get_extra_state() of {key!r}")
            for key, module in inventory.extra_state.items()
        }
        if first
        else None,
        sharding_rules=_sharding_rules(inventory),
    )
    begins = {
        shard.name: shard.begin for shard in inventory.parameters if shard.writes and shard.length
    }
    return Contents(manifest, list(_file_tensors(inventory, states, random)), begins)


def _sharding_rules(inventory: Inventory) -> dict[str, ShardingRule] | None:
    """``None`` if there is no rule for one of the parameters."""
    sharding_rules = {}
    for shard in inventory.parameters:
        if shard.sharding_rule is None:
            return None
        if shard.writes:
            assert shard.sharding_rule.range_of_rank(inventory.rank, shard.numel) == (
                shard.begin,
                shard.end,
            ), shard.name
        sharding_rules[shard.name] = shard.sharding_rule
    return sharding_rules


def _describe_buffer(buffer: ReplicatedBuffer) -> Tensor:
    if buffer.tensor.layout is not torch.strided:
        raise UnsupportedValueError(
            f"buffer {buffer.name!r} is {buffer.tensor.layout}, but a checkpoint stores only dense "
            "tensors. Make it dense, or register it with persistent=False."
        )
    restore = None if buffer.restore is None else dtype_name(buffer.restore, buffer.name)
    return Tensor(buffer.names, dtype_name(buffer.tensor.dtype, buffer.name), buffer.shape, restore)


class HostCopies:
    """Copies tensors to the host. The last copy is cached: its pieces are read in turn."""

    def __init__(self) -> None:
        self._last: tuple[torch.Tensor | LazyState, torch.Tensor] | None = None

    def flat(self, tensor: torch.Tensor | LazyState) -> torch.Tensor:
        if self._last is None or self._last[0] is not tensor:
            self._last = None  # frees the memory of the last copy
            value = tensor.make() if isinstance(tensor, LazyState) else local(tensor.detach())
            self._last = tensor, flatten_on_host(value)
        return self._last[1]


def _file_tensors(
    inventory: Inventory, states: Iterable[OptimizerStateShard], random: DeviceRandomState
) -> Iterator[FileTensor]:
    host = HostCopies()

    def item(
        key: str, tensor: torch.Tensor | LazyState, first: int, shape: tuple[int, ...]
    ) -> FileTensor:
        def read(begin: int, end: int) -> torch.Tensor:
            return host.flat(tensor)[first + begin : first + end]

        return FileTensor(key, tensor.dtype, shape, read)

    for shard in chain.from_iterable(inventory.by_holder().values()):
        if shard.writes and shard.length:
            yield item(parameter_key(shard.name), shard.holder, shard.at, (shard.length,))
    for state in states:
        for shard in state.parameters:
            if shard.writes and shard.length:
                key = state_key(state.key, shard.name)
                yield item(key, state.tensor, shard.at, (shard.length,))
    for buffer in inventory.buffers:
        begin = (buffer.row or 0) * math.prod(buffer.shape)
        yield item(buffer_key(buffer.name), buffer.tensor, begin, buffer.shape)
    bytes_of_device = torch.tensor(list(random.to_bytes()), dtype=torch.uint8, device="cpu")
    for key, value in ((RNG_TORCH, torch.get_rng_state()), (RNG_XLA, bytes_of_device)):
        yield _in_memory(key, value, tuple(value.shape))


def _in_memory(key: str, flat: torch.Tensor, shape: tuple[int, ...]) -> FileTensor:
    return FileTensor(key, flat.dtype, shape, lambda low, high: flat[low:high])

"""The ranks a model is sharded over, and the collectives between them, which are traced, not run.

Only this module of the engine emits XLA collectives. Layouts are unpinned: a pinned all-gather
would be an all-reduce, which sends twice the bytes and differs from rank to rank.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

from .. import xlac
from ..ranks.rank import RankContext, current_rank, is_simulated_rank
from ..tpu.slices import Groups
from .host_data import as_data
from .order import prevent_fusion
from .random_state import preserve_random_state
from .routes import Rings, Route, Routes, routes_for

_LARGE = 1 << 25


@dataclass(frozen=True)
class World:
    """The ranks that share the shards of a parameter.

    Attributes:
        rank: this rank's index among the ``size`` ranks that share one copy of a parameter.
        groups: global ordinals of every sharding group, ``size`` ordinals each.
        replica_groups: ordinals that store the *same* shard, or ``()`` if every shard exists once.
        device: the XLA device of this rank; autograd's threads have another default device.
        context: the rank's state in a CPU launch; ``None`` on TPU.
        device_kind: the runtime's name of the chip, such as "TPU v6 lite"; "" if unknown.
        routes: the routes over a complete TPU slice; ``None``: the compiler chooses.
    """

    rank: int
    size: int
    groups: Groups
    device: torch.device
    replica_groups: Groups = ()
    context: RankContext | None = field(default=None, compare=False, repr=False)
    device_kind: str = ""
    routes: Routes | None = field(default=None, compare=False, repr=False)

    @classmethod
    def current(
        cls,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        replication_groups: Sequence[Sequence[int]] | None = None,
        collective_routes: str = "auto",
    ) -> World:
        """The world of the calling rank; the arguments are those of the FSDP constructor.

        Raises ValueError if the sharding arguments do not fit together.
        """
        total, ordinal = xr.world_size(), xr.global_ordinal()
        rank, size = ordinal, total
        groups: Groups = (tuple(range(total)),)
        over_all = sharding_groups is None and sharding_rank is None
        if not (over_all and sharding_world_size is None):
            if sharding_groups is None or sharding_rank is None or sharding_world_size is None:
                raise ValueError(
                    f"sharding_groups={sharding_groups} needs sharding_rank and "
                    f"sharding_world_size, got {sharding_rank} and {sharding_world_size}, and both "
                    "need sharding_groups. Pass all three, or device_mesh, or leave all three out "
                    "to shard over all ranks"
                )
            rank, size = sharding_rank, sharding_world_size
            if not 0 <= rank < size:
                raise ValueError(
                    f"sharding_rank must be in 0..{size - 1}, got {rank}. "
                    "Pass this rank's index in its group"
                )
            groups = checked_groups("sharding_groups", sharding_groups, size)
            # A process that simulates one of many ranks may have any index.
            if total > 1 and all(group[rank] != ordinal for group in groups):
                raise ValueError(
                    f"sharding_rank={rank}, but no group of sharding_groups has this rank, "
                    f"{ordinal}, at that index: {as_lists(groups)}. Pass this rank's index in its "
                    "group"
                )
        replicas: Groups = ()
        if replication_groups is not None:
            replicas = checked_groups("replication_groups", replication_groups, None)
            _require_replicas(replicas, groups)
        device = torch_xla.device()
        kind = xm.xla_device_kind(device)
        routes = None
        devices = xr.global_runtime_device_attributes()
        if total > 1 and groups == (tuple(range(total)),) and "coords" in devices[0]:
            routes = routes_for(kind, devices, collective_routes)
            # A process that was not launched is one rank, even if it sees the entire slice.
            if routes is not None and routes.slice.devices != total:
                routes = None
        return cls(rank, size, groups, device, replicas, current_rank(), kind, routes)

    @classmethod
    def to_reduce_over(cls, groups: Groups | None, device: torch.device) -> World:
        """A world without a rank, for reductions over ``groups`` or all ranks, on any thread.

        Raises ValueError if ``groups`` do not contain every rank once.
        """
        total = xr.world_size()
        if groups is None:
            groups = (tuple(range(total)),)
        elif sorted(ordinal for group in groups for ordinal in group) != list(range(total)):
            raise ValueError(
                f"groups must contain each of the {total} ranks once, got {as_lists(groups)}. Pass "
                "lists of rank ordinals that together are all ranks"
            )
        return cls(0, len(groups[0]), groups, device, (), current_rank())

    @cached_property
    def _device_name(self) -> str:
        return str(self.device)

    @property
    def replicas(self) -> int:
        """How many ranks store the same shard."""
        return len(self.replica_groups[0]) if self.replica_groups else 1

    @property
    def as_on_tpu(self) -> bool:
        """Whether to trace the program that is best for TPUs. XLA on CPUs drops barriers, starts
        gathers early, and needs numbered collectives.
        """
        return self.context is None or self.context.as_on_tpu

    def gather_route(self, number_of_bytes: int) -> Route:
        """Of an all-gather that results in N bytes on each rank."""
        return Route((self.groups,)) if self.routes is None else self.routes.gather(number_of_bytes)

    def reduction_route(self, number_of_bytes: int, rows: int) -> Route:
        """Of a reduce-scatter of N bytes in ``rows`` rows."""
        if self.routes is None:
            return Route((self.groups,))
        return self.routes.reduction(number_of_bytes, rows)

    def overlaps_reductions(self, number_of_bytes: int) -> bool:
        """Whether large gradients of N bytes are reduced around rings, overlapped with compute."""
        if self.routes is None:
            return False
        size = max(number_of_bytes, _LARGE)
        stages = self.routes.scatter(size).stages
        return any(self.routes.rings(groups, size) is not None for groups in stages)

    def all_gather(
        self, shard: torch.Tensor, label: str = "", route: Route | None = None
    ) -> torch.Tensor:
        """Concatenates every rank's ``shard`` on dimension 0: ``(d, ...)`` to ``(size*d, ...)``."""
        if route is None:
            route = self.gather_route(self.size * shard.numel() * shard.element_size())
        if route.moves:
            shard = self.permute(shard, [(target, source) for source, target in route.moves], label)
        for groups in reversed(route.stages):
            shard = self._gather(shard, groups, label)
        return shard

    def reduce_scatter(
        self,
        full: torch.Tensor,
        label: str = "",
        scale: float = 1.0,
        route: Route | None = None,
    ) -> torch.Tensor:
        """Sums ``full`` over the ranks; returns this rank's rows of dimension 0, times ``scale``.

        ``(size*d, ...)`` to ``(d, ...)``. Around rings, sums are rounded at every step.
        """
        if self.size == 1:
            return full if scale == 1.0 else full * scale
        if route is None:
            size = full.numel() * full.element_size()
            route = self.reduction_route(size, full.shape[0])
        shard, last = full, len(route.stages) - 1
        for number, (groups, rings) in enumerate(zip_longest(route.stages, route.rings)):
            factor = scale if number == last else 1.0
            if rings is None:
                shard = self._scatter(shard, groups, label, factor)
            else:
                shard = self._around(shard, rings, label)
                shard = shard if factor == 1.0 else shard * factor
        return self.permute(shard, route.moves, label) if route.moves else shard

    def _around(self, full: torch.Tensor, rings: Rings, label: str) -> torch.Tensor:
        named = _named("reduce_scatter", label)
        # Otherwise the compiler computes gradients in the shape of parts, and copies activations.
        parts = prevent_fusion(full)
        halves = 2 * rings.size
        parts = parts.view(halves, full.shape[0] // halves, *full.shape[1:])
        if rings not in self._tables:
            # A table, not constants: all ranks must have the same program.
            self._tables[rings] = as_data(rings.parts(self.rank), self.device)
        mine = self._tables[rings]
        reduced = []
        for way in range(2):
            pairs = rings.pairs(way)
            held = torch.index_select(parts, 0, mine[way, :1])
            for step in range(1, rings.size):
                held = self.permute(held, pairs)
                held = held + torch.index_select(parts, 0, mine[way, step : step + 1])
            reduced.append(held)
        del named
        return torch.cat(reduced).reshape(-1, *full.shape[1:])

    @cached_property
    def _tables(self) -> dict[Rings, torch.Tensor]:
        return {}

    def all_reduce_sum(self, value: torch.Tensor, label: str = "") -> torch.Tensor:
        """Over the sharding group; same shape, meant for few elements."""
        return self._all_reduce(value, self.groups, xm.REDUCE_SUM, label)

    def all_reduce_max(self, value: torch.Tensor, label: str = "") -> torch.Tensor:
        """Elementwise, over the sharding group; same shape."""
        return self._all_reduce(value, self.groups, xm.REDUCE_MAX, label)

    def sum_over_replicas(self, value: torch.Tensor, label: str = "") -> torch.Tensor:
        """The sum over the ranks with the same shard; same shape."""
        return self._all_reduce(value, self.replica_groups, xm.REDUCE_SUM, label)

    @cached_property
    def rank_on_device(self) -> torch.Tensor:
        """``[rank]``, int32."""
        return as_data(torch.tensor([self.rank], dtype=torch.int32, device="cpu"), self.device)

    def _all_reduce(
        self, value: torch.Tensor, groups: Groups, kind: str, label: str
    ) -> torch.Tensor:
        if not groups or len(groups[0]) == 1:
            return value
        if self.context is not None:
            # torch_xla's all-reduce has no channel id, which ranks on one CPU need.
            rows = self._gather(value[None], groups, label)
            return rows.sum(0) if kind == xm.REDUCE_SUM else rows.amax(0)

        def all_reduce(operand: torch.Tensor, channel: None) -> Any:
            return xm.all_reduce(kind, operand, groups=as_lists(groups), pin_layout=False)

        return self._traced("all_reduce", value, label, all_reduce)

    def _gather(self, shard: torch.Tensor, groups: Groups, label: str) -> torch.Tensor:
        size = len(groups[0])
        if size == 1:
            return shard

        def all_gather(operand: torch.Tensor, channel: int | None) -> torch.Tensor:
            return xlac.all_gather(operand, 0, size, as_lists(groups), False, channel, None)

        return self._traced("all_gather", shard, label, all_gather)

    def _scatter(
        self, full: torch.Tensor, groups: Groups, label: str, scale: float
    ) -> torch.Tensor:
        def reduce_scatter(operand: torch.Tensor, channel: int | None) -> torch.Tensor:
            token = xlac.collective_token(self._device_name)
            size, among = len(groups[0]), as_lists(groups)
            return xlac.reduce_scatter(
                xm.REDUCE_SUM, operand, token, scale, 0, size, among, False, channel, None
            )[0]

        return self._traced("reduce_scatter", full, label, reduce_scatter)

    def permute(
        self, value: torch.Tensor, moves: Sequence[Sequence[int]], label: str = ""
    ) -> torch.Tensor:
        """Sends every rank's ``value`` according to ``moves``, (sender, receiver)."""
        named = _named("collective_permute", label) if label else None
        if self.context is None:
            xlac.set_collective_token(self._device_name, None)
        moved = xm.collective_permute(value, as_lists(moves))
        del named
        return moved

    def _traced(
        self,
        kind: str,
        operand: torch.Tensor,
        label: str,
        collective: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> torch.Tensor:
        """The result of ``collective``, named; on CPU ranks numbered and in sequence."""
        named = _named(kind, label)
        # torch_xla's token prevents overlap, and TPU ranks, with one program, do not need it.
        xlac.set_collective_token(self._device_name, None)
        if self.context is None:
            result = collective(operand, None)
        else:
            result = self.context.trace(kind, operand, label, collective)
        del named
        return result


def _named(kind: str, label: str) -> object:
    """While the result exists, names what is traced."""
    return xlac.scope(f"{kind}[{label}]") if xlac.has_scopes() else None


def as_lists(groups: Sequence[Sequence[int]]) -> list[list[int]]:
    """The type that torch_xla needs."""
    return list(map(list, groups))


def checked_groups(name: str, groups: Sequence[Sequence[int]], size: int | None) -> Groups:
    """``groups``, the argument ``name``, of ``size`` ordinals each (``None``: as the first).

    Raises ValueError if there is none, a group has another size, or an ordinal is in two groups.
    """
    checked = tuple(tuple(map(operator.index, group)) for group in groups)
    if not checked:
        raise ValueError(f"{name} must be lists of ordinals, got []. Leave it out, or pass groups")
    size = len(checked[0]) if size is None else size
    flat = [ordinal for group in checked for ordinal in group]
    if any(len(group) != size for group in checked):
        raise ValueError(
            f"every group of {name} must have {size or 'equally many'} ordinals, got "
            f"{as_lists(checked)}. Pass groups of equal size (sharding_groups: sharding_world_size)"
        )
    if len(set(flat)) != len(flat):
        raise ValueError(
            f"{name} contains an ordinal twice: {as_lists(checked)}. Each rank must be in one group"
        )
    return checked


def _require_replicas(replicas: Groups, groups: Groups) -> None:
    """Raises ValueError unless ``replicas`` contain each rank once, by index in its group."""
    place = {ordinal: number for group in groups for number, ordinal in enumerate(group)}
    flat = sorted(ordinal for group in replicas for ordinal in group)
    fit = all(len({place.get(ordinal) for ordinal in group}) == 1 for group in replicas)
    if flat != sorted(place) or not fit:
        raise ValueError(
            f"replication_groups={as_lists(replicas)} must contain each rank of sharding_groups="
            f"{as_lists(groups)} once, and each must consist of ranks at the same index of their "
            "groups. For sharding_groups=[[0, 1], [2, 3]] pass replication_groups=[[0, 2], [1, 3]]"
        )


def all_gather_object(world: World, tag: str, value: Any) -> list[Any] | None:
    """The values of all ranks, in order, of a small picklable ``value``; all must call it.

    CPU ranks may trace one after another: only the last to call gets them, others get ``None``.
    """
    if world.context is not None:
        return world.context.post(tag, value)
    with preserve_random_state():
        values: list[Any] = xm.mesh_reduce(tag, value, list)  # type: ignore[assignment]
    return values


def broadcast_from_first(world: World, value: torch.Tensor) -> torch.Tensor:
    """``value`` of the group's first rank, and of the first replica, on this rank's device.

    A separate program, because a rank that does not use the result must take part too.
    """
    if is_simulated_rank():
        return value
    result = value.to(torch.uint8) if value.dtype is torch.bool else value.detach()
    result = as_data(result.cpu(), world.device)
    ordinal = xr.global_ordinal()
    first_replica = all(ordinal not in group[1:] for group in world.replica_groups)
    firsts = [(world.all_reduce_sum, world.rank == 0)]
    if world.replica_groups:
        firsts.append((world.sum_over_replicas, first_replica))
    # torch_xla's token would put earlier collectives into the program, so it would always differ.
    alone = contextlib.nullcontext() if world.context is None else world.context.separate_channels()
    with alone:
        for add, first in firsts:
            mine = as_data(first, world.device)  # 0-d, as the value may be
            result = add(torch.where(mine, result, torch.zeros_like(result)), "from the first")
        result = result.to(value.dtype)
        xlac.start_tensors([result])
    return result

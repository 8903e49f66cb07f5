"""The collectives and rendezvous of ``xm`` for CPU ranks, with the same signatures and results.

XLA connects separate programs only by collectives with a channel id, which torch_xla accepts only
for all-gather and reduce-scatter: the others use these. The ids are the rank's, also where a caller
has passed one. Values that depend on the rank are input data, so that all ranks share one program.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from ... import xlac
from ..rank import RankContext
from . import call_site
from .session import Session

RankGroups = Sequence[Sequence[int]] | None
_Tensors = TypeVar("_Tensors", torch.Tensor, "torch.Tensor | list[torch.Tensor]")

# Gathered values are [g, ...]: one row for each member.
_REDUCE_ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    xm.REDUCE_SUM: lambda rows: rows.sum(0, dtype=rows.dtype),
    xm.REDUCE_MUL: lambda rows: rows.prod(0, dtype=rows.dtype),
    xm.REDUCE_MIN: lambda rows: rows.amin(0),
    xm.REDUCE_MAX: lambda rows: rows.amax(0),
    xm.REDUCE_AND: lambda rows: _fold(rows, torch.bitwise_and),
    xm.REDUCE_OR: lambda rows: _fold(rows, torch.bitwise_or),
}


def _fold(rows: torch.Tensor, combine: Callable) -> torch.Tensor:
    total = rows[0]
    for row in rows[1:]:
        total = combine(total, row)
    return total


class Collectives:
    """These methods replace the functions of ``xla_model`` with the same names."""

    NAMES = (
        *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute"),
        *("xla_rendezvous", "mesh_reduce"),
    )

    def __init__(self, session: Session) -> None:
        self._session = session
        self._original = {name: getattr(xm, name) for name in self.NAMES}

    def replacements(self) -> dict[Callable, Callable]:
        return {self._original[name]: getattr(self, name) for name in self.NAMES}

    def all_reduce(
        self,
        reduce_type: str,
        inputs: torch.Tensor | list[torch.Tensor],
        scale: float = 1.0,
        groups: RankGroups = None,
        pin_layout: bool = True,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Returns a new tensor for a tensor; reduces a list in place."""
        tensors = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        context = self._rank_of("all_reduce", tensors)
        if context is None or self._session.size == 1:  # torch_xla only copies
            return self._original["all_reduce"](
                reduce_type, inputs, scale=scale, groups=groups, pin_layout=pin_layout
            )
        _require_reduce_type(reduce_type)
        reduced = list(tensors)
        # One collective for each dtype: on CPU, calls cost more than bytes.
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        with torch.no_grad():
            for indices in by_dtype.values():
                flat = torch.cat([tensors[i].detach().reshape(-1) for i in indices])
                rows = self._gather(context, f"all_reduce({reduce_type})", flat[None], 0, groups)
                total = _REDUCE_ROWS[reduce_type](rows)
                if scale != 1.0:
                    total = (total * scale).to(flat.dtype)
                parts = total.split([tensors[i].numel() for i in indices])
                for i, part in zip(indices, parts, strict=True):
                    reduced[i] = part.reshape(tensors[i].shape)
            if isinstance(inputs, torch.Tensor):
                return reduced[0]
            for tensor, value in zip(tensors, reduced, strict=True):
                tensor.copy_(value)
        return inputs

    def all_gather(
        self,
        value: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        groups: RankGroups = None,
        output: torch.Tensor | list[torch.Tensor] | None = None,
        pin_layout: bool = True,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        context = self._rank_of("all_gather", value)
        if context is None:
            return self._original["all_gather"](
                value, dim, groups, output, pin_layout, channel_id, use_global_device_ids
            )
        gather = partial(self._gather, context, "all_gather", dim=dim, groups=groups)
        return _for_each(value, output, gather)

    def reduce_scatter(
        self,
        reduce_type: str,
        input: torch.Tensor | list[torch.Tensor],
        scale: float,
        scatter_dim: int,
        shard_count: int,
        groups: RankGroups = None,
        output: torch.Tensor | list[torch.Tensor] | None = None,
        pin_layout: bool = True,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        context = self._rank_of("reduce_scatter", input)
        original = self._original["reduce_scatter"]
        if context is None:
            return original(
                reduce_type, input, scale, scatter_dim, shard_count, groups, output, pin_layout,
                channel_id, use_global_device_ids,
            )  # fmt: skip
        _require_reduce_type(reduce_type)

        def scatter(value: torch.Tensor, **numbered: Any) -> torch.Tensor:
            return original(
                reduce_type, value, scale, scatter_dim % value.dim(), shard_count, **numbered
            )

        kind = f"reduce_scatter({reduce_type})"
        run = partial(self._traced, context, kind, groups, scatter)
        return _for_each(input, output, run)

    def all_to_all(
        self,
        value: torch.Tensor,
        split_dimension: int,
        concat_dimension: int,
        split_count: int,
        groups: RankGroups = None,
        pin_layout: bool = True,
    ) -> torch.Tensor:
        """Member j's part i goes to member i, joined in order of j."""
        context = self._rank_of("all_to_all", value)
        if context is None:
            return self._original["all_to_all"](
                value, split_dimension, concat_dimension, split_count, groups, pin_layout
            )
        group = self._group_of(context, groups)
        if split_count != len(group):
            raise ValueError(
                f"all_to_all: split_count must be the size of a group, {len(group)}, "
                f"got {split_count}"
            )
        split_dimension %= value.dim()
        if value.shape[split_dimension] % split_count:
            raise ValueError(
                f"all_to_all: dimension {split_dimension} of {tuple(value.shape)} must be "
                f"divisible by split_count={split_count}"
            )
        with torch.no_grad():
            rows = self._gather(context, "all_to_all", value[None], 0, groups)
            parts = torch.stack(rows.chunk(split_count, split_dimension + 1))
            mine = _pick(parts, group.index(context.rank))
            return torch.cat(mine.unbind(0), concat_dimension % value.dim())

    def collective_permute(
        self, value: torch.Tensor, pairs: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Ranks to which no rank sends get zeros."""
        context = self._rank_of("collective_permute", value)
        if context is None:
            return self._original["collective_permute"](value, pairs)
        sources = {int(target): int(source) for source, target in pairs}
        with torch.no_grad():
            rows = self._gather(context, "collective_permute", value[None], 0, None)
            rows = torch.cat([rows, torch.zeros_like(rows[:1])])
            return _pick(rows, sources.get(context.rank, self._session.size))

    def xla_rendezvous(
        self, payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
    ) -> list[bytes]:
        """``xm.rendezvous`` and ``xm.mesh_reduce``. Tags must be equal (TPU only logs them)."""
        context = self._session.rank_of()
        if context is None:
            return self._original["xla_rendezvous"](payload, ordinals, tag)
        if ordinals and len(ordinals) != self._session.size:
            raise ValueError(
                f"xm.rendezvous: only a rendezvous of all {self._session.size} ranks is supported, "
                f"got ranks {list(ordinals)}; leave the argument out"
            )
        if not isinstance(payload, bytes):
            raise TypeError(f"xm.rendezvous: payload must be bytes, got {type(payload).__name__}")
        torch_xla.sync()  # as on TPU
        return self._session.exchange(context, f"xm.rendezvous({tag!r})", payload)

    def mesh_reduce(self, tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
        """``reduce_fn`` gets a copy of every rank's data, by rank."""
        if self._session.rank_of() is None:
            return self._original["mesh_reduce"](tag, data, reduce_fn)
        buffer = io.BytesIO()
        torch.save(xlac.tree_to_host(data), buffer)
        payloads = self.xla_rendezvous(buffer.getvalue(), tag=tag)
        # Safe: this process wrote these bytes.
        return reduce_fn([torch.load(io.BytesIO(each), weights_only=False) for each in payloads])

    def _gather(
        self, context: RankContext, kind: str, value: torch.Tensor, dim: int, groups: RankGroups
    ) -> torch.Tensor:
        gather = partial(self._original["all_gather"], dim=dim)
        return self._traced(context, kind, groups, gather, value)

    def _traced(
        self, context: RankContext, kind: str, groups: RankGroups, collective: Callable, value: Any
    ) -> torch.Tensor:
        label = f"groups {[list(group) for group in groups]}" if groups else ""
        among = self._groups(groups)

        def run(operand: torch.Tensor, channel: int) -> torch.Tensor:
            return collective(operand, groups=among, pin_layout=False, channel_id=channel)

        return context.trace(kind, value, label, run, call_site.here())

    def _groups(self, groups: RankGroups) -> list[list[int]]:
        if not groups:
            return [list(range(self._session.size))]  # a channel id needs groups
        return [list(map(int, group)) for group in groups]

    def _group_of(self, context: RankContext, groups: RankGroups) -> list[int]:
        for group in self._groups(groups):
            if context.rank in group:
                return group
        raise ValueError(f"rank {context.rank} is in none of the groups {groups}")

    def _rank_of(
        self, name: str, value: torch.Tensor | Sequence[torch.Tensor]
    ) -> RankContext | None:
        tensors = [value] if isinstance(value, torch.Tensor) else list(value)
        for one in tensors:
            require_plain = getattr(type(one), "require_plain", None)  # a shard's type has it
            if require_plain is not None:
                require_plain(one, f"xm.{name}")
        device = tensors[0].device if tensors else None
        if device is not None and device.type != "xla":
            return None  # torch_xla raises the error
        return self._session.rank_of(device)


def _pick(rows: torch.Tensor, index: int) -> torch.Tensor:
    # As data: a constant would be another program on each rank.
    return rows.index_select(0, torch.tensor([index], device="cpu").to(rows.device))[0]


def _for_each(inputs: _Tensors, output: Any, run: Callable) -> _Tensors:
    with torch.no_grad():
        if isinstance(inputs, torch.Tensor):
            return run(inputs) if output is None else output.copy_(run(inputs))
        results = [run(each) for each in inputs]
        if output is None:
            return results
        if not isinstance(output, list) or len(output) != len(inputs):
            raise ValueError(
                f"output must be a list of {len(inputs)} tensors, one for each input, got "
                f"{output!r}"
            )
        for target, value in zip(output, results, strict=True):
            target.copy_(value)
    return output


def _require_reduce_type(reduce_type: str) -> None:
    if reduce_type not in _REDUCE_ROWS:
        raise ValueError(f"reduce_type must be one of {sorted(_REDUCE_ROWS)}, got {reduce_type!r}")

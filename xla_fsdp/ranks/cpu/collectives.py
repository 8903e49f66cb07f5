"""The collectives and rendezvous of ``xm`` for CPU ranks, with the same signatures and results.

XLA connects separate programs only by collectives with a channel id, which torch_xla accepts only
for all-gather and reduce-scatter: the others use these. Values that depend on the rank are input
data, so that all ranks share one program.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from ... import xlac
from ..rank import RankContext
from . import call_site
from .session import Session

Groups = Sequence[Sequence[int]] | None
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
        *("rendezvous", "xla_rendezvous", "mesh_reduce"),
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
        groups: Groups = None,
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
        with torch.no_grad():
            reduced = self._reduced(context, reduce_type, tensors, scale, groups)
            if isinstance(inputs, torch.Tensor):
                return reduced[0]
            for tensor, value in zip(tensors, reduced, strict=True):
                tensor.copy_(value)
        return inputs

    def all_gather(
        self,
        value: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        groups: Groups = None,
        output: torch.Tensor | list[torch.Tensor] | None = None,
        pin_layout: bool = True,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        context = self._rank_of("all_gather", value)
        if context is None or channel_id is not None:
            gathered = self._original["all_gather"](
                _with_own_channel(context, "all_gather", value, channel_id), dim, groups, output,
                pin_layout, channel_id, use_global_device_ids,
            )  # fmt: skip
            return _added(context, gathered)
        return _for_each(value, output, lambda each: self._gather(context, each, dim, groups))

    def reduce_scatter(
        self,
        reduce_type: str,
        input: torch.Tensor | list[torch.Tensor],
        scale: float,
        scatter_dim: int,
        shard_count: int,
        groups: Groups = None,
        output: torch.Tensor | list[torch.Tensor] | None = None,
        pin_layout: bool = True,
        channel_id: int | None = None,
        use_global_device_ids: bool | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        context = self._rank_of("reduce_scatter", input)
        if context is None or channel_id is not None:
            mine = self._original["reduce_scatter"](
                reduce_type, _with_own_channel(context, "reduce_scatter", input, channel_id), scale,
                scatter_dim, shard_count, groups, output, pin_layout, channel_id,
                use_global_device_ids,
            )  # fmt: skip
            return _added(context, mine)
        _require_reduce_type(reduce_type)

        def scatter(value: torch.Tensor) -> torch.Tensor:
            kind = f"reduce_scatter({reduce_type})"
            channel = self._channel(context, kind, value, groups)
            mine = self._original["reduce_scatter"](
                reduce_type, _ordered(context, value), scale, scatter_dim % value.dim(),
                shard_count, groups=self._groups(groups), pin_layout=False, channel_id=channel,
            )  # fmt: skip
            return _added(context, mine)

        return _for_each(input, output, scatter)

    def all_to_all(
        self,
        value: torch.Tensor,
        split_dimension: int,
        concat_dimension: int,
        split_count: int,
        groups: Groups = None,
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
            rows = self._gather(context, value[None], 0, groups, kind="all_to_all")
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
            rows = self._gather(context, value[None], 0, None, kind="collective_permute")
            rows = torch.cat([rows, torch.zeros_like(rows[:1])])
            return _pick(rows, sources.get(context.rank, self._session.size))

    def rendezvous(
        self, tag: str, payload: bytes = b"", replicas: Sequence[int] = ()
    ) -> list[bytes]:
        """Tags must be equal on all ranks (TPU only logs them)."""
        if self._session.rank_of() is None:
            return self._original["rendezvous"](tag, payload, list(replicas))
        return self._exchange("xm.rendezvous", tag, payload, replicas)

    def xla_rendezvous(
        self, payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
    ) -> list[bytes]:
        if self._session.rank_of() is None:
            return self._original["xla_rendezvous"](payload, ordinals, tag)
        return self._exchange("xm.xla_rendezvous", tag, payload, ordinals)

    def mesh_reduce(self, tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
        """``reduce_fn`` gets a copy of every rank's data, by rank."""
        if self._session.rank_of() is None:
            return self._original["mesh_reduce"](tag, data, reduce_fn)
        buffer = io.BytesIO()
        torch.save(xlac.tree_to_host(data), buffer)
        payloads = self._exchange("xm.mesh_reduce", tag, buffer.getvalue(), None)
        # Safe: this process wrote these bytes.
        return reduce_fn([torch.load(io.BytesIO(each), weights_only=False) for each in payloads])

    def _reduced(
        self,
        context: RankContext,
        reduce_type: str,
        tensors: list[torch.Tensor],
        scale: float,
        groups: Groups,
    ) -> list[torch.Tensor]:
        """One collective for each dtype: on CPU, calls cost more than bytes."""
        reduced = list(tensors)
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        for indices in by_dtype.values():
            flat = torch.cat([tensors[i].detach().reshape(-1) for i in indices])
            kind = f"all_reduce({reduce_type})"
            rows = self._gather(context, flat[None], 0, groups, kind=kind)
            total = _REDUCE_ROWS[reduce_type](rows)
            if scale != 1.0:
                total = (total * scale).to(flat.dtype)
            parts = total.split([tensors[i].numel() for i in indices])
            for i, part in zip(indices, parts, strict=True):
                reduced[i] = part.reshape(tensors[i].shape)
        return reduced

    def _gather(
        self,
        context: RankContext,
        value: torch.Tensor,
        dim: int,
        groups: Groups,
        kind: str = "all_gather",
    ) -> torch.Tensor:
        channel = self._channel(context, kind, value, groups)
        rows = self._original["all_gather"](
            _ordered(context, value), dim, groups=self._groups(groups), pin_layout=False,
            channel_id=channel,
        )  # fmt: skip
        return _added(context, rows)

    @staticmethod
    def _channel(context: RankContext, kind: str, value: torch.Tensor, groups: Groups) -> int:
        label = f"groups {[list(group) for group in groups]}" if groups else ""
        return context.next_channel(kind, value.shape, value.dtype, label, where=call_site.here())

    def _groups(self, groups: Groups) -> list[list[int]]:
        if not groups:
            return [list(range(self._session.size))]  # a channel id needs groups
        return [list(map(int, group)) for group in groups]

    def _group_of(self, context: RankContext, groups: Groups) -> list[int]:
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

    def _exchange(
        self, what: str, tag: str | None, payload: bytes, ordinals: Sequence[int] | None
    ) -> list[bytes]:
        context = self._session.rank_of()
        assert context is not None
        if ordinals and len(ordinals) != self._session.size:
            raise ValueError(
                f"{what}: only a rendezvous of all {self._session.size} ranks is supported, "
                f"got ranks {list(ordinals)}; leave the argument out"
            )
        if not isinstance(payload, bytes):
            raise TypeError(f"{what}: payload must be bytes, got {type(payload).__name__}")
        torch_xla.sync()  # as on TPU
        return self._session.exchange(context, f"{what}({tag!r})", (what, tag), payload)


def _ordered(context: RankContext, operand: torch.Tensor) -> torch.Tensor:
    return operand if context.order is None else context.order.depend_on_last(operand)


def _added(context: RankContext | None, result: _Tensors) -> _Tensors:
    if context is not None and context.order is not None:
        context.order.add(result if isinstance(result, torch.Tensor) else result[0])
    return result


def _with_own_channel(
    context: RankContext | None, kind: str, value: _Tensors, channel_id: int | None
) -> _Tensors:
    """Records a collective whose caller chose the channel; returns its operands, in order."""
    if context is None or channel_id is None:
        return value
    first = value if isinstance(value, torch.Tensor) else value[0]
    context.record(channel_id, kind, first.shape, first.dtype, call_site.here())
    first = _ordered(context, first)
    if isinstance(value, torch.Tensor):
        return first
    return [first, *value[1:]]


def _pick(rows: torch.Tensor, index: int) -> torch.Tensor:
    # As data: a constant would be another program on each rank.
    return rows.index_select(0, torch.tensor([index]).to(rows.device))[0]


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

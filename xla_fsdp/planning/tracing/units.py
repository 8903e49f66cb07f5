"""The FSDP units of a traced model, and the bytes that plain ZeRO-3 sends for them.

ZeRO stage 3 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 7.2) gathers every parameter twice and reduce-scatters its gradient. Each of these
sends B(n-1)/n of B bytes over n ranks. Units that keep parameters send less.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as InTree

from ...names import is_wrapper
from ...sharding.comm_plan import Collective, Divisors, plan_gathers, plan_reductions, reduced_in
from .naming import plain_name


class OnWire(NamedTuple):
    """One collective: ``rows`` rows of a full tensor with padding, or of several small ones."""

    bytes: int
    rows: int

    @classmethod
    def of(cls, planned: Collective) -> OnWire:
        return cls(planned.bytes, planned.ranks * planned.shape[0])


@dataclass(frozen=True)
class TracedUnit:
    """One wrapper of this package; scanned blocks are one unit.

    ``elements`` and ``trainable``: each parameter once, without padding. ``itemsize``: of an
    element when gathered. ``gathered``, ``reduced``: collectives of parameters, and of gradients.
    """

    name: str
    elements: int
    trainable: int
    itemsize: int
    gathered: tuple[OnWire, ...]
    reduced: tuple[OnWire, ...]


def traced_units(roots: Iterable[nn.Module]) -> tuple[TracedUnit, ...]:
    found: list[TracedUnit] = []
    seen: set[object] = set()
    for root in roots:
        for name, module in root.named_modules():
            if not is_wrapper(module) or module in seen:
                continue
            seen.add(module)
            unit = module._unit
            options, world = unit.options, unit.world
            elements = trainable = wire = 0
            specs = [tensor.spec for tensor in unit.tensors]
            dtypes: dict[int, torch.dtype] = {}
            for number, tensor in enumerate(unit.tensors):
                dtype, layout = tensor.spec.compute_dtype(options.compute_dtype), tensor.layout
                elements += layout.numel
                wire += layout.numel * dtype.itemsize
                if layout.numel and tensor.shard.requires_grad:
                    trainable += layout.numel
                    dtypes[number] = reduced_in(dtype, options)
            if elements:
                gathers = plan_gathers(specs, options, world)
                reductions = plan_reductions(specs, dtypes, world, Divisors.of(world, False))
                found.append(TracedUnit(
                    plain_name(name), elements, trainable, round(wire / elements),
                    tuple(map(OnWire.of, gathers)), tuple(map(OnWire.of, reductions)),
                ))  # fmt: skip
    return tuple(found)


def innermost_unit(module: str, units: Iterable[str]) -> str:
    """The innermost of ``units`` that contains ``module``; the shortest name if none does."""
    names = sorted(units, key=len, reverse=True)
    inside = (u for u in names if not u or module == u or module.startswith(f"{u}."))
    return next(inside, names[-1])


def zero_bound(roots: Iterable[nn.Module]) -> int | None:
    """The ZeRO-3 bound in bytes that a device sends in a step; ``None`` if nothing is sharded.

    For the wrappers of this package and of torch_xla. Parameters count in their compute dtype,
    without padding. Frozen parameters are not reduced.
    """
    seen: set[int] = set()
    sent = 0.0

    def add(shard: Any, numel: int, dtype: torch.dtype, ranks: int) -> None:
        nonlocal sent
        if id(shard) not in seen:
            seen.add(id(shard))
            sent += (2 + shard.requires_grad) * numel * dtype.itemsize * (ranks - 1) / ranks

    module: Any
    shard: Any
    for module in (module for root in roots for module in root.modules()):
        if is_wrapper(module):
            unit = module._unit
            for tensor in unit.tensors:
                dtype = tensor.spec.compute_dtype(unit.options.compute_dtype)
                add(tensor.shard, tensor.layout.numel, dtype, unit.world.size)
        elif isinstance(module, InTree):
            for shard in module.sharded_params:
                numel = math.prod(shard._orig_size)
                add(shard, numel, module.compute_dtype, module.world_size)
    return round(sent) if seen else None

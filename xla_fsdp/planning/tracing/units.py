"""The FSDP units of a traced model: what each gathers and reduces together, in their order."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ...names import is_wrapper
from ...sharding.comm_plan import reduced_in
from ...sharding.layout import Layout
from .naming import plain


class OnWire(NamedTuple):
    """A full tensor as it is sent, with padding."""

    bytes: int
    rows: int  # its length along dimension 0


@dataclass(frozen=True)
class TracedUnit:
    """One wrapper of this package.

    ``name``: dotted, "" for the root. ``elements``: of its parameters, each counted once, without
    padding; ``trainable``: of those that are trained. ``itemsize``: bytes of an element in the
    dtype in which it is gathered. ``gathered``: its tensors; ``reduced``: gradients of those that
    are trained. Scanned blocks are one unit.
    """

    name: str
    elements: int
    trainable: int
    itemsize: int
    gathered: tuple[OnWire, ...]
    reduced: tuple[OnWire, ...]


def traced_units(roots: Iterable[nn.Module]) -> tuple[TracedUnit, ...]:
    """The units of ``roots`` whose parameters are sharded over ranks."""
    found: list[TracedUnit] = []
    seen: set[object] = set()
    for root in roots:
        for name, module in root.named_modules():
            if not is_wrapper(module) or module in seen:
                continue
            seen.add(module)
            unit = module._unit
            elements = trainable = wire = 0
            gathered, reduced = [], []
            for tensor in unit.tensors:
                dtype, layout = tensor.spec.compute_dtype(unit.options.compute_dtype), tensor.layout
                if not layout.numel:
                    continue
                elements += layout.numel
                wire += layout.numel * dtype.itemsize
                gathered.append(_on_wire(layout, dtype))
                if tensor.shard.requires_grad:
                    trainable += layout.numel
                    reduced.append(_on_wire(layout, reduced_in(dtype, unit.options)))
            if elements:
                itemsize = round(wire / elements)
                found.append(TracedUnit(
                    plain(name), elements, trainable, itemsize, tuple(gathered), tuple(reduced)
                ))  # fmt: skip
    return tuple(found)


def _on_wire(layout: Layout, dtype: torch.dtype) -> OnWire:
    rows = layout.size * layout.comm_shape[0]
    return OnWire(math.prod(layout.padded_shape) * dtype.itemsize, rows)

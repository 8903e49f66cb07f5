"""What the wrappers of a traced model gather together, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ...names import is_wrapper
from .naming import plain


@dataclass(frozen=True)
class TracedUnit:
    """One wrapper of this project.

    ``name``: dotted, "" for the root. ``elements``: of its parameters, each counted once, without
    padding; ``trainable``: of those that are trained. ``itemsize``: bytes of an element as it is
    gathered and computed with. Blocks in one loop are one unit here.
    """

    name: str
    elements: int
    trainable: int
    itemsize: int


def traced_units(roots: Iterable[nn.Module]) -> tuple[TracedUnit, ...]:
    """The units of ``roots`` that share parameters with other ranks."""
    found: list[TracedUnit] = []
    seen: set[object] = set()
    for root in roots:
        for name, module in root.named_modules():
            if not is_wrapper(module) or module in seen:
                continue
            seen.add(module)
            unit = module._unit
            elements = trainable = wire = 0
            for tensor in unit.tensors:
                stored = tensor.shard.dtype
                dtype = stored if tensor.wide else unit.options.compute_dtype or stored
                elements += tensor.layout.numel
                trainable += tensor.layout.numel * tensor.shard.requires_grad
                wire += tensor.layout.numel * dtype.itemsize
            if elements:
                itemsize = round(wire / elements)
                found.append(TracedUnit(plain(name), elements, trainable, itemsize))
    return tuple(found)

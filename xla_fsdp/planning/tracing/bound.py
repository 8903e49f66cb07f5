"""The bytes that plain ZeRO-3 sends: two gathers and one reduce-scatter.

ZeRO stage 3 (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", section 7.2) gathers every parameter for the forward and again for the backward, and
reduce-scatters its gradient. A gather or a reduce-scatter of B bytes over n ranks has every rank
send B(n-1)/n. A unit that keeps its parameters from forward to backward, such as the outermost one
(``disable_reshard_on_root``), gathers once: a step can send a little less than the bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...names import is_wrapper


@dataclass(frozen=True)
class ZeroBound:
    """The bound of one step, in bytes a device sends."""

    wire_bytes: int
    parameters: int  # elements, each parameter counted once
    label: str = "two all-gathers and one reduce-scatter of every parameter (ZeRO-3)"


def zero_bound(roots: Iterable[nn.Module]) -> ZeroBound | None:
    """The bound for the sharded parameters in ``roots``; ``None`` if nothing in them is sharded.

    Supports this package's wrapper and that of torch_xla. Parameters count in the dtype that they
    are computed in, without padding. Frozen parameters are not reduced.
    """
    sent, elements, seen = 0.0, 0, set()
    for root in roots:
        for module in root.modules():
            for key, numel, itemsize, ranks, trainable in _sharded(module):
                if key not in seen:
                    seen.add(key)
                    elements += numel
                    sent += (2 + trainable) * numel * itemsize * (ranks - 1) / ranks
    return ZeroBound(round(sent), elements) if seen else None


def _sharded(module: Any) -> Iterator[tuple[int, int, int, int, bool]]:
    """For each shard: identity, elements, bytes of an element, ranks, whether it is trained."""
    if is_wrapper(module):
        unit = module._unit
        for tensor in unit.tensors:
            stored = tensor.shard.dtype
            dtype = stored if tensor.wide else unit.options.compute_dtype or stored
            yield (
                id(tensor.shard), tensor.layout.numel, dtype.itemsize, unit.world.size,
                tensor.shard.requires_grad,
            )  # fmt: skip
    elif type(module).__module__.startswith("torch_xla.distributed.fsdp"):
        for shard in getattr(module, "sharded_params", ()):
            dtype = getattr(module, "compute_dtype", None) or torch.float32
            numel = math.prod(getattr(shard, "_orig_size", shard.shape))
            yield id(shard), numel, dtype.itemsize, module.world_size, shard.requires_grad

"""Clips gradient shards by the norm of the full gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn

from ..collectives.host_data import as_data
from ..collectives.world import World, checked_groups
from ..ranks.rank import is_simulated_rank
from .layout import spec_of
from .shard_reductions import largest, largest_of_ranks, own_power
from .sharded_parameter import local
from .sharded_tensor import require_reduced
from .unit import Unit


@torch.no_grad()
def clip_grad_norm_(
    units: Sequence[Unit],
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    groups: Sequence[Sequence[int]] | None = None,
) -> torch.Tensor:
    """Scales gradient shards so that the norm of all full gradients is at most ``max_norm``.

    Equals ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, with the coefficient
    ``min(1, max_norm / (norm + 1e-6))``. A parameter of several units, or a replicated one, counts
    once; if ranks have different gradients for it, the mean of their powers counts (``inf``: the
    largest). The host waits for the device only if gradients are on the host (``cpu_offload``).

    Args:
        norm_type: the order p of the norm, > 0, or ``inf``.
        groups: lists of rank ordinals to reduce the norm over, instead of the sharding groups.

    Returns:
        The norm before clipping, a 0-d tensor on the device, the same on all ranks of a group.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is not positive.
        RuntimeError: ``no_sync`` stores gradients that are not reduced yet.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}. Pass a number > 0")
    parameters = list(parameters)
    require_reduced(parameters, "clip_grad_norm_")
    device = units[0].world.device
    worlds = {id(shard): unit.world for unit in units for shard in unit.shards}
    # A rank without a gradient in some world still takes part in the reduction.
    by_world: dict[World | None, list[torch.Tensor]] = {unit.world: [] for unit in units}
    for parameter in parameters:
        grad, world = parameter.grad, worlds.get(id(parameter))
        if parameter.requires_grad:
            by_world.setdefault(world, [])
        if grad is not None:
            by_world.setdefault(world, []).append(grad.detach())
    largest_counts = math.isinf(norm_type)
    total = torch.zeros((), device=device)
    for world, grads in by_world.items():
        part = _own_power([g for g in grads if g.device == device], norm_type, device)
        on_host = [g for g in grads if g.device != device]
        if on_host and not is_simulated_rank():  # host sums are in no program
            theirs = as_data(_own_power(on_host, norm_type, torch.device("cpu")), device)
            part = largest(torch.stack([part, theirs])) if largest_counts else part + theirs
        if world is None:
            # If only this rank's gradient counted, ranks would scale by different coefficients.
            world = World.to_reduce_over(None, device)
            part = part if largest_counts else part / world.size
        elif groups is not None:
            world = World.to_reduce_over(checked_groups("groups", groups, None), device)
        if largest_counts:
            total = largest(torch.stack([total, largest_of_ranks(part, world)]))
        else:
            total = total + world.all_reduce_sum(part, "gradient norm")
    if not largest_counts:
        total = total.sqrt() if norm_type == 2 else total ** (1 / norm_type)

    ratio = max_norm / (total + 1e-6)
    # No clamp: in torch_xla it is a maximum too, and turns NaN into a number on CPUs.
    coefficient = torch.where(ratio > 1, torch.ones_like(ratio), ratio)
    coefficients = {device: coefficient}
    for grad in chain.from_iterable(by_world.values()):
        if grad.device not in coefficients:
            if is_simulated_rank():
                continue
            coefficients[grad.device] = coefficient.cpu()
        local(grad).mul_(coefficients[grad.device].to(grad.dtype))
    return total


def _own_power(
    grads: Sequence[torch.Tensor], norm_type: float, device: torch.device
) -> torch.Tensor:
    masks: dict[Any, Any] = {}
    parts = [(local(grad), spec_of(grad)) for grad in grads]
    powers = [own_power(part, spec, norm_type, masks) for part, spec in parts if part.numel()]
    if not powers:
        return torch.zeros((), device=device)
    return largest(torch.stack(powers)) if math.isinf(norm_type) else torch.stack(powers).sum()

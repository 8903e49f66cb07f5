"""What is likely a mistake of the script, looked for in the first forward and said once."""

from __future__ import annotations

import warnings

import torch_xla.runtime as xr
from torch import nn

from ..collectives.agreement import tell_all
from ..collectives.world import World
from ..ranks.rank import is_pretending
from ..ranks.slices import slices_of_ranks
from ..ranks.watchdog.settings import say
from .awaited import require_come
from .freeing import stamps
from .ignored import note_of
from .unit import NamedUnits

# On a parameter that no wrapper shards: a warning has named it.
WARNED = "_xla_fsdp_warned_unsharded"


def require_values(units: NamedUnits, doing: str) -> None:
    """Raises RuntimeError if ``doing`` comes before parameters of ``units`` have values."""
    if any(unit.awaited for _, unit in units):
        require_come([(f"{path}." if path else "", unit.awaited) for path, unit in units], doing)


def require_all_sharded(root: nn.Module, units: NamedUnits) -> None:
    """Warns of trainable parameters in ``root`` that none of ``units``, those in it, shards."""
    sharded = {shard for _, unit in units for shard in unit.shards}
    found = {
        name: parameter
        for name, parameter in root.named_parameters()
        if parameter.requires_grad and parameter not in sharded and note_of(parameter) is None
    }
    names = list(found)
    for parameter in found.values():
        setattr(parameter, WARNED, True)
    if names:
        some = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
        warnings.warn(
            f"{some} came into the model after it was wrapped: not sharded, and their gradients "
            "are not averaged over the ranks, so that ranks will drift apart. Add modules before "
            "wrapping, or wrap them",
            stacklevel=2,
        )


def compare_initial_weights(world: World, units: NamedUnits) -> None:
    """Warns if ranks built the model with different weights; once, before the first forward.

    Each rank has cut its shard out of its own, so that the whole is a mixture. What was loaded or
    changed since is not compared. All ranks must call it; nothing is compared among groups whose
    copies are independent.
    """
    holders = world.size * world.replicas
    if holders == 1 or holders != xr.world_size() or is_pretending():
        return
    own = {
        path: unit.initial_checksum
        for path, unit in units
        if unit.initial_stamps == stamps(unit.shards)
    }
    everyone = tell_all(world, "xla_fsdp initial weights", own)
    if everyone is None:  # another rank is told
        return
    differing = [path for path in own if len({each[path] for each in everyone if path in each}) > 1]
    if differing:
        some = ", ".join(repr(path or "the root") for path in differing[:5])
        warnings.warn(
            f"ranks built {some} with different weights, so that the sharded model is a mixture of "
            "them, and replicas differ: call torch.manual_seed with the same number on every rank "
            "before building the model, or pass sync_module_states=True, which takes those of rank "
            "0",
            stacklevel=2,
        )


def tell_of_slices(world: World) -> None:
    """Says how a model is sharded where there are several slices, once, by rank 0."""
    slices = slices_of_ranks()
    if not slices or xr.global_ordinal() != 0 or is_pretending():
        return
    where = f"{len(slices)} slices of {len(slices[0])} ranks"
    if world.replicas > 1 and set(world.groups) == set(slices):
        say(
            f"{where}: the model is sharded within each slice and replicated over them; pass "
            "sharding_strategy=ShardingStrategy.FULL_SHARD to shard over all ranks"
        )
    elif any(not any(set(group) <= set(one) for one in slices) for group in world.groups):
        say(
            f"{where}: the model is sharded over ranks of several slices, so every gather goes "
            "over the data-centre network"
        )

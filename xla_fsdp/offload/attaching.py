"""Connects a unit whose shards are on the host with its copies and gradients on the device."""

from __future__ import annotations

from ..sharding.cpu_offload import HostShard
from ..sharding.state import FSDPState
from .copies import ShardCopy, Uploads
from .gradients import HostGradients
from .streaming import Stream


def attach(unit: FSDPState) -> None:
    """Gives every shard of ``unit`` on the host a copy on the device, and a way for its gradient to
    the host. Does nothing if ``unit`` does not offload.

    Raises:
        ValueError: a parameter is shared with another wrapper (tied weights), and only one of the
            two wrappers offloads it.
    """
    how = unit.options.cpu_offload
    offloads = how is not None
    for tensor in unit.stored:
        if isinstance(tensor.shard, HostShard) is not offloads:
            ours, theirs = ("is", "not") if offloads else ("not", "is")
            raise ValueError(
                f"parameter {tensor.key!r} is shared with another wrapper (tied weights), and "
                f"{ours} offloaded here but {theirs} there. Pass the same cpu_offload to both"
            )
    if how is None:
        return
    uploads = Uploads(unit.world.device)
    gradients = unit.gradients.host = HostGradients(unit.world.device)
    if how.stream:
        unit.stream = Stream(unit, gradients)
    for tensor in unit.stored:
        shard = tensor.shard
        assert isinstance(shard, HostShard)  # checked above
        if tensor.copy is None:
            computed = None if tensor.wide else unit.options.compute_dtype
            tensor.copy = ShardCopy(shard, computed, uploads)
        elif tensor.copy.dtype is not tensor.spec.compute_dtype(unit.options.compute_dtype):
            # Tied, and the other wrapper has another compute dtype.
            tensor.copy = ShardCopy(shard, None, uploads)
        tensor.widens = True

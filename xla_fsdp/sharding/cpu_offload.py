"""``cpu_offload``: what of a wrapper's parameters lies in the host's memory."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class CPUOffload:
    """What is kept in the host's memory, and computed there: docs/offload.md.

    The shards that an optimizer sees, their gradients and its state are tensors on the CPU, and the
    update runs there. The device has a copy of the shards in the dtype in which they are gathered.
    These go together: an update needs all three in one place.

    Attributes:
        parameters: the shards, in the dtype in which they are stored.
        gradients: of the shards.
        optimizer: its state, and the update.
        stream: the copy is there only while the wrapper computes, forward and again backward. For
            models of which not even that much fits; each wrapper's forward and backward becomes a
            program of its own. Without effect on the outermost wrapper, whose copy stays. Not with
            ``reshard_after_forward=False`` or a number, and not in ``scan_blocks``.

    Raises:
        TypeError: an attribute is no bool.
        ValueError: some are True and others False.
    """

    parameters: bool = True
    gradients: bool = True
    optimizer: bool = True
    stream: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, bool):
                raise TypeError(f"CPUOffload.{field.name} must be True or False, got {value!r}")
        if self.stream and not self.parameters:
            raise ValueError("CPUOffload(stream=True) streams what is on the host: leave it out")
        if len({self.parameters, self.gradients, self.optimizer}) > 1:
            raise ValueError(
                f"{self} is not possible: an optimizer needs parameters, gradients and state in "
                "one place, and torch has no gradient on another device than its parameter. Pass "
                "CPUOffload(), which is all three on the host, or None"
            )


def require_streamable(offload: CPUOffload | None, reshard: bool | int) -> None:
    """Raises ValueError if ``offload`` streams what is to stay on the device after a forward, by
    ``reshard_after_forward=reshard``."""
    if offload is not None and offload.stream and reshard is not True:
        raise ValueError(
            "CPUOffload(stream=True) leaves nothing of a wrapper on the device after its forward, "
            f"and reshard_after_forward={reshard} keeps parameters there, as do SHARD_GRAD_OP and "
            "NO_SHARD of sharding_strategy: leave one of the two out"
        )

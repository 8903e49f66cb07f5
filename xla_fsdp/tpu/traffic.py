"""What of a collective decides how long it takes on the links of a slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .slices import Groups


class Traffic(Protocol):
    """A collective on the links: that of a plan is one, and says more."""

    @property
    def kind(self) -> str:
        """As HLO calls it: "all-gather", "collective-permute"."""

    @property
    def bytes(self) -> int:
        """The larger of what goes in and what comes out, without padding."""

    @property
    def wire_bytes(self) -> int:
        """What a device sends: see :func:`wire_bytes`."""

    @property
    def groups(self) -> Groups:
        """Ranks that take part together, or pairs of source and target; () means all."""

    @property
    def emitter(self) -> str:
        """The algorithm that the compiler chose, as it calls it; "" if unknown."""

    @property
    def across_slices(self) -> bool:
        """Whether it runs between slices, over the data-center network."""


class NamedTraffic(Traffic, Protocol):
    """Traffic of a program that calls it by a name."""

    @property
    def name(self) -> str: ...


def wire_bytes(kind: str, number_of_bytes: int, group_size: int) -> int:
    """Bytes a device sends in one collective of ``number_of_bytes``, the larger of its ends."""
    if kind == "collective-permute":
        return number_of_bytes
    if group_size <= 1:
        return 0
    factor = 2 if kind == "all-reduce" else 1
    return factor * number_of_bytes * (group_size - 1) // group_size


@dataclass(frozen=True)
class OneCollective:
    """Traffic that is in no program: to ask how long it would take."""

    kind: str
    bytes: int
    groups: Groups
    emitter: str = ""
    across_slices: bool = False

    @property
    def wire_bytes(self) -> int:
        """See :class:`Traffic`."""
        ranks = 2 if self.kind == "collective-permute" else len(self.groups[0])
        return wire_bytes(self.kind, self.bytes, ranks)

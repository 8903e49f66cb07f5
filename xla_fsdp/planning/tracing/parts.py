"""The programs that a streamed step is cut into, each with what is on the device beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from ...offload.copies import ShardCopy
from .host_step import units_of
from .live import held
from .traced import StepBoundary, TracedProgram


@dataclass(frozen=True)
class TracedPart:
    """One program of a step.

    Attributes:
        beside: bytes of tensors on the device that the program neither reads nor makes.
        to_device: bytes of shards that are sent for it.
        to_host: bytes of gradients that it makes for the host.
    """

    program: TracedProgram
    beside: int
    to_device: int
    to_host: int


class Parts:
    """Collects the programs of one step, of whose model units are streamed."""

    def __init__(self) -> None:
        self.found: list[TracedPart] = []
        self._known: dict[str, TracedProgram] = {}  # by fingerprint; the same one for equal ones
        self._sent = 0

    def add(
        self,
        program: TracedProgram,
        boundary: StepBoundary,
        tensors: Iterable[torch.Tensor],
        roots: Iterable[nn.Module],
        to_host: int,
    ) -> None:
        """``program`` is what ``boundary`` lowered last, of ``tensors``, those on the device."""
        sent = _sent(roots)
        program = self._known.setdefault(program.fingerprint, program)
        beside = boundary.bytes_beside([one for one in map(held, tensors) if not one.pending])
        self.found.append(TracedPart(program, beside, sent - self._sent, to_host))
        self._sent = sent

    def noted(self) -> tuple[TracedPart, ...]:
        """All of them. While one runs, the copies for the next arrive, and the gradients of the two
        before leave."""
        parts = self.found
        return tuple(
            replace(
                part,
                beside=part.beside
                + sum(after.to_device for after in parts[number + 1 : number + 2])
                + sum(before.to_host for before in parts[max(number - 2, 0) : number]),
            )
            for number, part in enumerate(parts)
        )


def is_streamed(roots: Iterable[nn.Module]) -> bool:
    """Whether units of ``roots`` have their parameters on the device only while they compute."""
    return any(unit.stream is not None for unit in units_of(roots))


def fingerprint(parts: Iterable[TracedPart]) -> str:
    """Equal for steps whose programs could share executables."""
    return hashlib.sha256("".join(p.program.fingerprint for p in parts).encode()).hexdigest()


def _sent(roots: Iterable[nn.Module]) -> int:
    """Bytes that were sent to the device so far."""
    uploads = {
        id(tensor.copy.uploads): tensor.copy.uploads
        for unit in units_of(roots)
        for tensor in unit.stored
        if isinstance(tensor.copy, ShardCopy)
    }
    return sum(one.sent for one in uploads.values())

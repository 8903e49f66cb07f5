"""What a forward reads and changes beside its inputs, so that it can be run again: random numbers,
modes, buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch_xla.core.xla_model as xm
from torch import nn

from .sharding.freeing import stamps


@dataclass(frozen=True)
class RandomState:
    """The states of the generators that a module on ``device`` can draw from."""

    device: torch.device
    cpu: torch.Tensor
    xla: int | None

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        xla = xm.get_rng_state(str(device)) if device.type == "xla" else None
        return cls(device, torch.get_rng_state(), xla)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.xla is not None:
            xm.set_rng_state(self.xla, str(self.device))

    def equals(self, other: RandomState) -> bool:
        return self.xla == other.xla and torch.equal(self.cpu, other.cpu)


@contextlib.contextmanager
def random_numbers_from(state: RandomState) -> Iterator[None]:
    """What is drawn within is what was drawn from ``state`` on, and nothing to those outside."""
    now = RandomState.of(state.device)
    state.restore()
    try:
        yield
    finally:
        now.restore()


@contextlib.contextmanager
def in_modes(modes: Iterable[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Within, each of these modules is in training, or in evaluation, as it says."""
    others = [(module, now) for module, was in modes if (now := module.training) is not was]
    for module, now in others:
        module.training = not now
    try:
        yield
    finally:
        for module, now in others:
            module.training = now


class Buffers:
    """Those of ``module`` before a forward. What the forward updates is kept until it runs again
    (spectral norm computes with the vectors that it has just made better)."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [
            (owner, name, buffer, stamps([buffer]), torch.clone(buffer))
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]

    def forward_over(self) -> None:
        """Forgets those that are what they were."""
        self._before = [
            (owner, name, buffer, stamp, value)
            for owner, name, buffer, stamp, value in self._before
            if owner._buffers.get(name) is not buffer or stamps([buffer]) != stamp
        ]

    def put(self) -> None:
        """Has the module compute with what was there before."""
        for owner, name, _, _, value in self._before:
            if owner._buffers.get(name) is not None:
                owner._buffers[name] = torch.clone(value)


@contextlib.contextmanager
def buffers_as_they_are(module: nn.Module) -> Iterator[None]:
    """Undoes what happens to the module's buffers within, in place or by assignment."""
    before = [
        (owner, name, buffer, torch.clone(buffer))
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for owner, name, buffer, value in before:
                owner._buffers[name] = buffer
                # Not only if the version counter moved: batch norm updates without moving it.
                buffer.copy_(value)

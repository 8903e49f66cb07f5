"""The random state of this rank's XLA device, read and restored exactly.

It is the seed of the step and the seed of the last draw. ``torch_xla.sync()`` drops the latter,
``xm.get_rng_state`` returns only it, and ``xm.set_rng_state`` sets both, so these functions alone
do not restore a state from within a step.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch_xla
import torch_xla.core.xla_model as xm

from .. import xlac


@dataclass(frozen=True)
class DeviceRandomState:
    """The seed of the step, and the number of draws since."""

    seed: int
    draws: int = 0

    @classmethod
    def read(cls) -> DeviceRandomState:
        """The current state; runs no program."""
        device = str(torch_xla.device())
        last = xm.get_rng_state(device)
        xlac.forget_draws(device)
        seed, draws = xm.get_rng_state(device), 0
        while xm.get_rng_state(device) != last:
            _draw()
            draws += 1
        return cls(seed, draws)

    def restore(self) -> None:
        xm.set_rng_state(self.seed, str(torch_xla.device()))
        for _ in range(self.draws):
            _draw()

    def to_bytes(self) -> bytes:
        """The format in checkpoints."""
        return struct.pack("<2Q", self.seed, self.draws)

    @classmethod
    def from_bytes(cls, data: bytes) -> DeviceRandomState:
        """Also reads the seed alone, the format of older checkpoints."""
        return cls(*struct.unpack(f"<{len(data) // 8}Q", data))


@contextlib.contextmanager
def preserve_random_state() -> Iterator[DeviceRandomState]:
    """Afterwards the device draws the same numbers as without the code within."""
    state = DeviceRandomState.read()
    try:
        yield state
    finally:
        state.restore()


@contextlib.contextmanager
def synced_device() -> Iterator[DeviceRandomState]:
    """Runs pending programs, and preserves the random state."""
    with preserve_random_state() as state:
        torch_xla.sync()
        yield state


def _draw() -> None:
    torch.rand((), device=torch_xla.device())

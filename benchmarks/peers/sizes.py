"""How large workload S is, for those who build it without torch, and what follows from that."""

from __future__ import annotations

from dataclasses import dataclass

HEADS = 16
# What a step does about gathered weights and activations until the backward: jax_fsdp.py.
WAYS = KEPT, AGAIN, REMATERIALISED, SCANNED = "kept", "again", "rematerialised", "scanned"


@dataclass(frozen=True)
class Sizes:
    """``batch`` sequences of ``sequence`` positions a device; ``width`` is a multiple of HEADS."""

    blocks: int = 4
    width: int = 1024
    batch: int = 32
    sequence: int = 256

    @property
    def elements(self) -> int:
        """Of all parameters: weights, biases and two norms a block, and the two linear layers."""
        block = 12 * self.width**2 + (3 + 1 + 4 + 1) * self.width + 4 * self.width
        return self.blocks * block + 2 * (self.width**2 + self.width)

    @property
    def model_flops(self) -> float:
        """Of a step on one device: three times the matrix products of the forward."""
        tokens = self.batch * self.sequence
        attention = 4 * tokens * self.sequence * self.width  # scores, and what is mixed by them
        block = 2 * tokens * 12 * self.width**2 + attention
        return 3.0 * (self.blocks * block + 2 * 2 * tokens * self.width**2)

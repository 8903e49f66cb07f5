"""The sizes of workload S, without importing torch, and figures computed from them."""

from __future__ import annotations

from dataclasses import dataclass

HEADS = 16
# What is saved for the backward and what is gathered or computed again: see jax_fsdp.py.
WAYS = KEPT, AGAIN, REMATERIALISED, SCANNED = "kept", "again", "rematerialised", "scanned"


@dataclass(frozen=True)
class Sizes:
    """``batch`` sequences of ``sequence`` positions per device; HEADS must divide ``width``."""

    blocks: int = 4
    width: int = 1024
    batch: int = 32
    sequence: int = 256

    @property
    def elements(self) -> int:
        """Elements of all parameters: each block with its norms, and the two linear layers."""
        block = 12 * self.width**2 + (3 + 1 + 4 + 1) * self.width + 4 * self.width
        return self.blocks * block + 2 * (self.width**2 + self.width)

    @property
    def model_flops(self) -> float:
        """FLOPs of a step on one device: three times the matmuls of the forward."""
        tokens = self.batch * self.sequence
        attention = (
            4 * tokens * self.sequence * self.width
        )  # scores, and the weighted sum of the values
        block = 2 * tokens * 12 * self.width**2 + attention
        return 3.0 * (self.blocks * block + 2 * 2 * tokens * self.width**2)

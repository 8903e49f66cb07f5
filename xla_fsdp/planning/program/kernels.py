"""Model the time of Pallas kernels from their cost estimates; the compiler has no others.

A kernel's custom call has Pallas' ``CostEstimate``: floating-point operations, and bytes between
HBM and the core. Its time in the model is the longer of the two at the chip's peak rates (the
roofline of Williams et al., "Roofline: an insightful visual performance model", CACM 2009). The
real time is longer, since neither the vector unit nor the start of a kernel is included.
"""

from __future__ import annotations

from ...tpu.chips import Chip
from .hlo import Instruction

_TARGET = "tpu_custom_call"
# An attribute that xla_fsdp.layers.jax_call sets: FLOPs of the model, if fewer than the kernel's.
_MODEL_FLOPS = "xla_fsdp_model_flops"


def is_kernel(instruction: Instruction) -> bool:
    """Whether ``instruction`` calls a Pallas kernel."""
    return (
        instruction.opcode == "custom-call"
        and f'custom_call_target="{_TARGET}"' in instruction.attributes
    )


def kernel_cycles(instruction: Instruction, chip: Chip) -> int | None:
    """Cycles of one execution at peak rates; ``None`` if the kernel has no cost estimate."""
    cost = _cost(instruction)
    if not cost:
        return None
    flops, moved = (float(cost.get(name, 0)) for name in ("flops", "bytes_accessed"))
    seconds = max(flops / chip.device_flops, moved / chip.device_hbm_bandwidth)
    return round(seconds * chip.clock_hz)


def kernel_flops(instruction: Instruction) -> float:
    """The kernel's part of the model FLOPs; 0 if the kernel has no cost estimate."""
    for pair in (instruction.attribute("frontend_attributes") or "").strip("{}").split(","):
        name, _, value = pair.partition("=")
        if name.strip() == _MODEL_FLOPS:
            return float(value.strip('"'))
    return float(_cost(instruction).get("flops", 0))


def _cost(instruction: Instruction) -> dict[str, str]:
    config = instruction.backend_config.get("custom_call_config") or {}
    return config.get("cost_estimate") or {}

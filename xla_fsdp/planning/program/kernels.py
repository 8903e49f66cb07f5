"""What Pallas kernels take, of which the compiler knows nothing but what they say themselves.

A kernel's custom call carries Pallas' ``CostEstimate``: floating-point operations and bytes between
HBM and the core. Its time in the model is the longer of the two at the chip's peak rates, the
roofline of Williams et al., "Roofline: an insightful visual performance model" (CACM 2009): less
than it will take, since neither the vector unit nor the start of a kernel is in it.
"""

from __future__ import annotations

from ...tpu.chips import Chip
from .hlo import Instruction

_TARGET = "tpu_custom_call"
# Of xla_fsdp.layers.jax_call: FLOPs of the model, where they are fewer than those of the kernel.
_MODEL_FLOPS = "xla_fsdp_model_flops"


def is_kernel(instruction: Instruction) -> bool:
    """Whether it is a call of a Pallas kernel."""
    return (
        instruction.opcode == "custom-call"
        and f'custom_call_target="{_TARGET}"' in instruction.attributes
    )


def kernel_cycles(instruction: Instruction, chip: Chip) -> int | None:
    """Cycles of one execution at peak rates; ``None`` if the kernel does not say what it takes."""
    cost = _cost(instruction)
    if not cost:
        return None
    flops, moved = (float(cost.get(name, 0)) for name in ("flops", "bytes_accessed"))
    seconds = max(flops / chip.device_flops, moved / chip.device_hbm_bandwidth)
    return round(seconds * chip.clock_hz)


def kernel_flops(instruction: Instruction) -> float:
    """Its part of the model's FLOPs, 0 if it does not say what it takes."""
    for pair in (instruction.attribute("frontend_attributes") or "").strip("{}").split(","):
        name, _, value = pair.partition("=")
        if name.strip() == _MODEL_FLOPS:
            return float(value.strip('"'))
    return float(_cost(instruction).get("flops", 0))


def _cost(instruction: Instruction) -> dict[str, str]:
    config = instruction.backend_config.get("custom_call_config") or {}
    return config.get("cost_estimate") or {}

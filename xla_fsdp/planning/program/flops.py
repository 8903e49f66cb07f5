"""Counts the floating-point operations (FLOPs) of a traced program, and finds its attention.

A matmul of (m, k) and (k, n) counts 2mkn, a convolution likewise for each output, and a Pallas
kernel its cost estimate. Training counts three times the forward. For a transformer this is the 6 N
per token of Kaplan et al., "Scaling Laws for Neural Language Models" (section 2.1), plus attention.
Recomputation does not count (Chowdhery et al., "PaLM", appendix B).
"""

from __future__ import annotations

import math

from ...tpu.chips import HEAD_DIM, LANES, LARGEST_HEAD_DIM, Chip
from .hlo import HloModule, Instruction, leaves, parse_module
from .places import inline_schedule
from .scopes import parse_scope

_AGAIN = "recompute["
_NOT_FORWARD = ("backward[", "optimizer[")
_KERNEL = b"tpu_custom_call"
# Set by xla_fsdp.layers.jax_call: FLOPs of the model, if fewer than the kernel's.
_MODEL_FLOPS = "xla_fsdp_model_flops"


def model_flops(traced: bytes) -> float:
    """Model FLOPs of one step on one device; a frozen and the first layer also count three times.

    Raises ValueError if ``traced`` is not an HloModuleProto.
    """
    forward = everything = 0.0
    for place in inline_schedule(parse_module(traced)).places:
        flops = flops_of(place.instruction) * place.times
        if flops and _AGAIN not in place.path:
            everything += flops
            if not any(part in place.path for part in _NOT_FORWARD):
                forward += flops
    # A step without modules has no names.
    return 3 * forward if b"backward[" in traced else everything


def flops_of(instruction: Instruction) -> float:
    """FLOPs of one execution, without those of computations that it calls."""
    if instruction.opcode == "dot":
        left = _dims_of(instruction.operands[0])
        axes = instruction.message.dot_dimension_numbers.lhs_contracting_dimensions
        return 2.0 * math.prod(_dims_of(instruction)) * math.prod(left[axis] for axis in axes)
    if instruction.opcode == "convolution":
        kernel, numbers = _dims_of(instruction.operands[1]), instruction.message
        outputs = kernel[numbers.convolution_dimension_numbers.kernel_output_feature_dimension]
        # Zeros between the inputs of a transposed convolution do not count.
        zeros = math.prod(window.base_dilation for window in numbers.window.dimensions)
        return 2.0 * math.prod(_dims_of(instruction)) * math.prod(kernel) / outputs / zeros
    if not is_kernel(instruction):
        return 0.0
    cost = _cost(instruction).get("flops", "0")
    return float(instruction.attributes.get(_MODEL_FLOPS, cost))


def _dims_of(instruction: Instruction) -> tuple[int, ...]:
    (shape,) = leaves(instruction.shape)
    return shape.dims


def is_kernel(instruction: Instruction) -> bool:
    return instruction.message.custom_call_target == _KERNEL


def kernel_cycles(instruction: Instruction, chip: Chip) -> int | None:
    """Cycles of one execution by the roofline (Williams et al., "Roofline: an insightful visual
    performance model", CACM 2009); ``None`` if the kernel has no cost estimate.
    """
    cost = _cost(instruction)
    if not cost:
        return None
    flops, moved = (float(cost.get(name, 0)) for name in ("flops", "bytes_accessed"))
    seconds = max(flops / chip.device_flops, moved / chip.device_hbm_bandwidth)
    return round(seconds * chip.clock_hz)


def _cost(instruction: Instruction) -> dict[str, str]:
    config = instruction.backend_config.get("custom_call_config") or {}
    return config.get("cost_estimate") or {}


def attention_shapes(module: HloModule) -> tuple[int, int, int] | None:
    """(queries, keys, head dimension) of the first attention in the forward.

    Attention is two batched matmuls with an exponential of the first result's size between them.
    """
    scores: tuple[int, ...] = ()
    softmax = False
    for one in module.instructions:
        if parse_scope(one.op_name)[0] != "forward":
            continue
        if one.opcode == "exponential":
            softmax = softmax or math.prod(_dims_of(one)) == math.prod(scores)
        elif one.opcode == "dot" and one.message.dot_dimension_numbers.lhs_batch_dimensions:
            if softmax:
                return scores[-2], scores[-1], _dims_of(one)[-1]
            scores = _dims_of(one)
    return None


def why_no_kernel(traced: bytes, chip: Chip) -> str:
    """Why attention cannot use a kernel, or "" if it can or if there is none."""
    found = attention_shapes(parse_module(traced))
    if found is None:
        return ""
    *lengths, dim = found
    if not chip.attention_kernel:
        return f"the kernel cannot be compiled for {chip.family}"
    for length in lengths:
        if length % LANES:
            more = length + -length % LANES
            return f"{length} tokens are no multiple of {LANES}; {more} would be"
    if dim % HEAD_DIM or dim > LARGEST_HEAD_DIM:
        return f"the head dimension {dim} is no multiple of {HEAD_DIM} up to {LARGEST_HEAD_DIM}"
    return ""

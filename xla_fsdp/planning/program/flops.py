"""Count the floating-point operations of a model in the traced program.

A matmul of (m, k) and (k, n) counts 2mkn, a convolution likewise for each of its outputs, and a
Pallas kernel counts its cost estimate (``kernels.py``). Nothing else counts. The backward of a
matmul is two matmuls of the same size (one for the gradient of each factor), so training counts
three times the forward. For a transformer this is the 6 N per token of Kaplan et al., "Scaling Laws
for Neural Language Models" (section 2.1), plus attention. Recomputation in the backward does not
count, by the definition of model FLOPs utilisation in Chowdhery et al., "PaLM" (appendix B).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from .hlo import Computation, Instruction, Module, parse_module
from .kernels import is_kernel, kernel_flops
from .shapes import Shape, numbers
from .trips import trip_count

_CONTRACTING = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_AGAIN = "recompute["
_NOT_FORWARD = ("backward[", "optimizer[")
_DILATED = re.compile(r"lhs_dilate=([\dx]+)")


def model_flops(traced: str) -> float:
    """Model FLOPs of one step on one device.

    By the convention above, a frozen layer and the first layer also count three times.

    Args:
        traced: text of the traced program, with the names that ``tracing/naming.py`` sets.

    Raises:
        ValueError: ``traced`` is not HLO.
    """
    module = parse_module(traced)
    forward = everything = 0.0
    for name, flops in _named_flops(module, module.entry, "", 1):
        if _AGAIN not in name:
            everything += flops
            if not any(part in name for part in _NOT_FORWARD):
                forward += flops
    # A step without modules has no names.
    named = "backward[" in traced
    return 3 * forward if named else everything


def _named_flops(
    module: Module, computation: Computation, name: str, times: int
) -> Iterator[tuple[str, float]]:
    """Yield name and FLOPs of the matmuls in ``computation``, which runs ``times`` times.

    ``name``: the name of the calling instruction; it is prepended to the names.
    """
    for instruction in computation.instructions:
        path = f"{name}/{instruction.op_name}"
        flops = flops_of(computation, instruction)
        if flops:
            yield path, times * flops
        for key in ("body", "to_apply"):
            inner = instruction.attribute(key)
            if inner is None or instruction.opcode not in ("while", "call"):
                continue
            often = trip_count(module, computation, instruction) if key == "body" else 1
            body = module.named(inner.lstrip("%"), instruction)
            yield from _named_flops(module, body, path, times * (often or 1))


def flops_of(computation: Computation, instruction: Instruction) -> float:
    """FLOPs of one execution of an instruction, without those of computations that it calls."""
    if instruction.opcode == "dot":
        left = _dims(computation, instruction, 0)
        contracting = _CONTRACTING.search(instruction.attributes)
        axes = numbers(contracting[1]) if contracting else ()
        return 2.0 * _elements(instruction) * math.prod(left[axis] for axis in axes)
    if instruction.opcode == "convolution":
        kernel = _dims(computation, instruction, 1)
        labels = _LABELS.search(instruction.attributes)
        outputs = kernel[labels[2].index("o")] if labels else 1
        # A transposed convolution inserts zeros between its inputs; they do not count.
        spread = _DILATED.search(instruction.attributes)
        zeros = math.prod(map(int, spread[1].split("x"))) if spread else 1
        return 2.0 * _elements(instruction) * math.prod(kernel) / outputs / zeros
    return kernel_flops(instruction) if is_kernel(instruction) else 0.0


def _dims(computation: Computation, instruction: Instruction, operand: int) -> tuple[int, ...]:
    return _shape(computation.by_name[instruction.operands[operand]]).dims


def _elements(instruction: Instruction) -> int:
    return math.prod(_shape(instruction).dims)


def _shape(instruction: Instruction) -> Shape:
    assert isinstance(instruction.shape, Shape), instruction.name
    return instruction.shape

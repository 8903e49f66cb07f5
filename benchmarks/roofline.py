"""Compare the modelled time of each operation of a compiled step with the chip's peaks.

The compiler's cycles of an operation are compared with the longer of its matmuls at the peak rate
and its bytes at the bandwidth of HBM (Williams et al., "Roofline", CACM 2009). The bytes are those
of operands and results in HBM, including the padding of their layouts. If a fusion only slices an
operand, only the slices count.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from xla_fsdp.planning.program.flops import flops_of, is_kernel
from xla_fsdp.planning.program.hlo import (
    HBM,
    Computation,
    Instruction,
    Module,
    Shape,
    Tuple,
    leaves,
    numbers,
    parse_module,
)
from xla_fsdp.planning.program.places import Place, line_up
from xla_fsdp.planning.records import Op, Schedule
from xla_fsdp.tpu.chips import Chip

KINDS = ("products", "kernels", "copies", "other")
_COPIES = ("copy", "transpose", "reshape")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_FIELD = re.compile(r"(\w+)=([-\dx_]+)")
_SLICES = ("dynamic-slice", "slice", "gather")
_TILES = re.compile(r"(?<![A-Z])T((?:\([^()]*\))+)")


@dataclass(frozen=True)
class Timed:
    """The times of an operation in a step, by the compiler and at the peaks.

    ``again``: the module for which the backward recomputes the operation; "" if it does not.
    """

    op: Op
    kind: str
    seconds: float
    products: float  # seconds of its matmuls at the peak
    moved: float  # seconds of its bytes at the bandwidth of HBM
    again: str

    @property
    def floor(self) -> float:
        return max(self.products, self.moved)

    def beside(self, plain: float) -> float:
        """Seconds if vector and matrix unit overlap within an operation.

        ``plain``: the share of the peak that the compiler estimates for a matmul alone. The time
        beyond such a matmul is assumed to be that of the vector unit; a TensorCore issues to both
        units in one instruction. The result is at most the compiler's estimate.
        """
        if self.kind != "products":
            return self.seconds
        matrix = self.products / plain
        return min(self.seconds, max(matrix, self.seconds - matrix, self.moved))


def timed(text: str, schedule: Schedule, chip: Chip) -> list[Timed]:
    """Every operation of ``schedule``, which was parsed from ``text``."""
    module = parse_module(text)
    places = line_up(module).places
    by_scope: dict[int, dict[str, Instruction]] = {}
    for place in places:
        by_scope.setdefault(place.scope, {})[place.instruction.name] = place.instruction
    found = []
    for op in schedule.ops:
        place = places[op.index]
        assert place.instruction.name == op.name, (place.instruction.name, op.name)
        flops = _flops(module, place.instruction, by_scope[place.scope])
        kernel = is_kernel(place.instruction)
        kind = "kernels" if kernel else "products" if flops else "other"
        if op.opcode in _COPIES:
            kind = "copies"
        bytes_ = _bytes(module, place, by_scope[place.scope]) if op.cycles else 0
        found.append(
            Timed(
                op, kind, op.cycles * op.times / chip.clock_hz,
                0.0 if kernel else flops * op.times / chip.device_flops,
                0.0 if kernel else bytes_ * op.times / chip.device_hbm_bandwidth,
                _again(place.instruction.op_name),
            )
        )  # fmt: skip
    return found


def _again(name: str) -> str:
    """The module for which an operation is recomputed."""
    _, found, rest = name.rpartition("recompute[")
    return rest.partition("]")[0].rpartition(".")[2] if found else ""


def _flops(module: Module, one: Instruction, named: dict[str, Instruction]) -> float:
    if one.opcode == "fusion":
        return _inside(module, module.called_by(one))
    if one.opcode in ("dot", "convolution"):
        return _product(Computation("", list(named.values())), one)
    return 0.0


def _inside(module: Module, computation: Computation) -> float:
    total = 0.0
    for one in computation.instructions:
        if one.opcode == "fusion":
            total += _inside(module, module.called_by(one))
        elif one.opcode in ("dot", "convolution"):
            total += _product(computation, one)
    return total


def _product(computation: Computation, one: Instruction) -> float:
    """FLOPs without those of padding. Padding can be large: the compiler may write a convolution
    of 1 x 1 as one of 56 x 56 in which only one position is not padding."""
    flops = flops_of(computation, one)
    labels = _LABELS.search(one.attributes)
    window = one.attribute("window")
    if one.opcode == "dot" or not labels or not window:
        return flops
    spread = 1
    for axis, number in enumerate(label for label in labels[1] if label.isdigit()):
        given = {key: value.split("x")[axis] for key, value in _FIELD.findall(window)}
        length = _length(computation, one.operands[0], labels[1], number)
        out = _dims(one)[labels[3].index(number)]
        size, stride = int(given["size"]), int(given.get("stride", 1))
        step, gaps = int(given.get("rhs_dilate", 1)), int(given.get("lhs_dilate", 1))
        low = int(given.get("pad", "0_0").split("_")[0])
        reached = (o * stride + k * step - low for o in range(out) for k in range(size))
        hits = sum(0 <= at <= (length - 1) * gaps and at % gaps == 0 for at in reached)
        flops *= hits / (out * size)
        spread *= gaps
    return flops * spread  # flops_of has already divided by it


def _length(computation: Computation, operand: str, labels: str, number: str) -> int:
    return _dims(computation.by_name[operand])[labels.index(number)]


def _dims(one: Instruction) -> tuple[int, ...]:
    assert isinstance(one.shape, Shape), one.name
    return one.shape.dims


def _bytes(module: Module, place: Place, named: dict[str, Instruction]) -> int:
    one = place.instruction
    operands = [named[name] for name in one.operands if name in named]
    if one.opcode == "fusion":
        inside = module.called_by(one)
        read = sum(
            _read(inside, parameter, padded_bytes(operand.shape))
            for parameter, operand in zip(inside.parameters, operands, strict=False)
        )
        return read + _written(inside, one)
    read = sum(padded_bytes(operand.shape) for operand in operands)
    written = padded_bytes(one.shape)
    if one.opcode in _SLICES:
        return 2 * written
    if one.opcode == "dynamic-update-slice":
        return 2 * padded_bytes(operands[1].shape)
    return read + written


def _read(inside: Computation, parameter: Instruction, whole: int) -> int:
    """Bytes that a fusion reads of an operand that has ``whole`` bytes in HBM."""
    if not whole:
        return 0
    total = 0
    for one in inside.instructions:
        if parameter.name not in one.operands:
            continue
        if one.opcode == "dynamic-update-slice" and one.operands[0] == parameter.name:
            continue  # only written to
        if one.opcode not in _SLICES:
            return whole
        total += sum(_padded(leaf) for leaf in leaves(one.shape))
    return min(whole, total)


def _written(inside: Computation, one: Instruction) -> int:
    root = inside.root
    parts = [inside.by_name[name] for name in root.operands] if root.opcode == "tuple" else [root]
    shapes = leaves(one.shape)
    if len(parts) != len(shapes):
        return padded_bytes(one.shape)
    total = 0
    for part, shape in zip(parts, shapes, strict=True):
        bytes_ = padded_bytes(shape)
        if bytes_ and part.opcode == "dynamic-update-slice":
            bytes_ = sum(_padded(leaf) for leaf in leaves(inside.by_name[part.operands[1]].shape))
        total += bytes_
    return total


def padded_bytes(shape: Shape | Tuple) -> int:
    """Bytes of HBM of the arrays of a shape, including the padding of their tiled layouts."""
    return sum(_padded(leaf) for leaf in leaves(shape) if leaf.space == HBM)


def _padded(shape: Shape) -> int:
    order, _, rest = shape.layout.partition(":")
    sizes = [shape.dims[d] for d in reversed(numbers(order))]
    if len(sizes) != len(shape.dims):
        sizes = list(shape.dims)
    tiles = _TILES.search(rest)
    for tile in re.findall(r"\(([^()]*)\)", tiles[1]) if tiles else ():
        sizes = _tiled(sizes, [part.strip() for part in tile.split(",")])
    return (math.prod(sizes) * shape.bits + 7) // 8


def _tiled(sizes: list[int], tile: list[str]) -> list[int]:
    """Sizes, major first, after tiling the minor ones: the numbers of tiles, then the tile. "*"
    merges a dimension into the next minor one."""
    sizes = [1] * (len(tile) - len(sizes)) + sizes
    counts, lengths, merged = sizes[: len(sizes) - len(tile)], [], 1
    for size, length in zip(sizes[len(counts) :], tile, strict=True):
        merged *= size
        if length != "*":
            counts.append(-(-merged // int(length)))
            lengths.append(int(length))
            merged = 1
    return counts + lengths


def by_kind(all_of_them: list[Timed]) -> dict[str, dict[str, float]]:
    """Seconds by kind: estimated by the compiler, and at the chip's peaks. Operations without an
    estimate do not count in either."""
    totals = {kind: {"estimated": 0.0, "floor": 0.0} for kind in KINDS}
    for one in all_of_them:
        totals[one.kind]["estimated"] += one.seconds
        totals[one.kind]["floor"] += one.floor if one.seconds and one.kind != "kernels" else 0.0
    return totals

"""Reads a scheduled program: its operations in order, live buffers, and copies to the host."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

from ...tpu.chips import LANES, SUBLANES, Chip
from ..records import Buffer, CompiledCollective, HostCopy, Op, Schedule
from .assignment import AllocatedValue, Assignment, without_overlap
from .compiled_collectives import Found, find_collectives
from .flops import is_kernel, kernel_cycles
from .hlo import HOST, HloModule, Instruction, leaves, parse_module
from .places import InlinedSchedule, Place, inline_schedule
from .scopes import Labels

# These take no time; loops and calls take that of the instructions inside.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all"
    " optimization-barrier opt-barrier add-dependency domain".split()
)
# Of libtpu 0.0.21 and 0.0.51, where they have no estimate.
_NO_ESTIMATE = (2**63 - 1, 2**64 - 1)
_ESTIMATE = re.compile(rb'"estimated_cycles":\s*"?(\d+)')

_COPIES = frozenset("copy slice dynamic-slice dynamic-update-slice".split())
_CALLS = frozenset("fusion call async-start".split())
_MATMULS = frozenset("dot convolution".split())
# These only move data, or make it without reading any.
_MOVES = frozenset(
    "parameter constant tuple get-tuple-element bitcast copy copy-start copy-done transpose reshape"
    " slice slice-start slice-done dynamic-slice dynamic-update-slice pad concatenate broadcast"
    " iota reverse async-done".split()
)


def read_line(program: bytes) -> tuple[InlinedSchedule, Found, Labels]:
    """The instructions in order, the collectives, and phase and module of each instruction; raises
    ValueError as ``read_schedule``.
    """
    module = parse_module(program)
    if not module.scheduled:
        raise ValueError(f"module {module.name!r} is not scheduled")
    line = inline_schedule(module)
    found = find_collectives(line)
    return line, found, Labels(line, {c.name: (c.phase, c.module) for c in found.collectives})


def read_schedule(
    program: bytes, assignment: Assignment, arguments: Sequence[str] = (), chip: Chip | None = None
) -> Schedule:
    """Raises ValueError if ``program`` is not an HloModuleProto, or not scheduled.

    ``arguments``: names by number, if known. ``chip``: without it, Pallas kernels have no cycles.
    """
    line, found, labels = read_line(program)
    ops = tuple(_ops(line, found.places, labels, chip))
    buffers = _hbm_buffers(line, labels, assignment, arguments)
    change = [0] * (len(line.places) + 1)
    for buffer in buffers:
        change[buffer.born] += buffer.bytes
        change[buffer.dies + 1] -= buffer.bytes
    curve = tuple(accumulate(change[:-1]))
    copies = tuple(_host_copies(line))
    return Schedule(
        length=len(line.places),
        ops=ops,
        collectives=tuple(_overlapped(found.collectives, ops)),
        buffers=buffers,
        curve=curve,
        peak_index=max(range(len(curve)), key=curve.__getitem__),
        notes=tuple(line.notes + found.notes + _untimed(line, chip)),
        to_host=sum(one.bytes * one.times for one in copies if one.to_host),
        to_device=sum(one.bytes * one.times for one in copies if not one.to_host),
        host_copies=copies,
    )


def _estimated_cycles(instruction: Instruction) -> int:
    """The compiler's estimate for one execution, with instructions inside a fusion; 0 if there is
    none.

    All programs seen have at most one for each instruction, so the JSON is not parsed.
    """
    cycles = _stated_cycles(instruction)
    return 0 if cycles in _NO_ESTIMATE else cycles


def _stated_cycles(instruction: Instruction) -> int:
    found = _ESTIMATE.search(instruction.message.backend_config)
    return int(found[1]) if found else 0


def _untimed(line: InlinedSchedule, chip: Chip | None) -> list[str]:
    """Notes on operations whose modelled time is missing or too short."""
    instructions = [place.instruction for place in line.places]
    unable = sum(_stated_cycles(one) in _NO_ESTIMATE for one in instructions)
    random = [one for one in instructions if one.opcode == "rng-bit-generator"]
    notes = []
    if unable:
        notes.append(f"the compiler has no estimate for {unable} fusion(s): no time for them here")
    if random and not any(map(_estimated_cycles, random)):
        notes.append(
            f"the compiler has no estimate for {len(random)} generator(s) of random numbers: no "
            "time for them here"
        )
    kernels = [one for one in instructions if is_kernel(one)]
    unknown = sum(chip is None or kernel_cycles(one, chip) is None for one in kernels)
    if len(kernels) > unknown:
        notes.append(
            f"{len(kernels) - unknown} Pallas kernel(s): the modelled time is that of their stated "
            "FLOPs or bytes at the chip's peak rates, which is less than on the chip"
        )
    if unknown:
        notes.append(
            f"{unknown} Pallas kernel(s) have no cost estimate (cost_estimate= of pallas_call): no "
            "time and no FLOPs for them here"
        )
    return notes


def computing_places(line: InlinedSchedule, taken: Collection[int]) -> Iterator[Place]:
    """Yield the places that compute; ``taken``: the places of collectives."""
    for place in line.places:
        if place.index not in taken and place.instruction.opcode not in _FREE:
            yield place


def _ops(line: InlinedSchedule, taken: set[int], labels: Labels, chip: Chip | None) -> Iterator[Op]:
    scores = _elements_of_scores(line.module)
    for place in computing_places(line, taken):
        instruction = place.instruction
        phase, module = labels.of(instruction)
        inside = list(_called_instructions(instruction))
        matmuls = [one for one in inside if one.opcode in _MATMULS]
        if chip is not None and is_kernel(instruction):
            cycles = kernel_cycles(instruction, chip) or 0
        else:
            cycles = _estimated_cycles(instruction)
        yield Op(
            index=place.index,
            name=instruction.name,
            opcode=instruction.opcode,
            cycles=cycles,
            times=place.times,
            module=module,
            phase=phase,
            recomputed=labels.is_recomputed(instruction),
            work="kernel" if is_kernel(instruction) else _work_of(inside, matmuls, scores),
            padding=max(map(_padded_share, matmuls), default=0.0),
        )


def _work_of(inside: Sequence[Instruction], matmuls: Sequence[Instruction], scores: int) -> str:
    """What an operation mostly does, one of WORK. ``scores``: the number of elements of attention
    scores.
    """
    if matmuls:
        return "attention" if any(map(_is_batched, matmuls)) else "matmul"
    if {one.opcode for one in inside} <= _MOVES:
        return "copy"
    sizes = (prod(leaf.dims) for one in inside for leaf in leaves(one.shape))
    return "attention" if scores and scores in sizes else "elementwise"


def _called_instructions(instruction: Instruction) -> Iterator[Instruction]:
    if instruction.opcode not in _CALLS:
        yield instruction
        return
    for computation in instruction.called:
        for one in computation.instructions:
            yield from _called_instructions(one)


def _is_batched(matmul: Instruction) -> bool:
    """Whether it is a separate matmul for each sample and head, as in attention.

    The TPU compiler writes the batch as a spatial dimension of a convolution, whose window selects
    one element of both operands at a time.
    """
    if matmul.opcode == "dot":
        return bool(matmul.message.dot_dimension_numbers.lhs_batch_dimensions)
    windows = [
        (one.size, one.base_dilation, one.stride + 1, one.padding_low + one.padding_high)
        for one in matmul.message.window.dimensions
    ]
    return len(windows) == 1 and windows[0] == (windows[0][0],) * 3 + (0,)


def _elements_of_scores(module: HloModule) -> int:
    """The number of elements of attention scores, the largest batched matmuls; 0 if not known."""
    sizes = {
        prod(leaf.dims)
        for one in module.instructions
        if one.opcode in _MATMULS and _is_batched(one)
        for leaf in leaves(one.shape)
    }
    return max(sizes) if len(sizes) > 1 else 0


def _padded_share(matmul: Instruction) -> float:
    """The share of its result that pads the tiles of vector registers."""
    (shape, *_) = leaves(matmul.shape)
    padded = list(shape.dims)
    for axis, tile in zip(shape.order, (LANES, SUBLANES), strict=False):
        padded[axis] = -(-padded[axis] // tile) * tile
    return 1 - prod(shape.dims) / prod(padded) if prod(padded) else 0.0


def _overlapped(
    collectives: list[CompiledCollective], ops: tuple[Op, ...]
) -> Iterator[CompiledCollective]:
    places = [op.index for op in ops]
    totals = [0, *accumulate(op.cycles * op.times for op in ops)]
    for one in collectives:
        if one.asynchronous:
            first, last = bisect_right(places, one.index), bisect_left(places, one.done)
            cycles = max(0, totals[last] - totals[first]) // max(1, one.times)
            one = replace(one, overlap_cycles=cycles)
        yield one


def _host_copies(line: InlinedSchedule) -> Iterator[HostCopy]:
    ends = {
        operand: place.index
        for place in line.places
        if place.instruction.opcode.endswith("-done")
        for operand in line.operands(place)
    }
    for place in line.places:
        kind = place.instruction.opcode.removesuffix("-start")
        if kind not in _COPIES:
            continue
        given = [leaves(one.instruction.shape)[0] for one in line.operands(place)]
        if kind == "dynamic-update-slice":  # in place: it moves what is written
            target, source = given[:2]
            size = source.bytes
        else:
            # An asynchronous copy has the shape (result, operand, context), an asynchronous slice
            # (operands, result, context).
            slices = place.instruction.opcode.endswith("-start") and kind != "copy"
            source = given[0]
            target = leaves(place.instruction.shape)[len(given) if slices else 0]
            size = target.bytes
        if (source.space == HOST) != (target.space == HOST):
            done = ends.get(place, place.index)
            yield HostCopy(place.index, done, size, target.space == HOST, place.times)


def _hbm_buffers(
    line: InlinedSchedule, labels: Labels, assignment: Assignment, arguments: Sequence[str]
) -> tuple[Buffer, ...]:
    """Everything in HBM except the program itself, largest first."""
    places = {place.instruction.name: place for place in reversed(line.places)}
    last = len(line.places) - 1
    # The compiler's sequence also has instructions inside fusions and asynchronous operations. They
    # get the place of the last one before them.
    in_line = (places[name].index if name in places else 0 for name in assignment.sequence)
    place_of = list(accumulate(in_line, max, initial=0))[1:]

    def buffer(name: str, size: int, value: AllocatedValue, category: str) -> Buffer:
        place = places.get(value.name)
        phase, module = labels.of(place.instruction) if place else ("", "")
        if category == "argument":
            # "exp_avg of NAME" belongs to NAME.
            module = name.rpartition(" of ")[2] if name != value.name else ""
        return Buffer(
            name=name,
            bytes=size,
            born=0 if category == "argument" else place_of[value.born],
            dies=place_of[value.dies] if category == "temporary" else last,
            category=category,
            shape=value.shape.partition("{")[0],
            opcode=place.instruction.opcode if place else "",
            module=module,
            phase=phase,
        )

    found = []
    for one in assignment.allocations:
        if one.category == "temporary":
            values = without_overlap(one.values)
            found += [buffer(value.name, value.bytes, value, "temporary") for value in values]
        elif one.values and one.category != "constant":  # constants are part of the program
            number, value = one.parameter, one.values[0]
            if one.category == "output":  # earlier values of its memory are temporary
                output = max(one.values, key=lambda value: value.dies)
                value = replace(output, born=value.born)
            known = number is not None and number < len(arguments)
            name = arguments[number] if known and number is not None else ""
            found.append(buffer(name or value.name, one.bytes, value, one.category))
    return tuple(sorted(found, key=lambda b: (-b.bytes, b.born)))

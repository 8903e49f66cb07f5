"""From the text of a scheduled program to what a plan knows about it."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

from ...tpu.chips import Chip
from ..records import Collective, Op, Schedule
from .assignment import Assignment
from .collectives import find_collectives
from .hlo import Instruction, Module, parse_module
from .host_transfers import host_transfers
from .kernels import is_kernel, kernel_cycles
from .memory import Memory
from .places import Line, Place, line_up
from .scopes import Labels

# Nothing runs for these; of a loop or a call it is the instructions inside that run.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all"
    " optimization-barrier opt-barrier add-dependency domain".split()
)
_CANNOT_TELL = 2**63 - 1
_ESTIMATE = re.compile(r'"estimated_cycles":\s*"?(\d+)')


def read_schedule(
    text: str, assignment: Assignment, arguments: Sequence[str] = (), chip: Chip | None = None
) -> Schedule:
    """Read a compiled program.

    Args:
        text: the scheduled, optimized HLO module (``HloModule.to_string()``).
        assignment: XLA's buffer assignment of that module.
        arguments: names of the arguments by number, where they have any.
        chip: gives Pallas kernels cycles, which are none without it.

    Raises ValueError if ``text`` is not HLO or not scheduled (without the order of the instructions
    nothing here has a meaning).
    """
    module = parse_module(text)
    if not module.scheduled:
        raise ValueError(f"module {module.name!r} is not scheduled (no is_scheduled=true)")
    line = line_up(module)
    found = find_collectives(line)
    labels = Labels(line, {c.name: (c.phase, c.module) for c in found.collectives})
    ops = tuple(_ops(line, found.places, labels, chip))
    memory = Memory(line, labels, assignment, arguments)
    curve = memory.curve
    to_host, to_device = host_transfers(line)
    return Schedule(
        length=len(line.places),
        ops=ops,
        collectives=tuple(_overlapped(found.collectives, ops)),
        buffers=memory.buffers,
        curve=curve,
        peak_index=max(range(len(curve)), key=curve.__getitem__),
        aliased=_aliased(module),
        notes=tuple(line.notes + found.notes + _untimed(line) + _kernels(line, chip)),
        to_host=to_host,
        to_device=to_device,
    )


def estimated_cycles(instruction: Instruction) -> int:
    """The compiler's estimate for one execution, 0 if it gives none.

    It stands in ``window_config`` wherever it was seen, and never twice for one instruction, so
    the text is searched without reading the JSON. What is inside a fusion is part of the fusion's
    own estimate. The largest number there is means that the compiler could not tell.
    """
    found = _ESTIMATE.search(instruction.attributes)
    cycles = int(found[1]) if found else 0
    return cycles if cycles < _CANNOT_TELL else 0


def _untimed(line: Line) -> list[str]:
    """What takes time, and has none in the model."""
    attributes = [place.instruction.attributes for place in line.places]
    unable = sum(f'"{_CANNOT_TELL}"' in text for text in attributes)
    random = [p for p in line.places if p.instruction.opcode == "rng-bit-generator"]
    notes = []
    if unable:
        notes.append(f"the compiler has no estimate for {unable} fusion(s): no time for them here")
    if random and not any(estimated_cycles(p.instruction) for p in random):
        notes.append(
            f"the compiler has no estimate for {len(random)} generator(s) of random numbers: no "
            "time for them here"
        )
    return notes


def _kernels(line: Line, chip: Chip | None) -> list[str]:
    """How Pallas kernels are timed, or that they are not."""
    kernels = [place.instruction for place in line.places if is_kernel(place.instruction)]
    unknown = sum(chip is None or kernel_cycles(one, chip) is None for one in kernels)
    notes = []
    if len(kernels) > unknown:
        notes.append(
            f"{len(kernels) - unknown} Pallas kernel(s) take, in the model, what their stated "
            "FLOPs or bytes take at the chip's peak rates: less than on the chip"
        )
    if unknown:
        notes.append(
            f"{unknown} Pallas kernel(s) do not say what they take (cost_estimate= of "
            "pallas_call): no time and no FLOPs for them here"
        )
    return notes


def _cycles(instruction: Instruction, chip: Chip | None) -> int:
    if chip is not None and is_kernel(instruction):
        return kernel_cycles(instruction, chip) or 0
    return estimated_cycles(instruction)


def computing(line: Line, taken: Collection[int]) -> Iterator[Place]:
    """Where something is computed; ``taken``: the places of collectives."""
    for place in line.places:
        if place.index not in taken and place.instruction.opcode not in _FREE:
            yield place


def _ops(line: Line, taken: set[int], labels: Labels, chip: Chip | None) -> Iterator[Op]:
    for place in computing(line, taken):
        instruction = place.instruction
        phase, module = labels.of(instruction)
        yield Op(
            index=place.index,
            name=instruction.name,
            opcode=instruction.opcode,
            cycles=_cycles(instruction, chip),
            times=place.times,
            module=module,
            phase=phase,
        )


def _overlapped(collectives: list[Collective], ops: tuple[Op, ...]) -> Iterator[Collective]:
    """The collectives with the cycles of what runs beside one execution of each."""
    places = [op.index for op in ops]
    totals = [0, *accumulate(op.cycles * op.times for op in ops)]
    for one in collectives:
        if one.asynchronous:
            first, last = bisect_right(places, one.index), bisect_left(places, one.done)
            cycles = max(0, totals[last] - totals[first]) // max(1, one.times)
            one = replace(one, overlap_cycles=cycles)
        yield one


def _aliased(module: Module) -> dict[int, int]:
    # A program with one output has no tuple of outputs, and its place is ().
    return {output[0] if output else 0: argument for output, argument, _ in module.aliases}

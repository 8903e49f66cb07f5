"""Warnings on a plan: what costs memory, bytes or time and can be avoided."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ..records import Collective, Schedule
from ..tracing.step import TracedStep
from .amounts import units
from .tables import TINY, count, wire

_LITTLE_HEADROOM = 0.05
_MANY = 20


def warnings(
    schedule: Schedule,
    step: TracedStep,
    executables: int,
    ranks: Sequence[int],
    headroom: float,
) -> Iterator[str]:
    """Yield one sentence for each avoidable cost in memory, bytes or time."""
    if 0 <= headroom < _LITTLE_HEADROOM:
        yield (
            f"only {100 * headroom:.1f} % of HBM is free; other programs (evaluation) and "
            "fragmentation need some of it"
        )
    if executables > 1:
        yield (
            f"{executables} different programs on the {len(ranks)} traced ranks: each rank has to "
            "compile, and ranks cannot share the compilation cache"
        )
    for place in dict.fromkeys(step.reads):
        yield (
            f"a value is read on the host during the step ({place}): everything it depends on runs "
            "again in a separate program that is not planned, and the host waits for it"
        )
    for place in dict.fromkeys(step.sized_by_data):
        yield (
            f"the number of elements of a tensor depends on values ({place}): a TPU compiles "
            "another program for every new number. The plan uses the largest possible number"
        )
    if step.untrained:
        names = ", ".join(step.untrained[:4]) + (" …" if len(step.untrained) > 4 else "")
        yield (
            f"{len(step.untrained)} of {step.trained} parameters that the optimizer trains got no "
            f"gradient; computations with them are not in the plan: {names}"
        )
    if not step.has_optimizer and any(c.phase == "backward" for c in schedule.collectives):
        yield (
            "there is a backward, but nothing updates the parameters; perhaps a condition on a "
            "value that was read skipped the optimizer's step (in a plan every read gives zeros)"
        )
    if step.with_closure:
        yield (
            "the optimizer is called with a closure: the plan is of the first step, in which the "
            "optimizer state does not exist yet"
        )
    if step.programs_before:
        yield (
            f"{step.programs_before} program(s) without an optimizer step ran before this one "
            "(micro-batches, evaluation) and were not planned"
        )
    missed = _not_donated(step)
    if missed:
        yield (
            f"{len(missed)} state tensors are not updated in place, so their old and new values "
            f"occupy memory together: {', '.join(missed[:3])}{' …' if len(missed) > 3 else ''}"
        )
    yield from _about_collectives(schedule.collectives, any(op.cycles for op in schedule.ops))


def _not_donated(step: TracedStep) -> list[str]:
    """Optimizer state that the step reads but does not update in place."""
    program = step.program
    return [
        name
        for number, name in enumerate(program.arguments)
        if " of " in name and number not in program.donated
    ]


def _about_collectives(collectives: Sequence[Collective], timed: bool) -> Iterator[str]:
    doubled: Counter[str] = Counter()
    padded: Counter[str] = Counter()
    for one in collectives:
        if one.kind != "all-reduce" or one.bytes < TINY:
            continue
        if one.asked == "reduce-scatter":
            doubled[_unit(one)] += one.wire_bytes * one.times
        elif one.phase == "forward":
            padded[_unit(one)] += one.wire_bytes * one.times
    if doubled:
        yield (
            f"gradients of {_listed(doubled)} are reduced by a full all-reduce, which sends twice "
            "the bytes of a reduce-scatter"
        )
    if padded:
        yield (
            f"the forward of {_listed(padded)} sums large tensors over the ranks; if this is a "
            "gather of parameters by all-reduce of padded shards (torch_xla's pinned all_gather), "
            "it sends twice the bytes"
        )
    tiny = count([c for c in collectives if c.bytes < TINY and not c.asynchronous])
    if tiny > _MANY:
        yield f"{tiny} synchronous collectives send less than 64 KiB each: their cost is latency"
    beside = [c for c in collectives if c.asynchronous or c.fused]
    if wire(collectives) and not wire(beside) and timed:
        yield "no collective overlaps with compute: the step contains all of their time"


def _unit(one: Collective) -> str:
    return units([one.module])[one.module] if one.module else "the step"


def _listed(sent: Counter[str]) -> str:
    names = [name for name, _ in sent.most_common()]
    shown = sorted(names[:4])
    return ", ".join(shown) + (f" and {len(names) - 4} more units" if len(names) > 4 else "")

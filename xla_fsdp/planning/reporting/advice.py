"""What is wrong with a plan, in plain words."""

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
    """One sentence for each thing that costs memory, bytes or time and need not."""
    if 0 <= headroom < _LITTLE_HEADROOM:
        yield (
            f"only {100 * headroom:.1f} % of HBM stays free; other programs (evaluation) and "
            "fragmentation need some"
        )
    if executables > 1:
        yield (
            f"{executables} different programs on the {len(ranks)} ranks traced: every rank "
            "compiles its own, and the compilation cache helps nobody"
        )
    for place in dict.fromkeys(step.reads):
        yield (
            f"a value is read on the host in mid-step ({place}): what it depends on runs once "
            "more, in a program of its own that is not planned, and the host waits for it"
        )
    for place in dict.fromkeys(step.sized_by_data):
        yield (
            f"how many elements a tensor has depends on values ({place}): on a TPU every number is "
            "another program, compiled when it first occurs. Planned with as many as there can be"
        )
    if step.untrained:
        names = ", ".join(step.untrained[:4]) + (" …" if len(step.untrained) > 4 else "")
        yield (
            f"{len(step.untrained)} of {step.trained} parameters that the optimizer trains got no "
            f"gradient, and what computes with them is not planned: {names}"
        )
    if not step.has_optimizer and any(c.phase == "backward" for c in schedule.collectives):
        yield (
            "there is a backward, but nothing updates the parameters; a condition on a value that "
            "was read may have left the optimizer's step out (reads give zeros)"
        )
    if step.with_closure:
        yield (
            "the optimizer is called with a closure: its state is planned as in the first step, "
            "where it does not exist yet"
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
    """Optimizer state that is read and not overwritten."""
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
            f"gradients of {_listed(doubled)} are reduced by a full all-reduce: twice the bytes of "
            "a reduce-scatter"
        )
    if padded:
        yield (
            f"the forward of {_listed(padded)} sums large tensors over the ranks; if this is a "
            "gather of parameters by all-reduce of padded shards (torch_xla's pinned all_gather), "
            "it sends twice the bytes"
        )
    tiny = count([c for c in collectives if c.bytes < TINY and not c.asynchronous])
    if tiny > _MANY:
        yield f"{tiny} synchronous collectives move less than 64 KiB each: they cost latency only"
    beside = [c for c in collectives if c.asynchronous or c.fused]
    if wire(collectives) and not wire(beside) and timed:
        yield "no collective runs beside compute: all of its time adds to the step"


def _unit(one: Collective) -> str:
    return units([one.module])[one.module] if one.module else "the step"


def _listed(sent: Counter[str]) -> str:
    names = [name for name, _ in sent.most_common()]
    shown = sorted(names[:4])
    return ", ".join(shown) + (f" and {len(names) - 4} more units" if len(names) > 4 else "")

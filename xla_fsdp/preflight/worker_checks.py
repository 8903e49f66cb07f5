"""Checks of what the workers say about themselves: chips, memory, clock, disk, environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..tpu.topology import Slice
from .checks import Check, by_worker, failed, ok, warning
from .workers import Answer

GIB = 2**30
_CACHE_GIB = 2  # compiled programs of a few models
_CLOCK_SECONDS = 5.0
# Of a worker's memory, before training: less means that something else runs there.
_AVAILABLE_PART = 0.5


def check_answers(answers: Mapping[int, Answer]) -> Check:
    """Whether every worker answered."""
    problems = {number: answer.problem for number, answer in answers.items() if answer.problem}
    if not problems:
        return ok("workers", f"{len(answers)} of {len(answers)} answered")
    return failed(
        "workers",
        by_worker(problems),
        f"{len(answers)} answers",
        "run --worker_command by hand with a simple command, such as hostname; --timeout gives "
        "more time, --python names another interpreter",
    )


def check_looks(answers: Mapping[int, Answer], wanted: Slice | None) -> Iterator[Check]:
    """The checks of those that did; ``wanted``: the slice that they should be."""
    looks = {number: answer.data for number, answer in answers.items()}
    yield _chips(looks, wanted)
    yield _free_chips(looks)
    yield _environment(looks)
    yield _memory(looks)
    yield _disk(looks)
    yield _clocks(answers)


def _chips(looks: Mapping[int, Mapping[str, Any]], wanted: Slice | None) -> Check:
    found = {number: look["chips"] for number, look in looks.items()}
    each = wanted.chips // wanted.hosts if wanted is not None else max(found.values())
    remedy = (
        "in a container: start it with --privileged; else stop and start the node, or create it "
        "again; --chip_files says where they show"
    )
    if each and all(count == each for count in found.values()):
        return ok("chips", f"{each} on every worker")
    shown = by_worker({number: f"{count} visible" for number, count in found.items()})
    return failed("chips", shown, f"{each or 'some'} on every worker", remedy)


def _free_chips(looks: Mapping[int, Mapping[str, Any]]) -> Check:
    used = {
        number: f"held by process {', '.join(look['users'])}"
        for number, look in looks.items()
        if look["users"]
    }
    if used:
        return failed(
            "chips free", by_worker(used), "no process", "end the earlier run on these workers"
        )
    locked = {
        number: "/tmp/libtpu_lockfile of another user"
        for number, look in looks.items()
        if look["foreign_lock"]
    }
    if locked:
        return warning(
            "chips free",
            by_worker(locked),
            "none",
            "if that user runs nothing: sudo rm /tmp/libtpu_lockfile",
        )
    return ok("chips free", "no process holds one, as far as this user can see")


def _environment(looks: Mapping[int, Mapping[str, Any]]) -> Check:
    found = {
        number: " ".join(f"{name}={value}" for name, value in look["variables"].items() if value)
        or "none set"
        for number, look in looks.items()
    }
    if len(set(found.values())) > 1:
        return warning(
            "environment",
            by_worker(found),
            "the same everywhere, or workers compile different programs and wait for each other",
            "set them in the command that starts training",
        )
    device = {number: look["variables"]["PJRT_DEVICE"] for number, look in looks.items()}
    if any(value not in (None, "TPU") for value in device.values()):
        return warning("environment", by_worker(found), "PJRT_DEVICE=TPU or unset", "unset it")
    return ok("environment", f"{next(iter(found.values()))}, everywhere")


def _memory(looks: Mapping[int, Mapping[str, Any]]) -> Check:
    sizes = {number: look["memory"] for number, look in looks.items() if look["memory"]}
    if len(sizes) < len(looks):
        return warning("memory", "not stated by some workers", "/proc/meminfo", "is it Linux?")
    shown = {
        number: f"{available / GIB:.0f} of {total / GIB:.0f} GiB available"
        for number, (total, available) in sizes.items()
    }
    if any(available < total * _AVAILABLE_PART for total, available in sizes.values()):
        low = {n: shown[n] for n, (total, free) in sizes.items() if free < total * _AVAILABLE_PART}
        return warning("memory", by_worker(low), "most of it", "see what else runs there")
    least = min(sizes, key=lambda number: sizes[number][1])
    return ok("memory", f"{shown[least]} on the worker with the least")


def _disk(looks: Mapping[int, Mapping[str, Any]]) -> Check:
    free = {number: look["cache_free"] for number, look in looks.items()}
    low = {n: f"{size / GIB:.1f} GiB free" for n, size in free.items() if size < _CACHE_GIB * GIB}
    if low:
        remedy = "make room, or name another place with --cache_dir"
        return warning("compilation cache", by_worker(low), f"{_CACHE_GIB} GiB or more", remedy)
    return ok("compilation cache", f"{min(free.values()) / GIB:.0f} GiB free or more")


def _clocks(answers: Mapping[int, Answer]) -> Check:
    """A worker read its clock between being asked and answering; by how much that cannot be."""
    off = {}
    for number, answer in answers.items():
        time = answer.data["time"]
        ahead, behind = time - answer.ended, answer.started - time
        if max(ahead, behind) > _CLOCK_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            off[number] = f"{max(ahead, behind):.0f} s or more {way} this machine"
    if off:
        remedy = "set the clock there (or here): credentials and logs depend on it"
        return warning("clocks", by_worker(off), f"within {_CLOCK_SECONDS:g} s", remedy)
    return ok("clocks", f"within {_CLOCK_SECONDS:g} s and the time of an answer")

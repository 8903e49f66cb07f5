"""Checks of the workers: chips, memory, clock, disk, environment, software, checkpoint folder.

To check that all workers share the checkpoint folder, each worker writes a file, then each checks
that it can see all files, then each removes its own. These are three rounds, because a worker must
not remove its file before all others have checked it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from .. import __version__
from ..tpu.topology import Slice
from ..wording import runs
from .checks import Check, by_worker, failed, ok, skipped, warning
from .workers import Answer, Workers

GIB = 2**30
_CACHE_GIB = 2  # compiled programs of a few models
_CLOCK_SECONDS = 5.0
# The part of a worker's memory that should be free. Less means that another program runs there.
_AVAILABLE_PART = 0.5
# The versions that setup.py pins: torch_xla works with this torch only, and this package with this
# torch_xla only.
PINS: Mapping[str, str] = MappingProxyType({"torch": "2.9.0", "torch_xla": "2.9.0"})
OLDEST_PYTHON = (3, 10)  # python_requires
_NOT_INSTALLED = "not installed"
_INSTALL_REMEDY = "install the same on every worker; --python selects the interpreter"
_LOW_GIB = 10  # a few checkpoints of a small model


def check_answers(answers: Mapping[int, Answer]) -> Check:
    """Whether every worker answered."""
    problems = {number: answer.problem for number, answer in answers.items() if answer.problem}
    if not problems:
        return ok("workers", f"{len(answers)} of {len(answers)} answered")
    return failed(
        "workers",
        by_worker(problems),
        f"{len(answers)} answers",
        "run --worker_command manually with a simple command, such as hostname; --timeout gives "
        "more time, --python selects another interpreter",
    )


def check_looks(answers: Mapping[int, Answer], wanted: Slice | None) -> Iterator[Check]:
    """The checks of the workers that answered; ``wanted``: the slice of the node."""
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
        "in a container: start it with --privileged; otherwise stop and start the node, or create "
        "it again; --chip_files is the pattern of the chips' files"
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
            "if that user runs no program: sudo rm /tmp/libtpu_lockfile",
        )
    return ok("chips free", "no process uses one, as far as this user can see")


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
            "the same everywhere: otherwise workers compile different programs and hang",
            "set them in the command that starts training",
        )
    device = {number: look["variables"]["PJRT_DEVICE"] for number, look in looks.items()}
    if any(value not in (None, "TPU") for value in device.values()):
        return warning("environment", by_worker(found), "PJRT_DEVICE=TPU or unset", "unset it")
    return ok("environment", f"{next(iter(found.values()))}, everywhere")


def _memory(looks: Mapping[int, Mapping[str, Any]]) -> Check:
    sizes = {number: look["memory"] for number, look in looks.items() if look["memory"]}
    if len(sizes) < len(looks):
        remedy = "check that the workers run Linux"
        return warning("memory", "not stated by some workers", "/proc/meminfo", remedy)
    shown = {
        number: f"{available / GIB:.0f} of {total / GIB:.0f} GiB available"
        for number, (total, available) in sizes.items()
    }
    if any(available < total * _AVAILABLE_PART for total, available in sizes.values()):
        low = {n: shown[n] for n, (total, free) in sizes.items() if free < total * _AVAILABLE_PART}
        return warning("memory", by_worker(low), "most of it", "end other programs there")
    least = min(sizes, key=lambda number: sizes[number][1])
    return ok("memory", f"{shown[least]} on the worker with the least")


def _disk(looks: Mapping[int, Mapping[str, Any]]) -> Check:
    free = {number: look["cache_free"] for number, look in looks.items()}
    low = {n: f"{size / GIB:.1f} GiB free" for n, size in free.items() if size < _CACHE_GIB * GIB}
    if low:
        remedy = "free some space, or give another folder with --cache_dir"
        return warning("compilation cache", by_worker(low), f"{_CACHE_GIB} GiB or more", remedy)
    return ok("compilation cache", f"{min(free.values()) / GIB:.0f} GiB free or more")


def _clocks(answers: Mapping[int, Answer]) -> Check:
    """Checks the clocks: a worker read its clock between the request and the answer."""
    off = {}
    for number, answer in answers.items():
        time = answer.data["time"]
        ahead, behind = time - answer.ended, answer.started - time
        if max(ahead, behind) > _CLOCK_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            off[number] = f"{max(ahead, behind):.0f} s or more {way} this machine"
    if off:
        remedy = "set the clock there (or here), because credentials and logs depend on it"
        return warning("clocks", by_worker(off), f"within {_CLOCK_SECONDS:g} s", remedy)
    return ok("clocks", f"within {_CLOCK_SECONDS:g} s and the time of an answer")


def check_versions(looks: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """A check for Python and each package; ``looks``: the answer of each worker."""
    yield _python({number: str(look["python"]) for number, look in looks.items()})
    for name in ("torch", "torch_xla", "libtpu", "xla_fsdp", "jax", "jaxlib"):
        found = {number: look["packages"][name] or _NOT_INSTALLED for number, look in looks.items()}
        kinds = set(found.values())
        if kinds == {_NOT_INSTALLED} and name in ("jax", "jaxlib"):
            continue  # only needed for planning and kernels
        if len(kinds) > 1:
            yield failed(name, by_worker(found), _expected(name), _INSTALL_REMEDY)
        elif name in PINS:
            yield _pinned(name, kinds.pop())
        elif name == "libtpu":
            yield _libtpu(
                kinds.pop(), {str(look["required_libtpu_version"]) for look in looks.values()}
            )
        elif name == "xla_fsdp":
            yield _own(kinds.pop())
        else:
            yield ok(name, f"{kinds.pop()} everywhere")


def _python(found: Mapping[int, str]) -> Check:
    # Pickles and wheels depend only on the first two numbers of the version.
    minor = {number: ".".join(text.split(".")[:2]) for number, text in found.items()}
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if len(set(minor.values())) > 1:
        return failed("python", by_worker(minor), "the same everywhere", _INSTALL_REMEDY)
    text = next(iter(minor.values()))
    if tuple(int(part) for part in text.split(".")) < OLDEST_PYTHON:
        return failed("python", f"{text} everywhere", f"{oldest} or later", _INSTALL_REMEDY)
    return ok("python", by_worker(found) if len(set(found.values())) > 1 else f"{text} everywhere")


def _expected(name: str) -> str:
    return f"{PINS[name]} everywhere" if name in PINS else "the same everywhere"


def _pinned(name: str, found: str) -> Check:
    if found.partition("+")[0] == PINS[name]:  # 2.9.0+cpu is a 2.9.0
        return ok(name, f"{found} everywhere")
    remedy = f"pip install '{name}=={PINS[name]}'; --python selects the interpreter"
    return failed(name, f"{found} everywhere", _expected(name), remedy)


def _libtpu(found: str, wanted: set[str]) -> Check:
    if found == _NOT_INSTALLED:
        remedy = f"pip install 'torch_xla[tpu]=={PINS['torch_xla']}'"
        return failed("libtpu", "not installed anywhere", "libtpu on every worker", remedy)
    if wanted in ({"None"}, {found}):
        return ok("libtpu", f"{found} everywhere")
    needs = ", ".join(sorted(wanted))
    return warning(
        "libtpu",
        f"{found} everywhere",
        f"{needs}, which torch_xla requires",
        f"pip install 'libtpu=={needs}'; jax[tpu] may have replaced it",
    )


def _own(found: str) -> Check:
    if found == __version__:
        return ok("xla_fsdp", f"{found} everywhere, as here")
    if found == _NOT_INSTALLED:
        return warning(
            "xla_fsdp",
            "not installed anywhere",
            f"{__version__}, as here",
            "install it, or put a copy on PYTHONPATH when you start the training",
        )
    return warning(
        "xla_fsdp", f"{found} everywhere", f"{__version__}, as here", "install the same version"
    )


def check_shared_path(workers: Workers, numbers: Iterable[int], path: str) -> Iterator[Check]:
    """The checks of ``path`` on the workers ``numbers``."""
    numbers = list(numbers)
    wrote: dict[int, Answer] = {}
    try:
        wrote = workers.ask("write", numbers, path=path)
        yield _writable(wrote, path, len(workers.numbers))
        writers = [number for number, answer in wrote.items() if not answer.problem]
        if writers:
            yield _space(wrote, writers, path)
        if len(writers) > 1 or writers == workers.numbers:
            read = workers.ask("read", writers, path=path, workers=writers)
            yield _shared(read, path, len(workers.numbers))
        else:
            yield skipped(
                "checkpoints shared", f"{path}: needs two workers that write, not {len(writers)}"
            )
    finally:  # also after Ctrl-C, and if the caller stops the generator
        left = _clean(workers, numbers, wrote, path)
    if left:
        yield warning(
            "probe files",
            by_worker(left),
            "removed",
            f"remove {path.rstrip('/')}/.preflight-{workers.token} manually",
        )


def _clean(
    workers: Workers, numbers: Iterable[int], wrote: Mapping[int, Answer], path: str
) -> dict[int, str]:
    """Removes the files; returns the workers on which that failed, with the reasons."""
    # Workers that did not answer the request to write would not answer the next one either.
    hung = {number for number, answer in wrote.items() if not answer.data}
    cleaned = workers.ask("clean", [n for n in numbers if n not in hung], path=path)
    made = {
        number: {"action": "prune", "worker": number, "made": answer.data["made"]}
        for number, answer in wrote.items()
        if answer.data.get("made")
    }
    workers.ask_each(made)  # folders in which there are other files by now stay
    left = dict.fromkeys(hung, "it may have left a file")
    for number, answer in cleaned.items():
        # If a worker could not write, the reason is already in another check.
        if answer.problem and not (number in wrote and wrote[number].problem):
            left[number] = answer.problem
    return left


def _writable(wrote: Mapping[int, Answer], path: str, total: int) -> Check:
    problems = {number: answer.problem for number, answer in wrote.items() if answer.problem}
    if not problems:
        return ok("checkpoints written", f"{path}: by {len(wrote)} of {total} workers")
    return failed(
        "checkpoints written",
        f"{path}: {by_worker(problems)}",
        f"a file written by each of {total} workers",
        "mount it on these workers and let this user write to it; a bucket needs fsspec and gcsfs "
        "on the workers, and a service account that may write to it",
    )


def _space(wrote: Mapping[int, Answer], writers: Iterable[int], path: str) -> Check:
    free = {number: wrote[number].data["free"] for number in writers}
    sizes = [size for size in free.values() if size is not None]
    if not sizes:
        return ok("checkpoint space", "a bucket has no limit")
    least = min(sizes) / GIB
    if least < _LOW_GIB:
        remedy = "free some space: keep_last= of save_checkpoint removes older checkpoints"
        found = f"{path}: {least:.1f} GiB free"
        return warning("checkpoint space", found, f"{_LOW_GIB} GiB or more", remedy)
    return ok("checkpoint space", f"{least:.0f} GiB free")


def _shared(read: Mapping[int, Answer], path: str, total: int) -> Check:
    problems = {}
    for number, answer in read.items():
        if answer.problem:
            problems[number] = answer.problem
        elif answer.data["missing"]:
            problems[number] = f"no file of {runs('worker', answer.data['missing'])}"
        elif answer.data["different"]:
            problems[number] = f"other content of {runs('worker', answer.data['different'])}"
    if problems:
        return failed(
            "checkpoints shared",
            f"{path}: {by_worker(problems)}",
            "each worker sees the files of all",
            "mount one file system on every worker (NFS, Filestore, a bucket), or give a bucket: "
            "gs://...",
        )
    return ok("checkpoints shared", f"{path}: by {len(read)} of {total} workers")

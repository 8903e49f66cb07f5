"""Checks of the workers: chips, memory, clock, disk, environment, software, checkpoint folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from .. import __version__
from ..plan_compiler import tested_for
from ..tpu.chips import Chip
from ..tpu.topology import Slice
from ..wording import runs
from .findings import Finding, by_worker, failed, ok, skipped, warning
from .workers import WorkerAnswer, Workers

GIB = 2**30
_CACHE_GIB = 2
_CHECKPOINT_GIB = 10
_CLOCK_SECONDS = 5.0
# Part of the memory that should be free; less means that another program runs there.
_AVAILABLE_PART = 0.5
# As in setup.py.
PINS = {"torch": "2.9.0", "torch_xla": "2.9.0"}
OLDEST_PYTHON = (3, 10)  # python_requires
_NOT_INSTALLED = "not installed"
_INSTALL_REMEDY = "install the same on every worker; --python selects the interpreter"

# By number of the worker.
_Looks = Mapping[int, Mapping[str, Any]]


def check_answers(answers: Mapping[int, WorkerAnswer]) -> Finding:
    problems = _problems(answers)
    if not problems:
        return ok("workers", f"{len(answers)} of {len(answers)} answered")
    remedy = (
        "run --worker_command manually with a simple command, such as hostname; --timeout gives "
        "more time, --python selects another interpreter"
    )
    return failed("workers", by_worker(problems), f"{len(answers)} answers", remedy)


def _problems(answers: Mapping[int, WorkerAnswer]) -> dict[int, str]:
    return {number: answer.problem for number, answer in answers.items() if answer.problem}


def check_looks(answers: Mapping[int, WorkerAnswer], wanted: Slice | None) -> Iterator[Finding]:
    """``wanted``: the slice of the node."""
    looks = {number: answer.data for number, answer in answers.items()}
    yield _chips(looks, wanted)
    yield _free_chips(looks)
    yield _environment(looks)
    yield _check_memory(looks)
    free = {number: look["cache_free"] for number, look in looks.items()}
    low = {n: f"{size / GIB:.1f} GiB free" for n, size in free.items() if size < _CACHE_GIB * GIB}
    if low:
        remedy = "free some space, or give another folder with --cache_dir"
        yield warning("compilation cache", by_worker(low), f"{_CACHE_GIB} GiB or more", remedy)
    else:
        yield ok("compilation cache", f"{min(free.values()) / GIB:.0f} GiB free or more")
    yield _check_clocks(answers)


def _chips(looks: _Looks, wanted: Slice | None) -> Finding:
    found = {number: look["chips"] for number, look in looks.items()}
    each = wanted.chips // wanted.hosts if wanted is not None else max(found.values())
    if each and all(count == each for count in found.values()):
        return ok("chips", f"{each} on every worker")
    shown = by_worker({number: f"{count} visible" for number, count in found.items()})
    remedy = (
        "in a container: start it with --privileged; otherwise stop and start the node, or create "
        "it again; --chip_files is the pattern of the chips' files"
    )
    return failed("chips", shown, f"{each or 'some'} on every worker", remedy)


def _free_chips(looks: _Looks) -> Finding:
    name, lock = "chips free", "/tmp/libtpu_lockfile"
    users = {number: look["users"] for number, look in looks.items() if look["users"]}
    used = {number: f"held by process {', '.join(each)}" for number, each in users.items()}
    if used:
        return failed(name, by_worker(used), "no process", "end the earlier run on these workers")
    locked = {n: f"{lock} of another user" for n, look in looks.items() if look["foreign_lock"]}
    if locked:
        remedy = f"if that user runs no program: sudo rm {lock}"
        return warning(name, by_worker(locked), "none", remedy)
    return ok(name, "no process uses one, as far as this user can see")


def _environment(looks: _Looks) -> Finding:
    found = {
        number: " ".join(f"{name}={value}" for name, value in look["variables"].items() if value)
        or "none set"
        for number, look in looks.items()
    }
    if len(set(found.values())) > 1:
        expected = "the same everywhere: otherwise workers compile different programs and hang"
        remedy = "set them in the command that starts training"
        return warning("environment", by_worker(found), expected, remedy)
    if any(look["variables"]["PJRT_DEVICE"] not in (None, "TPU") for look in looks.values()):
        return warning("environment", by_worker(found), "PJRT_DEVICE=TPU or unset", "unset it")
    return ok("environment", f"{next(iter(found.values()))}, everywhere")


def _check_memory(looks: _Looks) -> Finding:
    sizes = {number: look["memory"] for number, look in looks.items() if look["memory"]}
    if len(sizes) < len(looks):
        remedy = "check that the workers run Linux"
        return warning("memory", "not stated by some workers", "/proc/meminfo", remedy)
    shown = {
        number: f"{available / GIB:.0f} of {total / GIB:.0f} GiB available"
        for number, (total, available) in sizes.items()
    }
    low = {n: shown[n] for n, (total, free) in sizes.items() if free < total * _AVAILABLE_PART}
    if low:
        return warning("memory", by_worker(low), "most of it", "end other programs there")
    least = min(sizes, key=lambda number: sizes[number][1])
    return ok("memory", f"{shown[least]} on the worker with the least")


def _check_clocks(answers: Mapping[int, WorkerAnswer]) -> Finding:
    """A worker reads its clock between the request and its answer."""
    off = {}
    for number, answer in answers.items():
        ahead = answer.data["time"] - answer.ended
        behind = answer.started - answer.data["time"]
        if max(ahead, behind) > _CLOCK_SECONDS:
            way = "ahead of" if ahead > 0 else "behind"
            off[number] = f"{max(ahead, behind):.0f} s or more {way} this machine"
    if off:
        remedy = "set the clock there (or here), because credentials and logs depend on it"
        return warning("clocks", by_worker(off), f"within {_CLOCK_SECONDS:g} s", remedy)
    return ok("clocks", f"within {_CLOCK_SECONDS:g} s and the time of an answer")


def check_versions(answers: Mapping[int, WorkerAnswer], wanted: Slice | None) -> Iterator[Finding]:
    looks = {number: answer.data for number, answer in answers.items()}
    yield _python({number: str(look["python"]) for number, look in looks.items()})
    for name in ("torch", "torch_xla", "libtpu", "xla_fsdp", "jax", "jaxlib"):
        found = {number: look["packages"][name] or _NOT_INSTALLED for number, look in looks.items()}
        version = next(iter(found.values()))
        if len(set(found.values())) > 1:
            pinned = f"{PINS[name]} everywhere" if name in PINS else "the same everywhere"
            yield failed(name, by_worker(found), pinned, _INSTALL_REMEDY)
        elif name in PINS:
            yield _pinned(name, version)
        elif name == "libtpu":
            required = {look["required_libtpu_version"] for look in looks.values()}
            yield _libtpu(version, required, wanted.chip if wanted is not None else None)
        elif name == "xla_fsdp":
            yield _own(version)
        elif version != _NOT_INSTALLED:
            yield ok(name, f"{version} everywhere")


def _python(found: Mapping[int, str]) -> Finding:
    # Patch versions may differ.
    minor = {number: ".".join(text.split(".")[:2]) for number, text in found.items()}
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if len(set(minor.values())) > 1:
        return failed("python", by_worker(minor), "the same everywhere", _INSTALL_REMEDY)
    text = next(iter(minor.values()))
    if tuple(int(part) for part in text.split(".")) < OLDEST_PYTHON:
        return failed("python", f"{text} everywhere", f"{oldest} or later", _INSTALL_REMEDY)
    return ok("python", by_worker(found) if len(set(found.values())) > 1 else f"{text} everywhere")


def _pinned(name: str, found: str) -> Finding:
    if found.partition("+")[0] == PINS[name]:  # 2.9.0+cpu is a 2.9.0
        return ok(name, f"{found} everywhere")
    remedy = f"pip install '{name}=={PINS[name]}'; --python selects the interpreter"
    return failed(name, f"{found} everywhere", f"{PINS[name]} everywhere", remedy)


def _libtpu(found: str, required: set[str | None], chip: Chip | None) -> Finding:
    """Compares with torch_xla's requirement only if ``chip`` works with that version."""
    refused = () if chip is None else chip.refused_by
    if found == _NOT_INSTALLED:
        remedy = f"pip install 'torch_xla[tpu]=={PINS['torch_xla']}'"
        if chip is not None and required & set(refused):
            remedy += f", then pip install 'libtpu=={tested_for(chip)[0]}' for {chip.family}"
        return failed("libtpu", "not installed anywhere", "libtpu on every worker", remedy)
    if chip is not None and found in refused:
        supported = tested_for(chip)[0]
        remedy = f"pip install 'libtpu=={supported}'"
        expected = f"{supported}, because {found} does not support {chip.family}"
        return failed("libtpu", f"{found} everywhere", expected, remedy)
    if required in ({None}, {found}) or required & set(refused):
        return ok("libtpu", f"{found} everywhere")
    needs = ", ".join(sorted(map(str, required)))
    remedy = f"pip install 'libtpu=={needs}'; jax[tpu] may have replaced it"
    return warning("libtpu", f"{found} everywhere", f"{needs}, which torch_xla requires", remedy)


def _own(found: str) -> Finding:
    expected, remedy = f"{__version__}, as here", "install the same version"
    if found == __version__:
        return ok("xla_fsdp", f"{found} everywhere, as here")
    if found == _NOT_INSTALLED:
        remedy = "install it, or put a copy on PYTHONPATH when you start the training"
        return warning("xla_fsdp", "not installed anywhere", expected, remedy)
    return warning("xla_fsdp", f"{found} everywhere", expected, remedy)


def check_shared_path(workers: Workers, numbers: Iterable[int], path: str) -> Iterator[Finding]:
    """Three rounds, because no worker may remove its file before all others have checked it."""
    numbers = list(numbers)
    wrote: dict[int, WorkerAnswer] = {}
    try:
        wrote = workers.ask("write", numbers, path=path)
        yield _check_written(wrote, path, len(workers.numbers))
        writers = [number for number, answer in wrote.items() if not answer.problem]
        if writers:
            yield _space([wrote[number].data["free"] for number in writers], path)
        if len(writers) > 1 or writers == workers.numbers:
            read = workers.ask("read", writers, path=path, workers=writers)
            yield _check_shared(read, path, len(workers.numbers))
        else:
            found = f"{path}: needs two workers that write, not {len(writers)}"
            yield skipped("checkpoints shared", found)
    finally:
        left = _remove_files(workers, numbers, wrote, path)
    if left:
        remedy = f"remove {path.rstrip('/')}/.preflight-{workers.token} manually"
        yield warning("probe files", by_worker(left), "removed", remedy)


def _remove_files(
    workers: Workers, numbers: Iterable[int], wrote: Mapping[int, WorkerAnswer], path: str
) -> dict[int, str]:
    """Returns the workers on which that failed, with the reasons."""
    # These would not answer now either.
    hung = {number for number, answer in wrote.items() if not answer.data}
    cleaned = workers.ask("clean", [n for n in numbers if n not in hung], path=path)
    made = {number: answer.data.get("made", []) for number, answer in wrote.items()}
    workers.ask("clean", [number for number in made if made[number]], path=path, made=made)
    # If a worker could not write, another check has the reason.
    left = {n: text for n, text in _problems(cleaned).items() if n not in _problems(wrote)}
    return dict.fromkeys(hung, "it may have left a file") | left


def _check_written(wrote: Mapping[int, WorkerAnswer], path: str, total: int) -> Finding:
    problems = _problems(wrote)
    if not problems:
        return ok("checkpoints written", f"{path}: by {len(wrote)} of {total} workers")
    return failed(
        "checkpoints written",
        f"{path}: {by_worker(problems)}",
        f"a file written by each of {total} workers",
        "mount it on these workers and let this user write to it; a bucket needs fsspec and gcsfs "
        "on the workers, and a service account that may write to it",
    )


def _space(free: Iterable[int | None], path: str) -> Finding:
    sizes = [size for size in free if size is not None]
    if not sizes:
        return ok("checkpoint space", "a bucket has no limit")
    least = min(sizes) / GIB
    if least >= _CHECKPOINT_GIB:
        return ok("checkpoint space", f"{least:.0f} GiB free")
    remedy = "free some space: keep_last= of save_checkpoint removes older checkpoints"
    found, expected = f"{path}: {least:.1f} GiB free", f"{_CHECKPOINT_GIB} GiB or more"
    return warning("checkpoint space", found, expected, remedy)


def _check_shared(read: Mapping[int, WorkerAnswer], path: str, total: int) -> Finding:
    problems = _problems(read)
    for number in read.keys() - problems.keys():
        answer = read[number]
        if answer.data["missing"]:
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

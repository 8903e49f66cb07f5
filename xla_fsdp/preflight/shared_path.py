"""Checks that all workers write to one and the same checkpoint folder.

Each leaves a file, each looks for the files of all the others, each removes its own. Three rounds:
a file must not go before everybody has looked for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ..wording import runs
from .checks import Check, by_worker, failed, ok, skipped, warning
from .worker_checks import GIB
from .workers import Answer, Workers

_LOW_GIB = 10  # a few checkpoints of a small model


def check_shared_path(workers: Workers, numbers: Iterable[int], path: str) -> Iterator[Check]:
    """The checks of ``path`` as the workers ``numbers`` see it."""
    numbers = list(numbers)
    wrote: dict[int, Answer] = {}
    try:
        wrote = workers.ask("write", numbers, path=path)
        yield _writable(wrote, path, len(workers.numbers))
        writers = [number for number, answer in wrote.items() if not answer.problem]
        if writers:
            yield _free(wrote, writers, path)
        if len(writers) > 1 or writers == workers.numbers:
            read = workers.ask("read", writers, path=path, workers=writers)
            yield _shared(read, path, len(workers.numbers))
        else:
            yield skipped(
                "checkpoints shared", f"{path}: takes two workers that write, not {len(writers)}"
            )
    finally:  # also after Ctrl-C, and if whoever takes the checks stops
        left = _clean(workers, numbers, wrote, path)
    if left:
        yield warning(
            "probe files",
            by_worker(left),
            "removed",
            f"remove {path.rstrip('/')}/.preflight-{workers.token} by hand",
        )


def _clean(
    workers: Workers, numbers: Iterable[int], wrote: Mapping[int, Answer], path: str
) -> dict[int, str]:
    """Removes what was left; where that did not work, and why."""
    # Who did not come back from writing would not come back from removing either.
    hung = {number for number, answer in wrote.items() if not answer.data}
    cleaned = workers.ask("clean", [n for n in numbers if n not in hung], path=path)
    made = {
        number: {"action": "prune", "worker": number, "made": answer.data["made"]}
        for number, answer in wrote.items()
        if answer.data.get("made")
    }
    workers.ask_each(made)  # what others have put in there by now stays
    left = dict.fromkeys(hung, "it may have left a file")
    for number, answer in cleaned.items():
        # Where nothing could be written, the reason has been told.
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
        "mount it there and let this user write; a bucket needs fsspec and its package (gcsfs) "
        "there, and a service account that may write",
    )


def _free(wrote: Mapping[int, Answer], writers: Iterable[int], path: str) -> Check:
    free = {number: wrote[number].data["free"] for number in writers}
    sizes = [size for size in free.values() if size is not None]
    if not sizes:
        return ok("checkpoint space", "a bucket states no limit")
    least = min(sizes) / GIB
    if least < _LOW_GIB:
        remedy = "make room: keep_last= of save_checkpoint removes older checkpoints"
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
            problems[number] = f"another content of {runs('worker', answer.data['different'])}"
    if problems:
        return failed(
            "checkpoints shared",
            f"{path}: {by_worker(problems)}",
            "each worker sees the files of all",
            "mount one file system on every worker (NFS, Filestore, a bucket), or give a bucket: "
            "gs://...",
        )
    return ok("checkpoints shared", f"{path}: by {len(read)} of {total} workers")

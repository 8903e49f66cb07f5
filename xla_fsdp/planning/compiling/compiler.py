"""The real TPU compiler, run without a TPU in a child process, with its results kept on disk."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ... import extras
from ...compiled.host_options import HostOptions
from ...tpu.topology import Slice
from ..program.flops import model_flops
from ..records import CompilerMemory
from ..tracing.fingerprint import names
from ..tracing.traced import PartitionedProgram, TracedProgram
from . import compile_child
from .cache import CompiledStep, PlanCache
from .progress import Progress

_NEEDED = ("jax", "jaxlib", "libtpu", "matplotlib")
_POLL_SECONDS = 0.1
_FORMAT = 2  # of what is kept; raise it when that changes


class CompileError(RuntimeError):
    """The TPU compiler refused the program, for another reason than its need of memory."""


def require_extra() -> None:
    """Raises MissingExtraError unless the packages of the ``plan`` extra are there."""
    extras.require_extra("plan", "planning", _NEEDED)


def versions() -> dict[str, str]:
    """Versions of what decides on the compiled program."""
    return {name: importlib.metadata.version(name) for name in ("torch_xla", "jaxlib", "libtpu")}


def compile_step(
    program: TracedProgram | PartitionedProgram,
    where: Slice,
    host: HostOptions,
    cache: PlanCache,
    progress: Progress,
) -> CompiledStep:
    """Compiles ``program`` for ``where``, or takes the result of an earlier time from ``cache``.

    ``host``: what libtpu reads there when it starts.

    Raises:
        CompileError: the compiler refused the program, or ended without a word.
    """
    request: dict[str, Any] = {
        "libtpu_name": where.libtpu_name,
        "topology_options": _topology_options(where, host),
        "devices": where.devices,
        "arguments": host.arguments,
        "donated": sorted(program.donated),
        "format": _FORMAT,
    }
    known: list[Any] = [program.fingerprint]
    if isinstance(program, PartitionedProgram):
        code = program.stablehlo
        request["partitioned"] = {"shardy": program.shardy}
        request["model_flops"] = program.model_flops
    else:
        code = program.hlo
        known.append(names(code))
    parts = json.dumps([*known, request, versions()], sort_keys=True)
    key = hashlib.sha256(parts.encode()).hexdigest()
    kept = cache.read(key)
    if kept is not None:
        return kept
    _give_back_memory()
    with tempfile.TemporaryDirectory(prefix="xla_fsdp_plan_") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / compile_child.program_file(request)).write_bytes(code)
        _run(folder, f"compiling for {where.name} ({where.devices} devices)", progress)
        compiled = _collect(folder, key, host.whose, request.get("model_flops"))
    cache.write(compiled)
    return compiled


def _topology_options(where: Slice, host: HostOptions) -> dict[str, object]:
    if host.chip_config is None:
        return dict(where.options)
    return {**where.options, "chip_config_name": host.chip_config}


def _run(folder: Path, what: str, progress: Progress) -> None:
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", compile_child.__name__, str(folder), str(os.getpid())],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=_environment(),
        )  # fmt: skip
        try:
            while child.poll() is None:
                progress.update(what, time.monotonic() - began)
                time.sleep(_POLL_SECONDS)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    if not (folder / "result.json").exists():
        tail = (folder / "log").read_text(errors="replace").strip().splitlines()[-15:]
        raise CompileError(
            f"the TPU compiler ended with exit status {child.returncode}"
            f"{_perhaps(child.returncode, folder)} and no result. "
            "Its last words:\n" + "\n".join(tail)
        )
    most = json.loads((folder / "result.json").read_text())["host_memory"]
    done = f"{what}, in {most / 2**30:.1f} GiB of host memory"
    progress.done(done, time.monotonic() - began)


def _perhaps(status: int, folder: Path) -> str:
    """What a user can do about a compiler that was killed, or crashed."""
    if status == -signal.SIGKILL:
        return " (killed, perhaps by a system out of memory)"
    arguments = json.loads((folder / "request.json").read_text())["arguments"]
    if status < 0 and arguments:
        return (
            " (a crash; compiler_options= can undo what it was asked, one by one: "
            f"LIBTPU_INIT_ARGS={arguments!r})"
        )
    return ""


def _give_back_memory() -> None:
    """Returns what the model took up to the system: the compiler needs gigabytes next."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _environment() -> dict[str, str]:
    """The child's environment: it must find this package where this process found it."""
    root = str(Path(__file__).parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _collect(folder: Path, key: str, named: Iterable[str], flops: float | None) -> CompiledStep:
    """``named``: options of interest. ``flops``: those of the model, or None to count them in the
    program."""
    result = json.loads((folder / "result.json").read_text())
    if result.get("error") and result["kind"] != "memory":
        raise CompileError(f"the TPU compiler refused the program: {result['error']}")
    refused = bool(result.get("error"))
    traced = _dumped(folder, "before_optimizations.txt")
    assignment = _dumped(folder, "after_optimizations-buffer-assignment.txt")
    if not refused:
        scheduled = (folder / "scheduled.txt").read_text()
    elif assignment:
        scheduled = _dumped(folder, "after_optimizations_after_buffer_assignment.txt")
    else:
        scheduled = ""  # it gave up before it had laid out anything
    return CompiledStep(
        key=key,
        traced=traced,
        scheduled=scheduled,
        assignment=assignment,
        memory=None if refused else CompilerMemory(**result["memory"]),
        refusal=result.get("error", ""),
        seconds=result["seconds"],
        from_cache=False,
        model_flops=model_flops(traced) if flops is None else flops,
        options=_values(_dumped(folder, "flagfile"), named),
    )


def _values(flags: str, named: Iterable[str]) -> dict[str, str]:
    """The values in ``flags``, lines of ``--name=value``, of the options ``named`` in it."""
    pairs = (line.lstrip("-").partition("=") for line in flags.splitlines())
    known = {name: value.strip("'") for name, _, value in pairs}
    return {name: known[name] for name in named if name in known}


def _dumped(folder: Path, ending: str) -> str:
    """The last file of that name: the program itself comes after what it was compiled from."""
    files = sorted((folder / "dump").glob(f"*.{ending}"))
    return files[-1].read_text() if files else ""

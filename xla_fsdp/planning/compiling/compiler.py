"""Runs the TPU compiler without a TPU, in a child process, and caches its results on disk."""

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
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ... import extras
from ...compiled.host_options import HostOptions
from ...plan_compiler import (
    COMMAND,
    Compiler,
    UnusableCompilerError,
    changed_environment,
    find_compiler,
    refusal_of,
)
from ...tpu.topology import Slice
from ...wording import to_one_line
from ..program.assignment import LIVE_RANGES
from ..program.flops import model_flops
from ..records import CompilerMemory
from ..tracing.fingerprint import names
from ..tracing.traced import PartitionedProgram, TracedProgram
from . import compile_child
from .cache import CompiledStep, PlanCache
from .progress import Progress

_POLL_SECONDS = 0.1
_FORMAT = 3  # of what is cached; raise it when that changes


class CompileError(RuntimeError):
    """The TPU compiler refused the program, for another reason than its need of memory."""


def require_extra(compiler: Compiler) -> None:
    """Raises MissingExtraError unless the packages of the ``plan`` extra are there that a plan
    with ``compiler`` needs."""
    own = ("jax", "jaxlib", "libtpu") if compiler.python == sys.executable else ()
    extras.require_extra("plan", "planning", (*own, "matplotlib"))


def compile_step(
    program: TracedProgram | PartitionedProgram,
    where: Slice,
    host: HostOptions,
    cache: PlanCache,
    progress: Progress,
    compiler: Compiler | None = None,
) -> CompiledStep:
    """Compiles ``program`` for ``where``, or takes the result of an earlier time from ``cache``.

    Args:
        host: what libtpu reads there when it starts.
        compiler: default: that of :func:`~xla_fsdp.plan_compiler.find_compiler`.

    Raises:
        CompileError: the compiler refused the program, or ended without a message.
        UnusableCompilerError: libtpu does not know the slice, or plans do not know this jax.
    """
    compiler = compiler or find_compiler()
    versions = {"torch_xla": importlib.metadata.version("torch_xla"), **compiler.versions}
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
    parts = json.dumps([*known, request, versions], sort_keys=True)
    key = hashlib.sha256(parts.encode()).hexdigest()
    kept = cache.read(key)
    if kept is not None:
        return kept
    _give_back_memory()
    with tempfile.TemporaryDirectory(prefix="xla_fsdp_plan_") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(request))
        (folder / compile_child.program_file(request)).write_bytes(code)
        what = f"compiling for {where.name} ({where.devices} devices)"
        _run(folder, what, progress, compiler)
        _require_usable(compiler, folder, where)
        compiled = _collect(folder, key, host.whose, request.get("model_flops"), versions)
    cache.write(compiled)
    return compiled


def _topology_options(where: Slice, host: HostOptions) -> dict[str, object]:
    if host.chip_config is None:
        return dict(where.options)
    return {**where.options, "chip_config_name": host.chip_config}


def _run(folder: Path, what: str, progress: Progress, compiler: Compiler) -> None:
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            [compiler.python, compile_child.__file__, str(folder), str(os.getpid())],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env=changed_environment(compiler.environment),
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
            "The end of its output:\n" + "\n".join(tail)
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


def _require_usable(compiler: Compiler, folder: Path, where: Slice) -> None:
    """Raises UnusableCompilerError if the compiler did not get as far as the program."""
    result = json.loads((folder / "result.json").read_text())
    if result.get("kind") == "topology":
        slice_ = f"{where.name} ({where.libtpu_name})"
        raise UnusableCompilerError(
            refusal_of(compiler.versions["libtpu"], slice_, result["error"])
        )
    if result.get("kind") == "names":
        raise UnusableCompilerError(
            f"jax {compiler.versions['jax']} of {compiler.python} has no "
            f"{to_one_line(result['error'], 200)}: install a tested release: {COMMAND}"
        )


def _collect(
    folder: Path,
    key: str,
    named: Iterable[str],
    flops: float | None,
    versions: Mapping[str, str],
) -> CompiledStep:
    """Reads the results in ``folder``.

    Args:
        named: options of interest.
        flops: those of the model, or None to count them in the program.
        versions: of what made the program.
    """
    result = json.loads((folder / "result.json").read_text())
    if result.get("error") and result["kind"] != "memory":
        raise CompileError(f"the TPU compiler refused the program: {result['error']}")
    refused = bool(result.get("error"))
    traced = _dumped(folder, "before_optimizations.txt")
    assignment = _dumped(folder, "after_optimizations-buffer-assignment.txt")
    if assignment and LIVE_RANGES not in assignment:  # libtpu 0.0.51 writes a separate file
        assignment += "\n" + _dumped(folder, "after_optimizations-live-range.txt")
    if not refused:
        scheduled = (folder / "scheduled.txt").read_text()
    elif assignment:
        scheduled = _dumped(folder, "after_optimizations_after_buffer_assignment.txt")
    else:
        scheduled = ""  # it stopped before it had assigned any memory
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
        versions=dict(versions),
    )


def _values(flags: str, named: Iterable[str]) -> dict[str, str]:
    """The values in ``flags``, lines of ``--name=value``, of the options ``named`` in it."""
    pairs = (line.lstrip("-").partition("=") for line in flags.splitlines())
    known = {name: value.strip("'") for name, _, value in pairs}
    return {name: known[name] for name in named if name in known}


def _dumped(folder: Path, ending: str) -> str:
    """The last file of that name: the program itself comes after what it was compiled from.

    Not counting parts that libtpu 0.0.51 takes out of it, for SparseCores, and compiles separately.
    """
    files = sorted((folder / "dump").glob(f"*.{ending}"))
    own = [file for file in files if ".extracted." not in file.name]
    return own[-1].read_text() if own else ""

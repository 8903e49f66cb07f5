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
from collections.abc import Iterable
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
from ..tracing.traced import PartitionedProgram, TracedProgram, names
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
    extras.require_extra("plan", "planning", (*own, "matplotlib", "google.protobuf"))


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
    chip_config = {} if host.chip_config is None else {"chip_config_name": host.chip_config}
    request: dict[str, Any] = {
        "libtpu_name": where.libtpu_name,
        "topology_options": {**where.options, **chip_config},
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
        result = _run(folder, host.arguments, what, progress, compiler)
        refusal = result.get("error", "")
        if refusal:
            _raise_unless_memory(result["kind"], refusal, compiler, where)
        traced = _dumped(folder, "before_optimizations.txt")
        assignment = _dumped(folder, "after_optimizations-buffer-assignment.txt")
        if assignment and LIVE_RANGES not in assignment:  # libtpu 0.0.51 writes a separate file
            assignment += "\n" + _dumped(folder, "after_optimizations-live-range.txt")
        flops = request.get("model_flops")
        scheduled = ""  # if it stopped before it had assigned any memory
        if not refusal:
            scheduled = (folder / "scheduled.txt").read_text()
        elif assignment:
            scheduled = _dumped(folder, "after_optimizations_after_buffer_assignment.txt")
        compiled = CompiledStep(
            key=key,
            traced=traced,
            scheduled=scheduled,
            assignment=assignment,
            memory=None if refusal else CompilerMemory(**result["memory"]),
            refusal=refusal,
            seconds=result["seconds"],
            from_cache=False,
            model_flops=model_flops(traced) if flops is None else flops,
            options=_values(_dumped(folder, "flagfile"), host.whose),
            versions=versions,
        )
    cache.write(compiled)
    return compiled


def _run(
    folder: Path, arguments: str, what: str, progress: Progress, compiler: Compiler
) -> dict[str, Any]:
    """Runs the compiler on the request in ``folder``; returns its ``result.json``."""
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
        perhaps = ""
        if child.returncode == -signal.SIGKILL:
            perhaps = " (killed, perhaps by a system out of memory)"
        elif child.returncode < 0 and arguments:
            perhaps = (
                " (a crash; compiler_options= can undo what it was asked, one by one: "
                f"LIBTPU_INIT_ARGS={arguments!r})"
            )
        raise CompileError(
            f"the TPU compiler ended with exit status {child.returncode}{perhaps} and no result. "
            "The end of its output:\n" + "\n".join(tail)
        )
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    done = f"{what}, in {result['host_memory'] / 2**30:.1f} GiB of host memory"
    progress.done(done, time.monotonic() - began)
    return result


def _give_back_memory() -> None:
    """Returns what the model took up to the system: the compiler needs gigabytes next."""
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def _raise_unless_memory(kind: str, error: str, compiler: Compiler, where: Slice) -> None:
    """Raises if the compiler failed for another reason than the program's need of memory."""
    if kind == "topology":
        slice_ = f"{where.name} ({where.libtpu_name})"
        raise UnusableCompilerError(refusal_of(compiler.versions["libtpu"], slice_, error))
    if kind == "names":
        raise UnusableCompilerError(
            f"jax {compiler.versions['jax']} of {compiler.python} has no "
            f"{to_one_line(error, 200)}: install a tested release: {COMMAND}"
        )
    if kind != "memory":
        raise CompileError(f"the TPU compiler refused the program: {error}")


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

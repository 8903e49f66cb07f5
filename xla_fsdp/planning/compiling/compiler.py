"""Runs the TPU compiler in a child process, and caches its results."""

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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ... import extras
from ...compiled.host_options import HostOptions, host_options
from ...plan_compiler import (
    COMMAND,
    Compiler,
    UnusableCompilerError,
    changed_environment,
    find_compiler,
    refusal_of,
    tested_for,
)
from ...tpu.calibration import Calibration, load_calibration
from ...tpu.topology import Slice, resolve
from ...wording import to_one_line
from ..program.assignment import LIVE_RANGES
from ..program.hlo import module_in
from ..records import CompilerMemory
from ..tracing.traced import PartitionedProgram, TracedProgram, scope_names
from . import compile_child
from .plan_cache import CompiledStep, PlanCache
from .progress import Progress

_POLL_SECONDS = 0.1
_FORMAT = 4  # of what is cached; raise it when that changes


class CompileError(RuntimeError):
    """The TPU compiler refused the program for a reason other than memory."""


@dataclass(frozen=True)
class Target:
    """A slice, and how programs are compiled for it; the fields are arguments of ``plan``."""

    where: Slice
    compiler: Compiler
    launcher: str
    options: Mapping[str, str]
    cache: PlanCache
    progress: Progress
    measured: Calibration | None = None

    @classmethod
    def of(
        cls,
        topology: str,
        compiler: str | os.PathLike[str] | None,
        launcher: str,
        options: Mapping[str, str] | None,
        cache: str | os.PathLike[str] | bool,
        progress: Progress,
        calibration: Calibration | str | os.PathLike[str] | None = None,
    ) -> Target:
        where = resolve(topology)
        if options is not None and not isinstance(options, Mapping):
            raise TypeError(
                "compiler_options must have values by name, such as "
                f"{{'xla_tpu_scoped_vmem_limit_kib': '49152'}}, got {options!r:.80}"
            )
        measured = None if calibration is None else load_calibration(calibration)
        if measured is not None:
            measured.apply(where.chip)  # raises before minutes of compilation
        used = find_compiler(compiler)
        used.require_knows(where.chip)
        own = ("jax", "jaxlib", "libtpu") if used.python == sys.executable else ()
        extras.require_extra("plan", "planning", (*own, "matplotlib", "google.protobuf"))
        kept = PlanCache.at(cache)
        return cls(where, used, launcher, options or {}, kept, progress, measured)

    def host(self, options: Mapping[str, str] = MappingProxyType({})) -> HostOptions:
        further = {**options, **self.options}
        return host_options(self.where.chip, self.launcher, further, libtpu=self.compiler.library)

    def compile(
        self, program: TracedProgram | PartitionedProgram, host: HostOptions
    ) -> CompiledStep:
        """Compiles ``program``, or takes its result from the cache.

        Raises CompileError, or UnusableCompilerError if libtpu does not know the slice, or this jax
        lacks a name.
        """
        where = self.where
        versions = {"torch_xla": importlib.metadata.version("torch_xla"), **self.compiler.versions}
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
            known.append(scope_names(code))
        parts = json.dumps([*known, request, versions], sort_keys=True)
        key = hashlib.sha256(parts.encode()).hexdigest()
        found = self.cache.read(key)
        if found is None:
            found = replace(self._compile(key, code, request, host), versions=versions)
            self.cache.write(found)
        return found

    def _compile(
        self, key: str, code: bytes, request: dict[str, Any], host: HostOptions
    ) -> CompiledStep:
        with contextlib.suppress(OSError, AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)  # the compiler needs gigabytes next
        with tempfile.TemporaryDirectory(prefix="xla_fsdp_plan_") as name:
            folder = Path(name)
            (folder / "request.json").write_text(json.dumps(request))
            (folder / compile_child.program_file(request)).write_bytes(code)
            result = self._run(folder, host.arguments)
            refusal = result.get("error", "")
            if refusal and result["kind"] != "memory":
                raise self._error(result["kind"], refusal)
            assignment = _dumped(folder, "after_optimizations-buffer-assignment.txt").decode()
            if assignment and LIVE_RANGES not in assignment:  # libtpu 0.0.51
                assignment += "\n" + _dumped(folder, "after_optimizations-live-range.txt").decode()
            scheduled = b""
            if not refusal:
                scheduled = (folder / "scheduled.pb").read_bytes()
            elif assignment:
                name = "after_optimizations_after_buffer_assignment.hlo.pb"
                scheduled = module_in(_dumped(folder, name))
            flags = _dumped(folder, "flagfile").decode().splitlines()
            values = dict(line.lstrip("-").partition("=")[::2] for line in flags)
            return CompiledStep(
                key=key,
                traced=module_in(_dumped(folder, "before_optimizations.hlo.pb")),
                scheduled=scheduled,
                assignment=assignment,
                memory=None if refusal else CompilerMemory(**result["memory"]),
                refusal=refusal,
                seconds=result["seconds"],
                from_cache=False,
                model_flops=request.get("model_flops"),
                options={name: values[name].strip("'") for name in host.whose if name in values},
                host_memory=result["host_memory"],
            )

    def _run(self, folder: Path, arguments: str) -> dict[str, Any]:
        where, compiler, began = self.where, self.compiler, time.monotonic()
        what = f"compiling for {where.name} ({where.devices} devices)"
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(
                [compiler.python, compile_child.__file__, str(folder), str(os.getpid())],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env=changed_environment(compiler.environment),
            )  # fmt: skip
            try:
                while child.poll() is None:
                    self.progress.update(what, time.monotonic() - began)
                    time.sleep(_POLL_SECONDS)
            finally:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        if not (folder / "result.json").exists():
            output = (folder / "log").read_text(errors="replace")
            raise CompileError(self._without_result(child.returncode, output, arguments))
        result: dict[str, Any] = json.loads((folder / "result.json").read_text())
        done = f"{what}, in {result['host_memory'] / 2**30:.1f} GiB of host memory"
        self.progress.done(done, time.monotonic() - began)
        return result

    def _without_result(self, status: int, output: str, arguments: str) -> str:
        version, where = self.compiler.versions["libtpu"], self.where
        remedies = []
        if status == -signal.SIGKILL:
            how = " (killed, perhaps by a system out of memory)"
            remedies.append("use scan_blocks, plan fewer blocks, or use a machine with more memory")
        elif status < 0:
            how = " (a crash)"
            others = [one for one in tested_for(where.chip) if one != version]
            if others:
                remedies.append(f"plan with compiler={others[0]!r}")
            if arguments:
                remedies.append(
                    "change its options one by one with compiler_options= "
                    f"(LIBTPU_INIT_ARGS={arguments!r})"
                )
        else:
            last = output.strip().splitlines()[-1:] or ["no message"]
            how = f" ({to_one_line(last[0], 200)})"
        remedy = ", or ".join(remedies) or "the reason may be in its output"
        return (
            f"libtpu {version} gave no result for {where.name}, exit status {status}{how}: {remedy}"
            f"{_output_text(output)}"
        )

    def _error(self, kind: str, error: str) -> Exception:
        """``kind``: as in ``compile_child.py``."""
        versions, where = self.compiler.versions, self.where
        if kind == "topology":
            slice_ = f"{where.name} ({where.libtpu_name})"
            return UnusableCompilerError(refusal_of(versions["libtpu"], slice_, error))
        if kind == "names":
            return UnusableCompilerError(
                f"jax {versions['jax']} of {self.compiler.python} has no "
                f"{to_one_line(error, 200)}: install a tested release: {COMMAND}"
            )
        short = to_one_line(error, 300)
        more = _output_text(error) if short.endswith("...") else ""
        return CompileError(f"the TPU compiler refused the program: {short}{more}")


def _output_text(output: str) -> str:
    with tempfile.NamedTemporaryFile(
        "w", prefix="xla_fsdp_compiler_", suffix=".log", delete=False, errors="replace"
    ) as file:
        file.write(output)
    return f". Its output: {file.name}"


def _dumped(folder: Path, ending: str) -> bytes:
    """The last file with that ending, except parts that libtpu 0.0.51 compiles for SparseCores."""
    files = sorted((folder / "dump").glob(f"*.{ending}"))
    own = [file for file in files if ".extracted." not in file.name]
    return own[-1].read_bytes() if own else b""

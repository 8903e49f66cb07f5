"""Which compiled programs may run in each other's place."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version

from ..tpu.compiler_options import libtpu_init_args
from ..tpu.libtpu_flags import ARGUMENTS

# Raised when what is kept changes.
_FORMAT = "1"
# They say where programs are kept, not what they are.
_NOT_OF_THE_KIND = (
    "XLA_FSDP_COMPILATION_CACHE",
    "XLA_FSDP_COMPILATION_CACHE_FOLDER",
    "XLA_PERSISTENT_CACHE_PATH",
    "XLA_PERSISTENT_CACHE_READ_ONLY",
)


def describe_kind(on: str, part: str) -> dict[str, str]:
    """What such programs have in common, by names for people.

    torch_xla's own key has the program in it, the devices and their number, the flags of XLA, and
    whether arguments are overwritten; seen to be missing on CPU: versions and processor.

    Args:
        on: CPU or TPU.
        part: which of the processes that run one program.
    """
    about = {
        "format": _FORMAT,
        "platform": on,
        "machine": platform.machine(),
        # Processes on TPU compile for other devices each.
        "process": part if on == "TPU" else "any",
        ARGUMENTS: libtpu_init_args(os.environ.get(ARGUMENTS, "")),
        "TPU_LIBRARY_PATH": os.environ.get("TPU_LIBRARY_PATH", ""),
        "TPU_MEGACORE": os.environ.get("TPU_MEGACORE", ""),
    }
    for package in ("torch", "torch_xla", "libtpu"):
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            about[package] = "none"
    if on == "CPU":
        about["processor"] = _processor()
    for name, value in sorted(os.environ.items()):
        if name.startswith("XLA_") and name not in _NOT_OF_THE_KIND:
            about[name] = value
    return about


def _processor() -> str:
    # XLA compiles for the instructions that the processor at hand has.
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        first = file.read().partition("\n\n")[0]
    fields = dict(line.split(":", 1) for line in first.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = " ".join(sorted(fields.get("flags", fields.get("Features", "")).split()))
    names = [fields[name] for name in ("model name", "cpu family", "model") if name in fields]
    return f"{' / '.join(names)}, {hashlib.sha256(flags.encode()).hexdigest()}"

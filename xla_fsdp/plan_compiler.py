"""TPU compilers for plans: ``python -m xla_fsdp.plan_compiler install``.

A compiler is a Python interpreter with jax and libtpu: this one, or a virtual environment's.
Nothing here imports jax, torch or libtpu.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from .extras import installed_versions
from .files import default_cache_folder
from .tpu.chips import Chip
from .tpu.libtpu_flags import library
from .wording import to_one_line

COMMAND = "python -m xla_fsdp.plan_compiler install"
FOLDER = "XLA_FSDP_COMPILERS"
_SECONDS = 60


@dataclass(frozen=True)
class Release:
    """The jax and the Python that a version of libtpu was tested with."""

    jax: str
    python: str


# Newest first. 0.0.21 is also what torch_xla 2.9.0 installs (the ``plan`` extra).
TESTED: Mapping[str, Release] = MappingProxyType({
    "0.0.51": Release(jax="0.12.0.1", python="3.12"),
    "0.0.21": Release(jax="0.7.1", python="3.11"),
})  # fmt: skip

# Runs in any Python, without packages.
_ASK = """
import importlib.metadata as m, json, os, platform
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return ""
found = {name: version(name) for name in ("jax", "jaxlib", "libtpu")}
library = ""
if found["libtpu"]:
    files = [f for f in m.files("libtpu") or [] if f.name == "libtpu.so"]
    library = os.fspath(files[0].locate()) if files else ""
print(json.dumps({**found, "python": platform.python_version(), "library": library}))
"""


class UnusableCompilerError(ValueError):
    """``compiler=`` names nothing that can compile the plan, or its installation failed."""


@dataclass(frozen=True)
class Compiler:
    """An interpreter with jax and libtpu.

    ``versions``: of "jaxlib", "libtpu", "jax" and "python". ``library``: its libtpu's path.
    ``environment``: changes for its processes; None removes a variable.
    """

    python: str
    versions: Mapping[str, str]
    library: str | None
    environment: Mapping[str, str | None] = field(default_factory=dict)

    def require_knows(self, chip: Chip) -> None:
        """Raises UnusableCompilerError if this libtpu does not compile for ``chip``."""
        if self.versions["libtpu"] in chip.refused_by:
            raise UnusableCompilerError(refusal_of(self.versions["libtpu"], chip.family))


def tested_for(chip: Chip) -> list[str]:
    return [version for version in TESTED if version not in chip.refused_by]


def refusal_of(libtpu: str, slice: str, message: str = "") -> str:
    newest = next(iter(TESTED))
    said = f" ({to_one_line(message, 200)})" if message else ""
    remedy = (
        f"plan with compiler={newest!r}, after: {COMMAND}"
        if libtpu != newest
        else "name another slice"
    )
    return f"libtpu {libtpu} does not compile for {slice}{said}: {remedy}"


def folder_of_compilers() -> Path:
    if os.environ.get(FOLDER):
        return Path(os.path.expanduser(os.environ[FOLDER]))
    return default_cache_folder("compilers")


def find_compiler(wanted: str | os.PathLike[str] | None = None) -> Compiler:
    """The compiler that ``wanted`` means.

    Args:
        wanted: a version of libtpu, the folder of an environment, or the path of an interpreter;
            default: the newest tested version that is installed, else this interpreter.

    Raises:
        UnusableCompilerError: there is none, or it lacks jax or libtpu.
        TypeError: ``wanted`` is neither text nor a path.
    """
    if wanted is None:
        installed = (folder_of_compilers() / version for version in TESTED)
        folder = next((one for one in installed if _python_in(one).is_file()), None)
        return _this_interpreter() if folder is None else _examined(_python_in(folder), "compiler")
    if not isinstance(wanted, (str, os.PathLike)):
        raise TypeError(
            f"compiler must be a version of libtpu, a folder or an interpreter, got {wanted!r:.80}"
        )
    given = os.fspath(wanted)
    return _examined(_place_of(given), f"compiler={given!r}")


def _place_of(given: str) -> Path:
    if re.fullmatch(r"\d+(\.\d+)+", given):
        python = _python_in(folder_of_compilers() / given)
        if python.is_file():
            return python
        if given == _this_interpreter().versions["libtpu"]:
            return Path(sys.executable)
        if given in TESTED:
            option = "" if given == next(iter(TESTED)) else f" --version {given}"
            raise UnusableCompilerError(f"compiler={given!r} is not installed: {COMMAND}{option}")
        raise UnusableCompilerError(
            f"compiler={given!r} is not installed and was not tested: pass one of "
            f"{', '.join(TESTED)} after: {COMMAND}, or the folder of an environment that has it"
        )
    path = Path(given).expanduser()
    python = _python_in(path) if path.is_dir() else path
    if not python.is_file():
        lacks = "has no bin/python" if path.is_dir() else "is no file"
        raise UnusableCompilerError(
            f"compiler={given!r} {lacks}: pass a version of libtpu (tested: {', '.join(TESTED)}), "
            "an interpreter, or the folder of an environment made by: "
            f"{COMMAND} --folder {'PATH' if path.exists() else given}"
        )
    return python


def _python_in(folder: Path) -> Path:
    return folder / "bin" / "python"


def _this_interpreter() -> Compiler:
    versions = installed_versions("jaxlib", "libtpu", "jax")
    return Compiler(sys.executable, versions, library())


def _examined(python: Path, named: str) -> Compiler:
    """``named``: how the user asked for it."""
    if os.path.abspath(python) == os.path.abspath(sys.executable):
        return _this_interpreter()
    # Another interpreter must not use this one's packages and libtpu.
    environment: dict[str, str | None] = dict.fromkeys(
        ("PYTHONPATH", "PYTHONHOME", "PTXLA_TPU_LIBRARY_PATH", "TPU_LIBRARY_PATH")
    )
    remedy = f"install one: {COMMAND}"
    try:
        done = _run_command([str(python), "-c", _ASK], environment, _SECONDS)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise UnusableCompilerError(
            f"{named}: {python} does not run as a Python interpreter "
            f"({to_one_line(error, 200)}): {remedy}"
        ) from error
    if found is None:
        raise UnusableCompilerError(
            f"{named}: {python} ended with exit status {done.returncode} "
            f"({to_one_line(done.stderr or 'no message', 200)}): {remedy}"
        )
    missing = [name for name in ("jax", "jaxlib", "libtpu") if not found[name]]
    if missing or not found["library"]:
        lacks = ", ".join(missing) or "libtpu.so"
        raise UnusableCompilerError(f"{named}: {python} has no {lacks}: {remedy}")
    environment["TPU_LIBRARY_PATH"] = path = found.pop("library")
    order = ("jaxlib", "libtpu", "jax", "python")
    return Compiler(str(python), {name: found[name] for name in order}, path, environment)


def _run_command(
    command: list[str], environment: Mapping[str, str | None], seconds: float | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=changed_environment(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds,
    )


def changed_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    changed = {**os.environ, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def install(
    version: str = next(iter(TESTED)),
    folder: str | os.PathLike[str] | None = None,
    python: str | None = None,
) -> Path:
    """Makes a virtual environment with libtpu and its jax; returns its folder.

    Args:
        version: of libtpu, one of :data:`TESTED`.
        folder: default: :func:`folder_of_compilers` / ``version``. It appears complete or not at
            all; an existing environment is not changed.
        python: an interpreter; default: one of the tested release of Python.

    Raises:
        UnusableCompilerError: the version is unknown, there is no such Python, or pip failed.
    """
    if version not in TESTED:
        raise UnusableCompilerError(
            f"version {version!r} of libtpu was not tested: pass one of {', '.join(TESTED)}, or "
            "make a virtual environment with jax and libtpu and pass its folder to "
            "plan(compiler=...)"
        )
    release = TESTED[version]
    if folder is not None and not os.fspath(folder):
        raise UnusableCompilerError("--folder is empty: pass a path, or leave it out")
    place = Path(folder) if folder is not None else folder_of_compilers() / version
    place = Path(os.path.abspath(place.expanduser()))  # "." has no name
    if _python_in(place).is_file():
        return place
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise UnusableCompilerError(
            f"{place} exists and is no virtual environment: pass another --folder, or remove this"
        )
    interpreter = python or _interpreter_of(release.python)
    partial = place.with_name(f".{place.name}.{uuid.uuid4().hex}.partial")
    packages = [f"jax=={release.jax}", f"libtpu=={version}"]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        _require_done([interpreter, "-m", "venv", str(partial)], "venv")
        pip = [str(_python_in(partial)), "-m", "pip", "install", "--disable-pip-version-check"]
        _require_done([*pip, "--quiet", *packages], "pip install " + " ".join(packages))
        if place.is_dir():
            place.rmdir()  # empty
        partial.rename(place)
    except OSError as error:
        if not _python_in(place).is_file():  # else another process was quicker
            raise UnusableCompilerError(
                f"{place} cannot be written ({error.strerror}): pass another --folder"
            ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return place


def _require_done(command: list[str], what: str) -> None:
    try:
        done = _run_command(command, {"PYTHONPATH": None, "PYTHONHOME": None})
    except OSError as error:
        raise UnusableCompilerError(
            f"{command[0]} does not run ({error.strerror}): pass another --python"
        ) from error
    if done.returncode != 0:
        lines = (done.stderr or done.stdout or "no message").strip().splitlines()
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
        raise UnusableCompilerError(
            f"{what} failed with {command[0]} ({to_one_line('; '.join(errors), 300)}): check "
            "whether the folder can be written and the package index be reached, or pass another "
            "--folder or --python"
        )


def _interpreter_of(release: str) -> str:
    folders = os.environ.get("PATH", "").split(os.pathsep)
    named = (os.path.join(folder, f"python{release}") for folder in folders)
    # pyenv's own commands on PATH start only releases that are switched on.
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = map(str, sorted(root.glob(f"versions/{release}*/bin/python")))
    for candidate in (sys.executable, *named, *installed):
        try:
            done = _run_command(
                [candidate, "-c", "import sys; print(*sys.version_info[:2])"], {}, _SECONDS
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.split() == release.split("."):
            return candidate
    raise UnusableCompilerError(
        f"there is no Python {release} on this machine: install python{release} with its venv "
        "module, or pass --python PATH"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m xla_fsdp.plan_compiler",
        description="Installs TPU compilers for xla_fsdp.plan, or shows the one that it uses.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("install", help="make an environment with jax and libtpu")
    newest = next(iter(TESTED))
    make.add_argument("--version", default=newest, help=f"of libtpu: {', '.join(TESTED)}")
    help = f"default: VERSION in the folder {FOLDER}, or in ~/.cache/xla_fsdp/compilers"
    make.add_argument("--folder", help=help)
    make.add_argument("--python", help="interpreter to make it with; default: the tested release")
    commands.add_parser("show", help="print the compiler that a plan uses by default")
    given = parser.parse_args(arguments)
    try:
        if given.command == "install":
            print(install(given.version, given.folder, given.python))
        else:
            found = find_compiler()
            versions = ", ".join(f"{name} {value}" for name, value in found.versions.items())
            print(f"{found.python}: {versions}")
    except (UnusableCompilerError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted, nothing installed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

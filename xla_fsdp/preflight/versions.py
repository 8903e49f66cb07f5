"""Checks that all workers have the same software, and that which this package needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from .. import __version__
from .checks import Check, by_worker, failed, ok, warning

# As setup.py pins them: torch_xla loads with no other torch, this package with no other torch_xla.
PINS: Mapping[str, str] = MappingProxyType({"torch": "2.9.0", "torch_xla": "2.9.0"})
OLDEST_PYTHON = (3, 10)  # python_requires

_NONE = "not installed"
_REMEDY = "install the same on every worker; --python names the interpreter that is meant"


def check_versions(looks: Mapping[int, Mapping[str, Any]]) -> Iterator[Check]:
    """A check for Python and each package; ``looks``: what each worker said."""
    yield _python({number: str(look["python"]) for number, look in looks.items()})
    for name in ("torch", "torch_xla", "libtpu", "xla_fsdp", "jax", "jaxlib"):
        found = {number: look["packages"][name] or _NONE for number, look in looks.items()}
        kinds = set(found.values())
        if kinds == {_NONE} and name in ("jax", "jaxlib"):
            continue  # only needed for planning and kernels
        if len(kinds) > 1:
            yield failed(name, by_worker(found), _expected(name), _REMEDY)
        elif name in PINS:
            yield _pinned(name, kinds.pop())
        elif name == "libtpu":
            yield _libtpu(kinds.pop(), {str(look["libtpu_wanted"]) for look in looks.values()})
        elif name == "xla_fsdp":
            yield _own(kinds.pop())
        else:
            yield ok(name, f"{kinds.pop()} everywhere")


def _python(found: Mapping[int, str]) -> Check:
    # Pickles and wheels depend on the first two numbers only.
    minor = {number: ".".join(text.split(".")[:2]) for number, text in found.items()}
    oldest = ".".join(map(str, OLDEST_PYTHON))
    if len(set(minor.values())) > 1:
        return failed("python", by_worker(minor), "the same everywhere", _REMEDY)
    text = next(iter(minor.values()))
    if tuple(int(part) for part in text.split(".")) < OLDEST_PYTHON:
        return failed("python", f"{text} everywhere", f"{oldest} or later", _REMEDY)
    return ok("python", by_worker(found) if len(set(found.values())) > 1 else f"{text} everywhere")


def _expected(name: str) -> str:
    return f"{PINS[name]} everywhere" if name in PINS else "the same everywhere"


def _pinned(name: str, found: str) -> Check:
    if found.partition("+")[0] == PINS[name]:  # 2.9.0+cpu is a 2.9.0
        return ok(name, f"{found} everywhere")
    remedy = f"pip install '{name}=={PINS[name]}'; --python names the interpreter that is meant"
    return failed(name, f"{found} everywhere", _expected(name), remedy)


def _libtpu(found: str, wanted: set[str]) -> Check:
    if found == _NONE:
        remedy = f"pip install 'torch_xla[tpu]=={PINS['torch_xla']}'"
        return failed("libtpu", "not installed anywhere", "libtpu on every worker", remedy)
    if wanted in ({"None"}, {found}):
        return ok("libtpu", f"{found} everywhere")
    needs = ", ".join(sorted(wanted))
    return warning(
        "libtpu",
        f"{found} everywhere",
        f"{needs}, which torch_xla names",
        f"pip install 'libtpu=={needs}'; jax[tpu] may have replaced it",
    )


def _own(found: str) -> Check:
    if found == __version__:
        return ok("xla_fsdp", f"{found} everywhere, as here")
    if found == _NONE:
        return warning(
            "xla_fsdp",
            "not installed anywhere",
            f"{__version__}, as here",
            "install it, or see that a copy is on PYTHONPATH when training starts",
        )
    return warning(
        "xla_fsdp", f"{found} everywhere", f"{__version__}, as here", "install the same version"
    )

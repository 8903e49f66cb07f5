"""Write reports as JSON and read them; check paths of files to write."""

from __future__ import annotations

import json
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy

from ... import extras
from .findings import Findings

_Kind = TypeVar("_Kind", bound=Findings)

_FORMAT, _VERSION = "xla_fsdp plan", 1


def encode(report: Findings) -> str:
    """The complete report as JSON."""
    data = {"format": _FORMAT, "version": _VERSION, "report": report}
    return json.dumps(data, default=_plain)


def decode(kind: type[_Kind], text: str, source: str) -> _Kind:
    """Read the report that ``encode`` wrote; sequences become tuples.

    Raises:
        ValueError: the text is not such a report. The message names ``source``, where the text
            comes from.
    """
    wanted = f"expected a report of Report.save(), JSON with format {_FORMAT!r}"
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{source} is not JSON ({error}): {wanted}") from error
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        raise ValueError(f"{source} is some other JSON: {wanted}")
    if data.get("version") != _VERSION:
        message = f"{source} has version {data.get('version')!r}, allowed is {_VERSION}: plan again"
        raise ValueError(message)
    try:
        return _reader(kind)(data.get("report"))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        message = f"{source} is damaged ({type(error).__name__}: {error}): {wanted}; plan again"
        raise ValueError(message) from error


def read(path: str | os.PathLike[str]) -> str:
    """Read the text of a stored report.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not text.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{path} is not text: expected a report that Report.save() wrote as JSON"
        raise ValueError(message) from error


def target(path: str | os.PathLike[str]) -> Path:
    """The path to write to, after checking that its folder exists.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    place = Path(path)
    if not place.parent.is_dir():
        raise FileNotFoundError(f"cannot write {path}: make the folder {place.parent} first")
    return place


def target_of_page(path: str | os.PathLike[str]) -> Path:
    """The path of an HTML page to write, after checking it.

    Raises:
        ValueError: the path does not end in .html.
        FileNotFoundError: there is no such folder.
        MissingExtraError: (an ImportError) matplotlib is not installed.
    """
    place = target(path)
    if place.suffix.lower() != ".html":
        raise ValueError(f"cannot plot to {str(path)!r}: allowed is .html; rename the file")
    extras.require_extra("plan", "a plot", ("matplotlib",))
    return place


def _plain(value: Any) -> Any:
    """Convert a data class, a mapping or a numpy number to a type that JSON has."""
    if is_dataclass(value):
        return vars(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, numpy.generic):
        return value.item()
    raise TypeError(f"{value!r:.60} in a report: allowed are data classes and types of JSON")


def _reader(kind: Any) -> Callable[[Any], Any]:
    """A function that converts a value from JSON to the type of an annotation."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        readers = {name: _reader(hint) for name, hint in typing.get_type_hints(kind).items()}
        return lambda value: kind(**{name: readers[name](item) for name, item in value.items()})
    if origin is types.UnionType:
        one = _reader(inner[0])
        return lambda value: None if value is None else one(value)
    if origin in (tuple, Sequence):
        one = _reader(inner[0])
        return lambda value: tuple([one(item) for item in _checked(value, list)])
    if origin is Mapping:
        key, one = inner[0], _reader(inner[1])
        return lambda value: {key(k): one(item) for k, item in _checked(value, dict).items()}
    return lambda value: _checked(value, (int, float) if kind is float else kind)


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        name = getattr(kind, "__name__", "a number")
        raise TypeError(f"{value!r:.60} where {name} belongs")
    return value

"""Reads JSON from untrusted files strictly: ambiguous JSON raises an error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import InvalidMetadataError, first_line
from .dtypes import DTYPES


def read_json(data: bytes, label: str) -> Any:
    """The value of the JSON text ``data``. ``label``: name of the file, for messages.

    Raises:
        InvalidMetadataError: it is not UTF-8 or not JSON, or has a duplicate key, NaN, Infinity, a
            number with thousands of digits, deep nesting, or text that UTF-8 cannot encode.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        if b"\\u" in data:
            write_json(value)  # raises for half of a surrogate pair
        return value
    except RecursionError:
        raise InvalidMetadataError(f"{label}: JSON is nested too deeply") from None
    except ValueError as error:
        raise InvalidMetadataError(f"{label}: not valid JSON: {first_line(error):.160}") from None


def write_json(value: Any) -> bytes:
    """The shortest JSON text. Equal values give equal bytes."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r:.80} occurs twice in one object")
            seen.add(key)
    return found


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text:.40} is larger than any float")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def is_shape(value: Any) -> bool:
    """Whether torch can have such sizes. It multiplies all sizes except zeros in 64 bits."""
    return (
        isinstance(value, (list, tuple))
        and len(value) <= 64
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
        and math.prod(n for n in value if n) < 1 << 63
    )


class Fields:
    """An object, from JSON or a pickle. Methods raise :class:`~..errors.InvalidMetadataError`."""

    def __init__(self, found: Any, label: str):
        self.label = label
        if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
            self.fail(f"is {type(found).__name__}, expected an object with strings as keys")
        self._found = found

    def fail(self, what: str) -> NoReturn:
        raise InvalidMetadataError(f"{self.label}: {what}")

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def require_format(self, name: str, version: int) -> None:
        found = self._found.get("format"), self._found.get("version")
        if found != (name, version):
            self.fail(
                f"has format {found[0]!r:.40} version {found[1]!r:.40}, but this version of "
                f"xla_fsdp reads {name!r} version {version}"
            )

    def json(self, name: str) -> Any:
        if name not in self._found:
            self.fail(f"has no {name!r:.120}")
        return self._found[name]

    def _require(self, name: str, valid: Callable[[Any], bool], expected: str) -> Any:
        value = self.json(name)
        if not valid(value):
            self.fail(f"{name!r:.80} is {value!r:.80}, expected {expected}")
        return value

    def text(self, name: str) -> str:
        return self._require(name, lambda value: isinstance(value, str), "a string")

    def integer(self, name: str, least: int = 0) -> int:
        return self._require(
            name,
            lambda value: type(value) is int and least <= value < 1 << 63,
            f"an integer of at least {least}",
        )

    def dtype(self, name: str) -> str:
        expected = f"one of {', '.join(DTYPES)}"
        return self._require(name, lambda v: isinstance(v, str) and v in DTYPES, expected)

    def list(self, name: str) -> Sequence[Any]:
        return self._require(name, lambda value: isinstance(value, (list, tuple)), "a list")

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._require(name, is_shape, "a shape: a list of sizes"))

    def names(self, name: str, least: int = 1) -> tuple[str, ...]:
        value = self.list(name)
        if len(value) < least or not all(isinstance(n, str) and n for n in value):
            self.fail(f"{name!r:.80} is {value!r:.80}, expected a list of names")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        return self.child(name)._found

    def child(self, name: str) -> Fields:
        return Fields(self.json(name), f"{self.label}: {name!r:.80}")

    def children(self) -> dict[str, Fields]:
        return {name: self.child(name) for name in self}

    def objects(self, name: str) -> Sequence[Fields]:
        """The items of a list of objects."""
        values = enumerate(self.list(name))
        return [Fields(value, f"{self.label}: {name}[{number}]") for number, value in values]

"""Fields of untrusted JSON objects: of the type that is expected, or an error that says where."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from ..errors import InvalidMetadataError
from .dtypes import DTYPES

T = TypeVar("T")


def is_shape(value: Any) -> bool:
    """Whether a list from JSON is a shape that a tensor can have: torch multiplies all sizes but
    zeros with 64 bits, ``[2**62, 2**62, 0]`` is none."""
    return (
        isinstance(value, list)
        and len(value) <= 64
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
        and math.prod(n for n in value if n) < 1 << 63
    )


class Fields:
    """One JSON object. All methods raise :class:`~..errors.InvalidMetadataError`."""

    def __init__(self, found: Mapping[str, Any], label: str):
        self._found = found
        self._label = label

    def fail(self, what: str) -> NoReturn:
        raise InvalidMetadataError(f"{self._label}: {what}")

    def has(self, name: str) -> bool:
        return name in self._found

    def json(self, name: str) -> Any:
        """Whatever it is."""
        if name not in self._found:
            self.fail(f"has no {name!r}")
        return self._found[name]

    def text(self, name: str) -> str:
        return self._of(name, str, "a string")

    def whole(self, name: str, least: int = 0) -> int:
        value = self._of(name, int, f"a whole number of at least {least}")
        if not least <= value < 1 << 63:
            self.fail(f"{name} is {value!r:.40}, expected a whole number of at least {least}")
        return value

    def dtype(self, name: str) -> str:
        value = self.text(name)
        if value not in DTYPES:
            self.fail(f"{name} is {value!r:.40}, expected one of {', '.join(DTYPES)}")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        value = self._of(name, list, "a shape")
        if not is_shape(value):
            self.fail(f"{name} is {value!r:.80}, expected a shape")
        return tuple(value)

    def names(self, name: str, least: int = 1) -> tuple[str, ...]:
        value = self._of(name, list, "a list of names")
        if len(value) < least or not all(isinstance(n, str) and n for n in value):
            self.fail(f"{name} is {value!r:.80}, expected a list of names")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        return self._of(name, dict, "an object")

    def objects(self, name: str) -> list[Fields]:
        """A list of objects."""
        value = self._of(name, list, "a list")
        return [self._child(f"{name}[{number}]", each) for number, each in enumerate(value)]

    def optional(self, name: str) -> Fields | None:
        """An object or null."""
        value = self.json(name)
        return None if value is None else self._child(name, value)

    def children(self, name: str) -> dict[str, Fields]:
        """An object of objects."""
        return {
            key: self._child(f"{name}[{key!r:.80}]", each)
            for key, each in self.mapping(name).items()
        }

    def children_of(self, name: str, read: Callable[[Fields, str], T]) -> dict[str, T]:
        """An object, each of whose values ``read`` understands."""
        inner = Fields(self.mapping(name), self._label)
        return {key: read(inner, key) for key in inner._found}

    def _child(self, where: str, value: Any) -> Fields:
        if not isinstance(value, dict):
            self.fail(f"{where} is {type(value).__name__}, expected an object")
        return Fields(value, f"{self._label}: {where}")

    def _of(self, name: str, kind: type[T], expected: str) -> T:
        value = self.json(name)
        if type(value) is not kind:
            self.fail(f"{name} is {value!r:.80}, expected {expected}")
        return value

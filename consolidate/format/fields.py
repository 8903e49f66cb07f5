"""Fields of untrusted objects: of the type that is expected, or an error that says where.

From JSON, or from a pickle that has tuples for lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ..errors import InvalidMetadataError
from .dtypes import DTYPES


def is_shape(value: Any) -> bool:
    """Whether a list is a shape that a tensor can have: torch multiplies all sizes but zeros with
    64 bits, ``[2**62, 2**62, 0]`` is none."""
    return (
        isinstance(value, (list, tuple))
        and len(value) <= 64
        and all(type(n) is int and 0 <= n < 1 << 63 for n in value)
        and math.prod(n for n in value if n) < 1 << 63
    )


class Fields:
    """One object. All methods raise :class:`~..errors.InvalidMetadataError`."""

    def __init__(self, found: Any, label: str):
        self.label = label
        if not isinstance(found, Mapping) or not all(isinstance(key, str) for key in found):
            self.fail(f"is {type(found).__name__}, expected an object with names as keys")
        self._found = found

    def fail(self, what: str) -> NoReturn:
        raise InvalidMetadataError(f"{self.label}: {what}")

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def require_format(self, name: str, version: int) -> None:
        """An object of a format that this reader knows."""
        found = self._found.get("format"), self._found.get("version")
        if found != (name, version):
            self.fail(
                f"is of format {found[0]!r:.40} version {found[1]!r:.40}, this reader knows "
                f"{name!r} version {version}"
            )

    def json(self, name: str) -> Any:
        """Whatever it is."""
        if name not in self._found:
            self.fail(f"has no {name!r:.120}")
        return self._found[name]

    def text(self, name: str) -> str:
        return self._of(name, (str,), "a string")

    def whole(self, name: str, least: int = 0) -> int:
        value = self._of(name, (int,), f"a whole number of at least {least}")
        if not least <= value < 1 << 63:
            self.fail(f"{name!r:.80} is {value!r:.40}, expected a whole number of at least {least}")
        return value

    def dtype(self, name: str) -> str:
        value = self.text(name)
        if value not in DTYPES:
            self.fail(f"{name!r:.80} is {value!r:.40}, expected one of {', '.join(DTYPES)}")
        return value

    def list(self, name: str) -> Sequence[Any]:
        return self._of(name, (list, tuple), "a list")

    def shape(self, name: str) -> tuple[int, ...]:
        value = self.json(name)
        if not is_shape(value):
            self.fail(f"{name!r:.80} is {value!r:.80}, expected a shape")
        return tuple(value)

    def names(self, name: str, least: int = 1) -> tuple[str, ...]:
        value = self.list(name)
        if len(value) < least or not all(isinstance(n, str) and n for n in value):
            self.fail(f"{name!r:.80} is {value!r:.80}, expected a list of names")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        return self.child(name)._found

    def child(self, name: str) -> Fields:
        """An object."""
        return Fields(self.json(name), f"{self.label}: {name!r:.80}")

    def children(self) -> dict[str, Fields]:
        """All values, which are objects."""
        return {name: self.child(name) for name in self}

    def objects(self, name: str) -> Sequence[Fields]:
        """A list of objects."""
        values = enumerate(self.list(name))
        return [Fields(value, f"{self.label}: {name}[{number}]") for number, value in values]

    def optional(self, name: str) -> Fields | None:
        """An object or null."""
        return None if self.json(name) is None else self.child(name)

    def _of(self, name: str, kinds: tuple[type, ...], expected: str) -> Any:
        value = self.json(name)
        if isinstance(value, bool) or not isinstance(value, kinds):
            self.fail(f"{name!r:.80} is {value!r:.80}, expected {expected}")
        return value

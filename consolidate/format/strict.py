"""Reads JSON from untrusted files strictly: ambiguous JSON raises an error."""

from __future__ import annotations

import json
import math
from typing import Any

from ..errors import InvalidMetadataError, first_line


def read_json(data: bytes, label: str) -> Any:
    """The value of the JSON text ``data``. ``label``: name of the file, for messages.

    Raises:
        InvalidMetadataError: ``data`` is not UTF-8 or not JSON, or has a key twice in one object
            (readers differ in which value they use), NaN or Infinity, a number with thousands of
            digits, deep nesting, or text that UTF-8 cannot encode.
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
    except ValueError as error:  # from json, from decoding, from int() or from this module
        raise InvalidMetadataError(f"{label}: not valid JSON: {first_line(error):.160}") from None


def write_json(value: Any) -> bytes:
    """The shortest JSON text of ``value``. Equal values give equal bytes."""
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
    if math.isinf(value):  # 1e999
        raise ValueError(f"{text:.40} is larger than any float")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")

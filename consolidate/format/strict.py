"""JSON from untrusted files: one meaning, or an error."""

from __future__ import annotations

import json
from typing import Any

from ..errors import InvalidMetadataError


def read_json(data: bytes, label: str) -> Any:
    """What ``data`` says.

    Raises:
        InvalidMetadataError: not UTF-8 or not JSON, a key twice in one object (readers differ in
            which they take), NaN or Infinity, numbers of thousands of digits, deep nesting, half a
            surrogate pair (which cannot be written again).
    """
    try:
        found = json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        if b"\\ud" in data.lower():
            json.dumps(found, ensure_ascii=False).encode("utf-8")
        return found
    except RecursionError:
        raise InvalidMetadataError(f"{label}: JSON is nested too deeply") from None
    except ValueError as error:  # of json, of UTF-8, of int() and our own
        reason = str(error).partition("\n")[0]
        raise InvalidMetadataError(f"{label}: not valid JSON: {reason:.160}") from None


def write_json(value: Any) -> bytes:
    """The shortest JSON; equal values give equal bytes."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {key!r:.80} stands twice in one object")
            seen.add(key)
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")

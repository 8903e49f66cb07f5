"""The options of a result, validated."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionsError

SAFETENSORS, PTH = "safetensors", "pth"
FORMATS = (SAFETENSORS, PTH)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{unit}B": 1000**power for power, unit in enumerate("KMGT", 1)}
_UNITS |= {f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", 1)}


@dataclass(frozen=True)
class Options:
    """The options of a result.

    Attributes:
        format: ``"safetensors"`` or ``"pth"``.
        max_shard_size: maximum bytes of the tensors in a safetensors file, None for one file.
        optimizer: whether to write the optimizer state too.
        dtype: safetensors name of the dtype for floating-point parameters (``"BF16"``), None for no
            cast.
        tied: ``{alias: parameter name}``, other names under which parameters are also saved.
    """

    format: str
    max_shard_size: int | None = None
    optimizer: bool = False
    dtype: str | None = None
    tied: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise OptionsError(f"format is {self.format!r:.40}, expected one of {FORMATS}")
        if self.max_shard_size is not None:
            if type(self.max_shard_size) is not int or self.max_shard_size < 1:
                raise OptionsError(
                    f"max_shard_size is {self.max_shard_size!r:.40}, expected a number of bytes of "
                    "at least 1"
                )
            if self.format != SAFETENSORS:
                raise OptionsError(
                    "max_shard_size requires --format safetensors: a torch file cannot be split. "
                    "Remove one of the two options."
                )
        if self.dtype is not None and self.dtype not in DTYPES.values():
            raise OptionsError(f"dtype is {self.dtype!r:.40}, expected one of {list(DTYPES)}")

    def described(self) -> dict[str, Any]:
        """The options as JSON."""
        return {**vars(self), "tied": dict(self.tied)}


def parse_size(text: str | int) -> int:
    """Number of bytes of a size: ``"5GB"`` is 5 * 10**9, ``"5GiB"`` is 5 * 2**30, ``"5"`` is 5.

    Raises:
        OptionsError: ``text`` is not a size of at least one byte.
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", str(text))
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if not found or found[2].lower() not in units:
        raise OptionsError(f"{text!r:.40} is not a size like 5GB, 500MB or 2GiB")
    size = int(float(found[1]) * units[found[2].lower()])
    if size < 1:
        raise OptionsError(f"{text!r:.40} is less than one byte, expected a size like 5GB")
    return size

"""The options of a result, and the path where it is written."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import OptionsError

SAFETENSORS, PTH = "safetensors", "pth"
FORMATS = (SAFETENSORS, PTH)
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_EXTENSIONS = {".safetensors": SAFETENSORS, ".pth": PTH, ".pt": PTH, ".bin": PTH}
_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)}


@dataclass(frozen=True)
class Options:
    """The options of a result.

    Attributes:
        max_shard_size: maximum bytes of the tensors in a safetensors file, None for one file.
        dtype: safetensors name of the dtype to cast floating-point parameters to, or None.
        tied: ``{alias: parameter name}``.
    """

    format: str
    max_shard_size: int | None = None
    optimizer: bool = False
    dtype: str | None = None
    tied: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise OptionsError(f"format is {self.format!r:.40}, expected one of {FORMATS}")
        if self.max_shard_size is not None and self.format != SAFETENSORS:
            raise OptionsError(
                "max_shard_size splits safetensors files only, and the result is a torch file. "
                "Pass --format safetensors, or remove max_shard_size."
            )


def parse_size(text: str | int) -> int:
    """``"5GB"`` is 5 * 10**9, ``"5GiB"`` is 5 * 2**30, ``"5"`` is 5. Raises OptionsError."""
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)\s*", str(text))
    if not found or found[2].lower() not in _UNITS:
        raise OptionsError(f"max_shard_size: {text!r:.40} is not a size like 5GB, 500MB or 2GiB")
    size = int(float(found[1]) * _UNITS[found[2].lower()])
    if size < 1:
        raise OptionsError(f"max_shard_size: {text!r:.40} is below 1 byte. Pass a size like 5GB")
    return size


def choose_target(
    prefix: str, sharded: bool, save_path: str, format: str | None, several: str
) -> tuple[str, bool, str]:
    """Chooses the path of the result, whether it is a folder, and its format. Raises OptionsError.

    Args:
        sharded: whether ``prefix`` is a checkpoint folder.
        save_path, format: the user's choice, "" and None for the default.
        several: name of the option that requires several files, "" if none does.
    """
    path = save_path.rstrip("/") or save_path
    extension = _EXTENSIONS.get(os.path.splitext(path)[1].lower())
    chosen = format or extension or (SAFETENSORS if sharded else PTH)
    if not path:
        path = default_path(prefix.rstrip("/") if sharded else prefix, "_consolidated")
        return path if several else f"{path}.{chosen}", bool(several), chosen
    if extension is not None:
        if extension != chosen:
            raise OptionsError(
                f"{path}: is the name of a {extension} file, not of --format {chosen}. Change one "
                "of them."
            )
        if several:
            raise OptionsError(
                f"{path}: is a file, but {several} writes several files. Pass a folder instead."
            )
        return path, False, chosen
    # The result of per-rank files may have any name.
    is_file = not (sharded or several) and chosen == PTH
    return path, not is_file, chosen


def default_path(prefix: str, ending: str) -> str:
    """Raises OptionsError if ``prefix`` is a URL."""
    if "://" in prefix:
        raise OptionsError(f"{prefix}: is a URL. Pass a path on a local disk as --save_path.")
    return prefix + ending

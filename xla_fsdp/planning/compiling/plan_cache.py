"""Results of the compiler, cached on disk."""

from __future__ import annotations

import gzip
import json
import os
import uuid
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path

from ...files import default_cache_folder
from ..program.flops import model_flops
from ..records import CompilerMemory, reader


@dataclass(frozen=True)
class CompiledStep:
    """What the compiler made of a program.

    Attributes:
        key: digest of program, slice, options and compiler versions.
        traced: the program as it was passed to the compiler, an ``HloModuleProto``.
        scheduled: likewise; without cycle estimates if the program did not fit.
        assignment: text of the buffer assignment.
        memory: ``None`` if the program did not fit.
        refusal: the compiler's message in that case, else "".
        model_flops: of one step on one device; ``None``: those of ``traced``.
        options: the compiler options that were set, with the values that libtpu reports.
        host_memory: peak bytes of the compiler's process; 0 if unknown.
    """

    key: str
    traced: bytes
    scheduled: bytes
    assignment: str
    memory: CompilerMemory | None
    refusal: str
    seconds: float
    from_cache: bool
    model_flops: float | None
    options: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    host_memory: int = 0

    @cached_property
    def flops(self) -> float:
        return model_flops(self.traced) if self.model_flops is None else self.model_flops


class PlanCache:
    """A folder of compiler results; ``None`` stores nothing.

    Several processes may share it. A file that is damaged, or of another version, counts as
    missing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def at(cls, where: str | os.PathLike[str] | bool) -> PlanCache:
        """The cache for ``plan(cache=where)``; raises TypeError for another type."""
        if where is True:
            return cls(default_cache_folder("plans"))
        if where and not isinstance(where, (str, os.PathLike)):
            raise TypeError(f"cache must be True, False or a folder, got {where!r}")
        return cls(Path(where) if where else None)

    def read(self, key: str) -> CompiledStep | None:
        if self._folder is None:
            return None
        try:
            with gzip.open(self._folder / f"{key}.json.gz", "rt", encoding="utf-8") as file:
                step: CompiledStep = reader(CompiledStep)(json.load(file))
        except (OSError, EOFError, zlib.error, RecursionError, ValueError):
            return None
        except (TypeError, KeyError, AttributeError):  # of another version
            return None
        return replace(step, from_cache=True) if step.key == key else None

    def write(self, step: CompiledStep) -> None:
        if self._folder is None:
            return
        text = json.dumps(asdict(step), default=lambda data: data.decode("latin-1"))
        content = gzip.compress(text.encode(), compresslevel=4)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / f"{step.key}.json.gz", content)
        except OSError as error:
            warnings.warn(
                f"the plan is not kept, {self._folder} cannot be written ({error.strerror}); pass "
                "cache=FOLDER or cache=False",
                stacklevel=2,
            )


def write_whole(place: Path, content: bytes) -> None:
    """Writes a file atomically."""
    partial = place.with_name(f".{place.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "xb") as stream:
            stream.write(content)
        os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)

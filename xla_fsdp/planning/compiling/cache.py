"""Results of the compiler, cached on disk by the digest of the request."""

from __future__ import annotations

import gzip
import json
import os
import uuid
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ...cache_folders import default_cache_folder
from ..records import CompilerMemory


@dataclass(frozen=True)
class CompiledStep:
    """What the compiler made of a program.

    Attributes:
        key: digest of program, slice, options and compiler versions.
        traced: text of the program as it was handed over.
        scheduled: text of the scheduled program. Without cycle estimates if it did not fit.
        assignment: text of the compiler's buffer assignment.
        memory: its own memory figures; ``None`` if the program did not fit while compiling.
        refusal: the compiler's message in that case, else "".
        seconds: how long it compiled.
        from_cache: nothing was compiled now.
        model_flops: of one step on one device, counted in ``traced``.
        options: values that the flags of libtpu had which somebody set, as it states them.
        versions: of torch_xla, jax, jaxlib, libtpu, and the compiler's Python.
    """

    key: str
    traced: str
    scheduled: str
    assignment: str
    memory: CompilerMemory | None
    refusal: str
    seconds: float
    from_cache: bool
    model_flops: float
    options: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)


class PlanCache:
    """A folder of earlier results. ``folder=None`` stores nothing.

    Files appear complete or not at all; one that is damaged, or of another version of this package,
    counts as missing. Several processes may use a folder at the same time.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def at(cls, where: str | os.PathLike[str] | bool) -> PlanCache:
        """``True``: ``$XDG_CACHE_HOME/xla_fsdp/plans``, by default in ``~/.cache``; ``False``: no
        cache; else a folder."""
        if where is True:
            return cls(default_cache_folder("plans"))
        return cls(Path(where) if where else None)

    def read(self, key: str) -> CompiledStep | None:
        record = self._load(f"{key}.json.gz")
        try:
            memory = record.pop("memory")
            step = CompiledStep(memory=CompilerMemory(**memory) if memory else None, **record)
        except (TypeError, KeyError, AttributeError):
            return None
        whole = _has_types(step) and (memory is None or _has_types(step.memory))
        return replace(step, from_cache=True) if whole and step.key == key else None

    def write(self, step: CompiledStep) -> None:
        self._store(f"{step.key}.json.gz", asdict(step))

    def programs(self, key: str, ranks: Sequence[int]) -> list[str] | None:
        """The fingerprints that the programs of ``ranks`` had when the first had ``key``."""
        found = self._load(_name(key, ranks))
        whole = isinstance(found, list) and all(isinstance(one, str) for one in found)
        return found if whole and len(found) == len(ranks) else None

    def write_programs(self, key: str, ranks: Sequence[int], programs: Sequence[str]) -> None:
        self._store(_name(key, ranks), list(programs))

    def _load(self, name: str) -> Any:
        if self._folder is None:
            return None
        try:
            with gzip.open(self._folder / name, "rt", encoding="utf-8") as file:
                return json.load(file)
        except (OSError, ValueError, EOFError, zlib.error, RecursionError):
            return None

    def _store(self, name: str, record: Any) -> None:
        if self._folder is None:
            return
        content = gzip.compress(json.dumps(record).encode(), compresslevel=4)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / name, content)
        except OSError as error:
            # A result of minutes of compiling is worth more than its copy in the cache.
            warnings.warn(
                f"the plan is not kept, {self._folder} cannot be written ({error.strerror}); pass "
                "cache=FOLDER or cache=False",
                stacklevel=2,
            )


def _has_types(record: Any) -> bool:
    """Whether every field has the simple type that it is stated with."""
    kinds: dict[Any, Any] = {
        "str": str,
        "int": int,
        "float": (int, float),
        "bool": bool,
        "dict[str, str]": dict,
    }
    return all(
        isinstance(getattr(record, one.name), kinds[str(one.type)])
        for one in fields(record)
        if one.type in kinds
    )


def write_whole(place: Path, content: bytes) -> None:
    """Writes a file completely or not at all."""
    partial = place.with_name(f".{place.name}.{uuid.uuid4().hex}.partial")
    try:
        with open(partial, "xb") as stream:
            stream.write(content)
        os.replace(partial, place)
    finally:
        partial.unlink(missing_ok=True)


def _name(key: str, ranks: Sequence[int]) -> str:
    return f"{key}-ranks-{'-'.join(map(str, ranks))}.json.gz"

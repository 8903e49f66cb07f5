"""Names of the last release that still work, with a DeprecationWarning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import wraps
from typing import Any, TypeVar

# Module or class -> old name -> new name.
RENAMED: dict[str, dict[str, str]] = {
    "xla_fsdp": {"latest": "latest_checkpoint", "loaded_later": "defer_init"},
    "xla_fsdp.compiler_options": {"for_large_products": "for_large_matmuls"},
    "Report": {"beside": "compare_trace"},
    "ShardingSettings": {"shard_ranks": "shard_group_size", "operation_vmem": "scoped_vmem_kib"},
}

Class = TypeVar("Class", bound=type)


def new_name(owner: str, old: str) -> str | None:
    """The new name of ``old``, with a warning for the caller's caller; else None."""
    new = RENAMED[owner].get(old)
    if new is not None:
        _warn_deprecated(owner, old, new, stacklevel=4)
    return new


def rename_keys(owner: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """``given`` with new names, with a warning. Raises TypeError for a name given twice."""
    renamed = dict(given)
    for old, new in RENAMED[owner].items():
        if old not in given:
            continue
        if new in given:
            raise TypeError(
                f"{owner} got both {new!r} and {old!r}, which is its old name. Pass {new!r} only"
            )
        renamed[new] = renamed.pop(old)
        _warn_deprecated(owner, old, new, stacklevel=4)
    return renamed


def accept_old_names(cls: Class) -> Class:
    owner, init = cls.__name__, getattr(cls, "__init__")  # noqa: B009, for mypy

    @wraps(init)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        init(self, *args, **rename_keys(owner, given))

    def __getattr__(self: Any, name: str) -> Any:
        new = new_name(owner, name)
        if new is None:
            raise AttributeError(f"{owner!r} object has no attribute {name!r}")
        return getattr(self, new)

    for method in (__init__, __getattr__):
        setattr(cls, method.__name__, method)
    return cls


def _warn_deprecated(owner: str, old: str, new: str, stacklevel: int) -> None:
    message = f"{owner}: {old!r} is deprecated and will be removed in the next release. Use {new!r}"
    warnings.warn(message, DeprecationWarning, stacklevel)

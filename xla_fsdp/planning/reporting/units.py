"""Top-level units: the parts of a model by which reports group what they show."""

from __future__ import annotations

from collections.abc import Iterable


def units(modules: Iterable[str]) -> dict[str, str]:
    """The unit of every module: its first path components, such that what repeats is kept apart.

    ``blocks.3.attn.qkv`` and ``blocks.3.norm`` belong to ``blocks.3``, ``embed.proj`` to ``embed``,
    and next to ``model.layers.0.mlp``, ``model.norm`` is ``model.norm`` and not ``model``.
    """
    paths = {m: [c for c in m.split(".") if c and not c.startswith("_")] for m in set(modules)}
    holders = set()
    for path in paths.values():
        number = next((i for i, part in enumerate(path) if part.isdigit()), 0)
        holders.update(tuple(path[: i + 1]) for i in range(number))
    found = {}
    for module, path in paths.items():
        depth = 1
        while depth < len(path) and tuple(path[:depth]) in holders:
            depth += 1
        found[module] = ".".join(path[:depth])
    return found

"""Finds the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

Blocks = str | Collection[type[nn.Module]] | None


def find_blocks(model: nn.Module, blocks: Blocks = None) -> list[nn.Module]:
    """The blocks of ``model``, in its order; see ``ShardingSettings.wrap`` for ``blocks``.

    Raises ValueError if ``blocks`` names no modules or no list, and TypeError for another type.
    """
    if isinstance(blocks, str):
        return _in_list(model, blocks)
    if blocks is None:
        kind = _repeated(model)
        return [] if kind is None else _outermost_blocks(model, (kind,))
    classes = tuple(blocks)
    if not classes or not all(isinstance(one, type) for one in classes):
        raise TypeError(
            "blocks must be the name of an nn.Sequential or nn.ModuleList, classes of modules, or "
            f"None; got {blocks!r}"
        )
    found = _outermost_blocks(model, classes)
    if not found:
        names = ", ".join(one.__name__ for one in classes)
        raise ValueError(f"blocks={names}: {type(model).__name__} has no module of these classes")
    return found


def list_of(
    model: nn.Module,
    blocks: Collection[nn.Module],
    kinds: Collection[type[nn.Module]] = (nn.Sequential,),
) -> str | None:
    """The dotted name of the module of ``kinds`` that consists of exactly ``blocks``."""
    wanted = list(blocks)
    for name, module in model.named_modules():
        if type(module) in kinds and name and list(module.children()) == wanted:
            return name
    return None


def replace_modules(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is not None and child in others and parent is not others[child]:
                parent._modules[name] = others[child]


def _in_list(model: nn.Module, name: str) -> list[nn.Module]:
    try:
        found = model.get_submodule(name)
    except AttributeError as error:
        lists = [
            path for path, one in model.named_modules()
            if path and isinstance(one, (nn.Sequential, nn.ModuleList))
        ]  # fmt: skip
        raise ValueError(
            f"blocks={name!r}: {type(model).__name__} has no such submodule; its lists are "
            f"{', '.join(lists) or 'none'}"
        ) from error
    if not isinstance(found, (nn.Sequential, nn.ModuleList)) or not len(found):
        raise ValueError(
            f"blocks={name!r} is a {type(found).__name__}; it must be an nn.Sequential or "
            "nn.ModuleList with modules in it"
        )
    return list(found)


def _repeated(model: nn.Module) -> type[nn.Module] | None:
    """Among lists whose modules have one class, the class with the most parameters."""
    sizes: dict[type[nn.Module], int] = {}
    for parent in model.modules():
        if not isinstance(parent, (nn.Sequential, nn.ModuleList)):
            continue
        children = list(parent)
        kinds = {type(child) for child in children}
        if len(children) < 2 or len(kinds) != 1 or kinds & {nn.Sequential, nn.ModuleList}:
            continue
        parameters = sum(p.numel() for child in children for p in child.parameters())
        if parameters:
            kind = kinds.pop()
            sizes[kind] = sizes.get(kind, 0) + parameters
    return max(sizes, key=sizes.__getitem__, default=None)


def _outermost_blocks(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    found: list[nn.Module] = []
    for child in model.children():
        found += [child] if isinstance(child, classes) else _outermost_blocks(child, classes)
    return list(dict.fromkeys(found))


class BlockRow(nn.Sequential):
    """Runs blocks one after the other and passes further arguments to each."""

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self:
            input = block(input, *args, **kwargs)
        return input

"""Find the repeated blocks of a model, and whether one ``nn.Sequential`` runs all of them.

Also modules that run blocks one after the other, several of them in one unit. Parameters keep the
names that they have in an ``nn.Sequential``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

# How a caller gives the blocks: the dotted name of their list, their classes, or None to find them.
Blocks = str | Collection[type[nn.Module]] | None

# The prefix of the attribute names of units. It is removed from all names that users see.
_UNIT = "_unit_"
_IN_NAMES = re.compile(rf"(^|\.){_UNIT}\d+\.")


def find_blocks(model: nn.Module, blocks: Blocks = None) -> list[nn.Module]:
    """The blocks of ``model``, in its order; see ``ShardingSettings.wrap`` for ``blocks``.

    Raises:
        ValueError: ``blocks`` names modules that do not exist, or no list of modules.
        TypeError: ``blocks`` is neither a name nor a collection of classes.
    """
    if isinstance(blocks, str):
        return _in_list(model, blocks)
    if blocks is None:
        kind = _repeated(model)
        return [] if kind is None else _outermost(model, (kind,))
    classes = tuple(blocks)
    if not classes or not all(isinstance(one, type) for one in classes):
        raise TypeError(
            "blocks must be the name of an nn.Sequential or nn.ModuleList, classes of modules, or "
            f"None; got {blocks!r}"
        )
    found = _outermost(model, classes)
    if not found:
        names = ", ".join(one.__name__ for one in classes)
        raise ValueError(f"blocks={names}: {type(model).__name__} has no module of these classes")
    return found


def list_of(model: nn.Module, blocks: Collection[nn.Module]) -> str | None:
    """The dotted name of the ``nn.Sequential`` that consists of exactly these ``blocks``; ``None``
    if there is none."""
    wanted = list(blocks)
    for name, module in model.named_modules():
        if type(module) is nn.Sequential and name and list(module) == wanted:
            return name
    return None


def replace_modules(model: nn.Module, others: Mapping[nn.Module, nn.Module]) -> None:
    """Replace the modules of ``model`` that are keys of ``others`` by the values."""
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


def _outermost(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> list[nn.Module]:
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, classes):
                if child not in found:
                    found.append(child)
            else:
                look(child)

    look(model)
    return found


class BlockRow(nn.Sequential):
    """Runs blocks one after the other and passes further arguments to each, as ``scan_blocks``."""

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self:
            input = block(input, *args, **kwargs)
        return input


def named_row(blocks: Mapping[int, nn.Module]) -> BlockRow:
    """A row of blocks by their numbers in the model: the module that one unit wraps."""
    row = BlockRow()
    for number, block in blocks.items():
        row.add_module(str(number), block)
    return row


class GroupedBlocks(nn.Module):
    """All blocks of a model, in units of several blocks. The model calls it: ``x = blocks(x)``.

    Parameters, modules and state dicts have the same names as in an ``nn.Sequential`` of the
    blocks, so the two can load each other's checkpoints.

    Args:
        units: wrappers, each around a :func:`named_row`; built one at a time.
    """

    def __init__(self, units: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, unit in enumerate(units):
            self.add_module(f"{_UNIT}{number}", unit)
        self._register_state_dict_hook(_without_units)
        self.register_load_state_dict_pre_hook(_with_units)
        self.register_load_state_dict_post_hook(_reported_without_units)

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        for unit in self.children():
            x = unit(x, *args, **kwargs)
        return x

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """As in wrappers, a unit has the same name as this module."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        for unit in self.children():
            yield from unit.named_modules(memo, prefix, remove_duplicate)

    def __getattr__(self, name: str) -> Any:
        """A block by its number, for ``get_submodule("blocks.3.up")``."""
        if name.isdecimal():
            for unit in self.children():
                if name in _row(unit)._modules:
                    return _row(unit)._modules[name]
        return super().__getattr__(name)

    def __getitem__(self, number: int) -> Any:
        return getattr(self, str(number if number >= 0 else number + len(self)))

    def __len__(self) -> int:
        return sum(len(_row(unit)) for unit in self.children())

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "with blocks_per_unit > 1 the blocks cannot run one by one: call x = blocks(x) instead "
            "of looping over them"
        )


def _row(unit: nn.Module) -> BlockRow:
    row = unit.module
    assert isinstance(row, BlockRow)
    return row


def _without_units(
    module: GroupedBlocks, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """State-dict hook. It removes and re-inserts every key, which preserves the order."""
    for key in list(state_dict):
        value, inside = state_dict.pop(key), key[len(prefix) :]
        state_dict[prefix + _cleaned(inside) if key.startswith(prefix) else key] = value


def _with_units(
    module: GroupedBlocks,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: Any,
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Load hook: adds the names of units to the keys."""
    units = {block: name for name, unit in module.named_children() for block in _row(unit)._modules}
    for key in [key for key in state_dict if key.startswith(prefix)]:
        inside = key[len(prefix) :]
        unit = units.get(inside.partition(".")[0])
        if unit is not None:
            state_dict[f"{prefix}{unit}.{inside}"] = state_dict.pop(key)
    module.__dict__["_load_errors"] = errors


def _reported_without_units(module: GroupedBlocks, found: tuple[list[str], list[str]]) -> None:
    for names in (*found, module.__dict__.pop("_load_errors", [])):
        names[:] = [_cleaned(name) for name in names]


def _cleaned(name: str) -> str:
    return _IN_NAMES.sub(r"\1", name)

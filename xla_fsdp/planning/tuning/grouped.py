"""Blocks that run one after the other, several of them in one unit, under the names they had."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from torch import nn

# What a unit is called among the children of its parent: in no name that anybody sees.
_UNIT = "_unit_"
_IN_NAMES = re.compile(rf"(^|\.){_UNIT}\d+\.")


class BlockRow(nn.Sequential):
    """Blocks one after the other; further arguments go to each, as with ``scan_blocks``."""

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> Any:
        for block in self:
            input = block(input, *args, **kwargs)
        return input


def named_row(blocks: Mapping[int, nn.Module]) -> BlockRow:
    """The row of some blocks, under their numbers among all: what one unit is around."""
    row = BlockRow()
    for number, block in blocks.items():
        row.add_module(str(number), block)
    return row


class GroupedBlocks(nn.Module):
    """All blocks of a model, which runs them as a whole, ``x = blocks(x)``.

    Parameters, modules and state dicts have the names that they have in an ``nn.Sequential`` of the
    blocks: checkpoints go from one to the other.

    Args:
        units: wrappers, each around a :func:`named_row`. Taken one by one.
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
        """As those of wrappers: units have the name of what is around them."""
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
            "blocks that are gathered several at a time run as a whole: call x = blocks(x) instead "
            "of looping over them"
        )


def _row(unit: nn.Module) -> BlockRow:
    row = unit.module
    assert isinstance(row, BlockRow)
    return row


def _without_units(
    module: GroupedBlocks, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """State-dict hook. Every key is taken out and put back, so that the order stays."""
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
    """Load hook: the reverse."""
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

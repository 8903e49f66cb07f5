"""Chooses some combinations of settings that show every pair of settings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

Cell = TypeVar("Cell", bound=tuple)


def pairs_of(cell: tuple) -> set[tuple]:
    return set(itertools.combinations(cell, 2))


def covering(
    cells: Sequence[Cell], shown_by: Callable[[Cell], set[tuple]] = pairs_of
) -> list[Cell]:
    """Some of ``cells`` that show every pair that one of them shows, in their order.

    Each next one is the first of those that show most pairs that are missing so far.
    """
    chosen: list[Cell] = []
    missing = set().union(*map(shown_by, cells))
    while missing:
        chosen.append(max(cells, key=lambda cell: len(shown_by(cell) & missing)))
        missing -= shown_by(chosen[-1])
    return sorted(chosen, key=cells.index)

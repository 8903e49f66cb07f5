"""Sums over rows and columns of matrices of which a rank has some elements.

Shape letters: ``d`` blocks of a stack, ``k`` runs of ``w`` elements in this rank's shard: whole
rows of a matrix where shards are made of them, else single elements.
"""

from __future__ import annotations

import math

import torch

from .parts import Parts


def factors_of(part: Parts, like: torch.Tensor) -> list[Factors | None]:
    """For each parameter in ``part`` its rows and columns, ``None`` if it is no matrix."""
    return [
        Factors(part, number, like) if len(shape) > 1 and torch.Size(shape).numel() else None
        for number, shape in enumerate(part.shapes)
    ]


class Factors:
    """The last two dimensions of one parameter, of which this rank has some elements.

    Attributes:
        rows, columns: how many there are in all, those of all leading dimensions together.
        mask: which of the shard's elements are this parameter's; ``None`` for all.
    """

    def __init__(self, part: Parts, number: int, like: torch.Tensor):
        shape, offset = part.shapes[number], part.offsets[number]
        self._part = part
        self._height, self._width = shape[-2:]
        self.batch, numel = math.prod(shape[:-2]), math.prod(shape)
        self.rows, self.columns = self.batch * self._height, self.batch * self._width
        at = part.positions(like) - offset  # in the flattened parameter
        several = len(part.shapes) > 1
        self.mask = ((at >= 0) & (at < numel)) if several else None
        aligned = not several and at.numel() % self._width == 0
        self._run = self._width if aligned else 1
        # Padding counts as the last element: its squares are 0, and its updates too.
        first = at.view(-1, self._run)[:, 0].clamp(0, numel - 1)
        self._row_of = torch.div(first, self._width, rounding_mode="floor")
        self._cell_of = torch.div(first, self._width * self._height, rounding_mode="floor")
        if not aligned:
            self._cell_of = self._cell_of * self._width + first % self._width

    def means(self, squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the means over each row ``(d, rows)`` and column ``(d, columns)``.

        ``squares``: of the shard's shape, 0 in the padding.
        """
        if self.mask is not None:
            squares = torch.where(self.mask, squares, torch.zeros_like(squares))
        depth = self._part.depth
        runs = squares.reshape(depth, -1, self._run)
        rows = runs.new_zeros(depth, self.rows).index_add(1, self._row_of, runs.sum(2))
        if self._run > 1 and self.batch == 1:
            columns = runs.sum(1)
        else:
            columns = runs.new_zeros(depth, self.columns // self._run, self._run)
            columns = columns.index_add(1, self._cell_of, runs).view(depth, -1)
        return rows / self._width, columns / self._height

    def spread(self, rows: torch.Tensor, columns: torch.Tensor, eps: float) -> torch.Tensor:
        """The product of rows and columns over the rows' mean, for each element of the shard."""
        depth = self._part.depth
        means = rows.view(depth, self.batch, -1).mean(2, keepdim=True).clamp(min=eps)
        rows = (rows.view(depth, self.batch, -1) / means).view(depth, -1)
        cells = columns.reshape(depth, -1, self._run)
        per_run = torch.index_select(rows, 1, self._row_of)[:, :, None]
        if self._run > 1 and self.batch == 1:
            return (per_run * cells).view(self._part.shape)
        return (per_run * torch.index_select(cells, 1, self._cell_of)).view(self._part.shape)

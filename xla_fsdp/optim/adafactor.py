"""The optimizer Adafactor.

Shape letters: ``d`` blocks of a stack, ``k`` runs of ``w`` elements in this rank's shard: complete
rows if the shard consists of rows, otherwise single elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .base import ShardedOptimizer, require_range
from .parts import Parts, norms, reduced
from .saved import LazyState, chunks, require_keys, require_shape


class Adafactor(ShardedOptimizer):
    """``torch.optim.Adafactor``, with the rows, columns and norms of full matrices.

    Shazeer and Stern, 2018 (arXiv 1804.04235). Options, defaults and formulas are torch's. Shards
    that are not complete rows are slow on TPUs: use ``shard_param_on_dim_0`` or sizes that divide
    evenly.

    Args:
        lr: the bound of the relative step, and the factor of the decoupled weight decay.
        beta2_decay: the exponent with which the rate of the means falls.
        eps: the minimum of the second moment (its root; ``None``: the parameter's rounding), and of
            the parameter norm that a step is relative to.
        d: the bound of an update's root mean square.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ):
        require_range("lr", lr, 0)
        require_range("-beta2_decay", -beta2_decay, 0)
        if eps[0] is not None:
            require_range("eps[0]", eps[0], 0, open_low=True)  # else padding divides by 0
        require_range("eps[1]", eps[1], 0)
        require_range("d", d, 1)
        require_range("weight_decay", weight_decay, 0)
        options = dict(lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay)
        super().__init__(params, options)

    def _update_parts(self) -> None:
        own = [
            _Own(self.state[parameter], group, parameter, grad, part)
            for group, parameter, grad, part in self._trained()
        ]
        parts = [one.part for one in own]
        sums = reduced(parts, [one.sums() for one in own], "rows, columns and norms")
        updates = [one.update(total) for one, total in zip(own, sums, strict=True)]
        found = norms(parts, updates, "norms of updates")
        for one, norm, update in zip(own, found, updates, strict=True):
            one.move(update, norm)

    member_state = frozenset({"row_var", "col_var"})

    def saved_state(
        self, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Rows and columns of each matrix, and one element for each other."""
        part = Parts(parameter)
        shapes = _state_shapes(part, parameter)
        require_keys(state, ["step", *shapes])
        for key, size in shapes.items():
            require_shape(key, state[key], size)
        held = {key: state[key].detach().float() for key in shapes}
        elements = held.pop("variance", None)
        variance = None if elements is None else LazyState(torch.float32, elements.cpu)
        # One block after the other, of each block one matrix after the other.
        blocks = zip(*(value.cpu().view(part.depth, -1) for value in held.values()), strict=True)
        lengths = _lengths(part.shapes)
        kept = iter([piece for block in blocks for piece in torch.cat(block).split(lengths)])
        members: list[dict[str, Any]] = []
        for shape in part.shapes * part.depth:
            own: dict[str, Any] = {"step": state["step"]}
            if _lengths([shape]):
                own |= {"row_var": chunks(next(kept)), "col_var": chunks(next(kept))}
            else:
                own["variance"] = variance
            members.append(own)
        return members

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        part, device = Parts(parameter), parameter.device
        state: dict[str, Any] = {"step": torch.tensor(float(saved["step"]), device=device)}
        shapes = _state_shapes(part, parameter)
        if shapes.pop("variance", None) is not None:
            state["variance"] = saved.get(
                "variance", torch.zeros(parameter.shape, device="cpu")
            ).to(device)
        found = []
        for number, shape in enumerate(part.shapes * part.depth):
            for key, length in zip(("row_var", "col_var"), _lengths([shape]), strict=False):
                values = saved.get(key) or []
                value = values[number] if number < len(values) else None
                found.append(
                    torch.zeros(length, device="cpu") if value is None else torch.cat(value)
                )
        if found:
            pieces = torch.cat(found).split([math.prod(size) for size in shapes.values()])
            for (key, size), piece in zip(shapes.items(), pieces, strict=True):
                state[key] = piece.view(size).to(device, copy=True)
        return state


def _lengths(shapes: Sequence[Sequence[int]]) -> list[int]:
    """The number of rows, or of columns, of each matrix."""
    sizes = [(torch.Size(shape).numel(), shape) for shape in shapes if len(shape) > 1]
    return [n // length for n, shape in sizes if n for length in (shape[-1], shape[-2])]


def _state_shapes(part: Parts, parameter: torch.Tensor) -> dict[str, list[int]]:
    """Shapes of the state: elements of vectors, rows and columns of matrices."""
    lengths, shapes = _lengths(part.shapes), {}
    if len(lengths) < 2 * len(part.shapes):
        shapes["variance"] = list(parameter.shape)
    if lengths and part.world is None:  # the format of torch.optim.Adafactor
        *batch, height, width = parameter.shape
        shapes |= {"row_var": [*batch, height, 1], "col_var": [*batch, 1, width]}
    elif lengths:
        # One dimension more than a parameter, to differ from elementwise state.
        shapes["row_and_col_var"] = [*[1] * parameter.dim(), part.depth, sum(lengths)]
    return shapes


class _Own:
    def __init__(
        self,
        state: dict[str, Any],
        group: dict[str, Any],
        parameter: torch.nn.Parameter,
        grad: torch.Tensor,
        part: Parts,
    ):
        self.state, self.group, self.parameter, self.part = state, group, parameter, part
        self.grad = part.without_padding(grad.float())
        self.factors = [
            Factors(part, number, parameter)
            for number, shape in enumerate(part.shapes)
            if _lengths([shape])
        ]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            for key, shape in _state_shapes(part, parameter).items():
                state[key] = torch.zeros(shape, device=parameter.device)
        for key, value in state.items():
            if value.dtype is not torch.float32:  # load_state_dict casts to the parameter's
                state[key] = value.float()
        state["step"].add_(1)

    @property
    def _scale(self) -> float | torch.Tensor:
        """The factor from a norm to the root mean square."""
        scales = [max(numel, 1) ** -0.5 for numel in self.part.numels]
        if len(self.part.shapes) == 1:
            return scales[0]
        return torch.tensor(scales, device=self.parameter.device)

    def sums(self) -> torch.Tensor:
        """What is summed over the ranks: squares of parameters, then rows and columns; flat."""
        weights = self.parameter.float()
        pieces = [self.part.sums(weights * weights)]
        squares = self.grad * self.grad
        means = [mean for factors in self.factors for mean in factors.means(squares)]
        if means:
            pieces.append(torch.cat(means, 1).reshape(-1))
        return torch.cat(pieces)

    def update(self, totals: torch.Tensor) -> torch.Tensor:
        """The update before clipping; ``totals``: the sums of all ranks."""
        count, state, step = self.part.count, self.state, self.state["step"]
        self.length = totals[:count].sqrt() * self._scale
        rate = step ** self.group["beta2_decay"]
        eps = self.group["eps"][0]
        eps = torch.finfo(self.parameter.dtype).eps if eps is None else eps
        estimate = None
        if "variance" in state:
            estimate = state["variance"].lerp_(self.grad * self.grad, rate)
        kept = [state[key] for key in ("row_var", "col_var", "row_and_col_var") if key in state]
        for value in kept:
            value.lerp_(totals[count : count + value.numel()].view(value.shape), rate)
            count += value.numel()
        means = [value.view(self.part.depth, -1) for value in kept]
        if len(means) == 1:
            means = list(means[0].split(_lengths(self.part.shapes), 1))
        for factors, rows, columns in zip(self.factors, means[::2], means[1::2], strict=True):
            own, mask = factors.spread(rows, columns, eps), factors.mask
            estimate = own if mask is None or estimate is None else torch.where(mask, own, estimate)
        assert estimate is not None  # there is at least one parameter
        return estimate.clamp(min=eps * eps).rsqrt() * self.grad

    def move(self, update: torch.Tensor, norm: torch.Tensor) -> None:
        """``norm``: of the full updates."""
        group, step = self.group, self.state["step"]
        rate = step.rsqrt().clamp(max=group["lr"])
        reach = self.length.clamp(min=group["eps"][1]) * rate
        reach = reach / (norm * self._scale / group["d"]).clamp(min=1.0)
        parameter = self.parameter
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_((update * self.part.spread(reach)).to(parameter.dtype))


class Factors:
    """The last two dimensions of one parameter, of which this rank has some elements.

    ``rows, columns``: for all leading dimensions together. ``mask``: the shard's elements of this
    parameter; ``None`` for all.
    """

    def __init__(self, part: Parts, number: int, like: torch.Tensor):
        shape, offset = part.shapes[number], part.offsets[number]
        self._part = part
        self._height, self._width = shape[-2:]
        self.batch, numel = math.prod(shape[:-2]), math.prod(shape)
        self.rows, self.columns = self.batch * self._height, self.batch * self._width
        at = part.positions(like) - offset
        several = len(part.shapes) > 1
        self.mask = ((at >= 0) & (at < numel)) if several else None
        aligned = not several and at.numel() % self._width == 0
        self._run = self._width if aligned else 1
        # Padding counts as the last element: its squares and updates are 0.
        first = at.view(-1, self._run)[:, 0].clamp(0, numel - 1)
        self._row_of = torch.div(first, self._width, rounding_mode="floor")
        self._cell_of = torch.div(first, self._width * self._height, rounding_mode="floor")
        if not aligned:
            self._cell_of = self._cell_of * self._width + first % self._width

    def means(self, squares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the means over rows ``(d, rows)`` and columns ``(d, columns)``."""
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
        depth = self._part.depth
        means = rows.view(depth, self.batch, -1).mean(2, keepdim=True).clamp(min=eps)
        rows = (rows.view(depth, self.batch, -1) / means).view(depth, -1)
        cells = columns.reshape(depth, -1, self._run)
        per_run = torch.index_select(rows, 1, self._row_of)[:, :, None]
        if self._run > 1 and self.batch == 1:
            return (per_run * cells).view(self._part.shape)
        return (per_run * torch.index_select(cells, 1, self._cell_of)).view(self._part.shape)

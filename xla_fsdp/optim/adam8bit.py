"""AdamW whose two moments take one byte each, with a scale for every block of elements.

Dynamic tree quantization (Dettmers, 2015, arXiv 1511.04561): elements, divided by the block's
largest, become the nearest of 256 values: 0, 1, and evenly spaced ones in seven decades below 1,
half as many in each lower decade. Values are computed, because tables are slow on TPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .base import ShardedOptimizer, require_adam_options, require_range
from .layerwise import one_minus_power
from .parts import Parts
from .saved import LazyState, require_keys, require_shape

BLOCK = 2048
_DECADES = 7
# The codes of 0, and those of 1 relative to them; signed or not.
_ZERO, _ONE = {True: 127, False: 0}, {True: 128, False: 255}


class AdamW8bit(ShardedOptimizer):
    """``torch.optim.AdamW`` with moments in 8 bits, by blocks of 2048 elements of the shard.

    Dettmers et al., 2021 (arXiv 2110.02861). Steps with another number of ranks are equal within
    the error of the encoding.

    Args:
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
        min_8bit_size: shards with fewer elements use float32 moments, as in the paper.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        min_8bit_size: int = 4096,
    ):
        require_adam_options(lr, betas, eps, weight_decay)
        require_range("min_8bit_size", min_8bit_size, 0)
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        super().__init__(params, {**options, "min_8bit_size": min_8bit_size})

    def _update_parts(self) -> None:
        for group, parameter, own_grad, part in self._trained():
            grad = part.without_padding(own_grad.float())
            state = self.state[parameter]
            if not state:
                state.update(_initial_state(parameter, group))
            state["step"].add_(1)
            mean, square = _moments(state)
            beta1, beta2 = group["betas"]
            mean = mean * beta1 + grad * (1 - beta1)
            square = square * beta2 + grad * grad * (1 - beta2)
            _keep(state, mean, square)
            scale = one_minus_power(beta2, state["step"]).sqrt()
            update = mean / one_minus_power(beta1, state["step"])
            update = update / (square.sqrt() / scale + group["eps"])
            if group["weight_decay"]:
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_((update * group["lr"]).to(parameter.dtype))

    member_state: frozenset[str] = frozenset()

    def saved_state(
        self, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """Code and scale of each element; float32 moments of small parameters."""
        shape, names = parameter.shape, [name for name, _ in _MOMENTS]
        encoded = "scales" in state
        require_keys(state, ["step", *names, *(["scales"] if encoded else [])])
        for name in names:
            require_shape(name, state[name], shape)
        if encoded:
            kept = state["scales"].detach()
            require_shape("scales", kept, _shape_of_scales(parameter))
        own: dict[str, Any] = {"step": state["step"]}
        for number, name in enumerate(names):
            moment = state[name].detach()
            if not encoded:
                own[name] = LazyState(torch.float32, moment.float().cpu)
                continue

            def scales(number: int = number) -> torch.Tensor:
                return scales_of_elements(kept.float().cpu().view(2, -1)[number], shape)

            # torch's load_state_dict would cast other dtypes.
            own[f"{name}_numbers"] = LazyState(torch.uint8, moment.to(torch.uint8).cpu)
            own[f"{name}_scales"] = LazyState(torch.float32, scales)
        return [own] * Parts(parameter).count

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Blocks with the same elements get the same bits. Others are encoded again.

        This moves an element by at most half the distance of two of the 256 values.
        """
        state = _initial_state(parameter, group)
        state["step"].fill_(float(saved["step"]))
        scales = []
        for name, signed in _MOMENTS:
            value = saved.get(name, torch.zeros(parameter.shape, device="cpu")).float()
            numbers, own = saved.get(f"{name}_numbers"), saved.get(f"{name}_scales")
            if numbers is not None and own is not None:
                value = value + _ratios(numbers, signed) * own  # the same bits as decode's
                if "scales" in state:
                    value, made = encode_again(value, numbers, own, signed)
                    scales.append(made)
            elif "scales" in state:
                value, made = encode(value, signed)
                scales.append(made)
            state[name] = value.to(parameter.device)
        if scales:
            kept = torch.stack(scales).view(state["scales"].shape)
            state["scales"] = kept.to(parameter.device)
        return state


def _shape_of_scales(parameter: torch.nn.Parameter) -> list[int]:
    """Its dimensions tell checkpoints that it is neither elementwise nor one value."""
    return [*[1] * parameter.dim(), 2, -(-parameter.numel() // BLOCK)]


def _initial_state(parameter: torch.nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = {"step": torch.zeros((), device=parameter.device)}
    encoded = parameter.numel() >= group["min_8bit_size"]
    for name, signed in _MOMENTS:
        code, dtype = (_ZERO[signed], torch.uint8) if encoded else (0.0, torch.float32)
        state[name] = torch.full_like(parameter, code, dtype=dtype)
    if encoded:
        state["scales"] = torch.zeros(_shape_of_scales(parameter), device=parameter.device)
    return state


def _moments(state: dict[str, Any]) -> list[torch.Tensor]:
    if "scales" not in state:
        return [state[name] for name, _ in _MOMENTS]
    scales = state["scales"].view(2, -1)
    return [decode(state[name], scales[n], signed) for n, (name, signed) in enumerate(_MOMENTS)]


def _keep(state: dict[str, Any], *moments: torch.Tensor) -> None:
    kept = list(moments)
    if "scales" in state:
        pairs = zip(moments, _MOMENTS, strict=True)
        encoded = [encode(moment, signed) for moment, (_, signed) in pairs]
        kept = [numbers for numbers, _ in encoded]
        scales = torch.stack([scales for _, scales in encoded])
        state["scales"].copy_(scales.view(state["scales"].shape))
    for (name, _), value in zip(_MOMENTS, kept, strict=True):
        if state[name].dtype is not value.dtype:  # load_state_dict casts
            state[name] = state[name].to(value.dtype)
        state[name].copy_(value)  # in place, so that the program reuses its memory


# The names of the moments, and whether they have a sign.
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))


def encode(value: torch.Tensor, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of float32 ``value``, uint8 in its shape, and the scales of the blocks."""
    blocks = _in_blocks(value)
    scales = blocks.abs().amax(1)
    ratio = blocks / torch.where(scales > 0, scales, torch.ones_like(scales))[:, None]
    size = ratio.abs()
    number, below = torch.zeros_like(size), 0.0
    for low, width, count, first in _decades(signed):
        place = ((size - low) / width).floor().clamp(0, count - 1) + first
        number = torch.where(size > (below + (low + 0.5 * width)) / 2, place, number)
        below = low + (count - 0.5) * width  # the largest value of the decade
    one = _ONE[signed]
    number = torch.where(size > (below + 1.0) / 2, torch.full_like(number, one), number)
    if signed:
        # The value 1 exists only with a positive sign.
        number = torch.where(ratio < 0, -number.clamp(max=one - 1), number) + _ZERO[signed]
    return number.reshape(-1)[: value.numel()].view(value.shape).to(torch.uint8), scales


def decode(numbers: torch.Tensor, scales: torch.Tensor, signed: bool) -> torch.Tensor:
    blocks = _in_blocks(_ratios(numbers, signed)) * scales[:, None]
    return blocks.reshape(-1)[: numbers.numel()].view(numbers.shape)


def scales_of_elements(scales: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return scales.repeat_interleave(BLOCK)[: shape.numel()].view(shape)


def encode_again(
    value: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, signed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Does :func:`encode`, but keeps the codes of unchanged blocks, bit for bit.

    ``scales``: one for each element; 0 if there was none, or in a block of zeros.
    """
    anew, scales_anew = encode(value, signed)
    before, own = _in_blocks(scales), _in_blocks(value)
    top = before.amax(1)
    same = ((before == top[:, None]) | ((before == 0) & (own == 0))).all(1)
    kept = torch.where(scales > 0, numbers, torch.full_like(numbers, _ZERO[signed]))
    of_element = scales_of_elements(same, value.shape)
    return torch.where(of_element, kept, anew), torch.where(same, top, scales_anew)


def _ratios(numbers: torch.Tensor, signed: bool) -> torch.Tensor:
    number = numbers.float() - _ZERO[signed]
    place = number.abs()
    size = torch.zeros_like(place)
    for low, width, _, first in _decades(signed):
        size = torch.where(place >= first, (place - first) * width + (low + 0.5 * width), size)
    size = torch.where(place >= _ONE[signed], torch.ones_like(size), size)
    return torch.where(number < 0, -size, size)


def _in_blocks(value: torch.Tensor) -> torch.Tensor:
    flat = value.reshape(-1)
    missing = -flat.numel() % BLOCK
    if missing:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(-1, BLOCK)


def _decades(signed: bool) -> Iterator[tuple[float, float, int, int]]:
    """Of each decade: where it begins, the distance of its values, their number (of one sign), and
    the code of the smallest, relative to that of 0."""
    first = 1
    for decade in range(_DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        yield (
            10.0 ** (decade - _DECADES),
            0.9 * 10.0 ** (decade + 1 - _DECADES) / count,
            count,
            first,
        )
        first += count

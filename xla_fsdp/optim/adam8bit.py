"""AdamW whose two moments take a byte each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .base import ShardedOptimizer, require_range
from .blockwise import BLOCK, decode, decode_each, encode, encode_again, scales_of_elements
from .layerwise import one_minus_power
from .parts import Parts
from .saved import Made, require_keys, require_shape


class AdamW8bit(ShardedOptimizer):
    """``torch.optim.AdamW`` with moments in 8 bits, by blocks of 2048 elements of the shard.

    Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2021 (arXiv 2110.02861). The
    moments are made float32 for their update and encoded again, see
    :mod:`xla_fsdp.optim.blockwise`. Which elements share a block depends on the ranks and the
    layout, so steps on other numbers of ranks are equal within the error of the encoding.

    A step sends nothing.

    Args:
        params: parameters, or groups of them.
        lr, betas, eps, weight_decay: as of ``torch.optim.AdamW``.
        min_8bit_size: shards of fewer elements keep float32 moments, as the authors do.

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
        require_range("lr", lr, 0)
        require_range("betas[0]", betas[0], 0, 1)
        require_range("betas[1]", betas[1], 0, 1)
        require_range("eps", eps, 0, open_low=True)  # padding would be divided by 0
        require_range("weight_decay", weight_decay, 0)
        require_range("min_8bit_size", min_8bit_size, 0)
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "min_8bit_size": min_8bit_size,
            },
        )

    def _update(self) -> None:
        for group, parameter, _ in self._trained():
            assert parameter.grad is not None  # those without were left out
            grad, state = parameter.grad.float(), self.state[parameter]
            if not state:
                _begin(state, parameter, parameter.numel() < group["min_8bit_size"])
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

    # No value is a single parameter's own, see SavesItself.
    member_state: frozenset[str] = frozenset()

    def saved_state(
        self, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        """For checkpoints: numbers and scales of each element; float32 of small parameters."""
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
                own[name] = Made(torch.float32, moment.float().cpu)
                continue

            def scales(number: int = number) -> torch.Tensor:
                return scales_of_elements(kept.float().cpu().view(2, -1)[number], shape)

            # torch's load_state_dict makes other dtypes of it.
            own[f"{name}_numbers"] = Made(torch.uint8, moment.to(torch.uint8).cpu)
            own[f"{name}_scales"] = Made(torch.float32, scales)
        return [own] * Parts(parameter).count

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The reverse. Blocks that are what they were get the very bits; others, of other ranks or
        another wrapping, are decoded and encoded anew: each element is then off by half the
        distance between two of the 256 values at most, as in any step."""
        state: dict[str, Any] = {}
        _begin(state, parameter, parameter.numel() < group["min_8bit_size"])
        state["step"].fill_(float(saved["step"]))
        scales = []
        for name, signed in _MOMENTS:
            value = saved.get(name, torch.zeros(parameter.shape)).float()
            numbers, own = saved.get(f"{name}_numbers"), saved.get(f"{name}_scales")
            if numbers is not None and own is not None:
                value = value + decode_each(numbers, own, signed)
            if "scales" in state:
                if numbers is None or own is None:
                    value, made = encode(value, signed)
                else:
                    value, made = encode_again(value, numbers, own, signed)
                scales.append(made)
            state[name] = value.to(parameter.device)
        if scales:
            kept = torch.stack(scales).view(state["scales"].shape)
            state["scales"] = kept.to(parameter.device)
        return state


def _shape_of_scales(parameter: torch.nn.Parameter) -> list[int]:
    """Of both moments. More dimensions than a parameter has, and more numbers than one: no
    checkpoint may take it for a value an element, or for one of the whole parameter."""
    return [*[1] * parameter.dim(), 2, -(-parameter.numel() // BLOCK)]


def _begin(state: dict[str, Any], parameter: torch.nn.Parameter, small: bool) -> None:
    zeros = torch.zeros_like(parameter, dtype=torch.float32)
    state["step"] = torch.zeros((), device=parameter.device)
    for name, signed in _MOMENTS:
        state[name], scales = (zeros.clone(), None) if small else encode(zeros, signed)
        if scales is not None:
            state["scales"] = torch.zeros(_shape_of_scales(parameter), device=parameter.device)


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
        if state[name].dtype is not value.dtype:  # load_state_dict casts to the parameter's
            state[name] = state[name].to(value.dtype)
        state[name].copy_(value)  # in place, so that the program reuses its memory


# The state's names, and whether they have a sign.
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))

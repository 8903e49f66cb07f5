"""The optimizers LAMB and LARS."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from .base import ShardedOptimizer, require_adam_options, require_range
from .parts import norms


class LAMB(ShardedOptimizer):
    """Adam, with each parameter's step scaled to the norm of the parameter.

    Algorithm 2 of You et al., 2019 (arXiv 1904.00962), with the identity as the function of the
    norm: with ``r`` the bias-corrected step of Adam and ``u = r + weight_decay * w``, ``w -= lr *
    |w| / |u| * u``; the ratio is 1 if one of the norms is 0.

    Args:
        lr: the norm of the step relative to the norm of the parameter.
        betas: decay rates of the means of gradients and of their squares.
        eps: added to the root of the second mean, > 0.
        weight_decay: the factor of the parameter in its update.
        adapt: ``False`` for a group without the ratio, such as biases and norm layers: like AdamW.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        adapt: bool = True,
    ):
        require_adam_options(lr, betas, eps, weight_decay)
        options = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, adapt=adapt)
        super().__init__(params, options)

    def _update_parts(self) -> None:
        trained = list(self._trained())
        updates = []
        for group, parameter, grad, _ in trained:
            beta1, beta2 = group["betas"]
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), device=parameter.device)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"].add_(1)
            mean = state["exp_avg"].mul_(beta1).add_(grad * (1 - beta1))
            square = state["exp_avg_sq"].mul_(beta2).add_(grad * grad * (1 - beta2))
            mean = mean / one_minus_power(beta1, state["step"]).to(mean.dtype)
            square = square / one_minus_power(beta2, state["step"]).to(square.dtype)
            update = mean / (square.sqrt() + group["eps"])
            if group["weight_decay"]:
                update = update + parameter * group["weight_decay"]
            updates.append(update)
        lengths = _norms(trained, updates, "updates")
        for (group, parameter, _, part), update, (length, step) in zip(
            trained, updates, lengths, strict=True
        ):
            if group["adapt"]:
                ratio = _ratio(length, step, step)
                update = update * part.spread(ratio).to(update.dtype)
            parameter.sub_(update * group["lr"])


class LARS(ShardedOptimizer):
    """SGD with momentum, with each parameter's step scaled to the norm of the parameter.

    Algorithm 1 of You, Gitman and Ginsburg, 2017 (arXiv 1708.03888): ``ratio = trust_coefficient *
    |w| / (|g| + weight_decay * |w|)``, ``v = momentum * v + lr * ratio * (g + weight_decay * w)``,
    ``w -= v``; the ratio is 1 if one of the norms is 0.

    Args:
        lr: the global learning rate.
        momentum: the factor of the last step in the next.
        weight_decay: the L2 penalty.
        trust_coefficient: the norm of the step relative to that of the parameter.
        adapt: ``False`` for a group without the ratio, such as biases and norm layers: SGD.

    Raises:
        ValueError: an option is out of range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.1,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
        adapt: bool = True,
    ):
        require_range("lr", lr, 0)
        require_range("momentum", momentum, 0, 1)
        require_range("weight_decay", weight_decay, 0)
        require_range("trust_coefficient", trust_coefficient, 0, open_low=True)
        options = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, adapt=adapt)
        super().__init__(params, {**options, "trust_coefficient": trust_coefficient})

    def _update_parts(self) -> None:
        trained = list(self._trained())
        lengths = _norms(trained, [grad for _, _, grad, _ in trained], "gradients")
        for (group, parameter, grad, part), (length, slope) in zip(trained, lengths, strict=True):
            decay = group["weight_decay"]
            step = (grad + parameter * decay if decay else grad) * group["lr"]
            if group["adapt"]:
                ratio = _ratio(length * group["trust_coefficient"], slope, slope + length * decay)
                step = step * part.spread(ratio).to(step.dtype)
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            parameter.sub_(state["momentum_buffer"].mul_(group["momentum"]).add_(step))


def one_minus_power(beta: float, step: torch.Tensor) -> torch.Tensor:
    """``1 - beta ** step``, accurate in float32 also if beta is close to 1."""
    if beta == 0:
        return torch.ones_like(step)
    return -torch.expm1(step * math.log(beta))


def _norms(
    trained: list[Any], others: list[torch.Tensor], label: str
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each of ``trained``, the norm of the parameter and that of its tensor in ``others``."""
    parts = [part for *_, part in trained]
    values = [*(parameter for _, parameter, *_ in trained), *others]
    found = norms([*parts, *parts], values, f"norms of parameters and {label}")
    return list(zip(found[: len(parts)], found[len(parts) :], strict=True))


def _ratio(above: torch.Tensor, norm: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """``above / below``, 1 where ``above`` or ``norm`` is 0."""
    return torch.where((above > 0) & (norm > 0), above / below, torch.ones_like(above))

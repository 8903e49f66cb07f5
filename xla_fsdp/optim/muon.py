"""The optimizer Muon."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from ..collectives.world import World
from .base import ShardedOptimizer, require_range
from .parts import Parts


class Muon(ShardedOptimizer):
    """``torch.optim.Muon`` on full matrices, although each rank has only some of their elements.

    Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024: momentum, made
    orthogonal by Newton-Schulz iterations. Options, defaults and formulas are torch's. All full
    matrices of one shape are on the device at the same time.

    Args:
        params: matrices (in the unsharded model), or groups of them; see :func:`split_matrices`.
        lr, weight_decay, momentum, nesterov: as in SGD; weight decay is decoupled.
        ns_coefficients, ns_steps, eps: of the iteration.
        adjust_lr_fn: ``None`` or ``"original"``: times ``sqrt(max(1, rows / columns))``;
            ``"match_rms_adamw"``: times ``0.2 * sqrt(max(rows, columns))``.
        compute_dtype: the dtype in which matrices are sent and iterated on.

    Raises:
        ValueError: an option is out of range; a parameter is not a matrix in the unsharded model.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        compute_dtype: torch.dtype = torch.bfloat16,
    ):
        require_range("lr", lr, 0)
        require_range("weight_decay", weight_decay, 0)
        require_range("momentum", momentum, 0, 1)
        require_range("eps", eps, 0, open_low=True)
        require_range("ns_steps", ns_steps, 1, 100)
        if len(ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, got {ns_coefficients}")
        if adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(
                f"adjust_lr_fn must be None, 'original' or 'match_rms_adamw', got {adjust_lr_fn!r}"
            )
        if not compute_dtype.is_floating_point:
            raise ValueError(f"compute_dtype must be a floating-point dtype, got {compute_dtype}")
        options: dict[str, Any] = dict(lr=lr, weight_decay=weight_decay, momentum=momentum)
        options |= dict(nesterov=nesterov, ns_coefficients=ns_coefficients, eps=eps)
        # Checkpoints support plain values only.
        dtype = str(compute_dtype).removeprefix("torch.")
        options |= dict(ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, compute_dtype=dtype)
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            part = Parts(parameter)
            wrong = [shape for shape in part.shapes if len(shape) != 2]
            if wrong:
                self.param_groups.pop()
                raise ValueError(
                    f"Muon supports only matrices, but {part.name} is (or contains) a parameter of "
                    f"shape {list(wrong[0])}. Use another optimizer for it, as in "
                    "xla_fsdp.optim.split_matrices; parameters in a flattened vector cannot be "
                    "separated, so wrap without flatten_parameters"
                )

    def _update_parts(self) -> None:
        for group in self.param_groups:
            own = [trained for trained in self._trained() if trained[0] is group]
            momenta = [
                part.gather(self._momentum(group, p, grad), "momentum of matrices")
                for _, p, grad, part in own
            ]
            # All matrices of one shape are orthogonalised together.
            alike: dict[tuple[World | None, tuple[int, ...]], list[tuple[int, int]]] = {}
            for number, (*_, part) in enumerate(own):
                for member, shape in enumerate(part.shapes):
                    alike.setdefault((part.world, shape), []).append((number, member))
            for (world, _), places in alike.items():
                matrices = [momenta[number][member] for number, member in places]
                done = _orthogonalise_by_rank(torch.cat(matrices), world, group)
                pieces = done.split([len(each) for each in matrices])
                for (number, member), piece in zip(places, pieces, strict=True):
                    momenta[number][member] = piece
            for (_, parameter, _, part), steps in zip(own, momenta, strict=True):
                scaled = [
                    step.to(parameter.dtype) * _adjustment(group["adjust_lr_fn"], shape)
                    for step, shape in zip(steps, part.shapes, strict=True)
                ]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(part.cut(scaled) * group["lr"])

    def _momentum(
        self, group: dict[str, Any], parameter: torch.nn.Parameter, grad: torch.Tensor
    ) -> torch.Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        mean = state["momentum_buffer"]
        mean.lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(mean, group["momentum"]) if group["nesterov"] else mean
        return update.to(getattr(torch, group["compute_dtype"]))


def split_matrices(
    parameters: Iterable[torch.nn.Parameter],
) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """The parameters that are matrices in the unsharded model, and the others."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in parameters:
        is_matrix = all(len(shape) == 2 for shape in Parts(parameter).shapes)
        (matrices if is_matrix else others).append(parameter)
    return matrices, others


def _orthogonalise_by_rank(
    matrices: torch.Tensor, world: World | None, group: dict[str, Any]
) -> torch.Tensor:
    count = matrices.shape[0]
    if world is None or world.size == 1 or count < 2:
        return _newton_schulz(matrices, group)
    share = math.ceil(count / world.size)
    missing = share * world.size - count
    if missing:
        matrices = torch.cat([matrices, matrices.new_zeros(missing, *matrices.shape[1:])])
    hands = matrices.view(world.size, share, *matrices.shape[1:])
    mine = torch.index_select(hands, 0, world.rank_on_device)[0]
    return world.all_gather(_newton_schulz(mine, group), "orthogonal matrices")[:count]


def _newton_schulz(matrices: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
    a, b, c = group["ns_coefficients"]
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=group["eps"])
    for _ in range(group["ns_steps"]):
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def _adjustment(name: str | None, shape: tuple[int, ...]) -> float:
    rows, columns = shape
    if name == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / columns))

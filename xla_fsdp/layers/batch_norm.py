"""Batch normalization with the statistics of the full batch, which is sharded over the ranks.

Means and variances of the ranks, in two passes, are combined after one gather (Chan, Golub and
LeVeque, 1983). From sums of x and of its square, in float32 with mean 4000 and deviation 1, no
digit of the variance would be right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ..collectives.world import World, checked_groups
from ..names import is_wrapper
from ..tpu.slices import Groups


class SyncBatchNorm(_BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` and ``3d`` with the statistics of the batch of all ranks.

    Has the parameters, buffers and state dict of ``nn.BatchNorm``. Gradients of weight and bias are
    local to the rank; FSDP averages them. Statistics are at least in float32; running statistics
    keep their dtype inside FSDP.

    With batch statistics (in training, or without running statistics), every rank of a group must
    call the module the same number of times with equal shapes.

    Args:
        num_features, eps, momentum, affine, track_running_stats, device, dtype: as in
            ``nn.BatchNorm2d``.
        groups: ordinals that share their statistics, e.g. ``[[0, 1], [2, 3]]``, every rank once;
            ``None``: all ranks together.

    Shape: ``(N, C, ...)`` to the same, in the dtype of the input.

    Raises:
        ValueError: ``groups`` overlap or have different sizes. In the forward: ``groups`` lack a
            rank; the input has fewer than two dimensions, not C channels, only one value a channel
            on all ranks of a group together (for batch statistics), or is not on an XLA device.
    """

    # Read by wrappers: bfloat16 would round a tenth of a small difference away.
    fsdp_keeps_buffer_dtypes = True
    groups: Groups | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        groups: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device, dtype)
        self.groups = None if groups is None else checked_groups("groups", groups, None)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, groups: Sequence[Sequence[int]] | None = None
    ) -> nn.Module:
        """Changes the class of every ``nn.BatchNorm1d``, ``2d`` and ``3d`` in ``module``, in place.

        Returns ``module``. Convert before wrapping and before ``checkpoint_module``.

        Raises:
            ValueError: a batch norm is wrapped already, overrides forward, or has no shape yet
                (lazy); ``groups`` as in the constructor.
            TypeError: ``module`` is not a module.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        checked = None if groups is None else checked_groups("groups", groups, None)
        wrappers = [n for n, m in module.named_modules() if is_wrapper(m)]
        found = []
        for name, one in module.named_modules():
            if isinstance(one, _BatchNorm) and not isinstance(one, SyncBatchNorm):
                _require_convertible(name, one, wrappers)
                found.append(one)
        for one in found:
            one.__class__ = cls
            vars(one)["groups"] = checked
        return module

    def _check_input_dim(self, x: torch.Tensor) -> None:
        if x.dim() < 2 or x.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm takes (N, {self.num_features}, ...), at least two dimensions with "
                f"{self.num_features} channels in the second, got an input of {tuple(x.shape)}"
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(x)
        batch = None
        if self.training or self.running_mean is None:
            batch = Batch(x, self.groups)
            mean, variance = batch.statistics(x)
            if self.training and self.track_running_stats and self.running_mean is not None:
                self._track(mean, variance * (batch.count / (batch.count - 1)))
        else:
            running_var = self.running_var
            assert running_var is not None
            mean, variance = wide(self.running_mean), wide(running_var)
        inverse = torch.rsqrt(variance + self.eps)
        return Normalized.apply(x, self.weight, self.bias, mean, inverse, batch)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        count = self.num_batches_tracked
        assert count is not None
        count.add_(1)
        momentum: float | torch.Tensor | None = self.momentum
        if momentum is None:  # no number is fetched
            momentum = 1.0 / count.to(mean.dtype)
        for running, batch in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.copy_((1.0 - momentum) * running + momentum * batch)

    def extra_repr(self) -> str:
        groups = "" if self.groups is None else f", groups={[list(g) for g in self.groups]}"
        return super().extra_repr() + groups


def _require_convertible(name: str, module: nn.Module, wrappers: Sequence[str]) -> None:
    what = f"{type(module).__name__} {name!r}"
    if any(not w or name == w or name.startswith(f"{w}.") for w in wrappers):
        raise ValueError(
            f"{what} is in a wrapped module, which may have cast its running statistics already. "
            "Call convert_sync_batchnorm before wrapping"
        )
    if isinstance(module, LazyModuleMixin):
        raise ValueError(
            f"{what} has no shape yet. Run the model once before convert_sync_batchnorm"
        )
    if getattr(module, "process_group", None) is not None:
        raise ValueError(
            f"{what} has a process_group, which XLA does not support. Set it to None and pass "
            "groups of ranks to convert_sync_batchnorm"
        )
    own = type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    if own or "forward" in vars(module):
        raise ValueError(
            f"{what} overrides forward, which a conversion would drop. Convert before "
            "checkpoint_module, and use xla_fsdp.SyncBatchNorm as base class of your classes"
        )


class Batch:
    """This rank's part of the batch of its group ``world``; ``count``: values a channel on all."""

    def __init__(self, x: torch.Tensor, groups: Groups | None):
        if x.device.type != "xla":
            raise ValueError(
                f"batch statistics of all ranks need an input on an XLA device, got {x.device}. "
                "Move model and input there, or call eval() to use running statistics"
            )
        self.world = World.to_reduce_over(groups, x.device)
        own = x.numel() // max(x.shape[1], 1)
        self.count = own * self.world.size
        if self.count < 2:
            raise ValueError(
                "Expected more than 1 value per channel for batch statistics, got an input of "
                f"{tuple(x.shape)} on {self.world.size} rank(s). Use larger batches, or eval()"
            )
        # CPU ranks with other input shapes raise an error instead of wrong statistics.
        self._label = f"batch norm of {own} values a channel"

    @torch.no_grad()
    def statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and biased variance, ``(C,)`` each."""
        x, own = wide(x), self.count // self.world.size
        (shift,) = _sums(x) / own
        distance = x - _like(shift, x)
        # The offset is 0 except for the rounding of the shift.
        offset, square = _sums(distance, distance * distance) / own
        mine = torch.stack([shift, offset, square - offset * offset])
        # (ranks, 3, C)
        shifts, offsets, variances = self.world.all_gather(mine[None], self._label).unbind(1)
        # Relative to one of the shifts, means keep more digits.
        means = (shifts - shifts[0]) + offsets
        mean = means.mean(0)
        variance = (variances + (means - mean).square()).mean(0)
        return shifts[0] + mean, variance.clamp(min=0.0)

    def mean(self, sums: torch.Tensor) -> torch.Tensor:
        """From ``sums``, ``(k, C)``, of this rank."""
        return self.world.all_reduce_sum(sums, self._label) / self.count


class Normalized(torch.autograd.Function):
    """``(x - mean) * inverse * weight + bias``; with a ``batch``, mean and inverse depend on x.

    Backward: Ioffe and Szegedy, *Batch normalization*, 2015, section 3: with x' = (x - mean) *
    inverse, ``inverse * weight * (dy - mean(dy) - x' * mean(dy * x'))``, with means over all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        inverse: torch.Tensor,
        batch: Batch | None,
    ) -> torch.Tensor:
        ctx.batch, ctx.bias_dtype = batch, None if bias is None else bias.dtype
        ctx.save_for_backward(x, weight, mean, inverse)
        y = (wide(x) - _like(mean, x)) * _like(inverse, x)
        if weight is not None:
            y = y * _like(wide(weight), x)
        if bias is not None:
            y = y + _like(wide(bias), x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, inverse = ctx.saved_tensors
        grad, normal = wide(grad), (wide(x) - _like(mean, x)) * _like(inverse, x)
        sums = _sums(grad, grad * normal)
        of_x = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = grad
            if ctx.batch is not None:
                of_sum, of_product = ctx.batch.mean(sums)
                of_x = grad - _like(of_sum, x) - normal * _like(of_product, x)
            scale = inverse if weight is None else inverse * wide(weight)
            of_x = (of_x * _like(scale, x)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            of_weight = sums[1].to(weight.dtype)
        if ctx.needs_input_grad[2]:
            of_bias = sums[0].to(ctx.bias_dtype)
        return of_x, of_weight, of_bias, None, None, None


def wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _sums(*values: torch.Tensor) -> torch.Tensor:
    """Sums by channel: ``(N, C, ...)`` each to ``(len(values), C)``."""
    dims = [0, *range(2, values[0].dim())]
    return torch.stack([value.sum(dims) for value in values])


def _like(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``(C,)`` in a shape that broadcasts with x."""
    return value.view(-1, *[1] * (x.dim() - 2))

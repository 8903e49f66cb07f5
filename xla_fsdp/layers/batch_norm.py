"""Batch normalisation by the statistics of the whole batch, which is spread over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.lazy import LazyModuleMixin

from ..collectives.groups import checked_groups
from ..names import is_wrapper
from ..tpu.slices import Groups
from .batch_statistics import Batch, Normalized, wide


class SyncBatchNorm(_BatchNorm):
    """``nn.BatchNorm1d``, ``2d`` and ``3d`` with the statistics of the batch of all ranks.

    Takes what ``torch.nn.SyncBatchNorm`` takes, on XLA, and has the parameters, buffers and state
    dict of ``nn.BatchNorm``. N ranks with a part of the batch each compute what ``nn.BatchNorm``
    computes on the whole. Gradients of weight and bias are the rank's own, for FSDP to average.

    Statistics, and everything between input and output, are in float32 at least. Running statistics
    keep their dtype inside FSDP whatever ``compute_dtype`` and ``buffer_dtype`` say: in bfloat16
    they would stop moving, since a tenth of a small difference is rounded away.

    Batch statistics are used in training, and in evaluation if there are no running statistics:
    then every rank of a group must call the module, equally often and with equal shapes, as the
    ranks of one XLA program do. With running statistics evaluation needs no collective.

    Args:
        num_features: C, the size of the input's dimension 1.
        eps: added to the variance.
        momentum: weight of the batch in the running statistics; ``None``: their plain average.
        affine: whether there are a weight and a bias.
        track_running_stats: whether there are running statistics.
        groups: ordinals that share their statistics, e.g. ``[[0, 1], [2, 3]]``, every rank once;
            ``None``: all ranks together.
        device, dtype: of parameters and buffers.

    Shape: ``(N, C, ...)`` to the same, in the dtype of the input.

    Raises:
        ValueError: ``groups`` that overlap or differ in size; in the forward, if they miss a rank,
            if the input has less than two dimensions, not C channels or, for batch statistics, one
            value a channel on all ranks of a group together, or if it is not on an XLA device.
    """

    # Seen by wrappers: running statistics in bfloat16 would stop moving.
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
        self.groups = _read(groups)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, groups: Sequence[Sequence[int]] | None = None
    ) -> nn.Module:
        """Makes every ``nn.BatchNorm1d``, ``2d`` and ``3d`` in ``module`` one of this class.

        In place: each stays the object that it is, with its parameters, buffers, mode, hooks and
        other attributes, and only its class changes. Returns ``module``. Convert before wrapping
        and before ``checkpoint_module``.

        Raises:
            ValueError: a batch norm is wrapped already, has a forward of its own (a subclass, or
                one replaced by ``checkpoint_module``), or has no shape yet (lazy); ``groups`` as in
                the constructor.
            TypeError: ``module`` is not a module.
        """
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        checked = _read(groups)
        wrappers = [n for n, m in module.named_modules() if is_wrapper(m)]
        found = []
        for name, one in module.named_modules():
            if isinstance(one, _BatchNorm) and not isinstance(one, SyncBatchNorm):
                _require_convertible(name, one, wrappers)
                found.append(one)
        # All were looked at before: an error leaves the module as it was.
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
            assert running_var is not None  # there are both or none
            mean, variance = wide(self.running_mean), wide(running_var)
        inverse = torch.rsqrt(variance + self.eps)
        return Normalized.apply(x, self.weight, self.bias, mean, inverse, batch)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        """Moves the running statistics, ``(C,)``, towards those of a batch."""
        count = self.num_batches_tracked
        assert count is not None  # there are all three or none
        count.add_(1)
        momentum: float | torch.Tensor | None = self.momentum
        if momentum is None:  # stays on the device: no number is fetched
            momentum = 1.0 / count.to(mean.dtype)
        for running, batch in ((self.running_mean, mean), (self.running_var, variance)):
            assert running is not None
            running.copy_((1.0 - momentum) * running + momentum * batch)

    def extra_repr(self) -> str:
        groups = "" if self.groups is None else f", groups={[list(g) for g in self.groups]}"
        return super().extra_repr() + groups


def _read(groups: Sequence[Sequence[int]] | None) -> Groups | None:
    return None if groups is None else checked_groups("groups", groups, None)


def _require_convertible(name: str, module: nn.Module, wrappers: Sequence[str]) -> None:
    what = f"{type(module).__name__} {name!r}"
    if any(not w or name == w or name.startswith(f"{w}.") for w in wrappers):
        raise ValueError(
            f"{what} is in a wrapped module, which may have cast its running statistics already; "
            "call convert_sync_batchnorm before wrapping"
        )
    if isinstance(module, LazyModuleMixin):
        raise ValueError(
            f"{what} has no shape yet; run the model once before convert_sync_batchnorm"
        )
    if getattr(module, "process_group", None) is not None:
        raise ValueError(
            f"{what} has a process_group, which XLA does not know; set it to None and give "
            "convert_sync_batchnorm the groups of ranks"
        )
    own = type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    if own or "forward" in vars(module):
        raise ValueError(
            f"{what} has a forward of its own, which a conversion would lose; convert before "
            "checkpoint_module, and use xla_fsdp.SyncBatchNorm itself in classes of your own"
        )

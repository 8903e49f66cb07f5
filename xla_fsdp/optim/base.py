"""Base classes of the optimizers in this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ..sharding.layout import spec_of
from ..sharding.sharded_parameter import as_sharded, on_local_parts
from ..sharding.sharded_tensor import sharded_tensor_of
from .parts import Parts


class ShardAwareOptimizer(Optimizer):
    """An optimizer that steps on shards, and whose state keeps its dtype when it is loaded."""

    # See planning/tracing/host_step.py.
    knows_shards = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` computes the loss again, which is returned. Collective.

        All ranks must have gradients for the same parameters.

        Raises:
            RuntimeError: loaded options and state belong to another kind of optimizer; or a
                gradient is sparse or complex.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """State keeps its dtype instead of the parameters'."""
        super().load_state_dict(state_dict)
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        own = [p for group in self.param_groups for p in group["params"]]
        for number, parameter in zip(saved, own, strict=True):
            for key, value in state_dict["state"].get(number, {}).items():
                now = self.state[parameter].get(key)
                if isinstance(now, torch.Tensor) and now.dtype is not value.dtype:
                    kept = value.detach().to(now.device, copy=True)
                    spec = spec_of(now)
                    self.state[parameter][key] = kept if spec is None else as_sharded(kept, spec)


class ShardedOptimizer(ShardAwareOptimizer):
    """An optimizer whose update is not elementwise."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises ValueError if a parameter is offloaded to the host."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            sharded = sharded_tensor_of(parameter)
            if sharded is not None and sharded.copy is not None:
                raise ValueError(
                    f"{type(self).__name__} needs {sharded.key!r} on the device, because it "
                    "communicates with all ranks, but cpu_offload stores it on the host. Use an "
                    "elementwise optimizer of torch (torch.optim.AdamW(parameters, fused=True)), "
                    "or wrap without cpu_offload"
                )

    def _update(self) -> None:
        with on_local_parts():
            self._update_parts()

    def _update_parts(self) -> None:
        """One step, on local tensors."""
        raise NotImplementedError

    def _trained(self) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter, torch.Tensor, Parts]]:
        """Groups, parameters that have a gradient, their gradients, and :class:`Parts` of them."""
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or not parameter.numel():
                    continue
                if grad.is_sparse or grad.is_complex():
                    kind = "sparse" if grad.is_sparse else "complex"
                    raise RuntimeError(
                        f"{type(self).__name__} needs real, dense gradients, but "
                        f"{Parts(parameter).name} has a {kind} one. Use another optimizer for it"
                    )
                yield group, parameter, grad, Parts(parameter)


def require_adam_options(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> None:
    require_range("lr", lr, 0)
    require_range("betas[0]", betas[0], 0, 1)
    require_range("betas[1]", betas[1], 0, 1)
    require_range("eps", eps, 0, open_low=True)  # else padding divides by 0
    require_range("weight_decay", weight_decay, 0)


def require_range(
    name: str, value: Any, low: float, high: float = float("inf"), open_low: bool = False
) -> None:
    """Raises ValueError unless ``low <= value < high`` (``low < value`` with ``open_low``)."""
    if not (low < value if open_low else low <= value) or not value < high:
        bounds = f"{'>' if open_low else '>='} {low:g}"
        bounds += "" if high == float("inf") else f" and < {high:g}"
        raise ValueError(f"{name} must be {bounds}, got {value}")

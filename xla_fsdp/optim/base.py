"""What the optimizers here have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ..sharding.shard_spec import spec_of
from ..sharding.sharded_parameter import as_sharded, on_local_parts
from ..sharding.sharded_tensor import home_of
from .parts import Parts


class KeepsDtypes(Optimizer):
    """An optimizer whose state keeps its dtype when it is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of any optimizer; state keeps its dtype, where torch would cast it to the
        parameters'."""
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


class ShardedOptimizer(KeepsDtypes):
    """An optimizer that needs to know more of a parameter than one element at a time.

    Takes what ``model.parameters()`` of a wrapped model gives, and plain parameters as well.
    """

    # Plans leave its tensors as they are, see planning/tracing/host_step.py.
    knows_shards = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As of any optimizer.

        Raises:
            ValueError: a parameter is offloaded to the host.
        """
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            home = home_of(parameter)
            if home is not None and home.copy is not None:
                raise ValueError(
                    f"{type(self).__name__} asks all ranks about {home.key!r}, which needs it on "
                    "the device; cpu_offload keeps it on the host. Take an optimizer of torch that "
                    "works on elements (torch.optim.AdamW(parameters, fused=True)), or wrap "
                    "without cpu_offload"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; ``closure`` computes the loss again, which is returned.

        Collectives are traced in here: all ranks must call it, with gradients for the same
        parameters.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with on_local_parts():
            self._update()
        return loss

    def _update(self) -> None:
        raise NotImplementedError

    def _trained(self) -> Iterator[tuple[dict[str, Any], torch.nn.Parameter, Parts]]:
        """All parameters with a gradient and with elements, and their groups."""
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad
                if grad is None or not parameter.numel():
                    continue
                if grad.is_sparse or grad.is_complex():
                    kind = "sparse" if grad.is_sparse else "complex"
                    raise RuntimeError(
                        f"{type(self).__name__} takes real, dense gradients; "
                        f"{Parts(parameter).name} has a {kind} one: give it to another optimizer"
                    )
                yield group, parameter, Parts(parameter)


def require_range(
    name: str, value: Any, low: float, high: float = float("inf"), open_low: bool = False
) -> None:
    """Raises ValueError unless ``low <= value < high`` (``low < value`` with ``open_low``)."""
    if not (low < value if open_low else low <= value) or not value < high:
        bounds = f"{'>' if open_low else '>='} {low:g}"
        bounds += "" if high == float("inf") else f" and < {high:g}"
        raise ValueError(f"{name} must be {bounds}, got {value}")

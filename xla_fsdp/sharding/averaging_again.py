"""Functions of torch_xla for models that every rank has whole, which raise on shards.

Each would take what one rank has of a parameter for what another has. They hand tensors to the
library in C++, which knows nothing of the type of a shard.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torch.optim.optimizer import Optimizer

from .. import xlac
from .sharded_tensor import homes_of

_CHANGING = threading.Lock()
# On a function that stands in the place of torch_xla's.
_CHECKS = "_xla_fsdp_checks"


def refuse_shards() -> None:
    """Puts functions that check in the place of torch_xla's, the first time it is called."""
    with _CHANGING:
        if not hasattr(xlac.gradients_to_average.value, _CHECKS):
            xlac.gradients_to_average.value = _checked(
                xlac.gradients_to_average.value, _require_no_shards
            )
            vars(xm)["broadcast_master_param"] = _checked(
                xm.broadcast_master_param, _require_not_divided
            )


def _checked(function: Callable[..., Any], check: Callable[[Any], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def checked(given: Any, *args: Any, **kwargs: Any) -> Any:
        if xr.world_size() > 1:
            check(given)
        return function(given, *args, **kwargs)

    setattr(checked, _CHECKS, True)
    return checked


def _require_no_shards(optimizer: Optimizer) -> None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    home = next(homes_of(parameters), None)
    if home is not None:
        raise RuntimeError(
            "xm.reduce_gradients (part of xm.optimizer_step, and what Accelerate's optimizer does "
            "without xla_fsdp.integrations.accelerate) averages gradients over the ranks once "
            f"more, and they are of different shards, such as that of {home.key!r}: leave it out, "
            "call optimizer.step(), and torch_xla.sync() after it; with Accelerate, import "
            "xla_fsdp.integrations.accelerate (with the Trainer "
            "xla_fsdp.integrations.transformers) at the top of the script"
        )


def _require_not_divided(model: nn.Module) -> None:
    home = next((home for home in homes_of(model.parameters()) if home.divided), None)
    if home is not None:
        raise RuntimeError(
            "xm.broadcast_master_param would give every rank the first one's shards, such as that "
            f"of {home.key!r}, in place of its own: call it before wrapping, or wrap with "
            "sync_module_states=True"
        )

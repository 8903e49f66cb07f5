"""``xla_model``'s functions for models that every rank has whole, refused where they are in shards.

Each would take what one rank has of a parameter for what another has.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torch.optim.optimizer import Optimizer

from .redirecting import copied, is_redirected, redirect
from .sharded_tensor import ShardedTensor, homes_of

_CHANGING = threading.Lock()


def refuse_shards() -> None:
    """Changes the functions, the first time it is called."""
    with _CHANGING:
        if not is_redirected(xm.reduce_gradients):
            _refuse(xm.broadcast_master_param, _divided_of_model, _BROADCAST)
            _refuse(xm.reduce_gradients, _shards_of_optimizer, _REDUCED)


def _refuse(
    function: Callable[..., Any], shards: Callable[[Any], Iterator[ShardedTensor]], wrong: str
) -> None:
    original = copied(function)

    @functools.wraps(original)
    def checked(given: Any, *args: Any, **kwargs: Any) -> Any:
        found = next(shards(given), None) if xr.world_size() > 1 else None
        if found is not None:
            raise RuntimeError(wrong.format(found.key))
        return original(given, *args, **kwargs)

    redirect(function, checked)


def _divided_of_model(model: nn.Module) -> Iterator[ShardedTensor]:
    return (home for home in homes_of(model.parameters()) if home.divided)


def _shards_of_optimizer(optimizer: Optimizer) -> Iterator[ShardedTensor]:
    return homes_of(p for group in optimizer.param_groups for p in group["params"])


_BROADCAST = (
    "xm.broadcast_master_param would give every rank the first one's shards, such as that of {!r}, "
    "in place of its own: call it before wrapping, or wrap with sync_module_states=True"
)
_REDUCED = (
    "xm.reduce_gradients, also as part of xm.optimizer_step, averages gradients over the ranks "
    "once more, and they are of different shards, such as that of {!r}: leave it out, call "
    "optimizer.step(), and torch_xla.sync() after it"
)

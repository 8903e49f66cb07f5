"""torch's clipping by norm, which would take the norm of one rank's shards, made to ask all ranks.

There are several functions of that name: torch's, the one that torch_xla puts in its place when it
is imported, and the one that is put there here. A script that says ``from torch.nn.utils import
clip_grad_norm_`` before the first module is wrapped has one of the former two for good. So these
functions themselves are changed.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch_xla.runtime as xr
from torch.nn.utils import clip_grad

from .attributes import shard_of
from .clipping import Shared, clip_grad_norm_
from .redirecting import copied, is_redirected, redirect
from .sharded_tensor import home_of
from .unsharded import UnshardedParameter

_CHANGING = threading.Lock()
# Where Accelerate's clipping is.
_ACCELERATOR = "accelerate.accelerator"
ACCELERATE_AVERAGES = (
    "Accelerate averages gradients over the ranks, and those of shards are of different "
    "parameters: import xla_fsdp.integrations.accelerate (with the Trainer "
    "xla_fsdp.integrations.transformers) at the top of the script"
)


def ask_all_ranks() -> None:
    """Changes what clips by norm, the first time it is called."""
    with _CHANGING:
        total = inspect.unwrap(torch.nn.utils.get_total_norm)
        if is_redirected(total):
            return
        # Clipping asks for the norm by another name, also where nothing is sharded.
        names = {"_get_total_norm": torch.no_grad()(copied(total))}
        # The second is torch_xla's, and what scripts find that look it up.
        for module in (clip_grad, torch.nn.utils):
            clip = inspect.unwrap(module.clip_grad_norm_)
            checked = _checked_clipping(torch.no_grad()(copied(clip, names)))
            redirect(clip, checked)
        vars(clip_grad)["clip_grad_norm_"] = vars(torch.nn.utils)["clip_grad_norm_"] = checked
        redirect(total, _checked_norm(names["_get_total_norm"]))


def _checked_clipping(clip: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(clip)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        each: list[Any] = [parameters]
        if not isinstance(parameters, torch.Tensor):
            each = [shard_of(parameter) for parameter in parameters]
        if any(isinstance(parameter, UnshardedParameter) for parameter in each):
            raise RuntimeError(
                "torch.nn.utils.clip_grad_norm_ was given full parameters, which have no gradient: "
                "their shards do. Call reshard() first, where unshard() was called"
            )
        homes = [(parameter, home_of(parameter)) for parameter in each]
        for parameter, home in homes:
            if home is not None and home.shard is not parameter:
                raise RuntimeError(
                    f"torch.nn.utils.clip_grad_norm_ was given parameters (one called {home.key!r} "
                    "in its wrapper) as they were before wrapping, which have no gradient: take "
                    "model.parameters() after it"
                )
        shared = [
            Shared(home.world, [parameter])
            for parameter, home in homes
            if home is not None and home.layout.size > 1 and home.world is not None
        ]
        if not shared:
            return clip(each, *args, **kwargs)
        caller = sys._getframe().f_back
        if caller is not None and caller.f_globals.get("__name__") == _ACCELERATOR:
            raise RuntimeError(ACCELERATE_AVERAGES)
        return _clip(shared, each, *args, **kwargs)

    return checked


def _checked_norm(norm: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(norm)
    def checked(tensors: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        each = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if xr.world_size() > 1 and any(tensor.device.type == "xla" for tensor in each):
            raise RuntimeError(
                "torch.nn.utils.get_total_norm on tensors of one of several ranks: gradients of "
                "shards do not say that they are, and it would take the norm of this rank's. Call "
                "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm), which returns the "
                "norm of all; float('inf') clips nothing"
            )
        return norm(each, *args, **kwargs)

    return checked


def _clip(
    shared: Sequence[Shared],
    parameters: Sequence[Any],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """``torch.nn.utils.clip_grad_norm_`` where some of ``parameters`` are shards: by the norm of
    what all ranks have of these, as ``model.clip_grad_norm_``. Every rank must call it."""
    if error_if_nonfinite:
        raise ValueError(
            "torch.nn.utils.clip_grad_norm_(error_if_nonfinite=True) is not possible on shards, "
            "whose norm is known when the program has run: leave it out, and look at the norm that "
            "is returned"
        )
    return clip_grad_norm_(shared, parameters, max_norm, norm_type)

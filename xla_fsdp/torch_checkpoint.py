"""``torch.utils.checkpoint`` on XLA. torch's wrappers, timm, diffusers and transformers call it.

Three things are missing on XLA. The function asks for a module ``torch.xla``. It restores the
random numbers of the CPU only. And the compiler merges the recomputation with the forward, so that
no memory is saved, unless a barrier ties its inputs to a gradient. What is recomputed, when, and
what is checked stays torch's.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
import torch_xla.utils.checkpoint
from torch.utils._python_dispatch import _disable_current_modes

from .replaying import (
    Autocast,
    RandomState,
    checkpoints,
    random_numbers_from,
    tied,
    xla_device_of,
)
from .sharding.gathering import computing, computing_passes
from .tree import map_tensors, tensors_in

_lock = threading.Lock()
_TorchFunction = torch.utils.checkpoint.CheckpointFunction
_TorchXlaFunction = torch_xla.utils.checkpoint.CheckpointFunction
_torch_generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator


def support_torch_checkpoint() -> None:
    """Has ``torch.utils.checkpoint`` work on XLA devices. A second call changes nothing."""
    with _lock:
        if torch.utils.checkpoint.CheckpointFunction is _Reentrant:
            return
        if not hasattr(torch, "xla"):
            torch._register_device_module("xla", types.ModuleType("torch.xla", __doc__))
        # Some modules, as torch's composable checkpoint, have imported them by name.
        for module in list(sys.modules.values()):
            for name, theirs, own in (
                ("CheckpointFunction", _TorchFunction, _Reentrant),
                ("CheckpointFunction", _TorchXlaFunction, _TorchXlaReentrant),
                ("_checkpoint_without_reentrant_generator", _torch_generator, _generator),
            ):
                if getattr(module, "__dict__", {}).get(name) is theirs:
                    setattr(module, name, own)


class _Region:
    """One call of ``torch.utils.checkpoint.checkpoint``, and how to run it again.

    Holds no tensor: torch saves the arguments.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function = function
        # Units whose parameters the function uses; the recomputation needs them gathered again.
        self.passes = computing_passes()
        self.device = device
        self.autocast = Autocast.of(device)
        self.random = RandomState.of(device)
        self.draws = True

    def forward_over(self) -> None:
        self.draws = not self.random.equals(RandomState.of(self.device))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The recomputation, not before the gradient that the last unit's backward began with."""
        events = self.passes[-1].unit.order.arrived if self.passes else ()
        return self.recompute(events, args, kwargs)

    def recompute(self, events: Sequence[torch.Tensor], args: tuple, kwargs: dict) -> Any:
        """The function, not before the gradients ``events`` exist."""
        with _disable_current_modes():  # selective checkpointing counts the function's operators
            for one in self.passes:
                one.require_shards_unchanged()
                one.unit.enter_backward(one, events[0] if events else None)
            args, kwargs = _tied_in((args, kwargs), events, self.device)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.autocast.again())
            stack.enter_context(computing(self.passes))
            if self.draws:
                stack.enter_context(random_numbers_from(self.random))
            return self.function(*args, **kwargs)


def _tied_in(arguments: Any, events: Sequence[torch.Tensor], device: torch.device) -> Any:
    """Copies of ``arguments``, with their graph, that exist only after ``events``."""
    tensors = [tensor for tensor in tensors_in(arguments) if tensor.device == device]
    copies = dict(zip(map(id, tensors), tied(tensors, events), strict=True))
    return map_tensors(lambda tensor: copies.get(id(tensor), tensor), arguments)


def _generator(
    function: Callable[..., Any],
    preserve_rng_state: bool,
    context_fn: Callable[..., Any],
    determinism_check: str,
    debug: bool,
    early_stop: bool,
    *args: Any,
    **kwargs: Any,
) -> Iterator[None]:
    """torch's, which calls the function that it is given in recomputations only."""
    if not checkpoints():
        yield
        return
    options = preserve_rng_state, context_fn, determinism_check, debug, early_stop
    device = xla_device_of(tensors_in((args, kwargs))) if torch.is_grad_enabled() else None
    if device is None:
        yield from _torch_generator(function, *options, *args, **kwargs)
        return
    region = _Region(function, device)
    yield from _torch_generator(region, *options, *args, **kwargs)
    region.forward_over()


class _Applied:
    """How torch's and torch_xla's reentrant functions are called."""

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not checkpoints():
            return function(*args)
        return super().apply(function, preserve_rng_state, *args)  # type: ignore[misc]


class _TorchXlaReentrant(_Applied, _TorchXlaFunction):
    """torch_xla's, which needs no more."""


class _Reentrant(_Applied, _TorchFunction):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any
    ) -> Any:
        device = xla_device_of(tensors_in(args))
        ctx.region = None if device is None else _Region(function, device)
        outputs = _TorchFunction.forward(ctx, function, preserve_rng_state, *args)
        if ctx.region is not None:
            ctx.region.forward_over()
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        region = ctx.region
        if region is not None:
            events = [grad for grad in grads if grad is not None and grad.device == region.device]
            ctx.run_function = lambda *args: region.recompute(events, args, {})
        return _TorchFunction.backward(ctx, *grads)

"""What a forward reads and changes besides its inputs, so that it can run again: random numbers,
autocast, modes, buffers. Also makes ``torch.utils.checkpoint`` work on XLA."""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from . import xlac
from .collectives.order import after, prevent_fusion
from .sharding.freeing import Stamp, stamps
from .sharding.gathering import computing, computing_passes
from .tree import map_tensors, tensors_in


@dataclass(frozen=True)
class RandomState:
    """The states of the generators that a module on ``device`` can draw from."""

    device: torch.device
    cpu: torch.Tensor
    xla: int | None

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        xla = xm.get_rng_state(str(device)) if device.type == "xla" else None
        return cls(device, torch.get_rng_state(), xla)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.xla is not None:
            xm.set_rng_state(self.xla, str(self.device))

    def equals(self, other: RandomState) -> bool:
        return self.xla == other.xla and torch.equal(self.cpu, other.cpu)


@dataclass(frozen=True)
class Autocast:
    """The settings of autocast, on a device and on the CPU."""

    settings: tuple[tuple[str, torch.dtype, bool], ...]
    caches: bool

    @classmethod
    def of(cls, device: torch.device) -> Autocast:
        settings = tuple(
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {device.type, "cpu"}
        )
        return cls(settings, torch.is_autocast_cache_enabled())

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Within, these settings are active again."""
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self.settings:
                stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=self.caches))
            yield


@contextlib.contextmanager
def random_numbers_from(state: RandomState) -> Iterator[None]:
    """Within, random numbers start from ``state``. Afterwards the generators are as before."""
    now = RandomState.of(state.device)
    state.restore()
    try:
        yield
    finally:
        now.restore()


def xla_device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The XLA device that a function of ``tensors`` computes on, if any."""
    for tensor in tensors:
        if tensor.device.type == "xla":
            return tensor.device
    if xlac.runtime_has_started():  # tensors in a closure may be on the device
        return torch_xla.device()
    return None


def delayed_until(
    tensors: Sequence[torch.Tensor], events: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Copies of ``tensors``, for recomputation, that exist only after ``events``.

    Without a barrier the compiler would merge the recomputation with the forward and store the
    result, which is what checkpointing avoids.
    """
    copies = after(tensors, events) if events else [prevent_fusion(tensor) for tensor in tensors]
    # Each copy has a graph node with one output: torch_xla 2.9 aborts the process if the indices of
    # an embedding are the direct output of a barrier, which has several outputs.
    return [torch.view_copy(copy, copy.shape) for copy in copies]


class _Thread(threading.local):
    checkpoints = True


_this_thread = _Thread()


def checkpoints() -> bool:
    """Whether checkpointed functions in this thread must save what their recomputation needs."""
    return _this_thread.checkpoints


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Within, this thread calls checkpointed functions as if they were not checkpointed."""
    before, _this_thread.checkpoints = _this_thread.checkpoints, False
    try:
        yield
    finally:
        _this_thread.checkpoints = before


@contextlib.contextmanager
def in_modes(modes: Iterable[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Within, each of these modules is in training mode (True) or in evaluation mode."""
    others = [(module, now) for module, was in modes if (now := module.training) is not was]
    for module, now in others:
        module.training = not now
    try:
        yield
    finally:
        for module, now in others:
            module.training = now


class Buffers:
    """The buffers of ``module`` before a forward, to run it again with them (spectral norm computes
    with the vectors that it has just updated)."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = [
            (owner, name, buffer, stamps([buffer]), _copy(buffer))
            for owner, name, buffer in _buffers_of(module)
        ]

    def end_forward(self) -> None:
        """Drops the buffers that the forward did not change."""
        self._before = [
            (owner, name, buffer, stamp, value)
            for owner, name, buffer, stamp, value in self._before
            if owner._buffers.get(name) is not buffer or _may_have_changed(buffer, stamp, value)
        ]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Within, the module computes with copies of the buffers before the forward.

        The buffers themselves do not change, so tensors that autograd saved of them stay valid.

        Raises:
            RuntimeError: a buffer changed nevertheless, through a reference other than the module's
                attribute.
        """
        found = {(owner, name): value for owner, name, _, _, value in self._before}
        now = [(owner, name, b, stamps([b])) for owner, name, b in _buffers_of(self._module)]
        copies: dict[int, torch.Tensor] = {}  # a buffer with two names stays one tensor
        for owner, name, buffer, _ in now:
            if id(buffer) not in copies:
                value = found.get((owner, name), buffer)
                copies[id(buffer)] = _copy(value).requires_grad_(buffer.requires_grad)
            owner._buffers[name] = copies[id(buffer)]
        try:
            yield
        finally:
            for owner, name, buffer, _ in now:
                owner._buffers[name] = buffer
        for owner, name, buffer, stamp in now:
            if stamps([buffer]) != stamp:
                raise RuntimeError(
                    f"the recomputation of {type(self._module).__name__} changed its buffer "
                    f"{name!r}, of a {type(owner).__name__}, a second time, through another "
                    f"reference than self.{name} (a list, a closure, a view). Change it through "
                    "that attribute in the forward, or use the module without recomputation"
                )


def _buffers_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield owner, name, buffer


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.clone(tensor.detach())


def _may_have_changed(buffer: torch.Tensor, stamp: list[Stamp], before: torch.Tensor) -> bool:
    """Whether a buffer may have changed although its stamp has not, as in batch norm updates. On
    XLA such a value is pending."""
    if stamps([buffer]) != stamp:
        return True
    if buffer.device.type == "xla":
        return xlac.are_pending([buffer])[0]
    return not torch.equal(buffer, before)


_lock = threading.Lock()
# -- torch.utils.checkpoint on XLA: torch's wrappers, timm, diffusers and transformers call it -----
#
# Three things are missing on XLA. The function needs a module ``torch.xla``. It restores the random
# numbers of the CPU only. And the compiler merges the recomputation with the forward, so that no
# memory is saved, unless a barrier ties its inputs to a gradient. All else (what is recomputed and
# when, and the checks) stays torch's.

_TorchFunction = torch.utils.checkpoint.CheckpointFunction
_TorchXlaFunction = torch_xla.utils.checkpoint.CheckpointFunction
_torch_generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator


def support_torch_checkpoint() -> None:
    """Makes ``torch.utils.checkpoint`` work on XLA devices. A second call does nothing."""
    with _lock:
        if torch.utils.checkpoint.CheckpointFunction is _Reentrant:
            return
        if not hasattr(torch, "xla"):
            torch._register_device_module("xla", types.ModuleType("torch.xla", __doc__))
        # Some modules, such as torch's composable checkpoint, have imported the functions by name.
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

    Stores no tensor: torch saves the arguments.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device) -> None:
        self.function = function
        # Units whose parameters the function uses; the recomputation gathers them again.
        self.passes = computing_passes()
        self.device = device
        self.autocast = Autocast.of(device)
        self.random = RandomState.of(device)
        self.draws = True

    def end_forward(self) -> None:
        self.draws = not self.random.equals(RandomState.of(self.device))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Recomputes, after the gradient that started the last unit's backward exists."""
        events = self.passes[-1].unit.order.arrived if self.passes else ()
        return self.recompute(events, args, kwargs)

    def recompute(self, events: Sequence[torch.Tensor], args: tuple, kwargs: dict) -> Any:
        """Calls the function again, after the gradients ``events`` exist."""
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
    copies = dict(zip(map(id, tensors), delayed_until(tensors, events), strict=True))
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
    """torch's generator; it calls the function that it gets only in recomputations."""
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
    region.end_forward()


class _Applied:
    """The calling convention of torch's and torch_xla's reentrant functions."""

    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not checkpoints():
            return function(*args)
        return super().apply(function, preserve_rng_state, *args)  # type: ignore[misc]


class _TorchXlaReentrant(_Applied, _TorchXlaFunction):
    """torch_xla's reentrant function, which needs nothing else."""


class _Reentrant(_Applied, _TorchFunction):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any
    ) -> Any:
        device = xla_device_of(tensors_in(args))
        ctx.region = None if device is None else _Region(function, device)
        outputs = _TorchFunction.forward(ctx, function, preserve_rng_state, *args)
        if ctx.region is not None:
            ctx.region.end_forward()
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        region = ctx.region
        if region is not None:
            events = [grad for grad in grads if grad is not None and grad.device == region.device]
            ctx.run_function = lambda *args: region.recompute(events, args, {})
        return _TorchFunction.backward(ctx, *grads)

"""Gradient checkpointing: the backward recomputes activations instead of storing them.

:func:`checkpoint_module` replaces tensors that autograd would save by numbers. When the backward
needs the first, the forward runs again and collects its saved tensors in the same order. The last
part makes ``torch.utils.checkpoint`` work on XLA; torch has no extension point for it.
"""

from __future__ import annotations

import contextlib
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
import torch.utils.checkpoint
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from . import xlac
from .collectives import host_memory
from .collectives.order import WAITS_OF_RECOMPUTATION, Event, after, prevent_fusion
from .layers import linear
from .sharding.freeing import stamps
from .sharding.gathering import computing, computing_passes
from .sharding.state import unique_units
from .tree import map_tensors, separate_tensors, tensors_in, with_tensors
from .wording import flag


def checkpoint_module(module: nn.Module, *, offload: bool = False) -> nn.Module:
    """Makes ``module`` recompute its activations in the backward; returns the module itself.

    The recomputation has the same inputs, random numbers, autocast settings, modes and parameters;
    buffers are updated once. Wrap the result, ``FSDP(checkpoint_module(layer))``, so that one
    gather serves recomputation and backward.

    Args:
        offload: on TPU, store the inputs that require gradients in host memory until the backward.
            Forward and backward must be in one program, without ``torch_xla.sync()`` in between;
            otherwise the compiler raises an error. No effect on other devices.

    Raises:
        TypeError: ``offload`` is not a bool, or ``module`` not a module.
        RuntimeError: in the backward, if the recomputation saves other tensors than the forward
            did.
    """
    flag("offload", offload)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {module!r}. Pass the module")
    forward = module.forward
    if isinstance(forward, _CheckpointedForward):
        forward = forward.original
    module.forward = _CheckpointedForward(module, forward, offload)
    return module


class _CheckpointedForward:
    """Replaces the forward of a module. Its reference is weak, so that both are freed together."""

    def __init__(self, module: nn.Module, forward: Callable, offload: bool) -> None:
        self._module = weakref.ref(module)
        self._is_method = getattr(forward, "__self__", None) is module
        self._forward = forward.__func__ if self._is_method else forward  # type: ignore[attr-defined]
        self.offload = offload

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "the module calls this forward, so it exists"
        return module

    @property
    def original(self) -> Callable:
        return types.MethodType(self._forward, self.module) if self._is_method else self._forward

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and _checkpoints.get()):
            return self.original(*args, **kwargs)
        recomputation = _ModuleRecomputation(self.module, self.original, (args, kwargs))
        if self.offload:
            args, kwargs = recomputation.offload(args, kwargs)
        return recomputation.run(args, kwargs)

    def __reduce__(self) -> tuple:
        return type(self), (self.module, self.original, self.offload)


_checkpoints: ContextVar[bool] = ContextVar("xla_fsdp_checkpoints", default=True)


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    token = _checkpoints.set(False)
    try:
        yield
    finally:
        _checkpoints.reset(token)


@contextlib.contextmanager
def in_modes(modes: Iterable[tuple[nn.Module, bool]]) -> Iterator[None]:
    others = [(module, now) for module, was in modes if (now := module.training) is not was]
    for module, now in others:
        module.training = not now
    try:
        yield
    finally:
        for module, now in others:
            module.training = now


class _Recomputation:
    """A call of a checkpointed function, to run it again. torch saves the arguments."""

    def __init__(self, function: Callable[..., Any], device: torch.device | None) -> None:
        self.function = function
        self.device = device or torch.device("cpu")
        self.passes = computing_passes()
        self.random = _random_state(self.device)
        self.draws = True
        caches = torch.is_autocast_cache_enabled()
        self.autocast = [
            torch.autocast(
                kind,
                torch.get_autocast_dtype(kind),
                torch.is_autocast_enabled(kind),
                cache_enabled=caches,
            )
            for kind in {self.device.type, "cpu"}
        ]

    def end_forward(self) -> None:
        """Detects whether random numbers were drawn: only then they must be restored."""
        (cpu, xla), (cpu_before, xla_before) = _random_state(self.device), self.random
        self.draws = xla != xla_before or not torch.equal(cpu, cpu_before)

    def enter_backward(self, events: Sequence[torch.Tensor]) -> None:
        for one in self.passes:
            one.require_shards_unchanged()
            one.unit.enter_backward(one, events[0] if events else None)

    @contextlib.contextmanager
    def state_of_forward(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for context in (*self.autocast, computing(self.passes)):
                stack.enter_context(context)
            if self.draws:
                stack.callback(_set_random_state, self.device, _random_state(self.device))
                _set_random_state(self.device, self.random)
            yield

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Recomputes, after the gradient that started the last unit's backward exists."""
        events = self.passes[-1].unit.order.arrived if self.passes else ()
        return self.recompute(events, args, kwargs)

    def recompute(self, events: Sequence[torch.Tensor], args: tuple, kwargs: dict) -> Any:
        with _disable_current_modes():  # selective checkpointing counts the function's operators
            self.enter_backward(events)
            tensors = [t for t in tensors_in((args, kwargs)) if t.device == self.device]
            copies = dict(zip(map(id, tensors), _delayed_until(tensors, events), strict=True))
            args, kwargs = map_tensors(lambda t: copies.get(id(t), t), (args, kwargs))
        with self.state_of_forward():
            return self.function(*args, **kwargs)


def _random_state(device: torch.device) -> tuple[torch.Tensor, int | None]:
    xla = xm.get_rng_state(str(device)) if device.type == "xla" else None
    return torch.get_rng_state(), xla


def _set_random_state(device: torch.device, state: tuple[torch.Tensor, int | None]) -> None:
    cpu, xla = state
    torch.set_rng_state(cpu)
    if xla is not None:
        xm.set_rng_state(xla, str(device))


def _xla_device_of(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    for tensor in tensors:
        if tensor.device.type == "xla":
            return tensor.device
    # Tensors in a closure may be on the device.
    return torch_xla.device() if xlac.runtime_has_started() else None


def _delayed_until(
    tensors: Sequence[torch.Tensor], events: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Copies after ``events``: the compiler would merge the recomputation with the forward."""
    copies = after(tensors, events) if events else [prevent_fusion(tensor) for tensor in tensors]
    # torch_xla 2.9 aborts if an embedding's indices are the direct output of a barrier.
    return [torch.view_copy(copy, copy.shape) for copy in copies]


class _SaveInputs(torch.autograd.Function):
    """Saves tensors under the hooks around the module; the scalar creates the graph node."""

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return scalar.clone()


class _ModuleRecomputation(_Recomputation):
    """One checkpointed forward of ``module``. The numbers that replace saved tensors refer to it.

    Recomputed tensors exist until the end of the backward; with streaming, until they are used.
    """

    def __init__(self, module: nn.Module, forward: Callable, inputs: tuple[tuple, dict]):
        tensors, self.inputs = separate_tensors(inputs)
        super().__init__(
            forward, _xla_device_of([*tensors, *module.parameters(), *module.buffers()])
        )
        self.module = module
        self.modes = [(one, one.training) for one in module.modules()]
        self.buffers = _Buffers(module)
        self.count = 0
        self.gradient: torch.Tensor | None = None
        self.recomputed: dict[int, dict[int, torch.Tensor]] = {}  # by graph task, by number
        self.needs_grad = [tensor.requires_grad for tensor in tensors]
        # By the number of the tensor.
        self.on_host: dict[int, torch.Size] = {}
        self._save(tensors, {})

    @cached_property
    def in_programs(self) -> bool:
        """Whether streaming cuts the step into programs here or next to it."""
        units = [*(one.unit for one in self.passes), *unique_units(self.module)]
        return any(unit.stream is not None for unit in units)

    def run(self, args: tuple, kwargs: dict) -> Any:
        hooks = torch.autograd.graph.saved_tensors_hooks(self._number, self._value)
        with hooks, linear.recomputed_later():
            outputs = self.function(*args, **kwargs)
        self.buffers.end_forward()
        self.end_forward()
        # Hooks live as long as the loss, but must not keep tensors alive after the backward.
        known = weakref.ref(self)

        def note(gradient: torch.Tensor) -> None:
            """Recomputation must not start before the first gradient."""
            alive = known()
            if alive is not None and alive.gradient is None:
                alive.gradient = gradient.detach()

        def hook(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.grad_fn is not None:
                tensor.register_hook(note)
            return tensor

        return map_tensors(hook, outputs)

    def _save(self, tensors: list[torch.Tensor], hosted: dict[int, torch.Tensor]) -> None:
        with torch.no_grad():
            # On XLA a copy uses no memory, and the forward may change its input in place.
            kept = [torch.view_copy(t, t.shape) if t.device.type == "xla" else t for t in tensors]
        kept = [hosted.get(number, tensor) for number, tensor in enumerate(kept)]
        self.saved = _SaveInputs.apply(torch.zeros((), requires_grad=True, device="cpu"), *kept)

    def offload(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Stores inputs in host memory. The forward waits until the previous module's are there."""
        if self.in_programs:
            raise RuntimeError(
                f"checkpoint_module({type(self.module).__name__}, offload=True) is in or around "
                "a wrapper with CPUOffload(stream=True), which cuts the step into programs, but "
                "offloaded inputs must come back in the program that sent them. Leave offload or "
                "stream out"
            )
        tensors = tensors_in((args, kwargs))
        hosted: dict[int, torch.Tensor] = {}
        for number, tensor in enumerate(tensors):
            # Other tensors (masks, parameters) would not be freed.
            if tensor.grad_fn is None or not host_memory.can_offload(tensor):
                continue
            if tensor.numel() and host_memory.can_be_stored(tensor.shape):
                hosted[number] = host_memory.store(tensor.detach())
        if not hosted:
            return args, kwargs
        self.on_host = {number: tensors[number].shape for number in hosted}
        self._save(tensors, hosted)
        if self.passes:
            last = max(hosted)
            arrived = host_memory.arrived(hosted[last], tensors[last].detach())
            before = self.passes[0].unit.order.offload(arrived)
            if before is not None:
                too_early = host_memory.never(before)
                for number in hosted:
                    tensors[number] = torch.where(too_early, 0.0, tensors[number])
        return with_tensors(self.inputs, tensors)

    def _number(self, tensor: torch.Tensor) -> int:
        self.count += 1
        return self.count - 1

    def _value(self, number: int) -> torch.Tensor:
        task = torch._C._current_graph_task_id()
        if number not in self.recomputed.get(task, ()):
            first = task not in self.recomputed
            self.recomputed[task] = dict(enumerate(self._recompute_saved()))
            if first and task != -1:
                # Autograd drops the callback some time after backward has returned.
                known = weakref.ref(self)

                def forget() -> None:
                    alive = known()
                    if alive is not None:
                        alive.recomputed.pop(task, None)
                        alive.gradient = None

                torch.autograd.Variable._execution_engine.queue_callback(forget)
        if self.in_programs:
            # Else they would become results of a program that starts.
            return self.recomputed[task].pop(number)
        return self.recomputed[task][number]

    def _recompute_saved(self) -> list[torch.Tensor]:
        tensors = [tensor.detach() for tensor in self.saved.grad_fn.saved_tensors]
        events: Sequence[torch.Tensor] = [] if self.gradient is None else [self.gradient]
        if self.on_host:
            fetched = events
            if events and self.passes:
                order = self.passes[0].unit.order
                fetched = order.start(Event.RECOMPUTATION, events[:1], WAITS_OF_RECOMPUTATION)
            for number, shape in self.on_host.items():
                tensors[number] = host_memory.fetch(tensors[number], shape, fetched)
        if self.device.type == "xla" and events:
            on_xla = [number for number, t in enumerate(tensors) if t.device == self.device]
            copies = _delayed_until([tensors[number] for number in on_xla], events)
            for number, copy in zip(on_xla, copies, strict=True):
                tensors[number] = copy
        self.enter_backward(events)
        with torch.enable_grad():
            # Not leaves: the forward may change its input in place.
            tensors = [
                torch.view_copy(t.requires_grad_(), t.shape) if needs else t
                for t, needs in zip(tensors, self.needs_grad, strict=True)
            ]
        args, kwargs = with_tensors(self.inputs, tensors)
        collected: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> None:
            collected.append(tensor.detach())

        def refuse(_: None) -> torch.Tensor:
            raise RuntimeError(
                "the recomputation of a checkpointed module called backward, which is not supported"
            )

        hooks = torch.autograd.graph.saved_tensors_hooks(collect, refuse)
        modes = in_modes(self.modes)
        with self.state_of_forward(), modes, self.buffers.as_before(), torch.enable_grad(), hooks:
            self.function(*args, **kwargs)
        if len(collected) != self.count:
            raise RuntimeError(
                f"the recomputation of {type(self.module).__name__} saved {len(collected)} tensors "
                f"for the backward, but its forward saved {self.count}. A checkpointed module must "
                "compute the same way twice: flags and counters that it reads must not "
                "change between forward and backward"
            )
        return collected


class _Buffers:
    """The buffers before a forward: spectral norm computes with vectors that it has updated."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = {
            use: (buffer, stamps([buffer]), buffer.detach().clone())
            for use, buffer in self._current().items()
        }

    def _current(self) -> dict[tuple[nn.Module, str], torch.Tensor]:
        return {
            (owner, name): buffer
            for owner in self._module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        }

    def end_forward(self) -> None:
        """Drops unchanged buffers. Batch norm keeps the stamp, but on XLA its value is pending."""
        now = self._current()
        for (owner, name), (buffer, stamp, before) in list(self._before.items()):
            if now.get((owner, name)) is buffer and stamps([buffer]) == stamp:
                on_xla = buffer.device.type == "xla"
                same = not xlac.are_pending([buffer])[0] if on_xla else torch.equal(buffer, before)
                if same:
                    del self._before[owner, name]

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Within, the module computes with copies of the buffers before the forward.

        Raises RuntimeError if a buffer changed through another reference than the module's
        attribute.
        """
        now = {use: (buffer, stamps([buffer])) for use, buffer in self._current().items()}
        copies: dict[int, torch.Tensor] = {}  # a buffer may have two names
        for (owner, name), (buffer, _) in now.items():
            if id(buffer) not in copies:
                *_, value = self._before.get((owner, name), (buffer,))
                value = value.detach().clone()
                copies[id(buffer)] = value.requires_grad_(buffer.requires_grad)
            owner._buffers[name] = copies[id(buffer)]
        try:
            yield
        finally:
            for (owner, name), (buffer, _) in now.items():
                owner._buffers[name] = buffer
        for (owner, name), (buffer, stamp) in now.items():
            if stamps([buffer]) != stamp:
                raise RuntimeError(
                    f"the recomputation of {type(self._module).__name__} changed its buffer "
                    f"{name!r}, of a {type(owner).__name__}, a second time, through another "
                    f"reference than self.{name} (a list, a closure, a view). Change it through "
                    "that attribute in the forward, or use the module without recomputation"
                )


# torch.utils.checkpoint needs a module ``torch.xla``, restores only the CPU's random state, and
# saves memory on XLA only with a barrier on the recomputation's inputs.

_TorchFunction = torch.utils.checkpoint.CheckpointFunction
_TorchXlaFunction = torch_xla.utils.checkpoint.CheckpointFunction
_torch_generator = torch.utils.checkpoint._checkpoint_without_reentrant_generator


def _generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
    """torch's generator, which calls ``function`` only to recompute."""
    if not _checkpoints.get():
        yield
        return
    device = _xla_device_of(tensors_in((args, kwargs))) if torch.is_grad_enabled() else None
    if device is None:
        yield from _torch_generator(function, *args, **kwargs)
        return
    recomputation = _Recomputation(function, device)
    yield from _torch_generator(recomputation, *args, **kwargs)
    recomputation.end_forward()


class _Applied:
    @classmethod
    def apply(cls, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not _checkpoints.get():
            return function(*args)
        return super().apply(function, preserve_rng_state, *args)  # type: ignore[misc]


class _TorchXlaReentrant(_Applied, _TorchXlaFunction):
    """torch_xla's reentrant function."""


class _Reentrant(_Applied, _TorchFunction):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any
    ) -> Any:
        device = _xla_device_of(tensors_in(args))
        ctx.recomputation = None if device is None else _Recomputation(function, device)
        outputs = _TorchFunction.forward(ctx, function, preserve_rng_state, *args)
        if ctx.recomputation is not None:
            ctx.recomputation.end_forward()
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        again = ctx.recomputation
        if again is not None:
            events = [grad for grad in grads if grad is not None and grad.device == again.device]
            ctx.run_function = lambda *args: again.recompute(events, args, {})
        return _TorchFunction.backward(ctx, *grads)


if not hasattr(torch, "xla"):
    torch._register_device_module("xla", types.ModuleType("torch.xla"))
# Some modules, such as torch's composable checkpoint, imported the functions by name.
for _module in list(sys.modules.values()):
    for _name, _theirs, _own in (
        ("CheckpointFunction", _TorchFunction, _Reentrant),
        ("CheckpointFunction", _TorchXlaFunction, _TorchXlaReentrant),
        ("_checkpoint_without_reentrant_generator", _torch_generator, _generator),
    ):
        if getattr(_module, "__dict__", {}).get(_name) is _theirs:
            setattr(_module, _name, _own)

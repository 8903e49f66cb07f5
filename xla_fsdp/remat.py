"""Gradient checkpointing: the backward recomputes activations instead of storing them.

No backward is nested in another: the forward builds its usual graph, but every tensor that autograd
would save is replaced by its number. When the backward needs the first of them, the forward runs
again and collects the tensors that it would have saved, in the same order. So gradients, hooks and
FSDP units work with one graph and one backward.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import nn

from .collectives import host_memory
from .layers import linear
from .replaying import (
    Autocast,
    Buffers,
    RandomState,
    checkpoints,
    delayed_until,
    random_numbers_from,
    xla_device_of,
)
from .sharding.gathering import computing, computing_passes
from .sharding.state import unique_units
from .tree import map_tensors, tensors_in


def checkpoint_module(module: nn.Module, *, offload: bool = False) -> nn.Module:
    """Makes ``module`` recompute its activations in the backward; returns the module itself.

    Its forward keeps its interface: keyword and non-tensor arguments, any structure of outputs. The
    recomputation uses the same inputs, random numbers, autocast settings and parameters; buffers
    that a forward updates (batch statistics) are updated once. Memory: the inputs are stored, all
    tensors between them and the outputs are freed.

    Wrap the result, ``FSDP(checkpoint_module(layer))``, so that one gather serves recomputation
    and backward.

    Args:
        offload: on TPU, store the inputs that require gradients in host memory until the backward.
            They are copied back while the backward of the next checkpointed module runs. Forward
            and backward must be in one program, without ``torch_xla.sync()`` in between; otherwise
            the compiler raises an error. No effect on other devices.

    Raises:
        TypeError: ``offload`` is not a bool.
        RuntimeError: in the backward, if the recomputation saves other tensors than the forward
            did (because the forward depends on something that changed in between).
    """
    if not isinstance(offload, bool):
        raise TypeError(f"offload must be True or False, got {offload!r}")
    forward = module.forward
    if isinstance(forward, Recomputed):
        forward = forward.original
    module.forward = Recomputed(module, forward, offload)
    return module


class Recomputed:
    """Replaces the forward of a module, and recomputes in the backward.

    Lifetime: has only a weak reference to the module, so that both are freed together.
    """

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
        return recomputed(self.module, self.original, args, kwargs, self.offload)

    def __reduce__(self) -> tuple:
        """Copies and pickles it for the copy of the module."""
        return type(self), (self.module, self.original, self.offload)


def recomputed(
    module: nn.Module, forward: Callable, args: tuple, kwargs: dict, offload: bool = False
) -> Any:
    """``forward(*args, **kwargs)``, a function of ``module``, recomputed in the backward.

    ``offload``: store the inputs in host memory until then.
    """
    if not (torch.is_grad_enabled() and checkpoints()):
        return forward(*args, **kwargs)
    replay = _Replay(module, forward, args, kwargs)
    if offload:
        args, kwargs = replay.offload(args, kwargs)
    outputs = replay.run(args, kwargs)

    # Hooks stay in the graph, which exists as long as the loss does. They must not keep tensors
    # alive that the backward has released.
    known = weakref.ref(replay)

    def note(gradient: torch.Tensor) -> None:
        alive = known()
        if alive is not None:
            alive.note_gradient(gradient)

    def hook(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is not None:
            tensor.register_hook(note)
        return tensor

    return map_tensors(hook, outputs)


class _Keep(torch.autograd.Function):
    """Saves tensors as an operator would, under the hooks that are active around the module.

    So an enclosing checkpoint drops the inputs of the inner one, and offloading moves them. The
    extra scalar input ensures that there is a graph node to save them on.
    """

    @staticmethod
    def forward(ctx: Any, scalar: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return scalar.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
        raise AssertionError("the output of this node is never used")


class _Replay:
    """One checkpointed forward, and how to run it again.

    Lifetime: referenced by the numbers that replace saved tensors, which the backward drops.
    Recomputed tensors exist until the end of the backward that needed them. With streamed units,
    whose programs start earlier, they exist only until they are used.
    """

    def __init__(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict):
        self.module = module
        self.forward = forward
        tensors = tensors_in((args, kwargs))
        # Units whose parameters the forward uses; the recomputation gathers them again.
        self.passes = computing_passes()
        candidates = [*tensors, *module.parameters(), *module.buffers()]
        self.device = xla_device_of(candidates) or torch.device("cpu")
        self.random = RandomState.of(self.device)
        self.buffers = Buffers(module)
        self.draws = True
        self.autocast = Autocast.of(self.device)
        self.count = 0
        self.gradient: torch.Tensor | None = None
        self.recomputed: dict[int, dict[int, torch.Tensor]] = {}  # by graph task, by number
        self.needs_grad = [tensor.requires_grad for tensor in tensors]
        # The shapes of tensors in host memory, by number of the tensor.
        self.on_host: dict[int, torch.Size] = {}
        self._keep(tensors, {})
        # This stores only the structure of the arguments: the tensors are in `kept`.
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.inputs = map_tensors(lambda t: _Slot(numbers[id(t)]), (args, kwargs))

    @cached_property
    def in_programs(self) -> bool:
        """Whether the step is cut into programs here or next to it (streaming)."""
        units = [*(one.unit for one in self.passes), *unique_units(self.module)]
        return any(unit.stream is not None for unit in units)

    def _keep(self, tensors: list[torch.Tensor], hosted: dict[int, torch.Tensor]) -> None:
        """Saves ``tensors``, or their copies in ``hosted``, for the backward."""
        with torch.no_grad():
            # On XLA a copy uses no memory, and allows the forward to change its input in place.
            kept = [torch.view_copy(t, t.shape) if t.device.type == "xla" else t for t in tensors]
        kept = [hosted.get(number, tensor) for number, tensor in enumerate(kept)]
        self.kept = _Keep.apply(torch.zeros((), requires_grad=True), *kept)

    def offload(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Stores inputs in host memory. Returns them for the forward, tied to the arrival of the
        previous module's inputs on the host."""
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
            # Tensors that are referenced elsewhere (masks, parameters) would not be freed.
            if tensor.grad_fn is None or not host_memory.can_offload(tensor):
                continue
            if tensor.numel() and host_memory.can_be_stored(tensor.shape):
                hosted[number] = host_memory.store(tensor.detach())
        if not hosted:
            return args, kwargs
        self.on_host = {number: tensors[number].shape for number in hosted}
        self._keep(tensors, hosted)
        if self.passes:
            last = max(hosted)
            arrived = host_memory.arrived(hosted[last], tensors[last].detach())
            before = self.passes[0].unit.order.offload(arrived)
            if before is not None:
                too_early = host_memory.never(before)
                for number in hosted:
                    tensors[number] = torch.where(too_early, 0.0, tensors[number])
        return _fill(self.inputs, tensors)

    def run(self, args: tuple, kwargs: dict) -> Any:
        """Runs the original forward."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._number, self._value)
        with hooks, linear.recomputed_later():
            outputs = self.forward(*args, **kwargs)
        self.buffers.end_forward()
        # The recomputation needs to restore random numbers only if the forward draws some.
        self.draws = not self.random.equals(RandomState.of(self.device))
        return outputs

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """Stores the first gradient that arrives: recomputation must not start before it."""
        if self.gradient is None:
            self.gradient = gradient.detach()

    def _number(self, tensor: torch.Tensor) -> int:
        self.count += 1
        return self.count - 1

    def _value(self, number: int) -> torch.Tensor:
        task = torch._C._current_graph_task_id()
        if number not in self.recomputed.get(task, ()):
            first = task not in self.recomputed
            self.recomputed[task] = dict(enumerate(self._recompute()))
            if first and task != -1:
                # Autograd's thread drops the callback some time after backward has returned.
                known = weakref.ref(self)

                def forget() -> None:
                    alive = known()
                    if alive is not None:
                        alive._forget(task)

                torch.autograd.Variable._execution_engine.queue_callback(forget)
        if self.in_programs:
            # Tensors that are referenced when a program starts become results of it.
            return self.recomputed[task].pop(number)
        return self.recomputed[task][number]

    def _forget(self, task: int) -> None:
        self.recomputed.pop(task, None)
        self.gradient = None

    def _recompute(self) -> list[torch.Tensor]:
        tensors = [tensor.detach() for tensor in self.kept.grad_fn.saved_tensors]
        self._fetch(tensors)
        on_xla = [number for number, t in enumerate(tensors) if t.device == self.device]
        if self.device.type == "xla" and self.gradient is not None:
            copies = delayed_until([tensors[number] for number in on_xla], [self.gradient])
            for number, copy in zip(on_xla, copies, strict=True):
                tensors[number] = copy
        for one in self.passes:
            one.require_shards_unchanged()
            one.unit.enter_backward(one, self.gradient)
        with torch.enable_grad():
            # Not leaves, so that the forward may change its input in place.
            tensors = [
                torch.view_copy(t.requires_grad_(), t.shape) if needs else t
                for t, needs in zip(tensors, self.needs_grad, strict=True)
            ]
        args, kwargs = _fill(self.inputs, tensors)
        collected: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> None:
            collected.append(tensor.detach())

        def refuse(_: None) -> torch.Tensor:
            raise RuntimeError(
                "the recomputation of a checkpointed module called backward, which is not supported"
            )

        with contextlib.ExitStack() as stack:
            stack.enter_context(self.autocast.again())
            stack.enter_context(self.buffers.as_before())
            if self.draws:
                stack.enter_context(random_numbers_from(self.random))
            stack.enter_context(computing(self.passes))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(collect, refuse))
            self.forward(*args, **kwargs)
        if len(collected) != self.count:
            raise RuntimeError(
                f"the recomputation of {type(self.module).__name__} saved {len(collected)} tensors "
                f"for the backward, but its forward saved {self.count}. A checkpointed module must "
                "compute the same way twice: mode, flags and counters that it reads must not "
                "change between forward and backward"
            )
        return collected

    def _fetch(self, tensors: list[torch.Tensor]) -> None:
        """Copies those of ``tensors`` that are in host memory back to the device."""
        if not self.on_host:
            return
        events: Sequence[torch.Tensor] = [] if self.gradient is None else [self.gradient]
        if events and self.passes:
            events = self.passes[0].unit.order.start_recomputation(events[0])
        for number, shape in self.on_host.items():
            tensors[number] = host_memory.fetch(tensors[number], shape, events)


class _Slot:
    """Placeholder for input tensor ``number`` in the stored arguments."""

    def __init__(self, number: int):
        self.number = number


def _fill(value: Any, tensors: list[torch.Tensor]) -> Any:
    return map_tensors(lambda slot: tensors[slot.number], value, leaf=_Slot)

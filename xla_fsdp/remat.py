"""Gradient checkpointing: activations are recomputed in the backward instead of kept.

Nothing is nested: the forward builds its ordinary graph, only every tensor that autograd would
save is replaced by its number. The first number that the backward asks for runs the forward again
and collects the tensors it would have saved, in the same order. So gradients, hooks and units see
one graph and one backward.
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
    random_numbers_from,
    tied,
    xla_device_of,
)
from .sharding.gathering import computing, computing_passes
from .sharding.state import unique_units
from .tree import map_tensors, tensors_in


def checkpoint_module(module: nn.Module, *, offload: bool = False) -> nn.Module:
    """Makes ``module`` recompute its activations in the backward; returns the module itself.

    Its forward takes and returns what it did before: keyword and non-tensor arguments, any
    structure of outputs. The recomputation sees the same inputs, random numbers, autocast setting
    and parameters; buffers that a forward updates (batch statistics) are updated once. Memory:
    the inputs stay, everything between them and the outputs goes.

    Wrap the result, ``FSDP(checkpoint_module(layer))``, so that one gather serves recomputation
    and backward.

    Args:
        offload: on TPU, those inputs that gradients flow back to wait for the backward in the
            host's memory, and come back while the backward of the checkpointed module after this
            one runs. Forward and backward must be in one program, with no ``torch_xla.sync()`` in
            between, or the compiler refuses it. Elsewhere without effect.

    Raises:
        TypeError: ``offload`` is no bool.
        RuntimeError: in the backward, if the recomputation saves other tensors than the forward
            did (a forward that depends on something that changed in between).
    """
    if not isinstance(offload, bool):
        raise TypeError(f"offload must be True or False, got {offload!r}")
    forward = module.forward
    if isinstance(forward, Recomputed):
        forward = forward.original
    module.forward = Recomputed(module, forward, offload)
    return module


class Recomputed:
    """The forward of a module, computed again in the backward, for the module to have as its own.

    Lifetime: knows the module only weakly, so that both go when nothing else refers to it.
    """

    def __init__(self, module: nn.Module, forward: Callable, offload: bool) -> None:
        self._module = weakref.ref(module)
        self._is_method = getattr(forward, "__self__", None) is module
        self._forward = forward.__func__ if self._is_method else forward  # type: ignore[attr-defined]
        self.offload = offload

    @property
    def module(self) -> nn.Module:
        module = self._module()
        assert module is not None, "is called by it"
        return module

    @property
    def original(self) -> Callable:
        return types.MethodType(self._forward, self.module) if self._is_method else self._forward

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return recomputed(self.module, self.original, args, kwargs, self.offload)

    def __reduce__(self) -> tuple:
        """How it is copied and pickled: for the copy of the module."""
        return type(self), (self.module, self.original, self.offload)


def recomputed(
    module: nn.Module, forward: Callable, args: tuple, kwargs: dict, offload: bool = False
) -> Any:
    """``forward(*args, **kwargs)``, a function of ``module``, computed again in the backward.

    ``offload``: with the inputs in the host's memory until then.
    """
    if not (torch.is_grad_enabled() and checkpoints()):
        return forward(*args, **kwargs)
    replay = _Replay(module, forward, args, kwargs)
    if offload:
        args, kwargs = replay.offload(args, kwargs)
    outputs = replay.run(args, kwargs)

    # Hooks stay with the graph, which lives as long as somebody holds the loss; what backward has
    # released must not stay with them.
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
    """Saves tensors the way an operator would, under the hooks that are active around the module.

    So an enclosing checkpoint forgets the inputs of the inner one, and offloading moves them. The
    extra scalar input makes sure that there is a node to save them on.
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

    Lifetime: owned by the numbers that stand in for saved tensors, which backward drops. What the
    recomputation collected lives to the end of the backward that asked for it or, where units are
    streamed and so programs start before, until it is asked for.
    """

    def __init__(self, module: nn.Module, forward: Callable, args: tuple, kwargs: dict):
        self.module = module
        self.forward = forward
        tensors = tensors_in((args, kwargs))
        # Units whose parameters the forward uses; the recomputation needs them gathered again.
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
        # By number of the tensor, the shape of those that wait in the host's memory.
        self.on_host: dict[int, torch.Size] = {}
        self._keep(tensors, {})
        # Of the arguments only the frame is held here: the tensors belong to `kept`.
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.inputs = map_tensors(lambda t: _Slot(numbers[id(t)]), (args, kwargs))

    @cached_property
    def in_programs(self) -> bool:
        """Whether the step is cut into programs in here, or next to it."""
        units = [*(one.unit for one in self.passes), *unique_units(self.module)]
        return any(unit.stream is not None for unit in units)

    def _keep(self, tensors: list[torch.Tensor], hosted: dict[int, torch.Tensor]) -> None:
        """Keeps ``tensors``, or what is ``hosted`` in their place."""
        with torch.no_grad():
            # On XLA a copy takes no memory, and lets the forward change its input in place.
            kept = [torch.view_copy(t, t.shape) if t.device.type == "xla" else t for t in tensors]
        kept = [hosted.get(number, tensor) for number, tensor in enumerate(kept)]
        self.kept = _Keep.apply(torch.zeros((), requires_grad=True), *kept)

    def offload(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Has inputs wait in the host's memory, and returns them as the forward is to use them: not
        before those of the module before this one are there."""
        if self.in_programs:
            raise RuntimeError(
                f"checkpoint_module({type(self.module).__name__}, offload=True) is in or around a "
                "wrapper with CPUOffload(stream=True), which cuts the step into programs, and what "
                "waits in the host's memory has to come back in the one that sent it: leave "
                "offload or stream out"
            )
        tensors = tensors_in((args, kwargs))
        hosted: dict[int, torch.Tensor] = {}
        for number, tensor in enumerate(tensors):
            # What others hold anyway (masks, parameters) is not freed by a copy elsewhere.
            if tensor.grad_fn is None or not host_memory.can_wait_there(tensor):
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
        """The forward itself."""
        hooks = torch.autograd.graph.saved_tensors_hooks(self._number, self._value)
        with hooks, linear.recomputed_later():
            outputs = self.forward(*args, **kwargs)
        self.buffers.forward_over()
        # Recomputation only disturbs the random numbers of others if it draws any.
        self.draws = not self.random.equals(RandomState.of(self.device))
        return outputs

    def note_gradient(self, gradient: torch.Tensor) -> None:
        """Remembers the first gradient that arrives: recomputation must not start before it."""
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
                # Autograd's thread drops the callback only some time after backward has returned.
                known = weakref.ref(self)

                def forget() -> None:
                    alive = known()
                    if alive is not None:
                        alive._forget(task)

                torch.autograd.Variable._execution_engine.queue_callback(forget)
        if self.in_programs:
            # What is held when a program starts is a result of it. Nobody asks again, as a rule.
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
            copies = tied([tensors[number] for number in on_xla], [self.gradient])
            for number, copy in zip(on_xla, copies, strict=True):
                tensors[number] = copy
        for one in self.passes:
            one.require_shards_unchanged()
            one.unit.enter_backward(one, self.gradient)
        with torch.enable_grad():
            # Not leaves: the forward may change its input in place.
            tensors = [
                torch.view_copy(t.requires_grad_(), t.shape) if needs else t
                for t, needs in zip(tensors, self.needs_grad, strict=True)
            ]
        args, kwargs = _fill(self.inputs, tensors)
        collected: list[torch.Tensor] = []

        def collect(tensor: torch.Tensor) -> None:
            collected.append(tensor.detach())

        def refuse(_: None) -> torch.Tensor:
            raise RuntimeError("the recomputation of a checkpointed module ran a backward itself")

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
                f"for the backward, its forward saved {self.count}; a checkpointed module must "
                "compute the same way twice (mode, flags and counters it reads must not change "
                "between forward and backward)"
            )
        return collected

    def _fetch(self, tensors: list[torch.Tensor]) -> None:
        """Brings back those of ``tensors`` that are in the host's memory."""
        if not self.on_host:
            return
        events: Sequence[torch.Tensor] = [] if self.gradient is None else [self.gradient]
        if events and self.passes:
            events = self.passes[0].unit.order.start_recomputation(events[0])
        for number, shape in self.on_host.items():
            tensors[number] = host_memory.fetch(tensors[number], shape, events)


class _Slot:
    """Stands for input tensor ``number`` in the kept arguments."""

    def __init__(self, number: int):
        self.number = number


def _fill(value: Any, tensors: list[torch.Tensor]) -> Any:
    return map_tensors(lambda slot: tensors[slot.number], value, leaf=_Slot)

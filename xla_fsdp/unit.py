"""A unit: the parameters that one wrapper gathers, frees and reduces together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .gather import Pass
from .options import FSDPOptions
from .order import after
from .shard import Layout
from .tree import map_tensors, tensors_in
from .world import World


@dataclass(eq=False)
class ShardedTensor:
    """One stored tensor: this rank's shard, and how it relates to the parameters in it.

    Usually one parameter; several with ``flatten_parameters``. A parameter that other units use as
    well (tied weights) is the same object in all of them.
    """

    shard: nn.Parameter
    layout: Layout
    key: str  # name in the wrapper that sharded it
    flattened: bool = False  # registered on the wrapper, not where its members are


@dataclass(frozen=True)
class Place:
    """A module attribute that must hold full parameter ``index`` while the unit computes."""

    paths: tuple[str, ...]  # dotted names of the module inside the wrapped module
    module: nn.Module
    name: str
    index: int
    resting: nn.Parameter | None  # what it holds otherwise: the shard, or None if flattened


class Unit:
    """Gathers, installs, frees and reduces the parameters of one wrapped module.

    Full parameters are numbered through all members of all sharded tensors, in order.
    """

    def __init__(self, options: FSDPOptions, world: World):
        self.options = options
        self.world = world
        self.tensors: list[ShardedTensor] = []
        self.places: list[Place] = []
        # Buffers that were cast, by dotted name in the wrapped module, with the dtype they had.
        self.buffer_dtypes: dict[str, torch.dtype] = {}
        self.placeholder = torch.zeros(1, device=world.device)
        # Divisors of the gradient before and after the reduction: one division, of the shard.
        self.predivide, self.postdivide = 1.0, float(world.size * world.replicas)
        if options.compute_dtype is torch.float16:
            self.divide_in_float16()
        self.require_sync = True
        self.label = ""
        # Full gradients of the micro-batches inside no_sync, by index in `tensors`.
        self._unsynced: dict[int, torch.Tensor] = {}
        self._installed: Pass | None = None
        self._computing = 0
        # Passes whose backward is under way, by autograd graph task (checkpointed layers run a
        # backward of their own inside the outer one).
        self._backward: dict[int, list[Pass]] = {}
        self._rnns: list[nn.RNNBase] = []
        # Called at the end of every backward; the root wrapper finishes the whole model in it.
        self.on_backward_end: Callable[[], None] | None = None

    # -- construction ---------------------------------------------------------------------------

    def adopt(self, tensor: ShardedTensor) -> int:
        """Adds a sharded tensor; returns the number of its first full parameter."""
        index = 0
        for known in self.tensors:
            if known is tensor:
                return index
            index += len(known.layout.members)
        self.tensors.append(tensor)
        return index

    def add_place(self, place: Place) -> None:
        """Registers a module attribute that uses a full parameter, and puts its shard there."""
        self.places.append(place)
        place.module._parameters[place.name] = place.resting
        if isinstance(place.module, nn.RNNBase):
            if place.module not in self._rnns:
                self._rnns.append(place.module)
            self._refresh_rnns()

    def divide_in_float16(self) -> None:
        """Splits the division evenly: a sum over many ranks would overflow (65504), a full division
        beforehand would underflow."""
        if not self.options.fp32_reduce_scatter:
            ranks, before = self.world.size * self.world.replicas, 1
            while before * before < ranks:
                before *= 2
            self.predivide, self.postdivide = float(before), ranks / before

    @property
    def shards(self) -> list[nn.Parameter]:
        return [tensor.shard for tensor in self.tensors]

    # -- forward --------------------------------------------------------------------------------

    @property
    def computing(self) -> bool:
        """Whether a forward of this unit is under way (a module may call itself)."""
        return self._computing > 0

    def begin(self, inputs: Any) -> Pass:
        """Gathers for a forward on ``inputs`` and gives the modules their full parameters."""
        one = Pass(self)
        if self.tensors:
            tied = self.options.optimization_barrier_in_forward
            arguments = tensors_in(inputs)
            events = [t for t in arguments if t.device == self.world.device] if tied else ()
            one.gather(events, self._needs_anchor(arguments))
        self._computing += 1
        self.install(one)
        return one

    def end(self, one: Pass, keep: bool) -> None:
        """After the forward, or after an exception in it."""
        self._computing -= 1
        self._restore()
        if not keep:
            one.release()

    def watch(self, one: Pass, outputs: Any) -> Any:
        """Has the first gradient that reaches ``outputs`` start the backward of pass ``one``."""

        def hook(tensor: torch.Tensor) -> torch.Tensor:
            # A leaf is not this unit's result, and would collect a hook at every step.
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: self.enter_backward(one, grad))
            return tensor

        return map_tensors(hook, outputs)

    def install(self, one: Pass) -> None:
        """Puts the pass's full parameters where the modules look for them."""
        self._installed = one
        for place in self.places:
            place.module._parameters[place.name] = one.full[place.index]
        self._refresh_rnns()

    def _restore(self) -> None:
        """Undoes the last install: back to an enclosing backward's parameters, or to the shards."""
        enclosing = [one for passes in self._backward.values() for one in passes]
        if enclosing:
            self.install(enclosing[-1])
        elif self._installed is not None:
            self._installed = None
            for place in self.places:
                place.module._parameters[place.name] = place.resting
            self._refresh_rnns()

    def settle(self) -> None:
        """Forgets what an exception in an earlier forward or backward left behind."""
        if not self.computing and torch._C._current_graph_task_id() == -1:
            for task in list(self._backward):
                self._leave_backward(task)
            self._restore()

    def _needs_anchor(self, arguments: Sequence[torch.Tensor]) -> bool:
        if not torch.is_grad_enabled() or any(shard.requires_grad for shard in self.shards):
            return False
        if any(tensor.requires_grad for tensor in arguments):
            return True
        modules = {id(place.module): place.module for place in self.places}.values()
        return any(p.requires_grad for module in modules for p in module.parameters())

    # -- backward -------------------------------------------------------------------------------

    def enter_backward(self, one: Pass, grad: torch.Tensor | None) -> None:
        """Regathers pass ``one`` for the backward that ``grad`` is the first sign of."""
        task = torch._C._current_graph_task_id()
        passes = self._backward.get(task)
        if passes is None:
            passes = self._backward[task] = []
            torch.autograd.Variable._execution_engine.queue_callback(
                lambda: self._end_backward(task)
            )
        if one in passes:
            return
        passes.append(one)
        tied = grad is not None and self.options.optimization_barrier_in_backward
        one.regather([grad] if tied else ())
        # Recomputation of checkpointed layers inside the unit looks for parameters in the modules.
        self.install(one)

    def _end_backward(self, task: int) -> None:
        self._leave_backward(task)
        if self.on_backward_end is not None:
            self.on_backward_end()

    def _leave_backward(self, task: int) -> None:
        for one in self._backward.pop(task):
            one.release()
        self._restore()

    # -- bytes ----------------------------------------------------------------------------------

    def gather(self, events: Sequence[torch.Tensor], backward: bool) -> list[torch.Tensor]:
        """Every full parameter in compute dtype, traced to run after ``events``.

        ``backward``: the last are asked for first. The compiler keeps to the order of tracing where
        nothing else decides, and a parameter gathered before its turn takes up memory.
        """
        shards = [self._in_compute_dtype(shard) for shard in self.shards]
        shapes = [tensor.layout.wire_shape for tensor in self.tensors]
        wires = list(zip(self.tensors, after(shards, events, shapes), strict=True))
        full = [self._gather(tensor, wire) for tensor, wire in (wires[::-1] if backward else wires)]
        return [value for values in (full[::-1] if backward else full) for value in values]

    def _gather(self, tensor: ShardedTensor, wire: torch.Tensor) -> list[torch.Tensor]:
        if tensor.layout.numel == 0:
            return [wire.new_zeros(member.shape) for member in tensor.layout.members]
        gathered = self.world.all_gather(wire, self.label + tensor.key)
        return tensor.layout.split(gathered)

    def _in_compute_dtype(self, shard: torch.Tensor) -> torch.Tensor:
        dtype = self.options.compute_dtype
        if dtype is not None and shard.is_floating_point() and shard.dtype != dtype:
            return shard.to(dtype)
        return shard

    def reduce(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> Iterator[torch.Tensor | None]:
        """A gradient shard for every sharded tensor, from the full gradients of its members.

        ``None`` where no member got a gradient or none is needed, and inside ``no_sync``.
        """
        first = 0
        for number, tensor in enumerate(self.tensors):
            members = grads[first : first + len(tensor.layout.members)]
            first += len(tensor.layout.members)
            if not needed[number] or all(grad is None for grad in members):
                yield None
                continue
            full = self._to_wire_dtype(tensor.layout.join(members))
            if number in self._unsynced:
                full = self._unsynced.pop(number) + full
            if self.require_sync:
                yield self._reduce(tensor, full)
            else:
                self._unsynced[number] = full
                yield None

    def forget_unsynced(self) -> None:
        """Drops what ``no_sync`` gathered."""
        self._unsynced = {}

    def flush(self) -> None:
        """Reduces what ``no_sync`` gathered for tensors that the last backward did not reach."""
        if self.require_sync:
            for number, full in self._unsynced.items():
                tensor = self.tensors[number]
                grad = self._reduce(tensor, full)
                shard = tensor.shard
                shard.grad = grad if shard.grad is None else shard.grad + grad
            self._unsynced = {}

    def _to_wire_dtype(self, grad: torch.Tensor) -> torch.Tensor:
        narrow = grad.dtype in (torch.float16, torch.bfloat16)
        return grad.float() if narrow and self.options.fp32_reduce_scatter else grad

    def _reduce(self, tensor: ShardedTensor, full: torch.Tensor) -> torch.Tensor:
        label = self.label + tensor.key
        if self.predivide != 1:
            full = full / self.predivide
        # The collective itself scales for nothing, but in the dtype of the wire: only where that
        # is exact, by a power of two, and where nothing else is to be summed up first.
        exact = math.frexp(self.postdivide)[0] == 0.5 and self.world.replicas == 1
        shard = full
        if tensor.layout.numel:
            shard = self.world.reduce_scatter(full, label, 1 / self.postdivide if exact else 1.0)
        if shard.dtype != tensor.shard.dtype:
            shard = shard.to(tensor.shard.dtype)
        # Not a view: torch_xla would keep what it is a view of as well, while somebody holds it.
        shard = torch.view_copy(shard, tensor.layout.shard_shape)
        if not exact:
            shard = self.world.sum_over_replicas(shard, label) / self.postdivide
        return shard

    def _refresh_rnns(self) -> None:
        # Recurrent modules compute with a list of their own instead of their attributes.
        for rnn in self._rnns:
            rnn._flat_weights = [rnn._parameters.get(name) for name in rnn._flat_weights_names]

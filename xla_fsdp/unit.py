"""A unit: the parameters that one wrapper gathers, frees and reduces together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import linear
from .carrier import Carrier
from .gather import Pass
from .options import FSDPOptions
from .order import Order
from .shard import Layout
from .tree import map_tensors, tensors_in
from .wire import Wire
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
        self.require_sync = True
        self.wire = Wire(options, world)
        self.carrier = Carrier(self.wire)
        # Shared by the units of a model once its root is known.
        self.order = Order()
        # Full gradients of the micro-batches inside no_sync, by index in `tensors`.
        self._unsynced: dict[int, torch.Tensor] = {}
        self._installed: Pass | None = None
        self._computing = 0
        # Passes whose backward is under way, by autograd graph task (checkpointed layers run a
        # backward of their own inside the outer one).
        self._backward: dict[int, list[Pass]] = {}
        self._rnns: list[nn.RNNBase] = []
        self._linears: list[nn.Linear] = []
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
        if place.module not in self._linears and linear.applies_to(place.module):
            if self.world.as_on_tpu:
                self._linears.append(place.module)

    @property
    def shards(self) -> list[nn.Parameter]:
        return [tensor.shard for tensor in self.tensors]

    def holders(self) -> list[tuple[ShardedTensor, nn.Parameter, int]]:
        """For every sharded tensor the parameter that an optimizer sees, and the first of its
        flattened elements that is the tensor's."""
        return [(tensor, tensor.shard, 0) for tensor in self.tensors]

    # -- forward --------------------------------------------------------------------------------

    @property
    def computing(self) -> bool:
        """Whether a forward of this unit is under way (a module may call itself)."""
        return self._computing > 0

    def begin(self, inputs: Any) -> Pass:
        """Gathers for a forward on ``inputs`` and gives the modules their full parameters."""
        one = Pass(self)
        if self.tensors:
            arguments = tensors_in(inputs)
            one.gather(self._forward_events(arguments), self._needs_anchor(arguments))
        self._computing += 1
        self.install(one)
        return one

    def _forward_events(self, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not (self.world.as_on_tpu and self.options.optimization_barrier_in_forward):
            return ()
        own = [tensor for tensor in arguments if tensor.device == self.world.device]
        if torch._C._current_graph_task_id() != -1:  # recomputation inside a backward
            return own
        return self.order.forward(own, self.options.forward_prefetch)

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
        for module in self._linears:
            linear.replace_forward(module, linear.keeps_input(module, self.world))
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
            for module in self._linears:
                linear.restore_forward(module)
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
        one.regather(self._backward_events(grad))
        # Recomputation of checkpointed layers inside the unit looks for parameters in the modules.
        self.install(one)

    def _backward_events(self, grad: torch.Tensor | None) -> Sequence[torch.Tensor]:
        options = self.options
        barrier = self.world.as_on_tpu and options.optimization_barrier_in_backward
        if grad is None or not barrier:
            return ()
        return self.order.backward([grad], options.backward_prefetch, options.limit_all_gathers)

    def _end_backward(self, task: int) -> None:
        self._leave_backward(task)
        if self.on_backward_end is not None:
            self.on_backward_end()

    def leave_backward(self) -> None:
        """Frees what the backward under way has gathered."""
        self._leave_backward(torch._C._current_graph_task_id())

    def _leave_backward(self, task: int) -> None:
        for one in self._backward.pop(task, ()):
            one.release()
        self.order.backward_over()
        self._restore()

    # -- bytes ----------------------------------------------------------------------------------

    def gather(self, events: Sequence[torch.Tensor], backward: bool) -> list[torch.Tensor]:
        """Every full parameter in compute dtype, traced to run after ``events``."""
        return self.carrier.gather(self.tensors, self.order, events, backward)

    def reduce(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """A gradient shard for every sharded tensor, from the full gradients of its members.

        ``None`` where no member got a gradient or none is needed, and inside ``no_sync``.
        """
        reached: dict[int, Sequence[torch.Tensor | None]] = {}
        first = 0
        for number, tensor in enumerate(self.tensors):
            members = grads[first : first + len(tensor.layout.members)]
            first += len(tensor.layout.members)
            if needed[number] and any(grad is not None for grad in members):
                reached[number] = members
        held = {
            number: self._unsynced.pop(number) for number in reached if number in self._unsynced
        }
        if not self.require_sync:
            self._unsynced.update(self.wire.joined(self.tensors, reached, held))
            return [None] * len(self.tensors)
        shards, arrived = self.carrier.reduce(self.tensors, reached, held)
        # At the end of the backward the order forgets.
        if self.world.as_on_tpu and torch._C._current_graph_task_id() in self._backward:
            self.order.reduced(arrived)
        return [shards.get(number) for number in range(len(self.tensors))]

    def forget_unsynced(self) -> None:
        """Drops what ``no_sync`` gathered."""
        self._unsynced = {}

    def flush(self) -> None:
        """Reduces what ``no_sync`` gathered for tensors that the last backward did not reach."""
        if self.require_sync and self._unsynced:
            for number, grad in self.wire.reduce(self.tensors, self._unsynced)[0].items():
                shard = self.tensors[number].shard
                shard.grad = grad if shard.grad is None else shard.grad + grad
            self._unsynced = {}

    def _refresh_rnns(self) -> None:
        # Recurrent modules compute with a list of their own instead of their attributes.
        for rnn in self._rnns:
            rnn._flat_weights = [rnn._parameters.get(name) for name in rnn._flat_weights_names]

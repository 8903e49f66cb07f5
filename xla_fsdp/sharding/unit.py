"""A unit: the parameters that one wrapper gathers, frees and reduces together."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..collectives.order import Order, waits_of_backward, waits_of_forward
from ..collectives.world import World
from ..layers import linear
from ..names import dotted, is_wrapper
from ..tree import map_tensors, tensors_in
from .attributes import refuse_replacement, watch_place
from .awaited import Awaited
from .block_memory import BlockMemory
from .comms import Communicator
from .freeing import Stamp
from .gathering import Pass
from .ignored import note_again
from .options import FSDPOptions
from .secondary import Secondaries, Secondary
from .shard_hooks import guard_hooks
from .sharded_tensor import Comings, Place, ShardedTensor, set_home_of_shards
from .unreduced import UnitGradients


class Unit:
    """Gathers, installs, frees and reduces the parameters of one wrapped module.

    Full parameters are numbered through all members of all sharded tensors, in order.
    """

    def __init__(self, options: FSDPOptions, world: World):
        self.options = options
        self.world = world
        self.tensors: list[ShardedTensor] = []
        # The number of the first full parameter of each, and one past the last.
        self._first = [0]
        # Those of them that are registered on this unit's wrapper.
        self.flattened: list[ShardedTensor] = []
        self.places: list[Place] = []
        # What the unit's wrapper is around, and parameters in it that stay whole: see ignored.py.
        self.wrapped: nn.Module | None = None
        self.ignored: list[nn.Parameter] = []
        # What a load must give values before the first forward.
        self.awaited: list[Awaited] = []
        # Of the whole parameters as this rank built them, and of the shards cut out of these.
        self.initial_checksum = 0
        self.initial_stamps: list[Stamp] = []
        # Buffers that were cast, by dotted name in the wrapped module, with the dtype they had.
        self.buffer_dtypes: dict[str, torch.dtype] = {}
        # What a freed parameter becomes: who has kept one and computes with it sees that.
        nan = float("nan")
        if world.as_on_tpu:
            self.placeholder = torch.full((1,), nan, device=world.device)
        else:  # data: a constant would make the first step's program another than the second's
            self.placeholder = torch.full((1,), nan, device="cpu").to(world.device)
        # Unknown until the first forward: the outermost unit is the root.
        self.is_root: bool | None = None
        # Whether modules hold full parameters outside of a forward, see summon.py.
        self.summoned = False
        self.comms = Communicator(options, world)
        self.gradients = UnitGradients(self.tensors, self.comms)
        # Only with reshard_after_forward=<int>.
        size = options.reshard_after_forward
        self.secondaries = None if isinstance(size, bool) else Secondaries(world, size)
        # Where shards are on the device only while the unit computes.
        self.stream: Comings | None = None
        # Where one trace serves several equal blocks: what hooks remember of them, meanwhile.
        self.memory: BlockMemory | None = None
        # Shared by the units of a model once its root is known.
        self.order = Order()
        self._installed: Pass | None = None
        self._computing = 0
        # Passes whose backward is under way, by autograd graph task (checkpointed layers run a
        # backward of their own inside the outer one).
        self._backward: dict[int, list[Pass]] = {}
        self._rnns: list[nn.RNNBase] = []
        # What computes with full parameters in a way of ours.
        self.linears: linear.Layers = {}

    # -- construction ---------------------------------------------------------------------------

    def adopt(self, tensor: ShardedTensor) -> int:
        """Adds a sharded tensor; returns the number of its first full parameter."""
        if tensor not in self.tensors:
            self.tensors.append(tensor)
            self._first.append(self._first[-1] + len(tensor.layout.members))
        return self._first[self.tensors.index(tensor)]

    def shard_of(self, index: int) -> int:
        """The number of the sharded tensor that full parameter ``index`` is a member of."""
        return bisect.bisect_right(self._first, index) - 1

    def member_of(self, index: int) -> tuple[ShardedTensor, int]:
        """The sharded tensor that has full parameter ``index``, and its number in there."""
        number = self.shard_of(index)
        return self.tensors[number], index - self._first[number]

    def wait_for_values(self) -> None:
        """Shards have no values from now on, until they are given some."""
        names: dict[ShardedTensor, dict[tuple[int, int], str]] = {}
        for place in self.places:
            tensor, member = self.member_of(place.index)
            names.setdefault(tensor, {}).setdefault((0, member), dotted(place.paths[0], place.name))
        self.awaited[:] = [Awaited(tensor.shard, members) for tensor, members in names.items()]

    def name_of(self, index: int) -> str:
        """The dotted name of full parameter ``index``, from the root if that is known."""
        place = next(place for place in self.places if place.index == index)
        return self.comms.label + dotted(place.paths[0], place.name)

    def names_of(self, tensor: ShardedTensor, members: int, block: int | None = None) -> list[str]:
        """The names of the first ``members`` full parameters of a sharded tensor.

        ``block``: where several equal blocks have such a tensor, the name that one of them has.
        """
        assert block is None  # a unit of one module
        first, names = self.adopt(tensor), []
        for member in range(members):
            used = any(place.index == first + member for place in self.places)
            name = f"{self.comms.label}{tensor.key}[{member}]"  # of a shared flat vector
            names.append(self.name_of(first + member) if used else name)
        return names

    @property
    def title(self) -> str:
        """The name of the wrapper for messages, from the root if that is known."""
        return self.comms.label.rstrip(".") or "the wrapper"

    def add_place(self, place: Place) -> None:
        """Registers a module attribute that uses a full parameter, and puts its shard there."""
        self.places.append(place)
        place.module._parameters[place.name] = place.resting
        tensor, member = self.member_of(place.index)
        watch_place(place, tensor, member, self.comms, dotted(place.paths[0], place.name))
        if isinstance(place.module, nn.RNNBase):
            if place.module not in self._rnns:
                self._rnns.append(place.module)
            self.refresh_rnns()

    @property
    def shards(self) -> list[nn.Parameter]:
        return [tensor.shard for tensor in self.tensors]

    @property
    def stored(self) -> list[ShardedTensor]:
        """The sharded tensors whose shards an optimizer sees."""
        return self.tensors

    def holders(self) -> list[tuple[ShardedTensor, nn.Parameter, int]]:
        """For every sharded tensor the parameter that an optimizer sees, and the first of its
        flattened elements that is the tensor's."""
        return [(tensor, tensor.shard, 0) for tensor in self.tensors]

    def note_homes(self) -> None:
        """Notes on every parameter that an optimizer sees what it is a shard of."""
        set_home_of_shards(self.tensors)
        for tensor in self.tensors:
            guard_hooks(tensor.shard)
        note_again(self.ignored)
        for one in self.awaited:
            one.wait_on()

    # -- forward --------------------------------------------------------------------------------

    @property
    def computing(self) -> bool:
        """Whether a forward of this unit is under way (a module may call itself)."""
        return self._computing > 0

    @property
    def held(self) -> Pass | None:
        """The pass with whose full parameters the modules compute now."""
        return self._installed

    def begin(self, inputs: Any, keep: bool) -> Pass:
        """Gathers for a forward on ``inputs`` and gives the modules their full parameters.

        ``keep``: these will stay until the backward.
        """
        if self._installed is None:
            self.require_resting()
        one = Pass(self, self._secondary(keep))
        if self.tensors:
            arguments = tensors_in(inputs)
            one.gather(self._forward_events(arguments), self._needs_anchor(arguments))
        self._computing += 1
        self.install(one)
        return one

    def _secondary(self, keep: bool) -> Secondary | None:
        """What a pass gathers from, or fills for its backward."""
        if self.secondaries is None or not torch.is_grad_enabled():
            return None
        if torch._C._current_graph_task_id() != -1:  # recomputation inside a backward
            return self.secondaries.of(self.shards)
        return None if keep else self.secondaries.fresh(self.shards)

    def _forward_events(self, arguments: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if not (self.world.as_on_tpu and self.options.optimization_barrier_in_forward):
            return ()
        own = [tensor for tensor in arguments if tensor.device == self.world.device]
        if torch._C._current_graph_task_id() != -1:  # recomputation inside a backward
            return own
        return self.order.start_forward(own, waits_of_forward(self.options.forward_prefetch))

    def require_resting(self) -> None:
        """Raises RuntimeError if a module holds something else than what was put there."""
        self.require_not_summoned()
        for place in self.places:
            if place.module._parameters.get(place.name) is not place.resting:
                refuse_replacement(self.name_of(place.index))

    def require_not_summoned(self) -> None:
        """Raises RuntimeError if modules hold full parameters that no forward has gathered."""
        if self.summoned:
            raise RuntimeError(
                f"the forward of {self.title!r} was called within summon_full_params or apply: "
                "leave that first, a forward gathers for itself"
            )

    def require_unchanged(self, one: Pass) -> None:
        """After the forward: raises RuntimeError if it changed its parameters, or replaced them."""
        one.require_full_unchanged()
        for place in self.places:
            if place.module._parameters.get(place.name) is not one.full[place.index]:
                raise RuntimeError(
                    f"the forward replaced its parameter {self.name_of(place.index)!r} by another; "
                    "a sharded parameter can only be replaced before wrapping"
                )

    def end(self, one: Pass, keep: bool) -> None:
        """After the forward, or after an exception in it."""
        self._computing -= 1
        self._restore()
        if not keep:
            one.reshard()

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
            # No Parameter, which would be a leaf of the graph; modules do not mind.
            full = one.full[place.index]
            place.module._parameters[place.name] = full  # type: ignore[assignment]
        linear.replace_forwards(self.linears, self.world)
        self.refresh_rnns()

    def _restore(self) -> None:
        """Undoes the last install: back to an enclosing backward's parameters, or to the shards."""
        enclosing = [one for passes in self._backward.values() for one in passes]
        if enclosing:
            self.install(enclosing[-1])
        elif self._installed is not None:
            self._installed = None
            for place in self.places:
                place.module._parameters[place.name] = place.resting
            linear.restore_forwards(self.linears)
            self.refresh_rnns()

    def settle(self) -> None:
        """Forgets what an exception in an earlier forward or backward left behind."""
        if not self.computing and torch._C._current_graph_task_id() == -1:
            for task in list(self._backward):
                self._leave_backward(task)
            if self.stream is not None:
                self.stream.forget()
            if self.gradients.host is not None:
                self.gradients.host.forget()
            self._restore()

    def _needs_anchor(self, arguments: Sequence[torch.Tensor]) -> bool:
        if not torch.is_grad_enabled() or any(shard.requires_grad for shard in self.shards):
            return False
        if any(tensor.requires_grad for tensor in arguments):
            return True
        # Perhaps of wrappers inside, or ignored.
        return self.wrapped is not None and any(p.requires_grad for p in self.wrapped.parameters())

    # -- backward -------------------------------------------------------------------------------

    def enter_backward(self, one: Pass, grad: torch.Tensor | None) -> None:
        """Regathers pass ``one`` for the backward that ``grad`` is the first sign of."""
        task = torch._C._current_graph_task_id()
        passes = self._backward.get(task)
        if passes is None:
            passes = self._backward[task] = []
            # Autograd's thread lets go of the callback some time after the backward.
            held = [lambda: self._end_backward(task, one.on_backward_end)]
            torch.autograd.Variable._execution_engine.queue_callback(lambda: held.pop()())
        if one in passes:
            return
        passes.append(one)
        one.unshard(self._backward_events(grad))
        # Recomputation of checkpointed layers inside the unit looks for parameters in the modules.
        self.install(one)

    def _backward_events(self, grad: torch.Tensor | None) -> Sequence[torch.Tensor]:
        options = self.options
        barrier = self.world.as_on_tpu and options.optimization_barrier_in_backward
        if grad is None or not barrier:
            return ()
        waits = waits_of_backward(options.backward_prefetch, options.limit_all_gathers)
        return self.order.start_backward([grad], waits)

    def _end_backward(self, task: int, then: Callable[[], None] | None) -> None:
        self._leave_backward(task)
        if then is not None:
            then()

    def leave_backward(self) -> None:
        """Frees what the backward under way has gathered."""
        self._leave_backward(torch._C._current_graph_task_id())

    def _leave_backward(self, task: int) -> None:
        for one in self._backward.pop(task, ()):
            one.finish()
        self.order.end_backward()
        self.comms.end_backward()
        self._restore()

    # -- bytes ----------------------------------------------------------------------------------

    def gather(
        self, events: Sequence[torch.Tensor], backward: bool, secondary: Secondary | None
    ) -> list[torch.Tensor]:
        """Every full parameter in compute dtype, traced to run after ``events``."""
        return self.comms.gather(self.tensors, self.order, events, backward, secondary)

    def reduce(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], leaves: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """As :meth:`UnitGradients.reduce`."""
        shards, arrived = self.gradients.reduce(grads, needed, leaves)
        # At the end of the backward the order forgets.
        if self.world.as_on_tpu and torch._C._current_graph_task_id() in self._backward:
            self.order.add_reductions(arrived)
        return shards

    def refresh_rnns(self) -> None:
        """Has recurrent modules, which compute with a list of their own, see their attributes."""
        for rnn in self._rnns:
            rnn._flat_weights = [rnn._parameters.get(name) for name in rnn._flat_weights_names]


def units_in(root: nn.Module) -> Iterator[tuple[str, Unit]]:
    """The units of all wrappers in ``root``, with the names of the wrapped modules as seen from
    there; a wrapper that has two names comes twice."""
    for name, module in root.named_modules(remove_duplicate=False):
        if is_wrapper(module):
            yield name, module._unit

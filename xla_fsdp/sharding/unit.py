"""A unit: the parameters that are gathered, freed and reduced together, and what becomes of their
full gradients. See also ``state.py``."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..collectives.world import World
from ..layers import linear
from ..names import dotted
from .attributes import FlattenedParameter
from .block_memory import BlockMemory
from .comms import Communicator
from .deferred_values import Awaited
from .freeing import Stamp
from .ignored import note_again
from .options import FSDPOptions
from .secondary import Secondaries
from .sharded_parameter import accumulate
from .sharded_tensor import Place, ShardedTensor, set_home_of_shards

if TYPE_CHECKING:
    from ..offload.gradients import HostGradients
    from ..offload.streaming import Stream


class UnitGradients:
    """What becomes of the full gradients of a unit's members.

    Attributes:
        comms: makes the reductions.
        require_sync: whether a backward reduces; ``False`` inside ``no_sync``.
        host: what takes the gradient shards, where shards are on the host.
    """

    def __init__(self, tensors: list[ShardedTensor], comms: Communicator) -> None:
        self._tensors = tensors  # the unit's own list, which grows while it is built
        self.comms = comms
        self.require_sync = True
        self.host: HostGradients | None = None
        # Full gradients of the micro-batches inside no_sync, by index in `tensors`.
        self._unsynced: dict[int, torch.Tensor] = {}

    def reduce(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], leaves: Sequence[Any]
    ) -> tuple[list[torch.Tensor | None], Sequence[torch.Tensor]]:
        """A gradient shard for every sharded tensor, from the full gradients of its members, and
        what came out of the collectives.

        ``None`` where no member got a gradient or none is needed, inside ``no_sync``, and where
        they go to the host. ``leaves``: the nodes of the graph that shards get theirs from.
        """
        handed_out = False
        if not self.require_sync or self._unsynced or self.host is not None:
            needed, handed_out = self._asked_for(leaves, needed)
        reached: dict[int, Sequence[torch.Tensor | None]] = {}
        first = 0
        for number, tensor in enumerate(self._tensors):
            members = grads[first : first + len(tensor.layout.members)]
            first += len(tensor.layout.members)
            if needed[number] and any(grad is not None for grad in members):
                reached[number] = members
        if handed_out:
            # Not the sum with what no_sync holds, which is for .grad, nor part of it.
            shards, arrived = self.comms.reduce(self._tensors, reached, {})
            return [shards.get(number) for number in range(len(self._tensors))], arrived
        if not self.require_sync:
            self._hold(self.comms.joined(self._tensors, reached, {}))
            return [None] * len(self._tensors), ()
        held = {number: self._unsynced[number] for number in reached if number in self._unsynced}
        self._forget(held)
        shards, arrived = self.comms.reduce(self._tensors, reached, held)
        found = [shards.get(number) for number in range(len(self._tensors))]
        return self._given([tensor.shard for tensor in self._tensors], found), arrived

    def given(
        self, shards: Sequence[torch.Tensor], grads: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """What autograd is to give ``shards``, whose gradients are ``grads``: these, or nothing,
        where the host gets those that the backward under way asks for."""
        if self.host is None:
            return grads
        given = [number for number, grad in enumerate(grads) if grad is not None]
        leaves = [torch.autograd.graph.get_gradient_edge(shards[number]).node for number in given]
        asked, _ = self._asked_for(leaves, [True] * len(given))
        chosen = {number for number, yes in zip(given, asked, strict=True) if yes}
        return self._given(shards, [g if n in chosen else None for n, g in enumerate(grads)])

    def _given(
        self, shards: Sequence[torch.Tensor], grads: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        if self.host is None:
            return grads
        for shard, grad in zip(shards, grads, strict=True):
            if grad is not None:
                self.host.take(shard, grad)
        return [None] * len(grads)

    def _asked_for(self, leaves: Sequence[Any], needed: Sequence[bool]) -> tuple[list[bool], bool]:
        """For which of ``leaves`` the backward under way computes a gradient (``inputs`` may be
        given to it), and whether it is handed out, by ``torch.autograd.grad``, instead of
        accumulated."""
        accumulated, handed_out = [], []
        for leaf, yes in zip(leaves, needed, strict=True):
            try:
                accumulated.append(yes and torch._C._will_engine_execute_node(leaf))
                handed_out.append(False)
            except RuntimeError:  # how it says so
                accumulated.append(False)
                handed_out.append(True)
        if not any(handed_out):
            return accumulated, False
        if self.host is not None:
            raise RuntimeError(
                "torch.autograd.grad with respect to parameters whose shards are on the host "
                "(cpu_offload), where gradients arrive once the backward is over: call "
                "backward(inputs=[...]), and read .grad"
            )
        return handed_out, True

    @property
    def are_held(self) -> bool:
        """Whether ``no_sync`` gathered something that is not reduced yet."""
        return bool(self._unsynced)

    def forget(self) -> None:
        """Drops what ``no_sync`` gathered."""
        self._forget(dict(self._unsynced))

    def flush(self) -> None:
        """Reduces what ``no_sync`` gathered for tensors that the last backward did not reach."""
        if self.require_sync and self._unsynced:
            for number, grad in self.comms.trace_reductions(self._tensors, self._unsynced)[
                0
            ].items():
                give = accumulate if self.host is None else self.host.take
                give(self._tensors[number].shard, grad)
            self.forget()

    def _hold(self, fulls: dict[int, torch.Tensor]) -> None:
        for number, full in fulls.items():
            if number in self._unsynced:
                # In place, so that a program can write the sum where it read the one before.
                self._unsynced[number].add_(full)
            else:
                # No view: torch_xla would keep what it is a view of as well.
                self._unsynced[number] = torch.view_copy(full, full.shape)
                self._tensors[number].unreduced += 1

    def _forget(self, numbers: dict[int, torch.Tensor]) -> None:
        for number in numbers:
            del self._unsynced[number]
            self._tensors[number].unreduced -= 1


# With the names of their modules as seen from a root, the outermost first: see state.units_in.
NamedUnits = Sequence[tuple[str, "Unit"]]


class Unit:
    """The parameters of one module, in shards.

    Full parameters are numbered through all members of all sharded tensors, in order.

    Args:
        module: what has them: the wrapped module, or the one that ``fully_shard`` was called on.
    """

    # How many equal blocks ``module`` is traced for (scanned blocks); None: for itself only.
    depth: int | None = None
    # What these have in one tensor: their buffers.
    buffers: Sequence[Any] = ()

    def __init__(self, options: FSDPOptions, world: World, module: nn.Module) -> None:
        self.options = options
        self.world = world
        self.module = module
        # Whether `fully_shard` made the unit: no wrapper is around the module.
        self.in_place = False
        self.tensors: list[ShardedTensor] = []
        # The number of the first full parameter of each, and one past the last.
        self._first = [0]
        # Those whose shards an optimizer sees: these, or what the blocks of a scan have in one.
        self.stored = self.tensors
        # Those of them that are registered on this unit's wrapper.
        self.flattened: list[ShardedTensor] = []
        self.places: list[Place] = []
        # Parameters in the module that stay whole: see ignored.py.
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
        self.comms = Communicator(options, world)
        self.gradients = UnitGradients(self.tensors, self.comms)
        # Only with reshard_after_forward=<int>.
        size = options.reshard_after_forward
        self.secondaries = None if isinstance(size, bool) else Secondaries(world, size)
        # Where shards are on the device only while the unit computes.
        self.stream: Stream | None = None
        # Where one trace serves several equal blocks: what hooks remember of them, meanwhile.
        self.memory: BlockMemory | None = None
        self._rnns: list[nn.RNNBase] = []
        # What computes with full parameters in a way of ours.
        self.linears: linear.Layers = {}

    def adopt(self, tensor: ShardedTensor) -> int:
        """Adds a sharded tensor; returns the number of its first full parameter."""
        if tensor not in self.tensors:
            self.tensors.append(tensor)
            tensor.comms = tensor.comms or self.comms
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
            names.setdefault(tensor, {}).setdefault((0, member), self._own_name(place.index))
        self.awaited[:] = [Awaited(tensor.shard, members) for tensor, members in names.items()]

    def name_of(self, index: int) -> str:
        """The dotted name of full parameter ``index``, from the root if that is known."""
        return self.comms.label + self._own_name(index)

    def _own_name(self, index: int) -> str:
        names = (found for place, found in self.named_places() if place.index == index and found)
        first = next(names, None)
        if first is not None:
            return first[0]
        place = next(place for place in self.places if place.index == index)
        return f"{place.name} of a {type(place.module).__name__} that is not in the module now"

    def named_places(self) -> Iterator[tuple[Place, list[str]]]:
        """Every place with the dotted names of its parameter in the unit's module, as they are now:
        none if the place is not in there any more."""
        paths: dict[nn.Module, list[str]] = {}
        for path, module in self.module.named_modules(remove_duplicate=False):
            paths.setdefault(module, []).append(path)
        for place in self.places:
            own = paths.get(place.module, ())
            yield place, [dotted(place.block, dotted(path, place.name)) for path in own]

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

    def add_place(self, place: Place, name: str) -> None:
        """Registers a module attribute that uses a full parameter, and puts its shard there.

        ``name``: the dotted name of the parameter in the unit's module.
        """
        self.places.append(place)
        if place.resting is None:
            tensor, member = self.member_of(place.index)
            shape = torch.Size(tensor.layout.members[member].shape)
            place.shown = FlattenedParameter(shape, tensor.shard, self.comms, name)
        place.rest()
        if isinstance(place.module, nn.RNNBase):
            if place.module not in self._rnns:
                self._rnns.append(place.module)
            self.refresh_rnns()

    @property
    def shards(self) -> list[nn.Parameter]:
        """The parameters that an optimizer sees."""
        return [tensor.shard for tensor in self.stored]

    def holders(self) -> list[tuple[ShardedTensor, nn.Parameter, int]]:
        """For every sharded tensor the parameter that an optimizer sees, and the first of its
        flattened elements that is the tensor's."""
        shards, held = self.shards, []
        for number, tensor in enumerate(self.tensors):
            block, index = divmod(number, len(shards))
            held.append((tensor, shards[index], block * math.prod(tensor.layout.shard_shape)))
        return held

    def note_homes(self) -> None:
        """Notes on every parameter that an optimizer sees what it is a shard of."""
        set_home_of_shards(self.stored)
        note_again(self.ignored)
        for one in self.awaited:
            one.wait_on()

    def refresh_rnns(self) -> None:
        """Has recurrent modules, which compute with a list of their own, see their attributes."""
        for rnn in self._rnns:
            rnn._flat_weights = [rnn._parameters.get(name) for name in rnn._flat_weights_names]

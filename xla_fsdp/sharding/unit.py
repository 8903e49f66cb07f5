"""A unit: the parameters that are gathered, freed and reduced together. See also ``state.py``."""

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
from .attributes import watch_place
from .awaited import Awaited
from .block_memory import BlockMemory
from .comms import Communicator
from .freeing import Stamp
from .ignored import note_again
from .options import FSDPOptions
from .secondary import Secondaries
from .sharded_tensor import Place, ShardedTensor, set_home_of_shards
from .unreduced import UnitGradients

if TYPE_CHECKING:
    from ..offload.streaming import Stream


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
        place.module._parameters[place.name] = place.resting
        tensor, member = self.member_of(place.index)
        watch_place(place, tensor, member, self.comms, name)
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

"""An FSDP unit: parameters that are gathered, freed and reduced together. See also ``state.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..collectives.world import World
from ..layers import linear
from ..names import dotted
from .comms import Communicator, subgroup
from .deferred_values import UninitializedTensor
from .freeing import Stamp
from .ignored import mark_parameters
from .options import FSDPOptions
from .shard_reductions import adds_to_grad
from .sharded_tensor import ParameterSlot, ShardedTensor, mark_shards

if TYPE_CHECKING:
    from ..offload import HostGradients, Stream


# With the names of their modules, the outermost first.
NamedUnits = Sequence[tuple[str, "Unit"]]


def paths_of(root: nn.Module) -> dict[nn.Module, list[str]]:
    """All dotted names of every module in ``root``."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return paths


class Unit:
    """The parameters of ``module``, the wrapped one or that of ``fully_shard``, in shards.

    Full parameters are numbered through all members of all sharded tensors, in order.
    """

    # Scanned blocks: how many ``module`` represents, and their stacked buffers.
    depth: int | None = None
    buffers: Sequence[Any] = ()

    def __init__(self, options: FSDPOptions, world: World, module: nn.Module) -> None:
        self.options = options
        self.world = world
        self.module = module
        # `fully_shard` made the unit.
        self.in_place = False
        self.tensors: list[ShardedTensor] = []
        # The sharded tensor of each full parameter, and its number there.
        self.members: list[tuple[ShardedTensor, int]] = []
        # The tensors whose shards an optimizer sees: these, or the stacks of scanned blocks.
        self.stored = self.tensors
        # Those that are registered on this unit's wrapper.
        self.flattened: list[ShardedTensor] = []
        self.slots: list[ParameterSlot] = []
        self.ignored: list[nn.Parameter] = []
        # Without values until a load.
        self.uninitialized: list[UninitializedTensor] = []
        # Of the full parameters that this rank built, and of their shards.
        self.initial_checksum = 0
        self.initial_stamps: list[Stamp] = []
        # The dtypes that cast buffers had, by module and name.
        self.buffer_dtypes: dict[tuple[nn.Module, str], torch.dtype] = {}
        # Freed parameters contain NaN, so that code that kept one gets NaN.
        nan = float("nan")
        if world.as_on_tpu:
            self.placeholder = torch.full((1,), nan, device=world.device)
        else:  # data: a constant would make the programs of the first two steps different
            self.placeholder = torch.full((1,), nan, device="cpu").to(world.device)
        self.comms = Communicator(options, world)
        # False inside no_sync.
        self.require_sync = True
        # Full gradients inside no_sync, by index in `tensors`.
        self._unsynced: dict[int, torch.Tensor] = {}
        self.host_gradients: HostGradients | None = None
        # The ranks that store second shards.
        size = options.reshard_after_forward
        self.secondary_world = None if isinstance(size, bool) else subgroup(world, size)
        self.stream: Stream | None = None
        self.rnns: list[nn.RNNBase] = []
        self.linears: linear.Layers = {}

    def add_tensor(self, tensor: ShardedTensor) -> int:
        """Returns the number of its first full parameter."""
        if tensor not in self.tensors:
            self.tensors.append(tensor)
            tensor.comms = tensor.comms or self.comms
            self.members += [(tensor, member) for member in range(len(tensor.layout.members))]
        return self.members.index((tensor, 0))

    def mark_uninitialized(self) -> None:
        names: dict[ShardedTensor, dict[tuple[int, int], str]] = {}
        for slot in self.slots:
            tensor, member = self.members[slot.index]
            names.setdefault(tensor, {}).setdefault((0, member), self._own_name(slot.index))
        self.uninitialized[:] = [
            UninitializedTensor(tensor.shard, members) for tensor, members in names.items()
        ]

    def name_of(self, index: int) -> str:
        """The dotted name of full parameter ``index``, from the root if that is known."""
        return self.comms.label + self._own_name(index)

    def _own_name(self, index: int) -> str:
        names = (found for slot, found in self.named_slots() if slot.index == index and found)
        first = next(names, None)
        if first is not None:
            return first[0]
        slot = next(slot for slot in self.slots if slot.index == index)
        return f"{slot.name} of a {type(slot.module).__name__} that was removed from the module"

    def named_slots(
        self, paths: Mapping[nn.Module, list[str]] | None = None
    ) -> Iterator[tuple[ParameterSlot, list[str]]]:
        """Every slot with the dotted names of its parameter, none if it was removed.

        ``paths``: of modules in the root; default: in :attr:`module`.
        """
        paths = paths_of(self.module) if paths is None else paths
        for slot in self.slots:
            own = paths.get(slot.module, ())
            yield slot, [dotted(slot.block, dotted(path, slot.name)) for path in own]

    def names_of(self, tensor: ShardedTensor, members: int) -> list[str]:
        """Of the first ``members`` full parameters of ``tensor``."""
        first, names = self.add_tensor(tensor), []
        for member in range(members):
            used = any(slot.index == first + member for slot in self.slots)
            name = f"{self.comms.label}{tensor.key}[{member}]"  # of a shared flat vector
            names.append(self.name_of(first + member) if used else name)
        return names

    @property
    def title(self) -> str:
        """For messages: its quoted name, if that is known."""
        return repr(self.comms.label.rstrip(".")) if self.comms.label else "the wrapper"

    @property
    def shards(self) -> list[nn.Parameter]:
        """What an optimizer sees."""
        return [tensor.shard for tensor in self.stored]

    def holders(self) -> list[tuple[ShardedTensor, nn.Parameter, int]]:
        """Every sharded tensor, the parameter that an optimizer sees, and its offset there."""
        shards, found = self.shards, []
        for number, tensor in enumerate(self.tensors):
            block, index = divmod(number, len(shards))
            found.append((tensor, shards[index], block * math.prod(tensor.layout.shard_shape)))
        return found

    def mark_shards(self) -> None:
        mark_shards(self.stored)
        mark_parameters(self.ignored)
        for one in self.uninitialized:
            one.restart_watch()

    def refresh_rnns(self) -> None:
        for rnn in self.rnns:
            rnn._flat_weights = [rnn._parameters.get(name) for name in rnn._flat_weights_names]

    def reduce_gradients(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], leaves: Sequence[Any]
    ) -> tuple[list[torch.Tensor | None], Sequence[torch.Tensor]]:
        """A gradient shard for every sharded tensor, and the results of the collectives.

        ``None`` without a gradient, inside ``no_sync``, and if it goes to the host. ``leaves``: the
        graph nodes that deliver gradients to the shards.
        """
        handed_out = False
        if not self.require_sync or self._unsynced or self.host_gradients is not None:
            needed, handed_out = self._asked_for(leaves, needed)
        reached: dict[int, Sequence[torch.Tensor | None]] = {}
        first = 0
        for number, tensor in enumerate(self.tensors):
            members = grads[first : first + len(tensor.layout.members)]
            first += len(tensor.layout.members)
            if needed[number] and any(grad is not None for grad in members):
                reached[number] = members
        if not (handed_out or self.require_sync):
            self._store_unsynced(self.comms.join_gradients(self.tensors, reached, {}))
            return [None] * len(self.tensors), ()
        # If gradients are returned, those of no_sync stay: the sum is for .grad.
        summed = [] if handed_out else [number for number in reached if number in self._unsynced]
        accumulated = {number: self._unsynced[number] for number in summed}
        self._drop_unsynced(accumulated)
        shards, arrived = self.comms.reduce(self.tensors, reached, accumulated)
        found = [shards.get(number) for number in range(len(self.tensors))]
        return self._given([tensor.shard for tensor in self.tensors], found), arrived

    def given_gradients(
        self, shards: Sequence[torch.Tensor], grads: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """The gradients for autograd to deliver; ``None`` for those that the host receives."""
        if self.host_gradients is None:
            return grads
        given = [number for number, grad in enumerate(grads) if grad is not None]
        leaves = [torch.autograd.graph.get_gradient_edge(shards[number]).node for number in given]
        asked, _ = self._asked_for(leaves, [True] * len(given))
        chosen = {number for number, yes in zip(given, asked, strict=True) if yes}
        return self._given(shards, [g if n in chosen else None for n, g in enumerate(grads)])

    def _given(
        self, shards: Sequence[torch.Tensor], grads: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        if self.host_gradients is None:
            return grads
        for shard, grad in zip(shards, grads, strict=True):
            if grad is not None:
                self.host_gradients.take(shard, grad)
        return [None] * len(grads)

    def _asked_for(self, leaves: Sequence[Any], needed: Sequence[bool]) -> tuple[list[bool], bool]:
        """For which ``leaves`` the backward computes a gradient, and whether it returns them."""
        accumulated, handed_out = [], []
        for leaf, yes in zip(leaves, needed, strict=True):
            adds = adds_to_grad(leaf) if yes else False
            accumulated.append(bool(adds))
            handed_out.append(adds is None)
        if not any(handed_out):
            return accumulated, False
        if self.host_gradients is not None:
            raise RuntimeError(
                "torch.autograd.grad was called for parameters whose shards are on the host "
                "(cpu_offload), where gradients arrive only after the backward. Call "
                "backward(inputs=[...]), and read .grad"
            )
        return handed_out, True

    def forget_gradients(self) -> None:
        self._drop_unsynced(dict(self._unsynced))

    def flush_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Reduces gradients of ``no_sync`` for tensors that the last backward did not reach.

        Returns shards and their gradients, without those that the host receives.
        """
        if not (self.require_sync and self._unsynced):
            return []
        reduced, _ = self.comms.trace_reductions(self.tensors, self._unsynced)
        self.forget_gradients()  # hooks read the gradients
        shards = [self.tensors[number].shard for number in reduced]
        found = zip(shards, self._given(shards, [*reduced.values()]), strict=True)
        return [(shard, grad) for shard, grad in found if grad is not None]

    def _store_unsynced(self, fulls: dict[int, torch.Tensor]) -> None:
        for number, full in fulls.items():
            if number in self._unsynced:
                # In place, so that a program can reuse the memory of the previous sum.
                self._unsynced[number].add_(full)
            else:
                # No view: torch_xla would keep the base of the view in memory.
                self._unsynced[number] = torch.view_copy(full, full.shape)
                self.tensors[number].unreduced.append((self._unsynced, number))

    def _drop_unsynced(self, numbers: dict[int, torch.Tensor]) -> None:
        for number in numbers:
            del self._unsynced[number]
            tensor = self.tensors[number]
            tensor.unreduced = [one for one in tensor.unreduced if one[0] is not self._unsynced]

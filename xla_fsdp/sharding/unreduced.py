"""The full gradients of one unit: reduced at once, or summed up inside ``no_sync`` until later."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .comms import Communicator
from .shard_hooks import accumulate
from .sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from ..offload.gradients import HostGradients


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

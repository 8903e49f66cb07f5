"""What users ask of a wrapper about gradients: accumulate, average, clip, forget them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .sharding.averaging import average_ignored_gradients
from .sharding.clipping import clip_grad_norm_
from .sharding.comm_hook import Hook, register
from .sharding.first_step import require_values
from .sharding.unit import Unit, units_in


class GradientMethods(nn.Module):
    """A module whose parameters ``_unit`` shards, and those of wrappers inside it."""

    _unit: Unit

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """All shards, inner wrappers included, that have a gradient."""
        return [parameter for parameter in self.parameters() if parameter.grad is not None]

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Scales all gradients so that their total norm is at most ``max_norm``; see
        :func:`xla_fsdp.sharding.clipping.clip_grad_norm_`. Must be called on every rank."""
        self._require_values("clip_grad_norm_ came")
        return clip_grad_norm_(
            self._wrapped_units(), self.parameters(), max_norm, norm_type, groups
        )

    def average_ignored_gradients(self) -> None:
        """Gives ignored parameters the mean of all ranks' gradients; call it on every rank.

        Between backward and clipping or step. Otherwise they have this rank's own gradient. Divides
        as :meth:`set_gradient_divide_factors` says.
        """
        average_ignored_gradients(self._wrapped_units())

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, also those that ``no_sync`` has left unreduced.

        An optimizer's ``zero_grad`` does not know of the latter.
        """
        super().zero_grad(set_to_none)
        for unit in self._wrapped_units():
            unit.gradients.forget()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backwards leave gradients unreduced; the first backward after it reduces the sum.

        Saves the reductions of all but the last micro-batch, at the price of the full gradients in
        memory.
        """
        units = self._wrapped_units()
        before = [unit.gradients.require_sync for unit in units]
        for unit in units:
            unit.gradients.require_sync = False
        try:
            yield
        finally:
            for unit, value in zip(units, before, strict=True):
                unit.gradients.require_sync = value

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divides gradients by ``pre`` before and by ``post`` after the reduction.

        The defaults average over all ranks. ``recursive``: in all wrappers inside as well.
        """
        for name, value in (("pre", pre), ("post", post)):
            if not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        for unit in self._wrapped_units() if recursive else [self._unit]:
            unit.wire.predivide, unit.wire.postdivide = float(pre), float(post)

    @property
    def gradient_predivide_factor(self) -> float:
        return self._unit.wire.predivide

    @property
    def gradient_postdivide_factor(self) -> float:
        return self._unit.wire.postdivide

    def register_comm_hook(self, state: object, hook: Hook, over: str = "all") -> None:
        """Has ``hook(state, bucket)`` make every reduction of gradients of this wrapper and of
        those inside it: ``docs/communication-hooks.md``.

        Args:
            state: handed to ``hook`` as it is. Not saved with the model.
            hook: takes ``state`` and a :class:`~xla_fsdp.comm_hooks.GradBucket`, returns the mean
                gradient of this rank's shards: ``bucket.reduce(changed)`` to change what is sent,
                ``bucket.shard_of(means)`` after averaging by other means. All ranks must do alike.
            over: ``"all"``: the hook gets each rank's own full gradients. ``"replicas"`` (hybrid
                sharding): gradients are reduced within the sharding group as ever, and the hook
                averages these shards over the replicas.

        Raises:
            TypeError: ``hook`` is no such function, or is one of torch.distributed.
            ValueError: ``over`` is something else, or there are no replicas.
            RuntimeError: a hook is registered already. In the backward: of scanned blocks, a hook
                kept something that only exists inside of their loop.
        """
        register(self._wrapped_units(), state, hook, over)

    def _require_values(self, doing: str) -> None:
        """Raises RuntimeError if ``doing`` comes before a load has given values to parameters."""
        if any(unit.awaited for unit in self._wrapped_units()):
            require_values(self, doing)

    def _wrapped_units(self) -> list[Unit]:
        # What is sharded in place has one unit together with its shell.
        return list(dict.fromkeys(unit for _, unit in units_in(self)))

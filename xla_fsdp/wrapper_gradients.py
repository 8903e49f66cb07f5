"""What users ask of a wrapper about gradients: accumulate, average, clip, forget them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from .sharding.clipping import clip_grad_norm_
from .sharding.comm_hook import Hook, register
from .sharding.comm_plan import Divisors
from .sharding.first_step import require_values
from .sharding.ignored import note_of
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

    @torch.no_grad()
    def average_ignored_gradients(self) -> None:
        """Gives ignored parameters the mean of all ranks' gradients; call it on every rank.

        Between backward and clipping or step. Otherwise they have this rank's own gradient. Divides
        as :meth:`set_gradient_divide_factors` says. All ranks must have gradients for the same
        parameters; one without gradient stays so.
        """
        # One all-reduce for each unit that ignores something and each dtype.
        done: set[nn.Parameter] = set()
        for unit in self._wrapped_units():
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for parameter in unit.ignored:
                note = note_of(parameter)
                if note is not None:
                    note.averaged = True
                if parameter.grad is not None and parameter not in done:
                    by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
                done.add(parameter)
            divisor = unit.comms.divisors.product
            for dtype, grads in by_dtype.items():
                flat = torch.cat([grad.reshape(-1) for grad in grads])
                flat = flat.float() if dtype in (torch.float16, torch.bfloat16) else flat
                total = unit.world.all_reduce_sum(flat, "ignored gradients")
                mean = unit.world.sum_over_replicas(total, "ignored gradients") / divisor
                pieces = mean.to(dtype).split([grad.numel() for grad in grads])
                for grad, piece in zip(grads, pieces, strict=True):
                    grad.copy_(piece.view(grad.shape))

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
            unit.comms.divisors = Divisors(float(pre), float(post))

    @property
    def gradient_predivide_factor(self) -> float:
        return self._unit.comms.divisors.before

    @property
    def gradient_postdivide_factor(self) -> float:
        return self._unit.comms.divisors.after

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


@torch.no_grad()
def narrow_gradients(unit: Unit) -> None:
    """After a backward: gives the gradients of ``unit`` the dtype that it computes in, if
    ``MixedPrecision(keep_low_precision_grads=True)`` asks for that.

    torch accumulates the next backward's into them as they are.
    """
    policy = unit.options.mixed_precision
    if policy is None or not policy.keep_low_precision_grads or policy.param_dtype is None:
        return
    for tensor, holder, _ in unit.holders():
        if holder.grad is not None and holder.is_floating_point() and not tensor.wide:
            if holder.grad.dtype is not policy.param_dtype:
                # Only the data of a gradient may have another dtype than its parameter.
                holder.grad.data = holder.grad.to(policy.param_dtype)

"""The methods of torch's ``FSDPModule``: when something is full, and when gradients are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..names import is_wrapper, shell_of
from ..sharding.unit import Unit
from .shell import Shell


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def wait(self) -> None:
        """Nothing: the program that reads a parameter waits for its gather."""


class FSDPSettings(nn.Module):
    """By torch's names. What says nothing but when bytes travel has no effect: that is decided when
    the program is compiled, and results are the same."""

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this module's own parameters; its modules hold them in full from here on.

        Until :meth:`reshard` or the next forward of the module. That uses what was gathered, and
        afterwards frees it or keeps it for the backward as ``reshard_after_forward`` says. What is
        computed with full parameters has right gradients; changing them is an error. Must be called
        on every rank.

        Args:
            async_op: return a handle, whose ``wait()`` there is no need for.
        """
        _require_bool("async_op", async_op)
        self._own_shell.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Frees what :meth:`unshard` gathered, or ``set_reshard_after_backward(False)`` kept.

        Raises:
            RuntimeError: a parameter was changed in between, which would be lost.
        """
        self._own_shell.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """``False``: backwards leave gradients unreduced, in full, and the first backward with
        ``True`` reduces the sum. ``recurse``: in what is sharded inside, too."""
        _require_bool("requires_gradient_sync", requires_gradient_sync)
        for shell in self._shells(recurse):
            if isinstance(shell, Shell):
                shell.set_sync(syncs=requires_gradient_sync)
            else:
                unit: Unit = shell._unit
                unit.gradients.require_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """``False``: backwards leave gradients unreduced where there are replicas (a 2-D mesh).

        The first backward with ``True`` reduces the sum. Unlike torch's, it keeps the gradients in
        full until then, as ``set_requires_gradient_sync(False)`` does.
        """
        _require_bool("requires_all_reduce", requires_all_reduce)
        for shell in self._shells(recurse):
            if isinstance(shell, Shell):
                shell.set_sync(all_reduces=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Whether full parameters are freed after the forward, and gathered again."""
        _require_bool("reshard_after_forward", reshard_after_forward)
        for shell in self._shells(recurse):
            if isinstance(shell, Shell):
                shell.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """``False``: full parameters stay after the backward, for the forward of the next
        micro-batch. Once a step has changed the shards they are gathered anew."""
        _require_bool("reshard_after_backward", reshard_after_backward)
        for shell in self._shells(recurse):
            if isinstance(shell, Shell):
                shell.in_place.keeping.after_backward = not reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides this module's reduced gradients by ``factor``, instead of by the number of
        ranks."""
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
            raise ValueError(f"factor must be a positive number, got {factor!r}")
        self._own_shell.set_gradient_divide_factors(1.0, float(factor), recursive=False)

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    # -- no effect ------------------------------------------------------------------------------

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Checked, and of no effect: the next module is prefetched in the order of the trace."""
        _require_sharded("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Checked, and of no effect: the next module is prefetched in the order of the trace."""
        _require_sharded("set_modules_to_backward_prefetch", modules)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: every backward ends by itself."""
        _require_bool("is_last_backward", is_last_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: a backward that needs no parameter drops the gather when it is compiled."""
        _require_bool("unshard_in_backward", unshard_in_backward)

    def set_post_optim_event(self, event: Any) -> None:
        """No effect: a program has no streams."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect: the compiler places buffers."""
        _require_bool("enable", enable)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: reductions are sums already."""
        _require_bool("enable", enable)

    # -- refused --------------------------------------------------------------------------------

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], **kwargs: Any) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "set_all_reduce_hook is not possible: change gradients in parameter.grad, between "
            "backward and step"
        )

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "set_custom_all_gather is not possible: collectives are part of the compiled program"
        )

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "set_custom_reduce_scatter is not possible: collectives are part of the compiled "
            "program. For gradients reduced in float32 pass mp_policy with reduce_dtype"
        )

    @property
    def _own_shell(self) -> Shell:
        shell = shell_of(self)
        assert isinstance(shell, Shell), "fully_shard gives one to every module of this class"
        return shell

    def _shells(self, recurse: bool) -> list[Any]:
        """What runs this module's forward, and those of all that is sharded inside of it."""
        _require_bool("recurse", recurse)
        among = self.modules() if recurse else [self]
        return [shell_of(module) or module for module in among if is_wrapper(module)]


def _require_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


def _require_sharded(method: str, modules: Any) -> None:
    if not isinstance(modules, (list, tuple)):
        raise ValueError(f"{method} takes a list of modules, got {modules!r}")
    for module in modules:
        if not isinstance(module, FSDPSettings):
            raise ValueError(
                f"{method} takes modules that fully_shard was called on, got a "
                f"{type(module).__name__}"
            )

"""The FSDP unit and the public methods that wrappers and modules sharded in place share."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch
import torch_xla
from torch import nn

from . import remat  # noqa: F401  # makes torch.utils.checkpoint work on XLA
from .names import is_wrapper
from .offload import attach
from .sharding import metadata, optimizer_hook  # noqa: F401  # registers the hook
from .sharding.building import UnitBuilder
from .sharding.clipping import clip_grad_norm_
from .sharding.comm_plan import Divisors
from .sharding.cpu_offload import stay_on_host
from .sharding.deferred_values import remaining_uninitialized
from .sharding.gathering import UnshardedParameter
from .sharding.ignored import ignored_mark_of, is_ignored, mark_ignored
from .sharding.options import FSDPOptions
from .sharding.state import FSDPState, unique_units, units_in
from .sharding.summon import require_no_scanned, summon_full_params
from .sharding.user_checks import has_forward, raise_exported, require_values
from .wrap import recursive_wrap, require_unwrapped, warn_if_none_chosen


def make_unit(module: nn.Module, owner: nn.Module, given: FSDPOptions) -> FSDPState:
    """Shards the parameters in ``module`` that no unit inside it has sharded yet.

    ``owner`` gets the unit: a wrapper around ``module``, or ``module`` itself.

    Raises:
        RuntimeError: the module is sharded already, or has no ``forward``.
        ValueError, TypeError: an option has a value that is not allowed.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if is_wrapper(module):
        raise RuntimeError(
            "this module is already wrapped. To nest wrappers, wrap the inner modules first and "
            "then the module around them"
        )
    if not has_forward(module):
        raise RuntimeError(
            f"{type(module).__name__} has no forward, so a wrapper cannot know when its "
            "parameters are needed. Wrap its elements, or the module that calls them"
        )
    given = given.resolved()
    options = given.inherited()
    if given.ignored_modules or given.ignored_parameters:
        mark_ignored(module, given.ignored_modules, given.ignored_parameters)
    if given.auto_wrap_policy is not None:
        require_unwrapped(module)
        wrapper_cls = given.auto_wrapper_callable or type(owner)
        kwargs = options.as_kwargs()
        modules = [one for one in module.modules() if is_ignored(one)]
        parameters = [one for one in module.parameters() if ignored_mark_of(one) is not None]
        recursive_wrap(
            module, given.auto_wrap_policy, wrapper_cls, modules, parameters, True, **kwargs
        )
        warn_if_none_chosen(module, given.auto_wrap_policy)
    world = options.world()
    on_device = any(p.device.type == "xla" and not p.is_meta for p in module.parameters())
    unit = UnitBuilder(module, owner, options, world).build()
    finish_unit(unit, on_device)
    adapt(module)
    return unit


def finish_unit(unit: FSDPState, on_device: bool) -> None:
    """``on_device``: parameters were on the device before."""
    narrow, offloads = False, unit.options.cpu_offload is not None
    for tensor in unit.stored:
        computed = tensor.spec.compute_dtype(unit.options.compute_dtype)
        narrow |= computed is torch.float16 and not unit.options.fp32_reduce_scatter
        offloads |= tensor.copy is not None  # shared with a unit that offloads
    if narrow:
        unit.comms.divisors = Divisors.of(unit.world, in_float16=True)
    if offloads:
        attach(unit)
    if unit.options.execute_sharding_on_init and on_device:
        torch_xla.sync()


class ShardedModule(nn.Module):
    """A module with an FSDP unit."""

    _is_fsdp_wrapper = True
    _unit: FSDPState

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, under the names that the parameters have in the unsharded module.

        Between ``unshard()`` and ``reshard()``: full parameters, for reading only.
        """
        for unit in unique_units(self):
            if unit.unsharded is None:
                unit.reset_after_failure()
        yield from super().named_parameters(*args, **kwargs)

    def state_dict(  # type: ignore[override]  # without the overload for destination
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """This rank's shards and all buffers; see :meth:`get_shard_metadata`.

        Raises:
            RuntimeError: some have no values yet (``param_init_fn=defer_init``).
        """
        _rest(self)
        require_values(units_in(self), "state_dict() was called")
        return super().state_dict(*args, **kwargs)

    def get_shard_metadata(self) -> dict[str, Any]:
        """Describes how to combine the ``state_dict()`` of all ranks, in plain values.

        Save it with the state dict, under ``"shard_metadata"``, for :mod:`xla_fsdp.consolidate`.
        """
        return metadata.shard_metadata(units_in(self))

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Scales all gradients so that their total norm is at most ``max_norm``. Collective.

        See :func:`xla_fsdp.sharding.clipping.clip_grad_norm_`.
        """
        require_values(units_in(self), "clip_grad_norm_ was called")
        return clip_grad_norm_(unique_units(self), self.parameters(), max_norm, norm_type, groups)

    @torch.no_grad()
    def average_ignored_gradients(self) -> None:
        """Replaces gradients of ignored parameters by the mean over all ranks. Collective.

        Call it between backward and clipping or step. Divides as ``set_gradient_divide_factors``
        says. All ranks must have gradients for the same parameters.
        """
        done: set[nn.Parameter] = set()
        for unit in unique_units(self):
            by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
            for parameter in unit.ignored:
                note = ignored_mark_of(parameter)
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
        """Drops all gradients, also those that ``no_sync`` stored without reducing them."""
        units = unique_units(self)
        for unit in units:
            unit.forget_gradients()
        # After unshard() the shards are not in the modules.
        shards = [shard for unit in units for shard in unit.shards]
        for parameter in dict.fromkeys([*self.parameters(), *shards]):
            if isinstance(parameter, UnshardedParameter) or parameter.grad is None:
                continue
            if set_to_none:
                parameter.grad = None
            else:
                with torch.no_grad():
                    parameter.grad.zero_()

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Calls ``fn`` on each module inside, then on this one, with full parameters. Collective.

        During each call, only the FSDP units around the module are full.
        """
        require_no_scanned(unique_units(self))
        _rest(self)
        with summon_full_params(self, recurse=False):
            return super().apply(fn)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``to``, ``half``, ``cpu`` and similar: dtypes may change, the device may not."""
        unit = self._unit
        unit.release()
        device, found = unit.world.device, fn(unit.placeholder).device
        if found != device:
            raise RuntimeError(
                f"the shards of a wrapped module stay on {device}, where its collectives run, and "
                f"cannot be moved to {found}. To get the values on the host call "
                "xla_fsdp.full_state_dict(model); for a model there, consolidate a checkpoint"
            )
        for tensor in unit.stored:
            metadata.require_no_new_parameters("the conversion of a module", repr(tensor.name))
        waiting = remaining_uninitialized(unit.uninitialized)
        super()._apply(stay_on_host(fn, unit.shards), recurse)
        for one in waiting:
            one.restart_watch()
        return self

    def __deepcopy__(self, memo: dict) -> Any:
        for unit in unique_units(self):
            unit.reshard()
        _rest(self)
        remaining_uninitialized(self._unit.uninitialized)
        clone: Any = object.__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        clone._unit.mark_shards()
        clone._unit.forget_gradients()
        return clone

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a sharded model cannot be pickled, because its shards are on this rank's device. Save "
            "state_dict() and get_shard_metadata(), or xla_fsdp.full_state_dict(model)"
        )

    def __prepare_scriptable__(self) -> NoReturn:
        """Called only by ``torch.jit.script``."""
        raise_exported(type(self._unit.module).__name__)

    def _fqn_modifiers(self) -> NoReturn:
        """Called only by ``torch.distributed.checkpoint.state_dict``."""
        raise RuntimeError(
            "torch.distributed.checkpoint.state_dict would treat this rank's shards as full "
            "parameters. Use xla_fsdp.full_state_dict, full_optim_state_dict and their load_ "
            "counterparts, or save_checkpoint; to_dcp writes torch's format"
        )


def _rest(module: nn.Module) -> None:
    for unit in unique_units(module):
        unit.install_shards()


def adapt(module: nn.Module) -> None:
    """Adapts models of other libraries, which read parameters outside of a forward."""
    if sys.modules.keys() & {"transformers.modeling_utils", "peft.peft_model"}:
        changes: Any = import_module(".integrations.changes", __package__)
        changes.adapt_model(module)

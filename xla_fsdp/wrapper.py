"""``XlaFullyShardedDataParallel``: the module around a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_xla
from torch import nn

from . import xlac
from .libraries import adapt
from .names import is_wrapper, shell_of
from .offload.attaching import attach
from .offload.streaming import share_traffic
from .sharding import metadata
from .sharding.building import UnitBuilder
from .sharding.first_step import (
    compare_initial_weights,
    require_all_sharded,
    require_values,
    tell_of_slices,
)
from .sharding.gathering import computing, computing_passes
from .sharding.ignored import mark_ignored
from .sharding.input_devices import raise_if_elsewhere
from .sharding.optimizer_checks import watch_optimizers
from .sharding.options import WRAPPER, FSDPOptions, constructor
from .sharding.saved_parameters import parameters_saved_as_recipes
from .sharding.transforms import require_plain_call, require_uncompiled
from .sharding.unit import units_in
from .torch_checkpoint import support_torch_checkpoint
from .tree import cast_floats
from .wrap import recursive_wrap, require_forward, require_unwrapped, warn_if_none_chosen
from .wrapper_gradients import narrow_gradients
from .wrapper_methods import WrapperMethods


class XlaFullyShardedDataParallel(WrapperMethods):
    """Shards a module's parameters, gradients and optimizer state over the ranks.

    Between its uses the module holds one shard a rank of each parameter. A forward gathers the
    full parameters, computes, and frees them; the backward gathers them again, and reduce-scatters
    the gradients, so that ``parameter.grad`` is the mean gradient of this rank's shard. Create the
    optimizer after wrapping and call ``optimizer.step()`` directly: the shards need no further
    reduction.

    Wrap the layers of a large model one by one (by hand, inside out, or with
    ``auto_wrap_policy``), then the whole: only one layer's parameters are then full at a time.
    Parameters keep their dotted names in ``named_parameters()`` and ``state_dict()``; their values
    are shards, one-dimensional unless ``shard_param_on_dim_0``.

    Args:
        module: the module to wrap. May be on CPU, on the XLA device or on the meta device. Its
            values must be the same on every rank (same seed, or same checkpoint), unless
            ``sync_module_states``.
        args, options: those of :class:`~xla_fsdp.FSDPOptions`, which describes each, by position or
            by name. Positions and defaults are those of torch_xla's class.

    Raises:
        RuntimeError: the module is already wrapped, or has no ``forward``.
        ValueError, TypeError: an option has a value that is not allowed, was removed, or does not
            exist.
    """

    @constructor(FSDPOptions)
    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__()
        self._wrap(module, FSDPOptions.of(WRAPPER, *args, **options))

    def _wrap(self, module: nn.Module, given: FSDPOptions) -> None:
        _require_wrappable(module)
        given = given.resolved()
        self.fsdp_options = options = given.inherited()
        ignored = mark_ignored(module, given.ignored_modules, given.ignored_parameters)
        if given.auto_wrap_policy is not None:
            require_unwrapped(module)
            wrapper_cls = given.auto_wrapper_callable or type(self)
            kwargs = options.as_kwargs()
            recursive_wrap(module, given.auto_wrap_policy, wrapper_cls, *ignored, True, **kwargs)
            warn_if_none_chosen(module, given.auto_wrap_policy)
        world = options.world()
        on_device = any(p.device.type == "xla" and not p.is_meta for p in module.parameters())
        builder = UnitBuilder(module, self, options, world)
        self._unit = builder.build()
        attach(self._unit)
        self._fsdp_wrapped_module = module
        watch_optimizers()
        support_torch_checkpoint()
        adapt(module)
        self._register_state_dict_hook(metadata.clean_state_dict_keys)
        self.register_load_state_dict_pre_hook(metadata.restore_state_dict_keys)
        self.register_load_state_dict_post_hook(metadata.clean_reported_keys)
        if options.execute_sharding_on_init and on_device:
            torch_xla.sync()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(self.module, args, kwargs)

    def _run(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        require_plain_call(type(self.module).__name__)
        unit = self._unit
        dtype = self.fsdp_options.dtype_of_inputs(root=self._unit.is_root is not False)
        if dtype is not None:
            args, kwargs = cast_floats(args, dtype), cast_floats(kwargs, dtype)
        if unit.computing:  # a module that calls itself: its parameters are there
            return forward(*args, **kwargs)
        if unit.is_root is None:
            self._become_root()
        self._settle(recursive=False)
        if unit.stream is not None:
            args, kwargs = unit.stream.entering((args, kwargs))
        stays = self._keeps_parameters()
        one = unit.begin((args, kwargs), stays)
        if unit.is_root:
            one.on_backward_end = self._end_backward
        keep = False
        try:
            with parameters_saved_as_recipes(), computing((one,)):
                outputs = one.copied_out(forward(*args, **kwargs))
            unit.require_unchanged(one)
            keep = stays
        except RuntimeError as error:
            raise_if_elsewhere(type(self.module).__name__, (args, kwargs), unit.world.device, error)
            raise
        finally:
            unit.end(one, keep)
            if not computing_passes() and torch._C._current_graph_task_id() == -1:
                unit.order.end_forward()
        if unit.stream is not None:
            del args, kwargs  # what is held when a program starts is a result of it
            unit.stream.forward_over()
        return unit.watch(one, outputs) if torch.is_grad_enabled() else outputs

    def _keeps_parameters(self) -> bool:
        """Whether the full parameters stay in memory from this forward to its backward."""
        if not torch.is_grad_enabled():
            return False
        if torch._C._current_graph_task_id() != -1:
            # Recomputation inside a backward: their own backward follows at once.
            return True
        if self._unit.is_root and self.fsdp_options.disable_reshard_on_root:
            return True
        return not self.fsdp_options.reshard_after_forward

    def _become_root(self) -> None:
        for unit in self._wrapped_units():
            unit.require_not_summoned()
        require_values(self, "the first forward came")
        for path, unit in reversed(list(units_in(self))):  # of two names the first stays
            unit.is_root = unit is self._unit
            unit.comms.label = f"{path}." if path else ""
            unit.order = self._unit.order
        share_traffic(self._wrapped_units())
        require_uncompiled(self)
        require_all_sharded(self)
        compare_initial_weights(self._unit.world, list(units_in(self)))
        tell_of_slices(self._unit.world)

    def _end_backward(self) -> None:
        with torch.no_grad():
            for unit in self._wrapped_units():
                unit.gradients.flush()
                narrow_gradients(unit)
        hosts = [unit.gradients.host for unit in self._wrapped_units()]
        if self.fsdp_options.sync_on_finalization or any(hosts):
            for unit in self._wrapped_units():  # what is full would be an output of the program
                unit.leave_backward()
        for host in hosts:
            if host is not None:
                host.arrive()
        for unit in self._wrapped_units():
            if unit.stream is not None:
                unit.stream.arrive()
        if self.fsdp_options.sync_on_finalization:
            xlac.start_program(self._unit.world.device)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Has ``module.method_name(...)`` compute like ``module(...)``: with its parameters gathered.

    For entry points other than ``forward`` (``encode``, ``generate``). Gradients flow through them,
    and hooks of the module do not run, as in any call of a method. No effect if ``module`` is not
    wrapped, so that a script may say it for both.

    Args:
        module: a wrapper of this package, or any module.
        method_name: a method of the wrapped module, or of one inside that it answers with (a
            ``PeftModel`` does).

    Raises:
        AttributeError: the wrapped module has no method of that name; with ``fully_shard``, its
            class has none.
        TypeError: ``module`` is no module, or runs scanned blocks, which only have a forward.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    shell = shell_of(module)
    module = shell or module
    if not isinstance(module, XlaFullyShardedDataParallel):
        return
    if type(module).forward is not XlaFullyShardedDataParallel.forward:
        raise TypeError(f"{type(module).__name__} computes in its forward only; call that")
    if not callable(getattr(module.module, method_name, None)):
        raise AttributeError(
            f"{type(module.module).__name__} has no method {method_name!r} to register"
        )
    if shell is not None and not hasattr(type(module.module), method_name):
        raise AttributeError(
            f"{method_name!r} is a method of a module inside {type(module.module).__name__}, not "
            "of its class, which alone fully_shard changes: wrap with XlaFullyShardedDataParallel, "
            "or give the class a method that calls it"
        )
    module._forward_methods = module._forward_methods | {method_name}


def _require_wrappable(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    if is_wrapper(module):
        raise RuntimeError(
            "this module is already wrapped; to nest, wrap the inner modules first and the module "
            "around them afterwards"
        )
    require_forward(module)

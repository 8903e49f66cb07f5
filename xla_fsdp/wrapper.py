"""``XlaFullyShardedDataParallel``: the module around a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch_xla
from torch import nn

from . import xlac
from .collectives.order import BackwardPrefetch
from .libraries import adapt
from .names import is_wrapper, shell_of
from .offload.attaching import attach
from .offload.streaming import share_traffic
from .sharding import metadata
from .sharding.building import UnitBuilder
from .sharding.cpu_offload import CPUOffload
from .sharding.first_step import (
    compare_initial_weights,
    require_all_sharded,
    require_values,
    tell_of_slices,
)
from .sharding.gathering import computing, computing_passes
from .sharding.ignored import mark_ignored
from .sharding.input_devices import raise_if_elsewhere
from .sharding.mixed_precision import MixedPrecision
from .sharding.optimizer_checks import watch_optimizers
from .sharding.options import FSDPOptions, known_options
from .sharding.saved_parameters import parameters_saved_as_recipes
from .sharding.strategy import ShardingStrategy
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
        reshard_after_forward: free the full parameters after the forward and gather them again
            for the backward (ZeRO-3). ``False``: keep them in between (ZeRO-2). A number ``k``:
            keep a ``k``-th on each of ``k`` consecutive ranks, and gather for the backward within
            these (ZeRO++'s hpZ, torch's ``fully_shard``); it divides the ranks that share the
            parameters.
        flatten_parameters: store all parameters of this wrapper as one vector (one for each dtype,
            and for trainable and frozen ones), ``flat_param_0``, ...
        execute_sharding_on_init: run the slicing at once if the module was on the XLA device, so
            that its full parameters leave device memory before the next layer is wrapped.
        optimization_barrier_in_forward: gather only once the module's inputs exist. Otherwise the
            compiler may gather all units at the start of the step.
        optimization_barrier_in_backward: the same for the gather of the backward and the gradient
            that arrives at the module.
        forward_prefetch: gather the parameters of the next wrapper while this one computes its
            forward. Two wrappers' parameters are then in memory at a time.
        backward_prefetch: ``BackwardPrefetch.BACKWARD_PRE``: gather the parameters of the next
            wrapper while this one computes its backward; ``BACKWARD_POST``: once it has, beside
            the reduction of its gradients; ``None``: once these are reduced.
        limit_all_gathers: gather for the backward only once the gradients of the wrapper two
            before are reduced, so that full gradients of two wrappers at most are in memory.
            Without it the compiler may put reductions off to the end of the step.
        sync_on_finalization: call ``torch_xla.sync()`` at the end of every backward through the
            root, so that the optimizer step is a program of its own.
        disable_reshard_on_root: keep the root's own parameters from forward to backward whatever
            ``reshard_after_forward`` says, since its backward follows at once.
        compute_dtype: dtype in which parameters are gathered, the module computes and gradients
            are reduced: ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``. Floating-point
            inputs are cast to it. Shards keep the dtype of the parameters. Default: no casting.
        buffer_dtype: dtype of floating-point buffers (default ``compute_dtype``), except those of
            ``SyncBatchNorm``, which keep theirs.
        fp32_reduce_scatter: reduce gradients in float32 although they are computed in a narrower
            ``compute_dtype``; doubles the bytes of the reduction.
        sharding_groups: global ordinals of the ranks that share one copy of the parameters, for
            every copy, e.g. ``[[0, 1], [2, 3]]``; needs ``sharding_rank`` (this rank's place in
            its group) and ``sharding_world_size``. Default: one group of all ranks; on several TPU
            slices a group for each, whose copies are replicas: docs/slices.md.
        shard_param_on_dim_0: shard along dimension 0 and keep the other dimensions.
        replication_groups: ordinals that hold the same shard, e.g. ``[[0, 2], [1, 3]]``, over
            which gradients are averaged in addition (hybrid sharding). Without it, as with
            tensor-parallel groups, the copies of ``sharding_groups`` are independent.
        auto_wrap_policy: wraps submodules first, see :mod:`xla_fsdp.wrap`; all options are
            forwarded to them.
        auto_wrapper_callable: what to wrap submodules with instead of this class, e.g.
            ``lambda m, *a, **k: FSDP(checkpoint_module(m), *a, **k)``.
        param_init_fn: gives values to a submodule on the meta device; default
            ``reset_parameters()``, one submodule at a time.
        sync_module_states: take parameters and buffers of the first rank (of each of
            ``sharding_groups``, and of the first replica) on all: one collective for each.
        sharding_strategy: torch FSDP's name for ``reshard_after_forward`` and the groups, see
            :class:`~xla_fsdp.ShardingStrategy`. Goes on to submodules that are wrapped by policy.
        device_mesh: the groups, as ordinals of all ranks: a list shares the parameters; of a 2-D
            ``(replicate, shard)`` mesh each row does, and columns average their gradients.
        mixed_precision: torch FSDP's names for the dtypes and for which inputs are cast, see
            :class:`~xla_fsdp.MixedPrecision`.
        cpu_offload: ``CPUOffload()`` keeps shards, gradients and optimizer state in the host's
            memory, and has the update run there: docs/offload.md.
        ignored_modules, ignored_parameters: submodules (with all that is in them, wrappers
            excepted) and parameters that stay whole on every rank, whose gradients are not reduced,
            see :meth:`average_ignored_gradients`. ``ignored_states`` is torch FSDP's name for
            either. Policies leave them alone too.
        collective_routes: how collectives over all ranks of a TPU slice go over its links.
            ``"auto"``: over one axis after the other where the model of the links says that it is
            worth it, and large gradients around rings of chips where that makes the step shorter;
            ``"default"``: all as the compiler does them. No effect elsewhere. See docs/torus.md.
        pin_layout_in_collective_ops, reduce_scatter_bucket_size_mb, coalesce_all_gather_ops:
            accepted without effect, for scripts of torch_xla's class.

    Raises:
        RuntimeError: the module is already wrapped, or has no ``forward``.
        ValueError, TypeError: an option has a value that is not allowed, was removed, or does not
            exist.
    """

    def __init__(
        self,
        module: nn.Module,
        reshard_after_forward: bool | int = True,
        flatten_parameters: bool = False,
        execute_sharding_on_init: bool = True,
        optimization_barrier_in_forward: bool = True,
        optimization_barrier_in_backward: bool = True,
        sync_on_finalization: bool = False,
        disable_reshard_on_root: bool = True,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        fp32_reduce_scatter: bool = False,
        sharding_groups: Sequence[Sequence[int]] | None = None,
        sharding_rank: int | None = None,
        sharding_world_size: int | None = None,
        shard_param_on_dim_0: bool = False,
        pin_layout_in_collective_ops: bool = True,
        reduce_scatter_bucket_size_mb: int | None = 0,
        coalesce_all_gather_ops: bool = False,
        auto_wrap_policy: Callable[..., bool] | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        replication_groups: Sequence[Sequence[int]] | None = None,
        forward_prefetch: bool = True,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        limit_all_gathers: bool = True,
        sync_module_states: bool = False,
        sharding_strategy: ShardingStrategy | None = None,
        device_mesh: Any = None,
        mixed_precision: MixedPrecision | None = None,
        cpu_offload: CPUOffload | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        ignored_parameters: Iterable[nn.Parameter] | None = None,
        ignored_states: Iterable[nn.Module] | Iterable[nn.Parameter] | None = None,
        collective_routes: str = "auto",
        **others: Any,
    ):
        known_options(others, type(self).__name__)
        _require_wrappable(module)
        _require_functions(
            auto_wrap_policy=auto_wrap_policy, auto_wrapper_callable=auto_wrapper_callable
        )
        given = locals()
        options = FSDPOptions(**{name: given[name] for name in FSDPOptions.__dataclass_fields__})
        super().__init__()
        ignored = mark_ignored(module, ignored_modules, ignored_parameters, ignored_states)
        if auto_wrap_policy is not None:
            require_unwrapped(module)
            wrapper_cls = auto_wrapper_callable or type(self)
            kwargs = options.as_kwargs()
            recursive_wrap(module, auto_wrap_policy, wrapper_cls, *ignored, True, **kwargs)
            warn_if_none_chosen(module, auto_wrap_policy)
        self.fsdp_options = options
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
        if execute_sharding_on_init and on_device:
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
                unit.order.forward_over()
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
            unit.wire.label = f"{path}." if path else ""
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


def _require_functions(**options: Any) -> None:
    for name, value in options.items():
        if value is not None and not callable(value):
            raise TypeError(
                f"{name} must be a function or None, got {value!r}; see xla_fsdp.wrap for policies"
            )

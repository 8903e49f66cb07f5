"""``fully_shard``: torch's FSDP2 API."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn

from .names import dotted, is_wrapper
from .sharded_module import ShardedModule, make_unit
from .sharding.comm_plan import Divisors, checked_factor
from .sharding.cpu_offload import CPUOffload
from .sharding.deferred_values import UninitializedTensor, remaining_uninitialized
from .sharding.gathering import computing_passes
from .sharding.ignored import as_list
from .sharding.metadata import export_local_tensors, require_copying
from .sharding.mixed_precision import MixedPrecision, require_flag, require_flags_and_dtypes
from .sharding.options import FULLY_SHARD, FSDPOptions, checked_mesh, takes_options
from .sharding.state import FSDPState, unique_units
from .sharding.summon import require_no_scanned, summon_full_params

T = TypeVar("T", bound="nn.Module | list[nn.Module]")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes in which a module that is sharded in place computes and communicates.

    Attributes:
        param_dtype: of gathered parameters; ``None``: their dtype.
        reduce_dtype: of the reduction of gradients: ``None`` (``param_dtype``) or
            ``torch.float32``.
        output_dtype: of floating-point outputs of the forward.
        cast_forward_inputs: cast floating-point inputs to ``param_dtype``.

    Raises:
        ValueError: an attribute has a value that is not allowed.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        dtypes = ("param_dtype", "reduce_dtype", "output_dtype")
        require_flags_and_dtypes(self, ("cast_forward_inputs",), dtypes)


@dataclass(frozen=True)
class OffloadPolicy:
    """Nothing is offloaded: shards stay on the device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Stores shards, gradients and optimizer state on the host, as the wrapper's ``CPUOffload()``.

    Attributes:
        pin_memory: no effect.
    """

    pin_memory: bool = True


@takes_options(FULLY_SHARD)
def fully_shard(
    module: T,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    **options: Any,
) -> T:
    """Shards ``module`` in place, as torch's ``fully_shard`` does, and returns it.

    Call it on the layers, then on the model, then make the optimizer. The module becomes an
    ``FSDPModule`` as well; names of modules, parameters and state dicts do not change.

    Args:
        module: makes one FSDP unit of all its parameters that are not sharded yet. A list is
            equivalent to a call for each module.
        mesh: a ``DeviceMesh``, a tensor or lists of ordinals. 1-D: these ranks share the
            parameters. 2-D, ``(replicate, shard)``: each row shares them, and gradients are
            averaged over the columns. Default: all ranks of a TPU slice share.
        reshard_after_forward: free the full parameters after the forward. ``None``: yes, except in
            the root (the outermost module). A number: store a part of them for the backward, which
            then gathers among that number of ranks only.
        shard_placement_fn: only ``None``: parameters are cut as vectors.
        mp_policy: dtypes; default: those of the parameters.
        offload_policy: ``CPUOffloadPolicy()`` or ``OffloadPolicy()``, the default.
        ignored_params: parameters that stay replicated and whose gradients are not reduced, see
            ``average_ignored_gradients``.
        options: further ones of :class:`~xla_fsdp.FSDPOptions`.

    Raises:
        ValueError, TypeError: an argument is not supported, or the class of the module has an
            attribute with the name of a method of FSDPModule.
        RuntimeError: the module is sharded or wrapped already, or has no ``forward``.
    """
    for name, value, kind, allowed in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy, "MixedPrecisionPolicy"),
        ("offload_policy", offload_policy, OffloadPolicy, "CPUOffloadPolicy or OffloadPolicy"),
    ):
        if value is not None and not isinstance(value, kind):
            raise ValueError(
                f"{name} must be an xla_fsdp.{allowed}, got {value!r}. Take it from xla_fsdp, not "
                "from torch, or leave it out"
            )
    precision = mp_policy or MixedPrecisionPolicy()
    if shard_placement_fn is not None:
        raise ValueError(
            f"shard_placement_fn={shard_placement_fn!r} is not supported: parameters are cut as "
            "vectors, which divides every shape evenly. Leave it out; results are the same"
        )
    mixed = None
    if precision.param_dtype is not None or precision.reduce_dtype is not None:
        cast = precision.cast_forward_inputs
        mixed = MixedPrecision(
            precision.param_dtype,
            precision.reduce_dtype,
            cast_forward_inputs=cast,
            cast_root_forward_inputs=cast,
        )
    if reshard_after_forward is not None:
        options |= {"reshard_after_forward": reshard_after_forward}
    given = replace(
        FSDPOptions.of(FULLY_SHARD, **options),
        device_mesh=None if mesh is None else checked_mesh(mesh, "mesh"),
        mixed_precision=mixed,
        cpu_offload=CPUOffload() if isinstance(offload_policy, CPUOffloadPolicy) else None,
        ignored_parameters=as_list("ignored_params", ignored_params, (nn.Parameter,)),
        disable_reshard_on_root=reshard_after_forward is None,
    )
    modules = module if isinstance(module, list) else [module]
    if not modules:
        raise ValueError("module is an empty list, with nothing to shard. Pass the modules in it")
    for one in modules:
        _require_names_free(one)
    for one in modules:
        unit = make_unit(one, one, given)
        unit.output_dtype = precision.output_dtype
        one.__dict__["_unit"] = unit
        one.__class__ = _sharded_class(type(one))  # type: ignore[arg-type]  # Module is hashable
        one._register_state_dict_hook(export_local_tensors)
        one.register_load_state_dict_pre_hook(_before_load)
    return module


def _require_names_free(module: Any) -> None:
    if not isinstance(module, nn.Module) or is_wrapper(module):
        return  # make_unit raises
    ours = {name for name in dir(FSDPModule) if not hasattr(nn.Module, name)} | {"_unit"}
    ours -= {"_fqn_modifiers"}  # torch calls it, but never on a sharded module
    taken = sorted(n for n in ours if not n.startswith("__") and hasattr(module, n))
    if taken:
        raise ValueError(
            f"{type(module).__name__} has an attribute {taken[0]!r}, which a method of FSDPModule "
            "would hide. Rename it, or wrap the module with XlaFullyShardedDataParallel"
        )


def _before_load(
    module: FSDPModule, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
) -> None:
    if not is_wrapper(module):
        return  # see checkpoint/protocol.py
    holders = "the shards that the module gathers"
    require_copying(state_dict, prefix, local_metadata, holders)
    module._unit.install_shards()


@functools.cache
def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of sharded modules of class ``original``. A second one has no effect."""
    own: dict[str, Any] = {"_fsdp_original": original, "__module__": original.__module__}
    seen = {"__init__"}
    for base in original.__mro__:
        for name, value in vars(base).items() if base not in (nn.Module, object) else ():
            special = name.startswith("__") or hasattr(nn.Module, name) and name != "forward"
            if name not in seen and isinstance(value, types.FunctionType) and not special:
                own[name] = _watched(name, value)
            seen.add(name)
    return type(f"FSDP{original.__name__}", (FSDPModule, original), own)


def _run(unit: FSDPState, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    # In a forward of `unit`, and in a recomputation of a part of one, parameters are full; a
    # recomputation must save the same tensors as the forward.
    if any(one.unit is unit for one in computing_passes()):
        return call(*args, **kwargs)
    return unit.run(call, args, kwargs)


def _watched(name: str, function: types.FunctionType) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        # `function` may have been replaced in the original class since.
        method = getattr(super(FSDPModule, self), name)
        unit = self._unit
        if name == "forward" or name in unit.forward_methods:
            return _run(unit, method, args, kwargs)
        if not (unit.has_full_parameters() or unit.summoned):
            if any(remaining_uninitialized(one.uninitialized) for one in unique_units(self)):
                # The method initializes the parameters.
                with summon_full_params(self):
                    return method(*args, **kwargs)
        return method(*args, **kwargs)

    return call


class UnshardHandle:
    """The result of ``unshard(async_op=True)``."""

    def wait(self) -> None:
        """Does nothing: the program that reads a parameter waits for its gather."""


class FSDPModule(ShardedModule):
    """A module after ``fully_shard``: an instance of its original class and of this one.

    A call gathers the parameters, computes and frees them; hooks run in between. Other methods
    raise an error if they compute with parameters, see ``register_fsdp_forward_method``.
    """

    _fsdp_original: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Of the original class: a slice of a Sequential constructs one."""
        original = getattr(cls, "_fsdp_original", None)
        if original is None:
            raise TypeError("FSDPModule is what xla_fsdp.fully_shard(module) makes of a module")
        return original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _run(self._unit, super().__call__, args, kwargs)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """As in torch: parameters and buffers have no values until they are given some.

        These come from a load, ``summon_full_params``, or the next methods of the model that are
        called, such as ``init_weights()``, with full parameters and the same on every rank. A
        forward before all have values raises RuntimeError.

        Raises:
            ValueError: a device other than that of the shards; ``recurse=False``; scanned blocks.
        """
        there = {shard.device.type for shard in self._unit.shards} or {"xla"}
        if torch.device(device).type not in there:
            raise ValueError(
                f"to_empty(device={device!r}) is not supported for a sharded module, because its "
                f"shards stay on {'/'.join(there)}. Pass device={min(there)!r}"
            )
        if not recurse:
            raise ValueError(
                "to_empty(recurse=False) is not supported for a sharded module, because its unit "
                "has the parameters of its submodules too. Leave recurse out"
            )
        units = unique_units(self)
        require_no_scanned(units)
        for unit in units:
            unit.install_shards()
            unit.mark_uninitialized()
        for name, module in self.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    own = UninitializedTensor(buffer, {(0, 0): dotted(name, key)}, (module, key))
                    self._unit.uninitialized.append(own)
        return self

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers the parameters of this module's FSDP unit. Collective.

        They are full until :meth:`reshard` or the module's next forward, which uses them. Computing
        with them gives correct gradients; changing them raises RuntimeError.

        Args:
            async_op: return a handle, whose ``wait()`` need not be called.
        """
        require_flag("async_op", async_op)
        self._unit.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Frees parameters that :meth:`unshard` or ``set_reshard_after_backward(False)`` left full.

        Raises:
            RuntimeError: a full parameter was changed in between, which would be lost.
        """
        self._unit.reshard()

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """``False``: backwards store full gradients; the first with ``True`` reduces the sum."""
        require_flag("requires_gradient_sync", requires_gradient_sync)
        require_flag("recurse", recurse)
        for unit in unique_units(self) if recurse else [self._unit]:
            unit.set_sync(syncs=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """``False``: with replicas (a 2-D mesh), acts as ``set_requires_gradient_sync(False)``."""
        require_flag("requires_all_reduce", requires_all_reduce)
        for unit in _units_in_place(self, recurse):
            unit.set_sync(all_reduces=requires_all_reduce)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether full parameters are freed after the forward, and gathered again."""
        require_flag("reshard_after_forward", reshard_after_forward)
        for unit in _units_in_place(self, recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """``False``: full parameters stay after the backward, until a step changes the shards."""
        require_flag("reshard_after_backward", reshard_after_backward)
        for unit in _units_in_place(self, recurse):
            unit.caches_after_backward = not reshard_after_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides reduced gradients by ``factor`` instead of the number of ranks."""
        self._unit.comms.divisors = Divisors(1.0, checked_factor("factor", factor))

    set_reduce_scatter_divide_factor = set_gradient_divide_factor

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """No effect: modules are prefetched in the order of the trace."""

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """No effect: modules are prefetched in the order of the trace."""

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: the end of every backward is detected."""

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """No effect: the compiler removes gathers that are not needed."""

    def set_post_optim_event(self, event: Any) -> None:
        """No effect: a program has no streams."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """No effect: the compiler places buffers."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """No effect: reductions are sums already."""

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], **kwargs: Any) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "set_all_reduce_hook is not supported. Change gradients in parameter.grad, between "
            "backward and step"
        )

    def set_custom_all_gather(self, comm: Any) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "set_custom_all_gather is not supported: collectives are part of the compiled program"
        )

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            "set_custom_reduce_scatter is not supported: collectives are part of the compiled "
            "program. For gradients reduced in float32 pass mp_policy with reduce_dtype"
        )


def _units_in_place(module: FSDPModule, recurse: bool) -> list[FSDPState]:
    require_flag("recurse", recurse)
    return [one for one in unique_units(module) if one.in_place] if recurse else [module._unit]

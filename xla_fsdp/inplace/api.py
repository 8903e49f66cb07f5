"""``fully_shard``: torch's FSDP2 by its name, on the machinery of the wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from ..names import SHELL, is_wrapper
from ..sharding.options import known_options
from .module import FSDPModule, become_sharded
from .policies import MixedPrecisionPolicy, OffloadPolicy, checked_precision, meant_by_offload
from .shell import Shell

T = TypeVar("T", bound="nn.Module | list[nn.Module]")

# Options of the wrapper that fully_shard says by another name, by the name.
_OTHERWISE = {
    "compute_dtype": "mp_policy",
    "fp32_reduce_scatter": "mp_policy",
    "mixed_precision": "mp_policy",
    "cpu_offload": "offload_policy",
    "sharding_strategy": "mesh and reshard_after_forward",
    "device_mesh": "mesh",
    "sharding_groups": "mesh",
    "sharding_rank": "mesh",
    "sharding_world_size": "mesh",
    "replication_groups": "mesh",
    "disable_reshard_on_root": "reshard_after_forward",
    "ignored_modules": "ignored_params",
    "ignored_parameters": "ignored_params",
    "ignored_states": "ignored_params",
}
_IMPOSSIBLE = ("flatten_parameters", "auto_wrap_policy", "auto_wrapper_callable")


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

    From the inside out: ``for layer in model.layers: fully_shard(layer)``, then
    ``fully_shard(model)``, then the optimizer. The module is of its own class still, and an
    ``FSDPModule``; names of modules, parameters and state dicts are what they were. Values of
    parameters are shards, as those of :class:`XlaFullyShardedDataParallel`, which describes what
    happens when; functions of this package that take a wrapped model take it.

    Args:
        module: what to gather and free together, all that is in it and not sharded yet. A list is
            as good as a call for each: every module is a unit of its own.
        mesh: the ranks, as a ``DeviceMesh``, a tensor or lists of ordinals. 1-D: these share the
            parameters. 2-D, ``(replicate, shard)``: each row does, columns average gradients.
            Default: all ranks share; on several TPU slices those of each, docs/slices.md.
        reshard_after_forward: free the full parameters after the forward. ``None``: yes, except
            in the root (the outermost module). A number: keep a part of them for the backward,
            which is then gathered among that many ranks only.
        shard_placement_fn: only ``None``: parameters are cut as vectors, whatever their shape.
        mp_policy: dtypes; default: those of the parameters.
        offload_policy: ``CPUOffloadPolicy()``: shards, gradients and the optimizer's state and
            step are on the host, docs/offload.md. ``OffloadPolicy()``, the default: nothing is.
        ignored_params: parameters that stay whole on every rank and whose gradients are not
            reduced, see ``average_ignored_gradients``.
        options: further ones of :class:`XlaFullyShardedDataParallel`, such as ``forward_prefetch``,
            ``param_init_fn`` (for modules on the meta device) or ``sync_module_states``.

    Raises:
        ValueError, TypeError: an argument that is not possible; a class that has attributes by the
            names of FSDPModule's methods.
        RuntimeError: the module is sharded or wrapped already, or has no ``forward``.
    """
    precision = checked_precision(mp_policy or MixedPrecisionPolicy())
    offload = meant_by_offload(OffloadPolicy() if offload_policy is None else offload_policy)
    if shard_placement_fn is not None:
        raise ValueError(
            f"shard_placement_fn={shard_placement_fn!r} is not possible: parameters are cut as "
            "vectors, which divides every shape evenly. Leave it out; results are the same"
        )
    given = _checked_options(options)
    given |= _about_resharding(reshard_after_forward) | {"cpu_offload": offload}
    if ignored_params is not None:
        given["ignored_parameters"] = ignored_params
    modules = module if isinstance(module, list) else [module]
    for one in modules:
        _require_shardable(one)
    for one in modules:
        shell = Shell(
            one, precision, device_mesh=mesh, mixed_precision=precision.as_option, **given
        )
        become_sharded(one, shell)
    return module


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if name in _OTHERWISE:
            raise ValueError(
                f"{name}={value!r}: fully_shard says that by {_OTHERWISE[name]}, pass that instead"
            )
        if name in _IMPOSSIBLE:
            raise ValueError(
                f"{name}={value!r} is not possible in fully_shard: leave it out, or wrap with "
                "XlaFullyShardedDataParallel"
            )
    return known_options(options, "fully_shard")


def _about_resharding(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, int):
        raise ValueError(
            f"reshard_after_forward must be True, False, a number of ranks or None, got {value!r}"
        )
    # What is said of a root holds for it.
    return {"reshard_after_forward": value, "disable_reshard_on_root": False}


def _require_shardable(module: Any) -> None:
    if not isinstance(module, nn.Module) or is_wrapper(module):
        return  # the wrapper says what is wrong
    ours = {name for name in dir(FSDPModule) if not hasattr(nn.Module, name)} | {"_unit", SHELL}
    taken = sorted(n for n in ours if not n.startswith("__") and hasattr(module, n))
    if taken:
        raise ValueError(
            f"{type(module).__name__} has an attribute {taken[0]!r} of its own, which fully_shard "
            "would hide: rename it, or wrap the module with XlaFullyShardedDataParallel"
        )

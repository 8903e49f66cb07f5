"""``fully_shard``: torch's FSDP2 by its name, on the machinery of the wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from ..names import SHELL, is_wrapper
from ..sharding.options import FULLY_SHARD, FSDPOptions, takes_options
from .module import FSDPModule, become_sharded
from .policies import MixedPrecisionPolicy, OffloadPolicy, checked_precision, meant_by_offload
from .shell import Shell

T = TypeVar("T", bound="nn.Module | list[nn.Module]")


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
        options: further ones of :class:`~xla_fsdp.FSDPOptions`, such as ``forward_prefetch``,
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
    if reshard_after_forward is not None:
        # What a user asks of a root holds for it.
        options |= {"reshard_after_forward": reshard_after_forward}
    given = replace(
        FSDPOptions.of(FULLY_SHARD, **options),
        device_mesh=mesh,
        mixed_precision=precision.as_option,
        cpu_offload=offload,
        ignored_parameters=ignored_params,
        disable_reshard_on_root=reshard_after_forward is None,
    )
    modules = module if isinstance(module, list) else [module]
    for one in modules:
        _require_shardable(one)
    for one in modules:
        become_sharded(one, Shell(one, precision, given))
    return module


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

"""Every option of the wrapper, stated and validated once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch_xla.runtime as xr

from ..collectives.order import BackwardPrefetch
from ..collectives.routes import require_how
from ..collectives.world import World
from .cpu_offload import CPUOffload, checked_offload
from .mixed_precision import COMPUTE_DTYPES, MixedPrecision, meant_by_precision
from .secondary import checked_reshard
from .strategy import ShardingStrategy, checked_mesh, meant_by_strategy, mesh_of_slices

# Options that say which ranks share what.
_GROUPS = ("sharding_groups", "sharding_rank", "sharding_world_size", "replication_groups")

# Arguments of torch_xla's class that scripts may pass and that do nothing here. Layouts are never
# pinned (a pinned gather is an all-reduce of twice the bytes), and every unit gathers and reduces
# its parameters together.
WITHOUT_EFFECT = (
    "pin_layout_in_collective_ops",
    "reduce_scatter_bucket_size_mb",
    "coalesce_all_gather_ops",
)
# Options that were removed, and what to do instead. Kept for one release.
_REMOVED = {
    "gather_dtype": "gathers in 8 bits made no step shorter. Leave it out; "
    "compute_dtype=torch.bfloat16 gathers in 16 bits",
}


@dataclass(frozen=True)
class FSDPOptions:
    """The constructor's arguments, by their names; see ``XlaFullyShardedDataParallel``."""

    reshard_after_forward: bool | int = True
    flatten_parameters: bool = False
    execute_sharding_on_init: bool = True
    optimization_barrier_in_forward: bool = True
    optimization_barrier_in_backward: bool = True
    forward_prefetch: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    limit_all_gathers: bool = True
    sync_on_finalization: bool = False
    disable_reshard_on_root: bool = True
    compute_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    fp32_reduce_scatter: bool = False
    sharding_groups: Sequence[Sequence[int]] | None = None
    sharding_rank: int | None = None
    sharding_world_size: int | None = None
    shard_param_on_dim_0: bool = False
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    replication_groups: Sequence[Sequence[int]] | None = None
    sync_module_states: bool = False
    sharding_strategy: ShardingStrategy | None = None
    device_mesh: Any = None
    mixed_precision: MixedPrecision | None = None
    cpu_offload: CPUOffload | None = None
    collective_routes: str = "auto"

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name == "reshard_after_forward":
                continue  # may be a number, see below
            if isinstance(option.default, bool) and not isinstance(value, bool):
                raise TypeError(f"{option.name} must be True or False, got {value!r}")
        for name in ("compute_dtype", "buffer_dtype"):
            value = getattr(self, name)
            if value is not None and value not in COMPUTE_DTYPES:
                allowed = ", ".join(str(dtype) for dtype in COMPUTE_DTYPES)
                raise ValueError(f"{name} must be one of {allowed} or None, got {value!r}")
        prefetch = self.backward_prefetch
        if prefetch is not None and not isinstance(prefetch, BackwardPrefetch):
            allowed = ", ".join(str(one) for one in BackwardPrefetch)
            raise TypeError(f"backward_prefetch must be {allowed} or None, got {prefetch!r}")
        require_how(self.collective_routes)
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise TypeError(
                f"param_init_fn must be a function of one module, got {self.param_init_fn!r}"
            )
        self._settle_groups()
        size = self.sharding_world_size or xr.world_size()
        resharded = checked_reshard(self.reshard_after_forward, size)
        object.__setattr__(self, "reshard_after_forward", resharded)
        meant = meant_by_precision(self.mixed_precision)
        self._settle(f"mixed_precision={self.mixed_precision}", meant)
        object.__setattr__(
            self,
            "cpu_offload",
            checked_offload(self.cpu_offload, self.mixed_precision, resharded),
        )

    def _settle_groups(self) -> None:
        mesh = self.device_mesh
        if mesh is not None:
            mesh = checked_mesh(mesh)
            object.__setattr__(self, "device_mesh", mesh)
        elif all(getattr(self, name) is None for name in _GROUPS):
            mesh = mesh_of_slices(self.sharding_strategy)
        meant = meant_by_strategy(
            self.sharding_strategy, mesh, self.sharding_groups, self.replication_groups
        )
        source = f"sharding_strategy={self.sharding_strategy}, device_mesh={mesh}"
        self._settle(source, meant)

    def _settle(self, source: str, meant: Mapping[str, Any]) -> None:
        """Sets the options that ``source`` stands for.

        Raises:
            ValueError: one was given, and otherwise. Wrapped children are given what is meant.
        """
        for option in fields(self):
            if option.name not in meant:
                continue
            given, value = getattr(self, option.name), meant[option.name]
            if option.name == "reshard_after_forward" and not isinstance(given, bool):
                if value and given != 1:
                    continue  # among how many ranks, where the strategy says that
                given = False if given == 1 else given  # 1 is equal to True
            if option.name.endswith("_groups") and given is not None:
                given = [list(group) for group in given]
            if given not in (option.default, value):
                raise ValueError(
                    f"{option.name}={given!r} contradicts {source}, which means "
                    f"{option.name}={value!r}: leave one of them out"
                )
            object.__setattr__(self, option.name, value)

    @property
    def dtype_of_buffers(self) -> torch.dtype | None:
        """What floating-point buffers are cast to; ``None``: to nothing."""
        return self.buffer_dtype or (None if self.mixed_precision else self.compute_dtype)

    def dtype_of_inputs(self, root: bool) -> torch.dtype | None:
        """What floating-point inputs of a forward are cast to; ``root``: of the outermost one."""
        policy = self.mixed_precision
        return self.compute_dtype if policy is None or policy.casts_inputs(root) else None

    def world(self) -> World:
        """That of the calling rank; see :meth:`World.current` for what it raises."""
        return World.current(
            self.sharding_groups,
            self.sharding_rank,
            self.sharding_world_size,
            self.replication_groups,
            self.collective_routes,
        )

    def as_kwargs(self) -> dict[str, Any]:
        """The options as constructor arguments, to forward to auto-wrapped children."""
        return {option.name: getattr(self, option.name) for option in fields(self)}


def known_options(
    given: Mapping[str, Any], owner: str, others: Iterable[str] = ()
) -> dict[str, Any]:
    """Those of ``given`` that have an effect; ``others`` are options of ``owner`` alone.

    Raises:
        ValueError: one was removed.
        TypeError: one never was an option.
    """
    has = [*others, *FSDPOptions.__dataclass_fields__]
    for name in given:
        if name in _REMOVED:
            raise ValueError(f"{name} was removed: {_REMOVED[name]}")
        if name not in has and name not in WITHOUT_EFFECT:
            raise TypeError(f"{owner} has no option {name!r}. Its options are {', '.join(has)}")
    return {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}

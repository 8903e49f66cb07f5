"""Every option of the wrapper, stated and validated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from .order import BackwardPrefetch

COMPUTE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class FSDPOptions:
    """The constructor's arguments, by their names; see ``XlaFullyShardedDataParallel``."""

    reshard_after_forward: bool = True
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
    pin_layout_in_collective_ops: bool = True
    reduce_scatter_bucket_size_mb: int | None = 0
    coalesce_all_gather_ops: bool = False
    param_init_fn: Callable[[torch.nn.Module], None] | None = None
    replication_groups: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        for option in fields(self):
            value = getattr(self, option.name)
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
        if self.param_init_fn is not None and not callable(self.param_init_fn):
            raise TypeError(
                f"param_init_fn must be a function of one module, got {self.param_init_fn!r}"
            )

    def as_kwargs(self) -> dict[str, Any]:
        """The options as constructor arguments, to forward to auto-wrapped children."""
        return {option.name: getattr(self, option.name) for option in fields(self)}

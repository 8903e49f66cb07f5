"""Other ways to train the network of workload S, to compare their plans with ours.

Each is lowered in a separate process (``child.py``), then planned like everything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .sizes import KEPT

if TYPE_CHECKING:
    from xla_fsdp import Report

    from .sizes import Sizes

SPMD, JAX = "SPMD", "JAX"
_MODULES = {SPMD: "spmd", JAX: "jax_fsdp"}

# The options that MaxText sets in configs/tpu/v5e/16b.sh and similar files (the first two are for
# slices joined by a network), and in benchmarks/xla_flags_library.py. On v4 they are those of
# configs/tpu/v4/22b.sh; its megacore_dense is already the default of plans.
_GATHERS_BESIDE_COMPUTE = dict.fromkeys(
    (
        "xla_tpu_enable_data_parallel_all_reduce_opt",
        "xla_tpu_data_parallel_opt_different_sized_ops",
        "xla_tpu_enable_async_collective_fusion",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather",
        "xla_tpu_enable_async_collective_fusion_multiple_steps",
        "xla_tpu_overlap_compute_collective_tc",
        "xla_enable_async_all_gather",
    ),
    "true",
)
_MAXTEXT = {
    "v4": {"xla_enable_async_all_gather": "true"},
    "v5e": _GATHERS_BESIDE_COMPUTE,
    "v5p": _GATHERS_BESIDE_COMPUTE,
    "v6e": {**_GATHERS_BESIDE_COMPUTE, "xla_tpu_scoped_vmem_limit_kib": "98304"},
}


def maxtext_options(family: str) -> Mapping[str, str]:
    """The compiler options in MaxText's configurations for a chip; none before v4."""
    return _MAXTEXT.get(family, {})


def plan_peer(
    name: str, where: str, sizes: Sizes | None = None, way: str = KEPT, **options: Any
) -> Report:
    """Plan workload S (or another size of it) on a slice, as a peer trains it.

    ``way``: what is saved for the backward, see ``jax_fsdp.py``. ``options``: as for
    ``plan_partitioned``.

    Raises:
        ValueError: no such peer or way, or another way than ``kept`` with SPMD.
        RuntimeError: the peer's step could not be lowered.
    """
    from xla_fsdp.planning.foreign import plan_partitioned
    from xla_fsdp.tpu.topology import resolve

    from .child import Request, lower
    from .sizes import WAYS, Sizes

    if name not in _MODULES:
        raise ValueError(f"no peer has the name {name!r}; allowed are {', '.join(_MODULES)}")
    if way not in WAYS:
        raise ValueError(f"way must be one of {', '.join(WAYS)}, got {way!r}")
    if way != KEPT and name == SPMD:
        raise ValueError("the SPMD variant is not set up for rematerialisation here; use JAX")
    request = Request(resolve(where).devices, sizes or Sizes(), way)
    return plan_partitioned(lower(_MODULES[name], request), where, **options)

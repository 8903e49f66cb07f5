"""Other ways to train the network of workload S, to be planned beside ours.

Each is lowered in a process of its own (``child.py``), then planned like everything else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from xla_fsdp import Report

    from .sizes import Sizes

SPMD, JAX = "SPMD", "JAX"
_MODULES = {SPMD: "spmd", JAX: "jax_fsdp"}


def plan_peer(
    name: str, where: str, sizes: Sizes | None = None, checkpoint: bool = False, **options: Any
) -> Report:
    """Workload S (or another size of it) as a peer trains it, on a slice.

    ``checkpoint``: rematerialise every block. ``options`` are those of ``plan_partitioned``.

    Raises:
        ValueError: no such peer, or rematerialisation with SPMD.
        RuntimeError: the peer's step could not be lowered.
    """
    from xla_fsdp.planning.foreign import plan_partitioned
    from xla_fsdp.tpu.topology import resolve

    from .child import Request, lower
    from .sizes import Sizes

    if name not in _MODULES:
        raise ValueError(f"no peer is called {name!r}; there are {', '.join(_MODULES)}")
    if checkpoint and name == SPMD:
        raise ValueError("the SPMD variant is not set up for rematerialisation here; use JAX")
    request = Request(resolve(where).devices, sizes or Sizes(), checkpoint)
    return plan_partitioned(lower(_MODULES[name], request), where, **options)

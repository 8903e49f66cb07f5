"""What the TPU compiler is asked to do that it does not do by itself.

The same in planning and at launch. ``xla_fsdp.launch`` puts the options into ``LIBTPU_INIT_ARGS``;
for programs started otherwise: ``export LIBTPU_INIT_ARGS="$(python -m xla_fsdp.compiler_options)"``
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

OPTIONS: Mapping[str, str] = MappingProxyType({
    # All-gathers may run beside loops over elements, not only beside products of matrices.
    # Workload S on v5e:2x4: 99 instead of 76 % of the bytes are sent beside compute.
    "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions": "true",
    # Operands are prefetched whole, not in up to four slices that are under way one by one: for
    # each the compiler sets aside two tables of 16 KiB that share memory with nothing.
    # Workload S on v5e:2x4: 1,025 instead of 1,045 MiB of temporaries, recomputed 367 instead of
    # 391, and 0.3 and 2 % fewer cycles. One slice would do the same, but on v5p it is refused.
    "xla_tpu_sliced_prefetch_max_slices": "0",
})  # fmt: skip


def libtpu_init_args(given: str, options: Mapping[str, str] = OPTIONS) -> str:
    """``given``, arguments of libtpu, and after them those of ``options`` that it has not."""
    known = read_libtpu_init_args(given)
    added = [f"--{name}={value}" for name, value in options.items() if name not in known]
    return " ".join([given, *added]).strip()


def read_libtpu_init_args(given: str) -> dict[str, str | None]:
    """Names and values of ``given``, arguments of libtpu; ``None`` where there is no value."""
    parts = (one.lstrip("-").partition("=") for one in given.split())
    return {name: value if equals else None for name, equals, value in parts}


if __name__ == "__main__":
    print(libtpu_init_args(os.environ.get("LIBTPU_INIT_ARGS", "")))

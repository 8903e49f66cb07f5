"""The public name of :mod:`xla_fsdp.tpu.compiler_options`."""

import sys

from .deprecated import new_name
from .tpu.compiler_options import (
    ON_SPARSE_CORES,
    OPTIONS,
    RefusedOptionError,
    add_to_environment,
    for_large_matmuls,
    libtpu_init_args,
    limit_scoped_vmem,
    main,
    require_loops_compile,
)

__all__ = [
    "ON_SPARSE_CORES",
    "OPTIONS",
    "RefusedOptionError",
    "add_to_environment",
    "for_large_matmuls",
    "libtpu_init_args",
    "limit_scoped_vmem",
    "require_loops_compile",
]


def __getattr__(name: str) -> object:
    new = new_name("xla_fsdp.compiler_options", name)
    if new is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[new]


if __name__ == "__main__":
    sys.exit(main())

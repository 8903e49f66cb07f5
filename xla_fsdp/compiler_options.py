"""The compiler options by their public name: see :mod:`xla_fsdp.tpu.compiler_options`."""

from .tpu.compiler_options import (
    FOR_LOOPS,
    OPTIONS,
    RefusedOptionError,
    add_to_environment,
    for_large_products,
    libtpu_init_args,
    main,
    require_loops_compile,
)
from .tpu.libtpu_flags import read as read_libtpu_init_args

__all__ = [
    "FOR_LOOPS",
    "OPTIONS",
    "RefusedOptionError",
    "add_to_environment",
    "for_large_products",
    "libtpu_init_args",
    "read_libtpu_init_args",
    "require_loops_compile",
]

if __name__ == "__main__":
    main()

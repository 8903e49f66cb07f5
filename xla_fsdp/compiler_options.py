"""The compiler options by their public name: see :mod:`xla_fsdp.tpu.compiler_options`."""

from .tpu.compiler_options import (
    FOR_LOOPS,
    OPTIONS,
    add_to_environment,
    libtpu_init_args,
    main,
    options_for,
    read_libtpu_init_args,
    require_loops_compile,
)

__all__ = [
    "FOR_LOOPS",
    "OPTIONS",
    "add_to_environment",
    "libtpu_init_args",
    "options_for",
    "read_libtpu_init_args",
    "require_loops_compile",
]

if __name__ == "__main__":
    main()

"""``python -m xla_fsdp.planning.recorded.hlo_child``: HloModuleProto from stdin, text to stdout."""

from __future__ import annotations

import sys


def main() -> None:
    import jaxlib._jax  # from the plan extra

    module = jaxlib._jax.HloModule.from_serialized_hlo_module_proto(sys.stdin.buffer.read())
    sys.stdout.write(module.to_string())


if __name__ == "__main__":
    main()

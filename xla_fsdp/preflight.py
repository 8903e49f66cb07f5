"""``python -m xla_fsdp.preflight``: see :mod:`xla_fsdp.pods.command_line`."""

from .pods.command_line import main

if __name__ == "__main__":
    raise SystemExit(main())

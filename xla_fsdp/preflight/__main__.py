"""``python -m xla_fsdp.preflight``."""

from .cli import main

raise SystemExit(main())

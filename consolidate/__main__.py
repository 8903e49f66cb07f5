"""``python -m xla_fsdp.consolidate``."""

from .cli import main

raise SystemExit(main())

"""Sharding for Lightning: ``import xla_fsdp.integrations.lightning``.

It registers ``strategy="xla_fully_sharded"`` for ``Trainer`` and ``Fabric``.
"""

from __future__ import annotations

from .installing import NAME, install, install_drop_in, uninstall
from .strategies import FabricStrategy, TrainerStrategy

__all__ = ["NAME", "FabricStrategy", "TrainerStrategy", "install", "install_drop_in", "uninstall"]

install()

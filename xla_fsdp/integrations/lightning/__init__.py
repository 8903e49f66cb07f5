"""Sharding for Lightning: ``import xla_fsdp.integrations.lightning``.

After this import ``Trainer(strategy="xla_fully_sharded")`` and
``Fabric(strategy="xla_fully_sharded")`` shard models on XLA; :class:`TrainerStrategy` and
:class:`FabricStrategy` take arguments. After :func:`install_drop_in`, or with
``XLA_FSDP_DROP_IN=1`` in the environment of a script that imports ``xla_fsdp``, also
``"xla_fsdp"`` and ``lightning.fabric.strategies.XLAFSDPStrategy`` select this package.
"""

from __future__ import annotations

from .installing import NAME, install, install_drop_in, uninstall
from .strategies import FabricStrategy, TrainerStrategy

__all__ = [
    "NAME",
    "FabricStrategy",
    "TrainerStrategy",
    "install",
    "install_drop_in",
    "uninstall",
]

install()

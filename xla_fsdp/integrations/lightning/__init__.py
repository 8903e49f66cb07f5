"""Lightning with this package's sharding: ``import xla_fsdp.integrations.lightning``.

From then on ``Trainer(strategy="xla_fully_sharded")`` and ``Fabric(strategy="xla_fully_sharded")``
shard models on XLA; :class:`TrainerStrategy` and :class:`FabricStrategy` take arguments. With
:func:`install_drop_in`, or ``XLA_FSDP_DROP_IN=1`` in the environment of a script that imports
``xla_fsdp``, so do ``"xla_fsdp"`` and ``lightning.fabric.strategies.XLAFSDPStrategy``.
"""

from __future__ import annotations

from .fabric_strategy import FabricStrategy
from .installing import NAME, install, install_drop_in, uninstall
from .trainer_strategy import TrainerStrategy

__all__ = [
    "NAME",
    "FabricStrategy",
    "TrainerStrategy",
    "install",
    "install_drop_in",
    "uninstall",
]

install()

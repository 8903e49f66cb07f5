"""A checkpoint folder of the current format, as a source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..format import folders, manifest, values
from ..format.reader import ShardedCheckpoint
from ..format.store import join, open_store
from ..source import Origin


def is_sharded(path: str) -> bool:
    """Whether ``path`` is a checkpoint folder or a folder with checkpoints, complete or not.

    A URL always is: per-rank torch files cannot be read from URLs.
    """
    if "://" in path:
        return True
    if not os.path.isdir(path):
        return False
    store, root = open_store(path)
    return folders.has_manifest(store, root) or bool(folders.list_folders(store, root))


class ShardedSource:
    """See :class:`~..source.Source`. Every byte that is read is compared with its digest.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged; see ``ShardedCheckpoint``.
    """

    def __init__(self, path: str):
        self.checkpoint = ShardedCheckpoint(path)
        found = self.manifest = self.checkpoint.manifest
        self.origin = Origin(found.save_id, found.step, found.world_size)
        self.label = self.checkpoint.folder
        self.found = f"step {found.step} of {found.world_size} ranks in {self.label}"
        self.inputs = [join(self.label, record.name) for record in found.files]
        self.inputs += [self.label, join(self.label, manifest.NAME)]
        self.parameters, self.buffers = found.parameters, found.buffers
        self.optimizer = found.optimizer
        self.size = sum(record.size for record in found.files)
        for name in found.parameters:
            self.checkpoint.pieces(name)  # checks all parameters before anything is written
            break
        tensors = [*found.parameters.values(), *found.buffers.values()]
        self.order = [(name, tensor.name) for tensor in tensors for name in tensor.names]

    @property
    def extra_state(self) -> Mapping[str, Any]:
        found = self.manifest.extra_state or {}
        return {key: values.decode(value, self.label) for key, value in found.items()}

    def read_parameter(self, name: str, begin: int, end: int, out: torch.Tensor) -> torch.Tensor:
        return self.checkpoint.read_parameter(name, begin, end, out)

    def read_state(
        self, key: str, name: str, begin: int, end: int, out: torch.Tensor
    ) -> torch.Tensor:
        return self.checkpoint.read_state(key, name, begin, end, out)

    def read_buffer(self, name: str, rank: int = 0) -> torch.Tensor:
        if rank >= self.manifest.world_size or not self.checkpoint.file(rank).has(
            manifest.buffer_key(name)
        ):
            rank = 0
        return self.checkpoint.read_buffer(name, rank)

    def verify(self, progress: Callable[[int], None]) -> str:
        """Compares the digests of all files."""
        self.checkpoint.verify(progress)
        return f"step {self.origin.step}, {self.origin.world_size} ranks, digests"

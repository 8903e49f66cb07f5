"""Checkpoints that can be consolidated: ranges of tensors, by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import OptionsError
from ..format import folders, manifest, values
from ..format.reader import ShardedCheckpoint
from ..format.store import join, open_store
from ..legacy.source import LegacySource, open_legacy

LEGACY_SUFFIX = "*.pth"


def open_source(
    path: Any,
    suffix: str | None = None,
    *,
    tied: Mapping[str, str] | None = None,
    allow_unsafe_pickle: bool = False,
) -> Source:
    """As :func:`~.run.consolidate_checkpoint`. Raises CheckpointError."""
    prefix = os.fsdecode(path)
    if suffix is None and _is_sharded_checkpoint(prefix):
        if tied:
            raise OptionsError(f"{prefix}: records its tied weights. Remove --tied.")
        return ShardedSource(prefix)
    pattern = LEGACY_SUFFIX if suffix is None else suffix
    return open_legacy(prefix, pattern, tied, allow_unsafe_pickle)


def _is_sharded_checkpoint(path: str) -> bool:
    """Whether it is a folder of a checkpoint (complete or not) or of several, or a URL."""
    if "://" in path:
        return True
    if not os.path.isdir(path):
        return False
    store, root = open_store(path)
    return folders.has_manifest(store, root) or bool(folders.list_folders(store, root))


class ShardedSource:
    """A checkpoint folder of the current format. Raises CheckpointError if it is damaged.

    Attributes:
        save_id: equal only for saves with the same bytes.
        label, found: texts for messages: its name, and what was found.
        inputs: paths of its files, which must not be overwritten.
        order: every name in the order of the state_dict, with the first name of its tensor.
        parameters, buffers: descriptions of tensors by first name.
        extra_state: what ``get_extra_state`` of modules returned, by key.
    """

    def __init__(self, path: str):
        self.checkpoint = ShardedCheckpoint(path)
        self.checkpoint.require_coverage()  # before anything is written
        found = self.manifest = self.checkpoint.manifest
        self.save_id, self.step, self.world_size = found.save_id, found.step, found.world_size
        self.label = self.checkpoint.folder
        self.found = f"step {found.step} of {found.world_size} ranks in {self.label}"
        self.inputs = [join(self.label, record.name) for record in found.files]
        self.inputs += [self.label, join(self.label, manifest.NAME)]
        self.parameters, self.buffers = found.parameters, found.buffers
        self.optimizer = found.optimizer
        self.read, self.read_buffer = self.checkpoint.read, self.checkpoint.read_buffer
        self.size = sum(record.size for record in found.files)
        tensors = [*found.parameters.values(), *found.buffers.values()]
        self.order = [(name, tensor.name) for tensor in tensors for name in tensor.names]

    @property
    def extra_state(self) -> Mapping[str, Any]:
        found = self.manifest.extra_state or {}
        return {key: values.decode(value, self.label) for key, value in found.items()}

    def verify(self, progress: Callable[[int], object]) -> str:
        self.checkpoint.verify(progress)
        return f"step {self.step}, {self.world_size} ranks, digests"


Source = ShardedSource | LegacySource

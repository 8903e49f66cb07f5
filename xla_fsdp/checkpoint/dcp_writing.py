"""What one rank writes into a directory of ``torch.distributed.checkpoint``."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from ..consolidate.errors import OutputError
from .boxes import Box, boxes
from .inventory import Held, Inventory

# torch keeps what it writes into one file in host memory.
FILE_BYTES = 1 << 28

Path = tuple[str | int, ...]


@dataclass
class Contents:
    """What this rank writes, and what the checkpoint holds in all.

    Attributes:
        whole: tensors whose value every rank can give, by key (0-d ones, and buffers).
        objects: what is no tensor.
        runs: of every sharded tensor, the parameter it belongs to, and a tensor that has the
            holder's shape.
        shapes: shape and dtype of every tensor.
        paths: of every key, the names it was made of.
        aliases: further keys of the same tensor.
    """

    whole: dict[str, torch.Tensor] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, tuple[Held, torch.Tensor]] = field(default_factory=dict)
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, list[str]] = field(default_factory=dict)

    def key(self, *path: str | int) -> str:
        key = ".".join(map(str, path))
        self.paths[key] = path
        return key

    def alias(self, top: str, names: Sequence[str]) -> None:
        """The tensor under the first of ``names`` is there under all of them."""
        first, *more = [self.key(top, name) for name in names]
        self.aliases[first] = more

    def add(self, path: Path, value: Any) -> None:
        """One tensor or object, the same on every rank."""
        if _is_taken_apart(value):
            each = value.items() if isinstance(value, Mapping) else enumerate(value)
            for name, inner in each:
                self.add((*path, name if isinstance(value, list) else str(name)), inner)
            return
        key = self.key(*path)
        if isinstance(value, torch.Tensor):
            self.whole[key] = value
            self.shapes[key] = tuple(value.shape), value.dtype
        else:
            self.objects[key] = value

    def add_run(self, path: Path, held: Held, value: torch.Tensor) -> None:
        """This rank's part of a parameter or of something of its shape."""
        key = self.key(*path)
        self.runs[key] = held, value
        self.shapes[key] = held.shape, value.dtype


def _is_taken_apart(value: Any) -> bool:
    """Whether torch saves what is in ``value`` one by one."""
    if isinstance(value, Mapping):
        return bool(value)
    return isinstance(value, list) and any(
        isinstance(inner, torch.Tensor) or _is_taken_apart(inner) for inner in value
    )


class _Planner(DefaultSavePlanner):
    """Gives torch's writer what it is to write, when it is."""

    def __init__(self, contents: Contents):
        super().__init__()
        self.contents = contents
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def items(self, inventory: Inventory) -> Iterator[WriteItem]:
        contents = self.contents
        if inventory.rank == 0:
            for key in contents.objects:
                yield WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO)
            for key, value in contents.whole.items():
                yield self._item(key, _all(value.shape))
        for key, (held, _) in contents.runs.items():
            if held.writes:
                for box in boxes(held.shape, held.begin, held.end):
                    yield self._item(key, box)
            if held.numel == 0 and inventory.rank == 0:
                yield self._item(key, _all(held.shape))

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        key, contents = write_item.index.fqn, self.contents
        if key in contents.objects:
            data = io.BytesIO()
            torch.save(contents.objects[key], data)
            return data
        if key in contents.whole:
            return contents.whole[key].detach().cpu()
        held, value = contents.runs[key]
        # Parts follow each other: one copy from the device serves all of a shard.
        if self._last is None or self._last[0] is not value:
            self._last = value, value.detach().cpu().reshape(-1)
        assert write_item.tensor_data is not None  # none of BYTE_IO only
        chunk = write_item.tensor_data.chunk
        first = held.at + _first_element(held.shape, chunk.offsets) - held.begin
        if not chunk.sizes.numel():
            first = 0
        return self._last[1][first : first + chunk.sizes.numel()].view(chunk.sizes)

    def _item(self, key: str, box: Box) -> WriteItem:
        shape, dtype = self.contents.shapes[key]
        data = TensorWriteData(
            ChunkStorageMetadata(box.offsets, box.sizes),
            TensorProperties(dtype=dtype),
            torch.Size(shape),
        )
        return WriteItem(MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=data)


def _all(shape: tuple[int, ...]) -> Box:
    return Box(torch.Size([0] * len(shape)), torch.Size(shape), 0)


def _first_element(shape: tuple[int, ...], offsets: torch.Size) -> int:
    number = 0
    for size, offset in zip(shape, offsets, strict=True):
        number = number * size + offset
    return number


def write_part(folder: str, contents: Contents, inventory: Inventory) -> list[Any]:
    """Writes this rank's files; what is in them, as JSON for rank 0."""
    planner, written = _Planner(contents), []
    batches: list[list[WriteItem]] = [[]]
    size = 0
    for item in planner.items(inventory):
        data = item.tensor_data
        own = data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0
        if size + own > FILE_BYTES and batches[-1]:
            batches.append([])
            size = 0
        size += own
        batches[-1].append(item)
    for number, items in enumerate(batches):
        # A file is named by the number of its plan.
        plans = [SavePlan([])] * (inventory.rank + number * inventory.world_size) + [
            SavePlan(items)
        ]
        writer = FileSystemWriter(folder)
        plan = writer.prepare_global_plan(plans)[-1]
        sizes = {item.index: item.tensor_data.chunk.sizes for item in items if item.tensor_data}
        try:
            results = writer.write_data(plan, planner).wait() if items else []
        except (OSError, RuntimeError) as error:
            raise OutputError(f"{folder}: cannot be written: {error}") from error
        for result in results:
            index, where = result.index, result.storage_data
            box = None if index.offset is None else [list(index.offset), list(sizes[index])]
            place = [where.relative_path, where.offset, where.length]
            written.append([index.fqn, box, result.size_in_bytes, place])
    return written

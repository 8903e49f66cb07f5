"""Checkpoints as files: small ones made without ranks, and ways to change one by hand.

``write_body`` and the functions on top of it do what somebody would who forges a checkpoint: every
digest is right afterwards.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import torch
from sharded_files import describe, everything, items_of
from torch import nn

from xla_fsdp.checkpoint import saving
from xla_fsdp.checkpoint.contents import Contents
from xla_fsdp.consolidate.format.digests import chunk_bytes, digest
from xla_fsdp.consolidate.format.folders import CheckpointFolder
from xla_fsdp.consolidate.format.manifest import NAME, file_name
from xla_fsdp.consolidate.format.reader import ShardedCheckpoint

HEAD, MIDDLE, TAIL = b'{"digest": "', b'", "manifest":\n', b"}\n"


class Small(nn.Module):
    """A parameter of every rank, a smaller one, one number, and buffers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 40)
        self.norm = nn.BatchNorm1d(40)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.norm(self.linear(x)) * self.gain


SHAPES = {
    "weight": (torch.float32, (5, 3)),
    "bias": (torch.bfloat16, (7,)),
    "gain": (torch.float32, ()),
    "empty": (torch.float32, (0, 3)),
}


def contents(rank: int, world: int, step: int, value: float, save_id: str) -> Contents:
    """What ``rank`` saves of a model in which every number is ``value``."""
    tensors = {name: torch.full(shape, value, dtype=d) for name, (d, shape) in SHAPES.items()}
    optimizer = {
        "groups": [{"params": ["weight", "bias", "gain"], "lr": 0.1, "betas": (0.9, 0.95)}],
        "state": {"weight": {"exp_avg": tensors["weight"], "step": step}},
    }
    mean = torch.full((2,), value)
    more = {"save_id": save_id, "extra": value if rank == 0 else None}
    manifest = describe(tensors, optimizer, world, step, {"mean": (mean, None)}, **more)

    def cut(name, count, world):
        return [(count * r // world, count * (r + 1) // world) for r in range(world)]

    return Contents(manifest, *items_of(rank, manifest, tensors, optimizer, {"mean": mean}, cut))


def begin(
    root, step: int, value: float, world: int = 3, keep_last=None
) -> list[saving.IncompleteSave]:
    """What ``save_checkpoint`` does on ``world`` ranks before they write: one object per rank."""
    store, folder = saving.open_store(str(root))
    save_id, version = saving._start_save(store, folder, step)
    place = CheckpointFolder(step, version)
    return [
        saving.IncompleteSave(
            store=store,
            root=folder,
            path=str(root),
            place=place,
            contents=contents(rank, world, step, value, save_id),
            rank=rank,
            keep_last=keep_last,
        )
        for rank in range(world)
    ]


def save(root, step: int, value: float, world: int = 3, keep_last=None) -> str:
    """``save_checkpoint`` of a model in which every number is ``value``, without ranks."""
    made = begin(root, step, value, world, keep_last)
    try:
        path = made[0].commit([incomplete.write() for incomplete in made])
    except Exception:
        made[0].remove_files()
        raise
    made[0].remove_old_checkpoints()
    return path


def read_value(path) -> float:
    """The number that a save was given; an error if it is not the only one."""
    return value_in(ShardedCheckpoint(path))


def value_in(checkpoint: ShardedCheckpoint) -> float:
    tensors = everything(checkpoint, range(checkpoint.manifest.world_size)).values()
    numbers = (number for tensor in tensors for number in tensor.flatten().tolist())
    (value,) = {checkpoint.manifest.extra, *numbers}
    return value


class Tiny(torch.nn.Module):
    """All its numbers, and its optimizer's, are always the same: a mix of two saves shows."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(16, 24))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return x @ self.weight


class Uniform:
    def __init__(self):
        import torch_xla

        from xla_fsdp import XlaFullyShardedDataParallel as FSDP

        self.model = FSDP(Tiny())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model(torch.ones(2, 16).to("xla")).sum().backward()
        self.optimizer.step()
        self.set(0.0)
        torch_xla.sync()

    def tensors(self):
        state = self.optimizer.state
        momentum = [state[p]["momentum_buffer"] for p in self.model.parameters()]
        return [*self.model.parameters(), *self.model.buffers(), *momentum]

    def set(self, value: float) -> None:
        with torch.no_grad():
            for tensor in self.tensors():
                tensor.fill_(value)

    def get(self) -> float:
        from xla_fsdp.sharding.sharded_parameter import local

        found = {v for one in self.tensors() for v in local(one).cpu().flatten().tolist()}
        assert len(found - {0.0}) <= 1, found  # 0: the padding
        return max(found)

    def load(self, root) -> float:
        import xla_fsdp

        found = xla_fsdp.load_checkpoint(root, self.model, self.optimizer)
        assert found.extra == self.get()
        return found.extra

    def save(self, root, step, value, **options):
        import xla_fsdp

        self.set(value)
        return xla_fsdp.save_checkpoint(
            root, self.model, self.optimizer, step=step, extra=value, **options
        )

    def start(self, checkpointer, step, value) -> None:
        self.set(value)
        checkpointer.save(self.model, self.optimizer, step=step, extra=value)


def copied(folder, to) -> Path:
    """A copy under the same name, in a folder ``to`` of its own."""
    return Path(shutil.copytree(folder, Path(to) / Path(folder).name))


def flip(path: Path, offset: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def seal(body: bytes) -> bytes:
    return HEAD + digest(body).encode() + MIDDLE + body + TAIL


def read_body(folder) -> dict:
    data = (Path(folder) / NAME).read_bytes()
    return json.loads(data[data.index(b"\n") : -len(TAIL)])


def write_body(folder, body: dict) -> None:
    (Path(folder) / NAME).write_bytes(seal(json.dumps(body).encode()))


@contextlib.contextmanager
def forged(folder):
    """The manifest's content, to be changed; then it gets a right digest, and all files do."""
    body = read_body(folder)
    yield body
    for record in body["files"]:
        path = Path(folder) / str(record["name"])
        if path.is_file():
            _describe(record, path.read_bytes())
    write_body(folder, body)


def _describe(record: dict, data: bytes) -> None:
    size = len(data)
    chunk = chunk_bytes(size)
    each = [digest(data[at : at + chunk]) for at in range(0, size, chunk)]
    record.update(size=size, chunk=chunk, digests="".join(each))


def split(data: bytes) -> tuple[dict, bytes]:
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def unsplit(header, tensors: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + tensors


@contextlib.contextmanager
def forged_file(folder, rank: int):
    """``[header, tensors]`` of a rank's file, to be changed; all digests are right afterwards."""
    with forged(folder) as body:
        path = Path(folder) / file_name(rank, body["world_size"])
        parts = list(split(path.read_bytes()))
        yield parts
        path.write_bytes(unsplit(*parts))


@contextlib.contextmanager
def forged_header(folder, rank: int):
    with forged_file(folder, rank) as (header, _):
        yield header


def take_out(folder, rank: int, key: str) -> None:
    """Removes a tensor from a rank's file; all digests are right afterwards."""
    with forged_file(folder, rank) as parts:
        header, tensors = parts
        begin, end = header.pop(key)["data_offsets"]
        for name, entry in header.items():
            if name != "__metadata__":
                entry["data_offsets"] = [
                    at - (end - begin) if at >= end else at for at in entry["data_offsets"]
                ]
        parts[1] = tensors[:begin] + tensors[end:]

"""Costs that grow with the number of ranks: ``python -m benchmarks.scale``.

Simulated ranks: plain functions, without devices, that write and read real checkpoints through a
store that counts its requests, and read the payloads of a real barrier. A simulated model of
``--parameters`` parameters is cut as the wrapper cuts it. Prints a table: a column for each number
of ranks, and the power of it that each row grows with.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from .tables import head, line

RANKS = (64, 256, 1024, 4096)
ROWS = 16


@dataclass
class Counted:
    """A store that counts the calls of another store, each as one request of an object store."""

    inner: object
    requests: Counter = field(default_factory=Counter)
    bytes: int = 0
    lock: object = field(default_factory=threading.Lock)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.inner, name)
        if not callable(call):
            return call

        def counted(*arguments):
            with self.lock:
                self.requests[name] += 1
                if name == "read_into":
                    self.bytes += len(arguments[2])
            return call(*arguments)

        return counted

    @property
    def total(self) -> int:
        return sum(self.requests.values())


def contents(rank: int, world: int, parameters: int):
    """What ``rank`` saves of the simulated model."""
    from xla_fsdp.checkpoint.contents import Contents
    from xla_fsdp.consolidate.format.manifest import (
        Group,
        Manifest,
        Optimizer,
        ShardingRule,
        State,
        Tensor,
        parameter_key,
        state_key,
    )  # fmt: skip
    from xla_fsdp.consolidate.format.rank_file import FileTensor

    names = [f"blocks.{number}.weight" for number in range(parameters)]
    shape = (ROWS * 4096,)
    chunk = shape[0] // world
    rule = ShardingRule(0, 1, chunk, 0)
    manifest = Manifest(
        save_id="0" * 16,
        step=1,
        world_size=world,
        parameters={name: Tensor((name,), "F32", shape) for name in names},
        buffers={},
        files=(),
        optimizer=Optimizer(
            "AdamW",
            (Group(tuple(names), {"lr": 0.1}),),
            {name: State({"exp_avg": "F32"}, {"step": {"value": 1}}) for name in names},
        ),
        sharding_rules=dict.fromkeys(names, rule),
    )
    value = torch.zeros(chunk)
    keys = [key for n in names for key in (parameter_key(n), state_key("exp_avg", n))]
    items = [
        FileTensor(key, value.dtype, (chunk,), lambda low, high: value[low:high]) for key in keys
    ]
    return Contents(manifest, items, dict.fromkeys(names, rank * chunk))


def saved(root: Path, world: int, parameters: int) -> tuple[str, dict]:
    """A checkpoint by ``world`` simulated ranks, and what it took."""
    from xla_fsdp.checkpoint import saving
    from xla_fsdp.consolidate.format.folders import CheckpointFolder
    from xla_fsdp.consolidate.format.store import open_store

    inner, folder = open_store(str(root))
    store = Counted(inner)
    save_id, version = saving._start_save(store, folder, 1)
    place = CheckpointFolder(1, version)
    records, one, first = [], 0, None
    for rank in range(world):
        own = contents(rank, world, parameters)
        own = replace(own, manifest=replace(own.manifest, save_id=save_id))
        incomplete = saving.IncompleteSave(
            store=store, root=folder, path=folder, place=place, contents=own, rank=rank,
            keep_last=None,
        )  # fmt: skip
        before = store.total
        records.append(incomplete.write())
        one, first = store.total - before, first or incomplete
    before, began = store.total, time.perf_counter()
    path = first.commit(records)
    completing, seconds = store.total - before, time.perf_counter() - began
    # The records as the ranks exchange them: each padded to the longest.
    payloads = [json.dumps([rank, [each, None]]).encode() for rank, each in enumerate(records)]
    length = 1 << max(8, (max(map(len, payloads)) - 1).bit_length())
    return path, {
        "save: requests of a rank": one,
        "save: requests of rank 0 to complete it": completing,
        "save: seconds of rank 0 to complete it (local disk)": seconds,
        "manifest: bytes": Path(path, "manifest.json").stat().st_size,
        "barrier with data: bytes that a rank receives": length * len(records),
    }


def loads(path: str, ranks: int) -> dict:
    """Costs of a load of one of ``ranks``."""
    from xla_fsdp.consolidate.format.local import LocalStore
    from xla_fsdp.consolidate.format.reader import ShardedCheckpoint

    store = Counted(LocalStore())
    tracemalloc.start()
    began = time.perf_counter()
    checkpoint = ShardedCheckpoint(path, store)
    for name, tensor in checkpoint.manifest.parameters.items():
        begin, end = (tensor.numel * rank // ranks for rank in (ranks // 2, ranks // 2 + 1))
        checkpoint.read(name, begin, end)
        checkpoint.read(name, begin, end, "exp_avg")
    seconds = time.perf_counter() - began
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "load on half: requests of a rank": store.total,
        "load on half: bytes that a rank reads": store.bytes,
        "load on half: peak host memory of a rank, bytes": peak,
        "load on half: seconds of a rank (local disk)": seconds,
    }


def consolidating(path: str) -> dict:
    """Costs of opening all files, as a consolidation does, and reading every tensor once."""
    from xla_fsdp.consolidate.format.local import LocalStore
    from xla_fsdp.consolidate.format.reader import ShardedCheckpoint

    store = Counted(LocalStore())
    began = time.perf_counter()
    checkpoint = ShardedCheckpoint(path, store)
    for name, tensor in checkpoint.manifest.parameters.items():
        checkpoint.pieces(name)
        checkpoint.read(name, 0, tensor.numel)
    return {
        "consolidation: requests": store.total,
        "consolidation: seconds (local disk)": time.perf_counter() - began,
    }


def measure(world: int, parameters: int, folder: Path) -> dict:
    """All rows, for ``world`` ranks."""
    path, found = saved(folder / str(world), world, parameters)
    return found | loads(path, world // 2) | consolidating(path)


def table(found: dict[int, dict]) -> str:
    ranks = sorted(found)
    lines = [head(["", *(f"{number:,} ranks" for number in ranks), "grows as ranks to the"])]
    for name in found[ranks[0]]:
        values = [found[number][name] for number in ranks]
        grows = 0.0  # the exponent p in: last = last but one * times ** p
        if len(ranks) > 1 and min(values[-2:]) > 0:
            grows = math.log(values[-1] / values[-2]) / math.log(ranks[-1] / ranks[-2])
        shown = [f"{value:,}" if isinstance(value, int) else f"{value:.4f}" for value in values]
        lines.append(line([name, *shown, f"{grows:.2f}"]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", choices=RANKS, default=list(RANKS))
    parser.add_argument("--parameters", type=int, default=40)
    options = parser.parse_args()
    found = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as name:
        for world in options.ranks:
            found[world] = measure(world, options.parameters, Path(name))
    print(table(found))


if __name__ == "__main__":
    main()

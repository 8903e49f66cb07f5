"""The time to save and to load, compared with a plain copy, the in-tree class and torch.

    python -m benchmarks.checkpoints --dir /tmp/checkpoints --gib 2

4 CPU ranks train a model whose parameters and Adam state have ``--gib`` GiB in total. These run in
turns, several times: ``save_checkpoint``; ``xm.save`` of state_dict, metadata and optimizer on
every rank, as for the class of torch_xla; ``torch.distributed.checkpoint`` of the same tensors, by
the same ranks in one process; and a plain copy of the checkpoint's files. All but the in-tree way
call fsync. Then the same for loading, where a plain copy means reading all files. All files are in
the page cache. A job loads only once, so the table has the first time as well as the median.
"""

from __future__ import annotations

import argparse
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from .tables import head, line

RANKS = 4
WIDTH = 2048
SAVED = Path("ours", "step-00000001")


def _model(gib: float):
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    torch.manual_seed(0)
    depth = max(1, round(gib * 2**30 / 12 / WIDTH**2))
    layers = [FSDP(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(depth)]
    model = FSDP(nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    return model, optimizer


def _rank(rank: int, folder: str, gib: float, rounds: int) -> dict[str, list[float]]:
    import torch_xla
    import torch_xla.core.xla_model as xm

    import xla_fsdp

    model, optimizer = _model(gib)
    root = Path(folder)
    times: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], None]) -> None:
        xm.rendezvous(name)
        start = time.perf_counter()
        work()
        xm.rendezvous(name)
        times.setdefault(name, []).append(time.perf_counter() - start)

    intree_file = root / "intree" / f"rank-{rank}-of-{RANKS}.pth"

    def save_ours() -> None:
        xla_fsdp.save_checkpoint(root / "ours", model, optimizer, step=1)

    def load_ours() -> None:
        xla_fsdp.load_checkpoint(root / "ours", model, optimizer)

    def save_intree() -> None:
        held = {
            "model": model.state_dict(),
            "shard_metadata": model.get_shard_metadata(),
            "optimizer": optimizer.state_dict(),
        }
        xm.save(held, str(intree_file), master_only=False)

    def load_intree() -> None:
        held = torch.load(intree_file)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optimizer"])
        torch_xla.sync(wait=True)

    def files() -> list[Path]:
        return sorted((root / SAVED).iterdir())

    for _ in range(rounds):
        if rank == 0:
            for name in ("ours", "intree", "copy", "dcp"):
                shutil.rmtree(root / name, ignore_errors=True)
                (root / name).mkdir(parents=True)
        timed("save, ours", save_ours)
        timed("save, in-tree way", save_intree)
        timed("save, plain copy", lambda: _copy(files(), root / "copy", rank))
        timed("save, torch dcp", lambda: _save_dcp(root / "dcp", model, optimizer, rank))
    for _ in range(rounds):
        timed("load, ours", load_ours)
        timed("load, in-tree way", load_intree)
        timed("load, plain copy", lambda: _read(files(), rank))
        timed("load, torch dcp", lambda: _load_dcp(root / "dcp", model, optimizer, rank))
    return times


def _copy(files: list[Path], folder: Path, rank: int) -> None:
    if rank == 0:  # one after the other, like cp
        for file in files:
            shutil.copyfile(file, folder / file.name)
            with open(folder / file.name, "rb+") as copied:
                os.fsync(copied.fileno())


def _read(files: list[Path], rank: int) -> None:
    if rank == 0:
        for file in files:
            file.read_bytes()


def _held(model, optimizer, rank: int) -> dict[str, torch.Tensor]:
    held = {f"{rank}.{name}": value for name, value in model.state_dict().items()}
    for number, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            own = value.to_local() if hasattr(value, "to_local") else value
            held[f"{rank}.{number}.{key}"] = own
    return held


# torch's library supports one process here, so ranks save their shards in turns, with own names.
def _save_dcp(folder: Path, model, optimizer, rank: int) -> None:
    import torch.distributed.checkpoint as dcp

    held = {name: value.cpu() for name, value in _held(model, optimizer, rank).items()}
    dcp.save(held, checkpoint_id=str(folder / str(rank)), no_dist=True)


def _load_dcp(folder: Path, model, optimizer, rank: int) -> None:
    import torch.distributed.checkpoint as dcp
    import torch_xla

    held = _held(model, optimizer, rank)
    host = {name: torch.empty_like(value, device="cpu") for name, value in held.items()}
    dcp.load(host, checkpoint_id=str(folder / str(rank)), no_dist=True)
    with torch.no_grad():
        for name, value in held.items():
            value.copy_(host[name].to(value.device))
    torch_xla.sync(wait=True)


def table(times: dict[str, list[float]], size: int) -> str:
    """A Markdown table: seconds of the first time in the process, the median of all times, and the
    speed relative to the plain copy of the same round (median; above 1: faster)."""
    rows = [head(["", "first, s", "s", "speed / plain copy"])]
    for name, each in times.items():
        copy = times[f"{name.partition(',')[0]}, plain copy"]
        ratio = median(c / own for c, own in zip(copy, each, strict=True))
        rows.append(line([name, *(f"{cell:.2f}" for cell in (each[0], median(each), ratio))]))
    return f"{size / 2**30:.2f} GiB on {RANKS} ranks\n\n" + "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--dir", default="/tmp/xla_fsdp-checkpoints", help="where to write")
    parser.add_argument("--gib", type=float, default=2.0, help="parameters and Adam state, GiB")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    import xla_fsdp

    try:
        ranks = xla_fsdp.launch(
            _rank, (arguments.dir, arguments.gib, arguments.rounds), num_devices=RANKS, timeout=600
        )
        saved = Path(arguments.dir) / SAVED
        size = sum(file.stat().st_size for file in saved.iterdir())
        print(table(ranks[0], size))
    finally:
        shutil.rmtree(arguments.dir, ignore_errors=True)


if __name__ == "__main__":
    main()

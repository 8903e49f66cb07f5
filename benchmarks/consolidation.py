"""Memory and speed of consolidation, compared with a plain copy and with other libraries.

    python -m benchmarks.consolidation --dir /tmp/bench [--gib 4] [--ranks 8] [--lanes LANE ...]

Writes to ``--dir``: a checkpoint of ``--ranks`` ranks of a float32 model of ``--gib`` GiB with Adam
state (three times the bytes), and, without optimizer state, the files that the in-tree class and
torch.distributed.checkpoint would write. Then it runs every lane in a separate process, and copies
the output file by file with ``shutil.copyfile`` and ``fsync``. All lanes read from the page cache,
if it is large enough for input and output. ``--dir`` is removed at the end.

Columns: seconds without the start of Python; seconds of the copy; the speed relative to the copy;
peak resident memory; the part of it that the process used before the work (mostly imports of
torch); and a bound, the largest parameter plus 300 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from .tables import head, line

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
LARGEST = 512 * MIB
COLUMNS = ("GB", "s", "copy s", "× copy", "peak MB", "of which before MB", "bound MB")


class Lane(NamedTuple):
    """A way to consolidate.

    ``prepare`` imports all that the lane needs; it gets the folder and the path of the output, and
    returns the work to measure. ``source``: the folder of the input. ``extension``: that of the
    output file; "" for a folder. ``syncs``: whether the work calls fsync.
    """

    prepare: Callable[[Path, str], Callable[[], object]]
    extension: str
    source: str = "ckpt"
    syncs: bool = True


def _consolidate(folder: Path, out: str, source: str = "ckpt", **options: object) -> Callable:
    from xla_fsdp.consolidate import consolidate_checkpoint

    return partial(consolidate_checkpoint, str(folder / source), out, **options)


def _reshard(folder: Path, out: str) -> Callable:
    from xla_fsdp.consolidate import reshard_checkpoint

    return partial(reshard_checkpoint, str(folder / "ckpt"), 4, out)


def _verify(folder: Path, out: str) -> Callable:
    from xla_fsdp.consolidate import verify_checkpoint

    return partial(verify_checkpoint, str(folder / "ckpt"))


def _in_tree(folder: Path, out: str) -> Callable:
    from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints

    return partial(consolidate_sharded_model_checkpoints, f"{folder}/intree/r", "*.pth", out)


def _dcp(folder: Path, out: str) -> Callable:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    return partial(dcp_to_torch_save, str(folder / "dcp"), out)


LANES = {
    "safetensors": Lane(_consolidate, ".safetensors"),
    "pth": Lane(_consolidate, ".pth"),
    "safetensors and optimizer": Lane(partial(_consolidate, optimizer=True), ""),
    "reshard to 4": Lane(_reshard, ""),
    "verify": Lane(_verify, ""),
    "in-tree files to pth": Lane(
        partial(_consolidate, source="intree/r", suffix="*.pth"), ".pth", "intree"
    ),
    "the same, in-tree function": Lane(_in_tree, ".pth", "intree", syncs=False),
    "dcp_to_torch_save": Lane(_dcp, ".pth", "dcp", syncs=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", required=True, help="folder to create, and to remove at the end")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lanes", nargs="*", choices=LANES, default=list(LANES), metavar="LANE")
    parser.add_argument("--measure", choices=LANES, help=argparse.SUPPRESS)  # in a child
    arguments = parser.parse_args()
    folder = Path(arguments.dir)
    if arguments.measure:
        return measure(arguments.measure, folder)
    folder.mkdir()
    try:
        shapes = shapes_of(int(arguments.gib * (1 << 30)))
        write_all(folder, shapes, arguments.ranks, arguments.lanes)
        print(head(["", *COLUMNS]))
        bound = max(shapes.values()) * 4 + 300 * 10**6
        for name in arguments.lanes:
            print(row(name, folder, bound), flush=True)
    finally:
        shutil.rmtree(folder)


def measure(name: str, folder: Path) -> None:
    """Prints seconds, and resident bytes before the work and at its peak, as JSON."""
    out = output_of(name, folder)
    work = LANES[name].prepare(folder, str(out))
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, begin = resident("VmRSS"), time.perf_counter()
    work()
    seconds = time.perf_counter() - begin
    peak = resident("VmHWM")
    if not LANES[name].syncs:
        begin = time.perf_counter()
        for path in files_of(out):
            os.fsync(os.open(path, os.O_RDONLY))
        seconds += time.perf_counter() - begin
    print(json.dumps([seconds, before, peak]))


def resident(field: str) -> int:
    """Bytes of the process in /proc/self/status."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def output_of(name: str, folder: Path) -> Path:
    return folder / f"out{LANES[name].extension}"


def files_of(path: Path) -> list[Path]:
    """The file ``path``, or the files of this folder."""
    return sorted(path.iterdir()) if path.is_dir() else [path]


def row(name: str, folder: Path, bound: int) -> str:
    """Runs a lane in a separate process, and a copy of its output."""
    out = output_of(name, folder)
    warm(folder)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.consolidation", f"--dir={folder}", f"--measure={name}"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        failed = f"failed: {done.stderr.strip().splitlines()[-1]}"
        return line([name, failed, *[""] * (len(COLUMNS) - 1)])
    seconds, before, peak = json.loads(done.stdout.splitlines()[-1])
    files = files_of(out if out.exists() else folder / "ckpt")
    size = sum(path.stat().st_size for path in files)
    copied = copy(files, folder / "copy")
    if out.exists():
        shutil.rmtree(out) if out.is_dir() else out.unlink()
    cells = [f"{size / 1e9:.2f}", f"{seconds:.1f}", f"{copied:.1f}", f"{copied / seconds:.2f}"]
    return line([name, *cells, *(f"{number / 1e6:.0f}" for number in (peak, before, bound))])


def shapes_of(size: int) -> dict[str, int]:
    """Elements by name: one tensor of 512 MiB, then blocks of 128, 16 and 1 MiB and 4 KiB."""
    shapes, left = {}, size
    for number in range(10_000):
        for part, step in (("embed", LARGEST), ("mlp", 128 * MIB), ("attn", 16 * MIB)):
            if left >= step and (part != "embed" or number == 0):
                shapes[f"block.{number}.{part}"] = step // 4
                left -= step
        for part, step in (("head", MIB), ("bias", 4096)):
            if left >= step:
                shapes[f"block.{number}.{part}"] = step // 4
                left -= step
        if left < 4096:
            break
    return shapes


def write_all(folder: Path, shapes: dict[str, int], ranks: int, lanes: list[str]) -> None:
    """Writes the inputs of ``lanes``."""
    base = torch.empty(LARGEST // 4).uniform_(-1, 1)
    sources = {LANES[name].source for name in lanes}
    if "ckpt" in sources:
        write_sharded(folder / "ckpt", shapes, ranks, base)
    if "intree" in sources:
        write_intree(folder / "intree", shapes, ranks, base)
    if "dcp" in sources:
        import torch.distributed.checkpoint as dcp

        tensors = {name: base[:count].clone() for name, count in shapes.items()}
        dcp.save(tensors, checkpoint_id=folder / "dcp", no_dist=True)
    os.sync()


def write_sharded(path: Path, shapes: dict[str, int], ranks: int, base: torch.Tensor) -> None:
    sys.path.insert(0, str(ROOT / "test"))
    from sharded_files import even_cuts, write_checkpoint

    tensors = {name: base[:count] for name, count in shapes.items()}
    state = {
        name: {"step": torch.tensor(9.0), "exp_avg": value, "exp_avg_sq": value}
        for name, value in tensors.items()
    }
    groups = [{"params": list(tensors), "lr": 1e-3, "betas": (0.9, 0.999)}]
    write_checkpoint(path, tensors, {"groups": groups, "state": state}, ranks, cut=even_cuts)


def write_intree(path: Path, shapes: dict[str, int], ranks: int, base: torch.Tensor) -> None:
    """Write files as the in-tree class does: shards padded to multiples of 128 elements."""
    path.mkdir()
    for rank in range(ranks):
        model, info = {}, {}
        for name, count in shapes.items():
            module, _, last = name.rpartition(".")
            length = -(-count // (ranks * 128)) * 128
            key = f"{module}._fsdp_shard.{last}"
            part = base[:count][rank * length : (rank + 1) * length]
            model[key] = torch.cat([part, part.new_zeros(length - len(part))])
            own = {"_orig_size": torch.Size([count]), "_orig_name": last}
            info.setdefault(module, {})[f"_fsdp_shard.{last}"] = own
        metadata = {
            "shard_info": info,
            "flatten_info": {},
            "buffer_info": {},
            "world_size": ranks,
            "rank": rank,
        }
        torch.save({"model": model, "shard_metadata": metadata}, path / f"r{rank}.pth")


def warm(folder: Path) -> None:
    """Read all input files into the page cache, for all lanes alike, and write all dirty pages."""
    os.sync()
    buffer = bytearray(16 * MIB)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def copy(files: list[Path], target: Path) -> float:
    """Seconds of a plain copy with fsync."""
    target.mkdir()
    begin = time.perf_counter()
    for path in files:
        shutil.copyfile(path, target / path.name)
        descriptor = os.open(target / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    return seconds


if __name__ == "__main__":
    main()

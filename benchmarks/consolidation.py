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
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
LARGEST = 512 * MIB

CONSOLIDATE = """
from xla_fsdp.consolidate import consolidate_checkpoint, reshard_checkpoint, verify_checkpoint
def work():
    {call}
"""
INTREE = """
from torch_xla.distributed.fsdp import consolidate_sharded_model_checkpoints
def work():
    consolidate_sharded_model_checkpoints({dir!r} + "/intree/r", "*.pth", {out!r})
"""
DCP = """
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
def work():
    dcp_to_torch_save({dir!r} + "/dcp", {out!r})
"""
MEASURE = """
import json, os, re, time, warnings
warnings.simplefilter("ignore")
def status(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
open("/proc/self/clear_refs", "w").write("5")
before, begin = status("VmRSS"), time.perf_counter()
work()
seconds = time.perf_counter() - begin
peak = status("VmHWM")
begin = time.perf_counter()
for folder, _, names in os.walk({out!r}):
    paths = [os.path.join(folder, name) for name in names]
    break
else:
    paths = [{out!r}] if os.path.exists({out!r}) else []
if {sync}:  # this lane does not fsync itself, so its time includes this fsync
    for path in paths:
        os.fsync(os.open(path, os.O_RDONLY))
    seconds += time.perf_counter() - begin
print(json.dumps([seconds, before, peak]))
"""

LANES = {
    "safetensors": (
        CONSOLIDATE,
        "consolidate_checkpoint({dir!r} + '/ckpt', {out!r})",
        ".safetensors",
    ),
    "safetensors, 1 GB shards": (
        CONSOLIDATE,
        "consolidate_checkpoint({dir!r} + '/ckpt', {out!r}, max_shard_size='1GB')",
        "",
    ),
    "pth": (CONSOLIDATE, "consolidate_checkpoint({dir!r} + '/ckpt', {out!r})", ".pth"),
    "bfloat16": (
        CONSOLIDATE,
        "consolidate_checkpoint({dir!r} + '/ckpt', {out!r}, dtype='bfloat16')",
        ".safetensors",
    ),
    "safetensors and optimizer": (
        CONSOLIDATE,
        "consolidate_checkpoint({dir!r} + '/ckpt', {out!r}, optimizer=True)",
        "",
    ),
    "pth and optimizer": (
        CONSOLIDATE,
        "consolidate_checkpoint({dir!r} + '/ckpt', {out!r}, optimizer=True, format='pth')",
        "",
    ),
    "reshard to 4": (CONSOLIDATE, "reshard_checkpoint({dir!r} + '/ckpt', 4, {out!r})", ""),
    "verify": (CONSOLIDATE, "verify_checkpoint({dir!r} + '/ckpt')", ""),
    "in-tree files to pth": (
        CONSOLIDATE,
        "consolidate_checkpoint({dir!r} + '/intree/r', {out!r}, suffix='*.pth')",
        ".pth",
    ),
    "the same, in-tree function": (INTREE, "", ".pth"),
    "dcp_to_torch_save": (DCP, "", ".pth"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", required=True, help="folder to create, and to remove at the end")
    parser.add_argument("--gib", type=float, default=4)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--lanes", nargs="*", choices=LANES, default=list(LANES), metavar="LANE")
    arguments = parser.parse_args()
    folder = Path(arguments.dir)
    folder.mkdir()
    try:
        shapes = shapes_of(int(arguments.gib * (1 << 30)))
        write_all(folder, shapes, arguments.ranks, arguments.lanes)
        print("| | GB | s | copy s | × copy | peak MB | of which before MB | bound MB |")
        print("|---|---|---|---|---|---|---|---|")
        bound = max(shapes.values()) * 4 + 300 * 10**6
        for name in arguments.lanes:
            print(row(name, folder, bound), flush=True)
    finally:
        shutil.rmtree(folder)


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
    base = torch.empty(LARGEST // 4).uniform_(-1, 1)
    if {name for name in lanes if LANES[name][0] is CONSOLIDATE} - {"in-tree files to pth"}:
        write_sharded(folder / "ckpt", shapes, ranks, base)
    if any("in-tree" in name for name in lanes):
        write_intree(folder / "intree", shapes, ranks, base)
    if "dcp_to_torch_save" in lanes:
        import torch.distributed.checkpoint as dcp

        dcp.save(
            {n: base[:c].clone() for n, c in shapes.items()},
            checkpoint_id=folder / "dcp",
            no_dist=True,
        )
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


def row(name: str, folder: Path, bound: int) -> str:
    script, call, extension = LANES[name]
    out = str(folder / "out") + extension
    own = script is CONSOLIDATE
    names = {"dir": str(folder), "out": out}
    text = script.format(call=call.format(**names), **names)
    text += MEASURE.format(out=out, sync=not own)
    warm(folder)
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PJRT_DEVICE": "CPU"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return f"| {name} | failed: {done.stderr.strip().splitlines()[-1]} | | | | | | |"
    seconds, before, peak = json.loads(done.stdout.splitlines()[-1])
    source = Path(out) if os.path.exists(out) else folder / "ckpt"
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    size = sum(path.stat().st_size for path in files)
    copied = copy(files, folder / "copy")
    if os.path.exists(out):
        shutil.rmtree(out) if os.path.isdir(out) else os.unlink(out)
    return (
        f"| {name} | {size / 1e9:.2f} | {seconds:.1f} | {copied:.1f} | {copied / seconds:.2f} | "
        f"{peak / 1e6:.0f} | {before / 1e6:.0f} | {bound / 1e6:.0f} |"
    )


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

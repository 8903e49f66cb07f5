"""Memory does not grow with the checkpoint, nor with its largest parameter."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from sharded_files import even_cuts, write_checkpoint

MIB = 1 << 20
# malloc returns freed pieces to the system at once. By default it keeps them, for each thread up to
# 64 MiB, and how many threads share them depends on the number of cores.
SETTINGS = {
    "PYTHONPATH": str(Path(__file__).parent.parent),
    "MALLOC_MMAP_THRESHOLD_": str(MIB),
}
MEASURE = """
import gc, re, sys, threading, time
from xla_fsdp.consolidate import consolidate_checkpoint, consolidate_sharded_model_checkpoints
from xla_fsdp.consolidate import reshard_checkpoint, verify_checkpoint

def resident(key):
    return int(re.search(key + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

folder = sys.argv[1]
gc.disable()  # what a call used is freed when it returns, not at some time later
open("/proc/self/clear_refs", "w").write("5")  # the peak so far was the imports'
before = resident("VmRSS")
verify_checkpoint(folder + "/ckpt")
consolidate_checkpoint(folder + "/ckpt", folder + "/out", optimizer=True, max_shard_size="100MB")
consolidate_checkpoint(folder + "/ckpt", folder + "/half.pth", dtype="bfloat16")
reshard_checkpoint(folder + "/ckpt", 3, folder + "/ranks")
consolidate_checkpoint(folder + "/legacy", folder + "/legacy.pth", suffix="-*.pth")
streamed = resident("VmHWM") - before

# Memory of the process itself, without mapped files, which the kernel can drop at any time.
peak = before = resident("RssAnon")
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, resident("RssAnon"))
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
consolidate_sharded_model_checkpoints(folder + "/legacy", "-*.pth")
done = True
thread.join()
print(streamed, peak - before)
"""


@pytest.fixture
def folder(tmp_path):
    """In memory if there is room: the disk is not what is tested here."""
    shared = Path("/dev/shm")
    if not shared.is_dir() or shutil.disk_usage(shared).free < 4 << 30:
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shared) as made:
        yield Path(made)


@pytest.mark.slow
def test_memory(folder):
    """600 MiB of model and Adam state; the largest parameter alone has 160 MiB."""
    tensors = {"large": torch.ones(40 * MIB), "small": torch.ones(10 * MIB)}
    state = {name: {"m": value, "v": value} for name, value in tensors.items()}
    optimizer = {"groups": [{"params": list(tensors)}], "state": state}
    write_checkpoint(folder / "ckpt", tensors, optimizer, 4, cut=even_cuts)
    about = {"format": "xla_fsdp", "version": 1, "world_size": 2, "buffers": {}}
    about["parameters"] = {
        name: {
            "layout": "flat",
            "numel": tensor.numel(),
            "members": [{"names": [name], "shape": list(tensor.shape), "offset": 0}],
        }
        for name, tensor in tensors.items()
    }
    for rank in range(2):
        model = {name: tensor.chunk(2)[rank].clone() for name, tensor in tensors.items()}
        adam = {name: shard * 2 for name, shard in model.items()}
        content = {"model": model, "shard_metadata": {**about, "rank": rank}, "optimizer": adam}
        torch.save(content, folder / f"legacy-{rank}.pth")
    del tensors, state, optimizer, model, adam, content
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(folder)],
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    streamed, in_memory = map(int, done.stdout.split())
    assert streamed < 64 * MIB
    # The function that returns the model takes its 200 MiB, and not the optimizer's.
    assert 200 * MIB <= in_memory < 216 * MIB

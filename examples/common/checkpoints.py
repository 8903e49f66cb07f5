"""Checkpoints of an example: a file a rank, and one file of the unsharded model made from them."""

import os
import subprocess
import sys
from typing import Any

from .script import Stop


def prepare_folder(prefix: str) -> None:
    """Makes the folder that ``prefix`` names, before hours of training rather than after."""
    folder = os.path.dirname(prefix) or "."
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Stop(f"--ckpt_prefix={prefix}: {error.strerror}: {folder}", code=2) from error
    if not os.access(folder, os.W_OK):
        raise Stop(f"--ckpt_prefix={prefix}: {folder} is not writable", code=2)


def save_rank(prefix: str, rank: int, world_size: int, model: Any, optimizer: Any) -> None:
    """Saves this rank's shards; returns when all ranks have saved theirs."""
    import torch_xla.core.xla_model as xm

    checkpoint = {
        "model": model.state_dict(),
        "shard_metadata": model.get_shard_metadata(),
        "optimizer": optimizer.state_dict(),
    }
    xm.save(checkpoint, rank_file(prefix, rank, world_size), master_only=False)
    xm.rendezvous("checkpoint saved")


def rank_file(prefix: str, rank: int, world_size: int) -> str:
    return f"{prefix}_rank-{rank:08d}-of-{world_size:08d}.pth"


def consolidate(prefix: str, world_size: int) -> str:
    """Joins the files of all ranks with the command line tool; returns the new file's path."""
    path = f"{prefix}_consolidated.pth"
    # Names the number of ranks: files of an earlier run with another number may lie there.
    suffix = f"_rank-*-of-{world_size:08d}.pth"
    command = [sys.executable, "-m", "xla_fsdp.consolidate", "--ckpt_prefix", prefix]
    command += ["--ckpt_suffix", suffix, "--save_path", path]
    run_command(command, "consolidation")
    return path


def run_command(command: list[str], what: str) -> str:
    """Runs ``command`` and returns what it printed; a failure ends the script."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Stop(f"{what} failed (exit code {done.returncode}): {done.stderr.strip()}")
    return done.stdout

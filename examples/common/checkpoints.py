"""Checkpoints of an example: saved while it trains, resumed from, and joined into one file."""

import os
import subprocess
import sys
from typing import Any

import xla_fsdp
from xla_fsdp.consolidate import CheckpointError

from .script import Stop


def prepare_folder(folder: str, resume: bool) -> None:
    """Makes the folder of the checkpoints, before hours of training rather than after."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise Stop(f"--ckpt_prefix={folder}: {error.strerror}: {folder}", code=2) from error
    if not os.access(folder, os.W_OK):
        raise Stop(f"--ckpt_prefix={folder}: {folder} is not writable", code=2)
    try:
        found = xla_fsdp.latest(folder)
    except CheckpointError as error:
        raise Stop(str(error), code=2) from error
    if found and not resume:
        raise Stop(f"{found} is there from an earlier run: --resume, or another --ckpt_prefix", 2)


def resume(folder: str, model: Any, optimizer: Any, steps: int) -> int:
    """Loads the latest checkpoint, if there is one; returns how many of ``steps`` are done."""
    try:
        found = xla_fsdp.load_checkpoint(folder, model, optimizer, missing_ok=True)
    except CheckpointError as error:
        raise Stop(str(error), code=2) from error
    if found is None:
        return 0
    if found.step >= steps:
        raise Stop(f"{found.path} is at {found.step} already: nothing to train up to {steps}", 2)
    return found.step


def consolidate(checkpoint: str, path: str) -> str:
    """Joins a checkpoint into one plain torch file with the command line tool; returns ``path``."""
    command = [sys.executable, "-m", "xla_fsdp.consolidate", "--ckpt_prefix", checkpoint]
    run_command([*command, "--save_path", path], "consolidation")
    return path


def run_command(command: list[str], what: str) -> str:
    """Runs ``command`` and returns what it printed; a failure ends the script."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Stop(f"{what} failed (exit code {done.returncode}): {done.stderr.strip()}")
    return done.stdout

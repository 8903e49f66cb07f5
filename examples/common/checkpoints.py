"""Checkpoints of an example: saved while it trains, resumed from, and joined into one file."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import xla_fsdp
from xla_fsdp.consolidate import CheckpointError

from .script import Stop


def is_remote(folder: str) -> bool:
    """Whether ``folder`` is for fsspec to open, such as ``gs://bucket/run``."""
    return "://" in folder


def prepare_folder(options: SimpleNamespace, flag: str = "ckpt_dir") -> None:
    """Makes the folder of the checkpoints, before hours of training rather than after."""
    folder = getattr(options, flag)
    if not is_remote(folder):
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise Stop(f"--{flag}={folder}: {error.strerror}: {folder}", code=2) from error
        if not os.access(folder, os.W_OK):
            raise Stop(f"--{flag}={folder}: {folder} is not writable", code=2)
    try:
        found = xla_fsdp.latest(folder)
    except (CheckpointError, OSError, ImportError, ValueError) as error:
        raise Stop(f"--{flag}={folder}: {' '.join(str(error).split())}", code=2) from error
    if found and not (options.resume or options.resume_epoch):
        raise Stop(f"{found} is there from an earlier run: --resume, or another --{flag}", 2)


def resume(
    folder: str, model: Any, optimizer: Any, scheduler: Any, steps: int, step: int = 0
) -> int:
    """Loads a checkpoint; returns how many of ``steps`` are done.

    That of ``step``, or, for 0, the latest, if there is one.
    """
    path = f"{folder}/step-{step:08d}" if step else folder
    try:
        found = xla_fsdp.load_checkpoint(path, model, optimizer, scheduler, missing_ok=not step)
    except CheckpointError as error:
        raise Stop(str(error), code=2) from error
    if found is None:
        return 0
    if found.step >= steps:
        raise Stop(f"{found.path} is at {found.step} already: nothing to train up to {steps}", 2)
    return found.step


def consolidate(checkpoint: str, folder: str) -> None:
    """Joins a checkpoint into safetensors files in ``folder`` with the command line tool."""
    command = [sys.executable, "-m", "xla_fsdp.consolidate", "--ckpt_prefix", checkpoint]
    run_command([*command, "--save_path", folder, "--format", "safetensors"], "consolidation")


def run_command(command: list[str], what: str) -> str:
    """Runs ``command`` and returns what it printed; a failure ends the script."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Stop(f"{what} failed (exit code {done.returncode}): {done.stderr.strip()}")
    return done.stdout

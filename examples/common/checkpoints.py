"""Checkpoints of an example: saved while it trains, resumed from, and joined into one file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import xla_fsdp
from xla_fsdp.consolidate import CheckpointError

from .script import Stop, reason

if TYPE_CHECKING:
    from xla_fsdp import LoadedCheckpoint


def is_remote(folder: str) -> bool:
    """Whether ``folder`` is for fsspec to open, such as ``gs://bucket/run``."""
    return "://" in folder


def prepare_folder(options: SimpleNamespace, flag: str = "ckpt_dir") -> None:
    """Makes the folder of the checkpoints, before hours of training rather than after."""
    folder = getattr(options, flag)
    if not folder:
        raise Stop(f"--{flag} is empty; name a folder", code=2)
    if not is_remote(folder):
        try:
            os.makedirs(folder, exist_ok=True)
        except (OSError, ValueError) as error:
            raise Stop(f"--{flag}={folder}: {reason(error)}: {folder}", code=2) from error
        if not os.access(folder, os.W_OK):
            raise Stop(f"--{flag}={folder}: {folder} is not writable", code=2)
    step = options.resume_epoch or None
    try:
        # Asked for an older one, a damaged newest one is in nobody's way.
        found = xla_fsdp.latest(folder, step)
    except (CheckpointError, OSError, ImportError, ValueError) as error:
        told = " ".join(str(error).split())
        older = "" if step or not isinstance(error, CheckpointError) else _another(folder)
        raise Stop(f"--{flag}={folder}: {told}{older}", code=2) from error
    if step and not found:
        raise Stop(f"no complete checkpoint of --resume_epoch={step} in {folder}", code=2)
    if found and not (options.resume or step):
        raise Stop(f"{found} is there from an earlier run: --resume, or another --{flag}", 2)


def resume(
    folder: str,
    state: tuple[Any, Any, Any],
    network: dict[str, Any],
    steps: int,
    step: int = 0,
) -> LoadedCheckpoint | None:
    """Loads the checkpoint of ``step``, or, for 0, the latest, ``None`` if there is none.

    Args:
        state: model, optimizer and scheduler.
        network: what :func:`extra` was given when it was saved.
        steps: those of the whole run.

    Raises:
        Stop: with code 2: it is damaged, of another network, or beyond ``steps``.
    """
    try:
        found = xla_fsdp.load_checkpoint(folder, *state, missing_ok=not step, step=step or None)
    except CheckpointError as error:
        # What another rank met begins with that rank and the class of its error.
        told = re.sub(r"^rank \d+ could not [^:]*: \w+: ", "", str(error))
        raise Stop(told, code=2) from error
    if found is None:
        return None
    _require_same(network, found)
    if found.step > steps:
        raise Stop(f"{found.path} is at {found.step} already: nothing to train up to {steps}", 2)
    return found


def extra(network: dict[str, Any]) -> dict[str, Any]:
    """What is saved beside the tensors: some networks differ in no shape, as in their heads."""
    return {"network": network}


def _require_same(network: dict[str, Any], found: LoadedCheckpoint) -> None:
    saved = found.extra.get("network") if isinstance(found.extra, dict) else None
    if not isinstance(saved, dict):
        return  # saved before networks were
    for name in sorted(saved.keys() | network.keys()):
        if saved.get(name) != network.get(name):
            raise Stop(
                f"{found.path} is of another network: its {name} is {saved.get(name)}, not "
                f"{network.get(name)}; give it the same, or begin in another folder",
                code=2,
            )


def _another(folder: str) -> str:
    """What to do about a damaged newest checkpoint: take the newest one that looks whole."""
    from xla_fsdp.consolidate.format import folders, store

    for place in reversed(folders.places(*store.open_store(folder))):
        try:
            if xla_fsdp.latest(folder, step=place.step):
                return f"; --resume_epoch={place.step} goes on from the newest that is whole"
        except CheckpointError:
            pass
    return ""


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

"""The checkpoints of a run: where they go, and which one it goes on from."""

import os
import re
from types import SimpleNamespace
from typing import Any

from absl import flags

import xla_fsdp
from xla_fsdp.consolidate import CheckpointError

from . import schedules
from .script import Stop, in_a_line

flags.DEFINE_bool("resume", False, "go on from the latest checkpoint, if there is one")
flags.DEFINE_integer("resume_epoch", 0, "go on from this epoch's checkpoint, not the latest", 0)
flags.register_multi_flags_validator(
    ["resume", "resume_epoch"],
    lambda given: not (given["resume"] and given["resume_epoch"]),
    "choose one: --resume takes the latest checkpoint, --resume_epoch that of an epoch",
)
flags.DEFINE_integer("keep_ckpts", 2, "checkpoints kept, the latest ones", lower_bound=1)


def prepare_folder(options: SimpleNamespace, flag: str = "ckpt_dir") -> None:
    """Makes the folder of the checkpoints, before hours of training; a plan needs none."""
    folder, step = getattr(options, flag), options.resume_epoch or None
    if options.plan:
        return
    if not folder:
        raise Stop(f"--{flag} is empty; name a folder", code=2)
    if "://" not in folder:  # else it is for fsspec to open
        try:
            os.makedirs(folder, exist_ok=True)
        except (OSError, ValueError) as error:
            raise Stop(f"--{flag}={folder}: {in_a_line(error)}: {folder}", code=2) from error
        if not os.access(folder, os.W_OK):
            raise Stop(f"--{flag}={folder}: {folder} is not writable", code=2)
    try:
        # Asked for an older one, a damaged newest one is in nobody's way.
        found = xla_fsdp.latest(folder, step)
    except (CheckpointError, OSError, ImportError, ValueError) as error:
        older = "" if step or not isinstance(error, CheckpointError) else _another(folder)
        raise Stop(f"--{flag}={folder}: {in_a_line(error, None)}{older}", 2) from error
    if step and not found:
        raise Stop(f"no complete checkpoint of --resume_epoch={step} in {folder}", code=2)
    if found and not (options.resume or step):
        raise Stop(f"{found} is there from an earlier run: --resume, or another --{flag}", code=2)


def resume(
    options: SimpleNamespace,
    folder: str,
    state: tuple[Any, Any, Any],
    network: dict[str, Any],
    steps: int,
) -> tuple[int, str]:
    """As :func:`load`; returns how many epochs are done, and the checkpoint."""
    found = load(options, folder, state, network, steps, options.num_epochs)
    return (found.step, found.path) if found else (0, "")


def load(
    options: SimpleNamespace,
    folder: str,
    state: tuple[Any, Any, Any],
    network: dict[str, Any],
    steps: int,
    last: int,
) -> "xla_fsdp.LoadedCheckpoint | None":
    """Loads what the flags ask for into ``state``: model, optimizer and scheduler.

    ``network`` must be what was saved as ``extra={"network": ...}``: some differ in no shape, as in
    their heads. From here on, rate and schedule are as the flags say now, with so many
    ``steps`` an epoch. It must not be beyond the ``last``.
    """
    step = options.resume_epoch
    if options.plan or not (options.resume or step):
        return None
    given = schedules.settings(state[1])
    try:
        found = xla_fsdp.load_checkpoint(folder, *state, missing_ok=not step, step=step or None)
    except CheckpointError as error:
        # What another rank met begins with that rank and the class of its error.
        told = re.sub(r"^rank \d+ could not [^:]*: \w+: ", "", str(error))
        raise Stop(told, code=2) from error
    if found is None:
        return None
    saved = found.extra.get("network") if isinstance(found.extra, dict) else None
    for name in sorted(saved.keys() | network.keys()) if isinstance(saved, dict) else ():
        if saved.get(name) != network.get(name):
            other = f"another network: its {name} is {saved.get(name)}, not {network.get(name)}"
            same = "give it the same, or begin in another folder"
            raise Stop(f"{found.path} is of {other}; {same}", code=2)
    if found.step > last:
        done = f"{found.path} is at {found.step} already"
        raise Stop(f"{done}: nothing to train up to {last}", code=2)
    schedules.go_on(*state[1:], given, found.step * steps)
    return found


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

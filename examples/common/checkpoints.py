"""Saves the checkpoints of a run, and resumes from them."""

import os
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

from absl import flags
from torch.utils.data import DataLoader

import xla_fsdp
from xla_fsdp.consolidate import CheckpointError

from . import evaluation, schedules
from .meters import Meters
from .script import DEFINE_number, Stop, to_one_line

flags.DEFINE_bool("resume", False, "resume from the latest checkpoint, if there is one")
flags.DEFINE_integer("resume_epoch", 0, "resume from the checkpoint of this epoch", 0)
DEFINE_number("preemption_grace", 25.0, "seconds from SIGTERM to the end, with code 75", "(0, inf)")
flags.DEFINE_integer("keep_ckpts", 2, "number of latest checkpoints to keep", lower_bound=1)


def prepare_folder(options: SimpleNamespace, flag: str = "ckpt_dir") -> None:
    """Creates the folder of the checkpoints before the training; a plan needs none."""
    folder, step = getattr(options, flag), options.resume_epoch or None
    if options.resume and step:
        one = "give only one: --resume takes the latest checkpoint, --resume_epoch that of an epoch"
        raise Stop(one, code=2)
    if options.plan:
        return
    if not folder:
        raise Stop(f"--{flag} is empty; give a folder", code=2)
    if "://" not in folder:  # fsspec opens URLs
        try:
            os.makedirs(folder, exist_ok=True)
        except (OSError, ValueError) as error:
            raise Stop(f"--{flag}={folder}: {to_one_line(error)}: {folder}", code=2) from error
        if not os.access(folder, os.W_OK):
            raise Stop(f"--{flag}={folder}: {folder} is not writable", code=2)
    try:
        # With --resume_epoch a damaged newer checkpoint does not matter.
        found = xla_fsdp.latest_checkpoint(folder, step)
    except (CheckpointError, OSError, ImportError, ValueError) as error:
        older = "" if step or not isinstance(error, CheckpointError) else _another(folder)
        raise Stop(f"--{flag}={folder}: {to_one_line(error, None)}{older}", 2) from error
    if step and not found:
        raise Stop(f"{folder} has no complete checkpoint of --resume_epoch={step}", code=2)
    if found and not (options.resume or step):
        there = f"{found} exists from an earlier run"
        raise Stop(f"{there}; give --resume, or another --{flag}", code=2)


def resume(
    options: SimpleNamespace,
    folder: str,
    state: tuple[Any, Any, Any],
    network: dict[str, Any],
    batches: DataLoader,
) -> tuple[int, str]:
    """Calls :func:`load`; returns the number of finished epochs, and the checkpoint.

    If :func:`save_and_exit` saved within an epoch, ``batches`` has only the rest of this epoch.
    """

    def steps_done(found: "xla_fsdp.LoadedCheckpoint") -> int:
        return found.step * len(batches) + _steps_begun(found.extra, batches)

    found = load(options, folder, state, network, options.num_epochs, steps_done)
    if found is None:
        return 0, ""
    done, begun = found.step, _steps_begun(found.extra, batches)
    if begun == len(batches):
        done += 1
    elif begun:
        batches.sampler.begun = (done, begun * batches.batch_size)
    return done, found.path


def load(
    options: SimpleNamespace,
    folder: str,
    state: tuple[Any, Any, Any],
    network: dict[str, Any],
    last: int,
    steps_done: Callable[["xla_fsdp.LoadedCheckpoint"], int] = lambda found: found.step,
) -> "xla_fsdp.LoadedCheckpoint | None":
    """Loads the checkpoint that the flags select into ``state``: model, optimizer and scheduler.

    ``network`` must equal the saved ``extra={"network": ...}``, because networks can differ without
    different shapes, for example in their number of heads. Learning rate and schedule are those of
    the current flags, after ``steps_done`` steps. The checkpoint must not be beyond ``last``.
    """
    step = options.resume_epoch
    if options.plan or not (options.resume or step):
        return None
    given = schedules.settings(state[1])
    try:
        found = xla_fsdp.load_checkpoint(folder, *state, missing_ok=not step, step=step or None)
    except CheckpointError as error:
        # An error of another rank begins with that rank and the class of the error.
        told = re.sub(r"^rank \d+ could not [^:]*: \w+: ", "", str(error))
        raise Stop(told, code=2) from error
    if found is None:
        return None
    saved = found.extra.get("network") if isinstance(found.extra, dict) else None
    for name in sorted(saved.keys() | network.keys()) if isinstance(saved, dict) else ():
        if saved.get(name) != network.get(name):
            other = f"another network: its {name} is {saved.get(name)}, not {network.get(name)}"
            same = "use the same value, or another folder"
            raise Stop(f"{found.path} is of {other}; {same}", code=2)
    if found.step > last:
        done = f"{found.path} is at {found.step} already"
        raise Stop(f"{done}, so there is nothing to train up to {last}", code=2)
    schedules.resume(*state[1:], given, steps_done(found))
    return found


def save_and_exit(
    preempted: "xla_fsdp.Preemption",
    options: SimpleNamespace,
    folder: str,
    state: tuple[Any, Any, Any],
    network: dict[str, Any],
    meters: Meters,
) -> NoReturn:
    """Saves a run that must end within an epoch, and ends the rank with exit code 75.

    The checkpoint replaces that of the epoch before, and has the number of steps of this epoch.
    """
    import torch_xla

    torch_xla.sync()  # runs the step alone: together with the save it would be compiled again
    evaluation.average_batch_statistics(state[0])
    xla_fsdp.save_checkpoint(
        folder,
        *state,
        step=meters.epoch - 1,
        extra={"network": network, "images": meters.images_done},
        keep_last=options.keep_ckpts,
    )
    preempted.exit()


def _steps_begun(extra: Any, batches: DataLoader) -> int:
    """The number of finished steps of the epoch that was saved unfinished.

    With another number of ranks or another batch size, some images may be repeated.
    """
    images = extra.get("images", 0) if isinstance(extra, dict) else 0
    if not images:
        return 0
    step = batches.batch_size * batches.sampler.num_replicas
    return min(images // step, len(batches))


def _another(folder: str) -> str:
    """A remedy for a damaged newest checkpoint: the newest one that seems complete."""
    from xla_fsdp.consolidate.format import folders, store

    try:
        places = folders.list_folders(*store.open_store(folder))
    except CheckpointError:  # the folder itself cannot be read
        return ""
    for place in reversed(places):
        try:
            if xla_fsdp.latest_checkpoint(folder, step=place.step):
                return f"; --resume_epoch={place.step} resumes from the newest complete one"
        except CheckpointError:
            pass
    return ""

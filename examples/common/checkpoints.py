"""Saves the checkpoints of a run, and resumes from them."""

import os
import re
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NoReturn

from absl import flags
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
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


@dataclass
class TrainingState:
    """What a run saves and resumes: the objects with state, and a description of the network.

    Networks can differ without different shapes, for example in their number of heads, so only a
    checkpoint with the same description is loaded.
    """

    model: nn.Module
    optimizer: Optimizer
    scheduler: LambdaLR | None
    network: dict[str, Any]


def prepare_folder(options: SimpleNamespace) -> None:
    """Creates the folder of the checkpoints before the training; a plan needs none."""
    folder, step = options.ckpt_dir, options.resume_epoch or None
    if options.resume and step:
        raise Stop(
            "give only one: --resume takes the latest checkpoint, --resume_epoch that of an epoch",
            code=2,
        )
    if options.plan:
        return
    if not folder:
        raise Stop("--ckpt_dir is empty; give a folder", code=2)
    try:
        if "://" not in folder:  # fsspec opens URLs
            os.makedirs(folder, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise Stop(f"--ckpt_dir={folder} is not writable", code=2)
        # With --resume_epoch a damaged newer checkpoint does not matter.
        found = xla_fsdp.latest_checkpoint(folder, step)
    except CheckpointError as error:
        older = "; --resume_epoch=N resumes from an older checkpoint" if options.resume else ""
        message = f"--ckpt_dir={folder}: {to_one_line(error, None)}{older}"
        raise Stop(message, code=2) from error
    except (OSError, ImportError, ValueError) as error:
        raise Stop(f"--ckpt_dir={folder}: {to_one_line(error)}", code=2) from error
    if step and not found:
        raise Stop(f"{folder} has no complete checkpoint of --resume_epoch={step}", code=2)
    if found and not (options.resume or step):
        raise Stop(
            f"{found} exists from an earlier run; give --resume, or another --ckpt_dir", code=2
        )


def load(
    options: SimpleNamespace, state: TrainingState, last: int, batches: DataLoader | None = None
) -> "xla_fsdp.LoadedCheckpoint | None":
    """Loads the checkpoint that the flags select into ``state``; returns None if there is none.

    Learning rate and schedule are those of the current flags. The checkpoint must not be beyond
    ``last``, an update, or an epoch of ``batches``.
    """
    step = options.resume_epoch or None
    if options.plan or not (options.resume or step):
        return None
    settings = schedules.settings(state.optimizer)
    try:
        loaded = xla_fsdp.load_checkpoint(
            options.ckpt_dir,
            state.model,
            state.optimizer,
            state.scheduler,
            missing_ok=step is None,
            step=step,
        )
    except CheckpointError as error:
        # An error of another rank begins with that rank and the class of the error.
        raise Stop(re.sub(r"^rank \d+ could not [^:]*: \w+: ", "", str(error)), code=2) from error
    if loaded is None:
        return None
    saved = (loaded.extra or {}).get("network", state.network)
    for name in sorted(saved.keys() | state.network.keys()):
        if saved.get(name) != state.network.get(name):
            raise Stop(
                f"{loaded.path} is of another network: its {name} is {saved.get(name)}, not "
                f"{state.network.get(name)}; use the same value, or another folder",
                code=2,
            )
    if loaded.step > last:
        raise Stop(
            f"{loaded.path} is at {loaded.step} already, so there is nothing to train up to {last}",
            code=2,
        )
    steps = loaded.step
    if batches is not None:
        steps = loaded.step * len(batches) + _steps_begun(loaded, batches)
    schedules.resume(state.optimizer, state.scheduler, settings, steps)
    return loaded


def resume(options: SimpleNamespace, state: TrainingState, batches: DataLoader) -> tuple[int, str]:
    """Calls :func:`load`; returns the number of finished epochs, and the path of the checkpoint.

    If :func:`save_and_exit` saved within an epoch, ``batches`` has only the rest of this epoch.
    """
    loaded = load(options, state, options.num_epochs, batches)
    if loaded is None:
        return 0, ""
    steps = _steps_begun(loaded, batches)
    if steps == len(batches):
        return loaded.step + 1, loaded.path
    if steps:
        batches.sampler.skip(loaded.step, steps * batches.batch_size)
    return loaded.step, loaded.path


def _steps_begun(loaded: "xla_fsdp.LoadedCheckpoint", batches: DataLoader) -> int:
    """The number of finished steps of the epoch that was saved unfinished.

    With another number of ranks or another batch size, some images may be repeated.
    """
    images = (loaded.extra or {}).get("images", 0)
    if not images:
        return 0
    return min(images // (batches.batch_size * batches.sampler.num_replicas), len(batches))


def save_and_exit(
    preempted: "xla_fsdp.Preemption",
    options: SimpleNamespace,
    state: TrainingState,
    meters: Meters,
) -> NoReturn:
    """Saves a run that must end within an epoch, and ends the rank with exit code 75.

    The checkpoint replaces that of the epoch before, and has the number of images of this epoch.
    """
    import torch_xla

    torch_xla.sync()  # runs the step alone: together with the save it would be compiled again
    evaluation.average_batch_statistics(state.model)
    xla_fsdp.save_checkpoint(
        options.ckpt_dir,
        state.model,
        state.optimizer,
        state.scheduler,
        step=meters.epoch - 1,
        extra={"network": state.network, "images": meters.images_done},
        keep_last=options.keep_ckpts,
    )
    preempted.exit()

"""The course of a training run, as far as it is the same in all examples of image classifiers.

Epochs with a progress bar, evaluation, checkpoints and resuming, and at the end consolidation and a
second opinion by plain torch. The step itself, and everything it is made of, is the script's.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from absl import flags
from torch import nn
from torch.utils.data import DataLoader

import xla_fsdp

from . import checkpoints, closing, schedules
from .memory import memory_in_use
from .progress import TrainingProgress
from .script import Stop

flags.DEFINE_integer("num_devices", None, "ranks; default: 4 on CPU, all on TPU", 1, 8)
# Ranks and epochs are added to it, and torch takes what fits into 64 bits.
flags.DEFINE_integer("seed", 1, "seed of weights and shuffling", 0, 2**32 - 1)
flags.DEFINE_bool("resume", False, "go on from the latest checkpoint, if there is one")
flags.DEFINE_integer(
    "resume_epoch", 0, "go on from the checkpoint of this epoch, not from the latest", 0
)
flags.register_multi_flags_validator(
    ["resume", "resume_epoch"],
    lambda given: not (given["resume"] and given["resume_epoch"]),
    "choose one: --resume takes the latest checkpoint, --resume_epoch that of an epoch",
)
flags.DEFINE_bool("no_ckpt_consolidation", False, "leave it at the files of the ranks")
flags.DEFINE_integer("keep_ckpts", 2, "checkpoints kept, the latest ones", lower_bound=1)
flags.DEFINE_string("logdir", None, "write TensorBoard curves there")
flags.DEFINE_integer("log_steps", 5, "steps between updates of the progress bar", lower_bound=1)
flags.DEFINE_integer("prefetch", 8, "batches a rank that wait on the device", lower_bound=1)
flags.DEFINE_integer("max_steps", None, "most steps an epoch, for a quick look", lower_bound=1)


@dataclass
class Task:
    """What is trained.

    Attributes:
        title: for the closing table.
        step: ``step(images, labels)``: one step on a batch of this rank; returns its mean loss.
        scheduler: ``step`` steps it, or ``None``.
        batches, held_out: this rank's (``sharing``); ``images``: how many are held out in all.
        network: what ``networks.build`` takes.
        description: what ``test_images.of`` takes.
        exact: whether plain torch must get as many images right, but for one in 2000 that is on the
            border; narrower dtypes round.
    """

    title: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    batches: DataLoader
    held_out: DataLoader
    images: int
    network: dict[str, Any]
    description: dict[str, Any]
    exact: bool = True


def fit(
    task: Task,
    options: SimpleNamespace,
    folder: str,
    num_epochs: int,
    eval_interval: int = 1,
    save_interval: int = 1,
) -> float:
    """Trains up to ``num_epochs``, evaluating and saving every so many, and after the last.

    ``options`` has the flags of this module and of ``planned``; ``folder`` is for the checkpoints.
    Runs on every rank; returns the accuracy at the end, 0 to 1. A run that is resumed after its
    last epoch, having been ended before its end, is evaluated and consolidated.

    Raises:
        Stop: the checkpoints do not fit (code 2); the loss is not finite any more; plain torch does
            not agree with the sharded model.
    """
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    rank, world_size = xr.global_ordinal(), xr.world_size()
    batches = task.batches
    images = min(len(batches.sampler), len(batches) * batches.batch_size)  # a rank and epoch
    images_a_step = images * world_size / len(batches)

    # Every rank has the same weights by now; dropout and crops are to be different ones.
    torch.manual_seed(options.seed + 1 + rank)
    xm.set_rng_state(options.seed + 1 + rank, str(torch_xla.device()))
    found = loss = None
    if (options.resume or options.resume_epoch) and not options.plan:
        state = (task.model, task.optimizer, task.scheduler)
        given = schedules.settings(task.optimizer)
        found = checkpoints.resume(folder, state, task.network, num_epochs, options.resume_epoch)
        if found:
            schedules.go_on(task.optimizer, task.scheduler, given, found.step * len(batches))
    done, saved = (found.step, found.path) if found else (0, "")
    show = rank == 0 and not options.plan
    if done == num_epochs and show:
        print(f"{saved} is the last epoch's: nothing is left to train", flush=True)
    with TrainingProgress(show, len(batches), images_a_step, options.logdir) as progress:
        for epoch in range(done + 1, num_epochs + 1):
            batches.sampler.set_epoch(epoch - 1)  # shuffles anew
            progress.start_epoch(epoch)
            with on_device(batches, options) as loader:
                loss = _train_epoch(task, loader, progress, options.log_steps)
            progress.end_epoch()
            if not math.isfinite(loss):
                raise Stop(f"the loss is {loss} in epoch {epoch}: choose a lower --lr")
            last = epoch == num_epochs
            correct = None
            if last or epoch % eval_interval == 0:
                correct = evaluate(task, options)
            progress.report(
                loss, None if correct is None else correct / task.images, memory_in_use()
            )
            if last or epoch % save_interval == 0:
                if correct is None:
                    average_batch_statistics(task.model)
                saved = xla_fsdp.save_checkpoint(
                    folder,
                    task.model,
                    task.optimizer,
                    task.scheduler,
                    step=epoch,
                    extra=checkpoints.extra(task.network),
                    keep_last=options.keep_ckpts,
                )
        if done == num_epochs:
            correct = evaluate(task, options)

    if rank == 0:
        closing.summarize(task, options, progress, num_epochs, world_size, loss, correct, saved)
    return correct / task.images


@contextlib.contextmanager
def on_device(batches: DataLoader, options: SimpleNamespace) -> Iterator[Iterable]:
    """Batches on the device, the next ones beside the step; raises what reading them raised.

    Steps: ``torch_xla.sync()`` is called after each batch.
    """
    import torch_xla
    import torch_xla.distributed.parallel_loader as pl

    errors = []

    def read() -> Iterator:
        # In a thread of torch_xla, for which an error is the end of the epoch.
        try:
            yield from batches
        except Exception as error:
            errors.append(error)

    device = torch_xla.device()
    loader = pl.ParallelLoader(read(), [device], device_prefetch_size=options.prefetch)

    def run() -> Iterator:
        yield from loader.per_device_loader(device)
        if errors:
            raise errors[0]

    try:
        yield run()
    finally:
        # Its threads must not be left at work when a failed run ends the process.
        loader.close()


def evaluate(task: Task, options: SimpleNamespace) -> int:
    """How many held-out images the model gets right, over all ranks."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    average_batch_statistics(task.model)
    # Training goes on as if nothing had been evaluated.
    device = str(torch_xla.device())
    state = xm.get_rng_state(device)
    with on_device(task.held_out, options) as loader:
        correct = count_correct(task.model, loader)
    xm.set_rng_state(state, device)
    return correct


def average_batch_statistics(model: nn.Module) -> None:
    """Makes every rank evaluate, and save, the same model: batch norm saw other images on each."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if statistics:
        xm.all_reduce(xm.REDUCE_SUM, statistics, scale=1 / xr.world_size())


@torch.no_grad()
def count_correct(model: nn.Module, loader: Any) -> int:
    """How many of the held-out images, over all ranks, the model gets right."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    model.eval()
    correct = torch.zeros((), dtype=torch.int64, device=torch_xla.device())
    for images, labels in loader:
        correct += (model(images).argmax(dim=1) == labels).sum()
    return xm.mesh_reduce("correct", correct.item(), sum)


def _train_epoch(task: Task, loader: Any, progress: TrainingProgress, log_steps: int) -> float:
    """Trains on every batch of ``loader``; returns the mean loss of all ranks."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    task.model.train()
    total = torch.zeros((), device=torch_xla.device())
    # The loader calls torch_xla.sync() between batches, which runs the step traced so far.
    for step, (images, labels) in enumerate(loader, start=1):
        rate = task.optimizer.param_groups[0]["lr"]  # of this step, which sets the next one's
        loss = task.step(images, labels)
        total += loss
        if step % log_steps == 0:
            # Called once the step has run: loss.item() here would cut the step in two.
            xm.add_step_closure(_show, (progress, step, loss, rate))
    return xm.mesh_reduce("loss", total.item(), sum) / step / xr.world_size()


def _show(progress: TrainingProgress, step: int, loss: torch.Tensor, rate: float) -> None:
    progress.update(step, loss.item(), rate, memory_in_use())

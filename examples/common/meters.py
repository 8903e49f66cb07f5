"""The output of rank 0: a progress bar, a line for each epoch, TensorBoard curves."""

import math
import resource
import time
from types import SimpleNamespace
from typing import Any

import torch
from absl import flags
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import xla_fsdp

from .script import Stop, require, to_one_line

flags.DEFINE_string("logdir", None, "write TensorBoard curves to this folder")
flags.DEFINE_string("profile_steps", None, "a:b: trace steps a to b - 1, for TensorBoard")
flags.DEFINE_integer("log_steps", 5, "steps between updates of the progress bar", lower_bound=1)


def _are_steps(text: str) -> bool:
    first, _, last = text.partition(":")
    return first.isdecimal() and last.isdecimal() and int(first) < int(last)


require("profile_steps", _are_steps, "must be a:b with a < b, such as 10:13")


class RunOutput:
    """The output of a run that is not a plan.

    The bar is shown on a terminal only, curves go to ``--logdir``, and inside of a ``with``
    statement ``--profile_steps`` are recorded.
    """

    def __init__(self, options: SimpleNamespace) -> None:
        import torch_xla.runtime as xr

        self.rank, self.world_size = xr.global_ordinal(), xr.world_size()
        self.loss: float | None = None
        self.seconds = self.speed = 0.0
        self._shows = self.rank == 0 and not options.plan
        self._console = Console(stderr=True, quiet=not self._shows)
        self._bar: Progress | None = None
        self._profile = self._writer = None
        if options.profile_steps and not options.plan:
            steps = tuple(map(int, options.profile_steps.split(":")))
            self._profile = xla_fsdp.profile(options.logdir or "runs/profile", steps)
        if options.logdir and self._shows:
            from torch.utils.tensorboard import SummaryWriter

            try:
                self._writer = SummaryWriter(options.logdir)
            except (OSError, ValueError, ImportError) as error:
                raise Stop(
                    f"--logdir={options.logdir}: {to_one_line(error)}; give another folder", code=2
                ) from error

    def _start_bar(self, text: str, total: int, status: str, done: int = 0) -> None:
        if self._shows and self._console.is_terminal:
            self._bar = Progress(
                "{task.description}",
                BarColumn(),
                MofNCompleteColumn(),
                "{task.fields[status]}",
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._bar.add_task(text, total=total, completed=done, status=status)
            self._bar.start()

    def _move_bar(self, done: int, status: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, refresh=True, status=status)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _write(self, curves: dict[str, float], step: int) -> None:
        if self._writer is not None:
            for name, value in curves.items():
                self._writer.add_scalar(name, value, step)

    def __enter__(self) -> Any:
        if self._profile is not None:
            self._profile.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._profile is not None:
            self._profile.__exit__(*error)
        self._close_bar()
        if self._writer is not None:
            self._writer.close()


class Meters(RunOutput):
    """Loss, accuracy, speed and memory of training by epochs, for all ranks together.

    A log file gets one line for each epoch. ``loss`` is the mean of the latest epoch, after which
    ``correct`` of the ``images`` held out were classified correctly.
    """

    UNIT, SPEED, RESULT = "epochs", "samples/s, last epoch", "accuracy"

    def __init__(self, options: SimpleNamespace, batches: DataLoader, held_out: DataLoader) -> None:
        super().__init__(options)
        self.log_steps, self.length = options.log_steps, options.num_epochs
        self.steps = len(batches)
        self.images = self.samples = len(held_out.dataset)
        self._batches = batches
        # The images of one rank in an epoch.
        share = min(len(batches.sampler), self.steps * batches.batch_size)
        self.samples_per_step = share * self.world_size / self.steps
        self.correct: int | None = None

    def start_epoch(self, number: int) -> None:
        import torch_xla

        self.epoch, self._start = number, time.perf_counter()
        # Steps of this epoch that an earlier run has finished.
        self._before = self._step = self._batches.sampler.skipped // self._batches.batch_size
        self._total = torch.zeros((), device=torch_xla.device())
        status = "compiling" if self.loss is None else ""
        self._start_bar(f"epoch {number}", self.steps, status, self._step)

    def step(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """Records a traced step; call it before the scheduler changes the optimizer's rate."""
        import torch_xla.core.xla_model as xm

        self._step += 1
        self._total += loss.detach()
        if self._step % self.log_steps == 0:
            rate = optimizer.param_groups[0]["lr"]
            # Called after the step has run, because loss.item() here would cut the step in two.
            xm.add_step_closure(self._show, (self._step, loss.detach(), rate))
        if self._profile is not None:
            self._profile.step()

    @property
    def images_done(self) -> int:
        """The number of images of this epoch, of all ranks, up to the last traced step."""
        return self._step * self._batches.batch_size * self.world_size

    def _show(self, step: int, loss: torch.Tensor, rate: float) -> None:
        made = (step - self._before) * self.samples_per_step
        speed = made / (time.perf_counter() - self._start)
        used, memory = memory_in_use()
        self._move_bar(step, f"loss {loss.item():.4f}, {speed:,.0f} samples/s, {memory}")
        curves = {"train/loss": loss.item(), "train/samples_per_second": speed}
        curves |= {"train/learning_rate": rate, "memory/bytes": used}
        self._write(curves, (self.epoch - 1) * self.steps + step)

    def end_epoch(self) -> None:
        """Ends the training of the epoch. Raises Stop if the loss is not finite."""
        import torch_xla.core.xla_model as xm

        total = xm.mesh_reduce("loss", self._total.item(), sum)
        made = self._step - self._before
        self.loss = total / made / self.world_size
        seconds = time.perf_counter() - self._start
        self.seconds += seconds
        self.speed = made * self.samples_per_step / seconds
        self._close_bar()
        if not math.isfinite(self.loss):
            raise Stop(f"the loss is {self.loss} in epoch {self.epoch}: choose a lower --lr")

    def report(self, correct: int | None) -> None:
        """Prints the line of the epoch. ``correct``: the number of correct images, if evaluated."""
        self.correct, curves, evaluated = correct, {"train/epoch_loss": self.loss}, ""
        if correct is not None:
            curves["test/accuracy"] = correct / self.images
            evaluated = f"accuracy {correct / self.images:.2%}, "
        shown = f"{evaluated}{self.speed:,.0f} samples/s, {memory_in_use()[1]}"
        line = f"epoch {self.epoch}: loss {self.loss:.4f}, {shown}"
        self._console.print(line, highlight=False, soft_wrap=True)
        self._write(curves, self.epoch * self.steps)
        if self._writer is not None:
            self._writer.flush()

    @property
    def result(self) -> str:
        return f"{self.correct / self.images:.2%} ({self.correct} of {self.images})"

    def compare(self, again: dict[str, Any], dtype: str) -> tuple[str, str]:
        """Returns the result of plain torch, and the difference if the results do not agree.

        XLA and torch sum in different orders, so they may disagree on an image with two almost
        equal logits: on one in 2000, or on one in 50 if the sharded model has a narrow ``dtype``.
        """
        correct, images = again["correct"], self.images
        difference = ""
        if abs(correct - self.correct) > max(1, images // (2000 if dtype == "float32" else 50)):
            difference = (
                f"the sharded model got {self.correct} of {images} right, the consolidated one "
                f"{correct}"
            )
        return f"{again['accuracy']:.2%} ({correct} of {images})", difference

    def report_finished_run(self, saved: str, correct: int) -> None:
        """Reports that an earlier run finished the last epoch, which is only evaluated."""
        self.correct = correct
        if self.rank == 0:
            print(f"{saved} is the last epoch's: nothing is left to train", flush=True)


def memory_in_use() -> tuple[int, str]:
    """The bytes in use on this rank's device, and text; on CPU ranks, those of the process."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    try:
        found = xm.get_memory_info(str(torch_xla.device()))
    except RuntimeError:  # XLA's CPU client does not support it
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[1]) * resource.getpagesize()
        return used, f"host {used / 2**30:.1f} GiB"
    used, limit = found["bytes_used"], found["bytes_limit"]
    return used, f"HBM {used / 2**30:.1f}{f' of {limit / 2**30:.1f}' if limit else ''} GiB"


def perplexity(loss: float) -> float:
    """exp(loss), or infinity if that is too large for a float."""
    return round(math.exp(loss), 2) if loss < 700 else math.inf

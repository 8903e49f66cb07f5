"""What rank 0 shows: a bar, a line when an epoch ends, TensorBoard curves."""

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

from .script import Stop, in_a_line, require

flags.DEFINE_string("logdir", None, "write TensorBoard curves there")
flags.DEFINE_string("profile_steps", None, "a:b: record steps a up to b, for TensorBoard")
flags.DEFINE_integer("log_steps", 5, "steps between updates of the progress bar", lower_bound=1)


def _are_steps(text: str) -> bool:
    first, _, last = text.partition(":")
    return first.isdecimal() and last.isdecimal() and int(first) < int(last)


require("profile_steps", _are_steps, "must be a:b with a < b, such as 10:13")


class Shown:
    """Where a run that is no plan is shown: the bar, on a terminal only, ``--logdir`` and, within a
    ``with``, ``--profile_steps``."""

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
                wrong = f"{in_a_line(error)}; name another folder"
                raise Stop(f"--logdir={options.logdir}: {wrong}", code=2) from error

    def _start_bar(self, text: str, total: int, status: str, done: int = 0) -> None:
        if self._shows and self._console.is_terminal:
            texts = ("{task.description}", "{task.fields[status]}")
            columns = (texts[0], BarColumn(), MofNCompleteColumn(), texts[1])
            how = {"console": self._console, "auto_refresh": False, "transient": True}
            self._bar = Progress(*columns, **how)
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


class Meters(Shown):
    """Loss, accuracy, speed and memory of training by epochs, of all ranks together.

    A log file gets one line an epoch. ``loss`` is the mean of the latest epoch, and ``correct`` of
    the ``images`` held out were right after it.
    """

    UNIT, SPEED, RESULT = "epochs", "samples/s, last epoch", "accuracy"

    def __init__(self, options: SimpleNamespace, batches: DataLoader, held_out: DataLoader) -> None:
        super().__init__(options)
        self.log_steps, self.length = options.log_steps, options.num_epochs
        self.steps = len(batches)
        self.images = self.samples = len(held_out.dataset)
        self._batches = batches
        share = min(len(batches.sampler), self.steps * batches.batch_size)  # a rank and epoch
        self.samples_per_step = share * self.world_size / self.steps
        self.correct: int | None = None

    def start_epoch(self, number: int) -> None:
        import torch_xla

        self.epoch, self._start = number, time.perf_counter()
        # Steps of this epoch that an earlier run has made.
        self._before = self._step = self._batches.sampler.had // self._batches.batch_size
        self._total = torch.zeros((), device=torch_xla.device())
        status = "compiling" if self.loss is None else ""
        self._start_bar(f"epoch {number}", self.steps, status, self._step)

    def step(self, loss: torch.Tensor, optimizer: Optimizer) -> None:
        """A step was traced, at the rate that the optimizer still has."""
        import torch_xla.core.xla_model as xm

        self._step += 1
        self._total += loss.detach()
        if self._step % self.log_steps == 0:
            rate = optimizer.param_groups[0]["lr"]
            # Called once the step has run: loss.item() here would cut the step in two.
            xm.add_step_closure(self._show, (self._step, loss.detach(), rate))
        if self._profile is not None:
            self._profile.step()

    @property
    def images_done(self) -> int:
        """Of this epoch, by all ranks, up to the step that was traced last."""
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
        """Every training step of the epoch is done. Stops if the loss is not finite any more."""
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
        """The epoch is over, and so many images are right, if it was evaluated."""
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

    def compare(self, again: dict[str, Any], dtype: str) -> tuple[str, bool, str]:
        """What plain torch finds, whether that is the same, and in what the two differ.

        XLA and torch sum in other orders: an image on the border may fall on either side. That is
        one in 2000, or one in 50 where the sharded model computed in a narrow ``dtype``.
        """
        mine, right, images = self.correct, again["correct"], self.images
        same = abs(right - mine) <= max(1, images // (2000 if dtype == "float32" else 50))
        two = f"the sharded model got {mine} of {images} right, the consolidated one {right}"
        return f"{again['accuracy']:.2%} ({right} of {images})", same, two

    def nothing_left(self, saved: str, correct: int) -> None:
        """The run before ended after its last epoch, which is only evaluated."""
        self.correct = correct
        if self.rank == 0:
            print(f"{saved} is the last epoch's: nothing is left to train", flush=True)


def memory_in_use() -> tuple[int, str]:
    """Bytes in use on this rank's device now, and as text; on CPU ranks, of their process."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    try:
        found = xm.get_memory_info(str(torch_xla.device()))
    except RuntimeError:  # XLA's CPU client does not count
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[1]) * resource.getpagesize()
        return used, f"host {used / 2**30:.1f} GiB"
    used, limit = found["bytes_used"], found["bytes_limit"]
    return used, f"HBM {used / 2**30:.1f}{f' of {limit / 2**30:.1f}' if limit else ''} GiB"


def perplexity(loss: float) -> float:
    """exp(loss), and infinity where that is too large for a number."""
    return round(math.exp(loss), 2) if loss < 700 else math.inf

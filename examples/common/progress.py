"""What rank 0 shows: a bar while an epoch runs, a line when it ends, a table at the very end."""

import sys
import time
from collections.abc import Iterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from .memory import Memory
from .script import Stop, reason


class TrainingProgress:
    """The bar and the TensorBoard curves of one rank, or nothing unless ``show``.

    The bar is drawn on a terminal only; a log file gets one line an epoch. A context manager, which
    takes the bar away whatever happens.

    Attributes:
        seconds: time spent in training epochs so far.
        samples_per_second: of the latest epoch, all ranks together.
    """

    def __init__(self, show: bool, steps: int, samples_per_step: int, logdir: str | None) -> None:
        self.steps, self.samples_per_step = steps, samples_per_step
        self.seconds = self.samples_per_second = 0.0
        self.epoch = 0
        self._console = Console(stderr=True, quiet=not show)
        self._bar: Progress | None = None
        self._writer = None
        if logdir and show:
            from torch.utils.tensorboard import SummaryWriter

            try:
                self._writer = SummaryWriter(logdir)
            except (OSError, ValueError, ImportError) as error:
                raise Stop(f"--logdir={logdir}: {reason(error)}; name another folder", 2) from error

    def start_epoch(self, number: int) -> None:
        """``number``: of the epoch, from 1."""
        compiling, self.epoch = not self.epoch, number
        self._epoch_start = time.perf_counter()
        if self._console.is_terminal and not self._console.quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            status = "compiling" if compiling else ""
            self._bar.add_task(f"epoch {self.epoch}", total=self.steps, status=status)
            self._bar.start()

    def update(self, step: int, loss: float, learning_rate: float, memory: Memory) -> None:
        """``step`` steps of the epoch are done, the latest with ``loss`` at ``learning_rate``."""
        speed = step * self.samples_per_step / (time.perf_counter() - self._epoch_start)
        if self._bar is not None:
            status = f"loss {loss:.4f}, {speed:,.0f} samples/s, {memory}"
            self._bar.update(self._bar.task_ids[0], completed=step, refresh=True, status=status)
        if self._writer is not None:
            done = (self.epoch - 1) * self.steps + step
            self._writer.add_scalar("train/loss", loss, done)
            self._writer.add_scalar("train/samples_per_second", speed, done)
            self._writer.add_scalar("train/learning_rate", learning_rate, done)
            self._writer.add_scalar("memory/bytes", memory.used, done)

    def end_epoch(self) -> None:
        """Every training step of the epoch is done."""
        seconds = time.perf_counter() - self._epoch_start
        self.seconds += seconds
        self.samples_per_second = self.steps * self.samples_per_step / seconds
        self._remove_bar()

    def report(self, loss: float, accuracy: float | None, memory: Memory) -> None:
        """The epoch is over: its mean training loss and, if evaluated, the accuracy, 0 to 1."""
        evaluated = "" if accuracy is None else f"accuracy {accuracy:.2%}, "
        self._console.print(
            f"epoch {self.epoch}: loss {loss:.4f}, {evaluated}"
            f"{self.samples_per_second:,.0f} samples/s, {memory}",
            highlight=False,
            soft_wrap=True,
        )
        if self._writer is not None:
            self._writer.add_scalar("train/epoch_loss", loss, self.epoch * self.steps)
            if accuracy is not None:
                self._writer.add_scalar("test/accuracy", accuracy, self.epoch * self.steps)
            self._writer.flush()

    def __enter__(self) -> "TrainingProgress":
        return self

    def __exit__(self, *error: object) -> None:
        self._remove_bar()
        if self._writer is not None:
            self._writer.close()

    def _remove_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def print_table(title: str, rows: Iterable[tuple[str, str]]) -> None:
    """Prints a table of two columns on standard output."""
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 100)
    table = Table(title=title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    console.print(table, highlight=False)

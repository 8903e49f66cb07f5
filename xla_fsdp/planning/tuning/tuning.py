"""The result of ``xla_fsdp.tune``: the best settings and the table of all candidates."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..compiling.cache import write_whole
from ..reporting.tables import aligned
from .search import GIB, Measured, Trial, too_much
from .settings import ShardingSettings

_SHOWN = 6  # rows of the table for candidates that were not compiled
_HEAD = ("settings", "step, ms", "compute", "exposed", "GiB", "estimate, ms", "GiB", "")


@dataclass(frozen=True)
class Tuning:
    """The result of :func:`xla_fsdp.tune`; ``print`` it.

    Attributes:
        settings: the best that was found, or None if nothing that was compiled fits, or nothing is
            faster than your own step.
        own: your own step, which was given as ``baseline``, with ``own_batch`` samples of a device.
        trials: every candidate, the best first.
        topology, devices: the slice.
        capacity: bytes of HBM that a step may use on one device.
        budget: how many compilations were allowed.
        compilations: how many there were, cached results included.
        from_cache: how many of them were cached results.
        samples: whether the batch is known, so that times per sample are compared.
        advice: if nothing fits, what would fit.
        notes: remarks on the search.
    """

    settings: ShardingSettings | None
    trials: tuple[Trial, ...]
    topology: str
    devices: int
    capacity: float
    budget: int
    compilations: int
    from_cache: int
    samples: bool
    advice: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    title: str = ""
    own: Measured | None = None
    own_batch: int = 1

    @property
    def best(self) -> Trial | None:
        """The trial of :attr:`settings`."""
        return self.trials[0] if self.settings is not None else None

    def __str__(self) -> str:
        what = f"{self.title}: " if self.title else ""
        lines = [self._verdict(), f"{what}{self.topology}, {self.devices} devices", ""]
        lines += self._table()
        texts = [*self.advice, *self._remarks()]
        for text in texts:
            lines += textwrap.wrap(text, 100, initial_indent="  * ", subsequent_indent="    ")
        return "\n".join(lines)

    def _verdict(self) -> str:
        best = self.best
        if best is None or best.measured is None:
            if self.own is None or not self.own.fits:
                return f"NOTHING FITS in {self.capacity / GIB:.1f} GiB a device on {self.topology}"
            step = f"{1e3 * self.own.seconds:,.2f} ms a step (model)"
            return (
                f"BEST: your own step as it is: {step}; no settings that were compiled are faster"
            )
        step = f"{1e3 * best.measured.seconds:,.2f} ms a step (model)"
        if self.samples:
            step += f", {1e6 * best.per_sample:,.1f} us a sample of a device's batch"
        return f"BEST: {best.settings}: {step}{self._against_own(best)}"

    def _against_own(self, best: Trial) -> str:
        if self.own is None:
            return ""
        if not self.own.fits:
            return f"; your own step {self._unfit(self.own)}"
        share = best.per_sample / (self.own.seconds / self.own_batch)
        return f", {share:.2f} times the time of your own step"

    def _unfit(self, own: Measured) -> str:
        return "does not fit" + (f" {too_much(own.hbm, self.capacity)}" if own.hbm else "")

    def _own_row(self, own: Measured) -> Sequence[str]:
        if not own.fits:
            last = self._unfit(own)
        elif self.best is None:
            last = "best"
        else:
            times = own.seconds / self.own_batch / self.best.per_sample
            last = f"{times:.2f} times the time of the best"
        return ("your own step", *_told(own), "", "", last)

    def _table(self) -> list[str]:
        asked = [trial for trial in self.trials if trial.tried]
        others = [trial for trial in self.trials if not trial.tried]
        shown = [*asked, *others[:_SHOWN]]
        several = len({trial.settings.batch for trial in self.trials}) > 1
        rows: list[Sequence[str]] = []
        if self.own is not None:
            rows.append(self._own_row(self.own))
        rows += [_row(trial, self.settings, several) for trial in shown]
        numeric = [False, *[True] * (len(_HEAD) - 2), False]
        return [*aligned([_HEAD, *rows], numeric), ""] if rows else []

    def _remarks(self) -> list[str]:
        left = sum(not trial.tried for trial in self.trials)
        remarks = [
            f"{self.compilations} of {self.budget} compilations, {self.from_cache} of them from "
            f"the cache; {left} more candidates were only estimated"
            + (f", of which {_SHOWN} are shown." if left > _SHOWN else "."),
            "The first four columns of numbers are of the compiled program, with plan's time "
            "model. The last two are estimates, corrected by the results of compiled candidates.",
        ]
        if self.samples:
            remarks.append("Compared: time of a step over samples a device.")
        return [*remarks, *self.notes]

    def to_json(self) -> str:
        """The result as JSON; ``ShardingSettings.from_json`` reads its ``settings``."""
        record: dict[str, Any] = asdict(self)
        record["settings"] = None
        if self.settings is not None:
            record["settings"] = json.loads(self.settings.to_json())
        return json.dumps(record, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_json` to a file. The file is written completely or not at all.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        write_whole(Path(path), f"{self.to_json()}\n".encode())


def _row(trial: Trial, best: ShardingSettings | None, with_batch: bool) -> Sequence[str]:
    guessed, told = trial.estimate, _told(trial.measured)
    last = "best" if trial.settings == best else trial.rejected
    by_analysis = (f"{1e3 * guessed.seconds:,.1f}", f"{guessed.hbm / GIB:.1f}")
    named = trial.settings if with_batch else trial.settings.changed(batch=None)
    return (str(named), *told, *by_analysis, last)


def _told(found: Measured | None) -> Sequence[str]:
    """What the compiler and the time model say, in cells of the table."""
    if found is None:
        return ["", "", "", ""]
    times = (found.seconds, found.compute, found.exposed)
    cells = [f"{1e3 * one:,.2f}" if found.seconds else "" for one in times]
    return [*cells, f"{found.hbm / GIB:.2f}" if found.hbm else ""]

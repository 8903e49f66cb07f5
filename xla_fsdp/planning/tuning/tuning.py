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
from .remedies import GIB
from .search import Trial
from .settings import ShardingSettings

_SHOWN = 6  # rows of the table for candidates that were not compiled
_HEAD = ("settings", "step, ms", "compute", "exposed", "GiB", "estimate, ms", "GiB", "")


@dataclass(frozen=True)
class Tuning:
    """The result of :func:`xla_fsdp.tune`; ``print`` it.

    Attributes:
        settings: the best settings; None if no compiled candidate fits.
        trials: all candidates, the best first.
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
            return f"NOTHING FITS in {self.capacity / GIB:.1f} GiB a device on {self.topology}"
        step = f"{1e3 * best.measured.seconds:,.2f} ms a step (model)"
        if self.samples:
            step += f", {1e6 * best.per_sample:,.1f} us for each sample of the device's batch"
        return f"BEST: {best.settings}: {step}"

    def _table(self) -> list[str]:
        asked = [trial for trial in self.trials if _was_asked(trial)]
        others = [trial for trial in self.trials if not _was_asked(trial)]
        shown = [*asked, *others[:_SHOWN]]
        several = len({trial.settings.batch for trial in self.trials}) > 1
        rows = [_row(trial, self.settings, several) for trial in shown]
        numeric = [False, *[True] * (len(_HEAD) - 2), False]
        return [*aligned([_HEAD, *rows], numeric), ""] if rows else []

    def _remarks(self) -> list[str]:
        left = sum(not _was_asked(trial) for trial in self.trials)
        remarks = [
            f"{self.compilations} of {self.budget} compilations, {self.from_cache} of them from "
            f"the cache; {left} more candidates were only estimated"
            + (f", of which {_SHOWN} are shown." if left > _SHOWN else "."),
            "The first four columns of numbers are of the compiled program, with plan's time "
            "model. The last two are estimates, corrected by the results of compiled candidates.",
        ]
        if self.samples:
            remarks.append("Candidates are compared by step time per sample of a device's batch.")
        if any(trial.settings.offload for trial in self.trials):
            remarks.append(
                "Copies to host memory and back take no time in this model, because the speed of "
                "these links is not published."
            )
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


def _was_asked(trial: Trial) -> bool:
    return trial.measured is not None or trial.rejected.startswith(
        ("not possible", "the compiler failed")
    )


def _row(trial: Trial, best: ShardingSettings | None, with_batch: bool) -> Sequence[str]:
    found, guessed = trial.measured, trial.estimate
    told = ["", "", "", ""]
    if found is not None:
        times = (found.seconds, found.compute, found.exposed)
        told = [f"{1e3 * one:,.2f}" if found.seconds else "" for one in times]
        told.append(f"{found.hbm / GIB:.2f}" if found.hbm else "")
    last = "best" if trial.settings == best else trial.rejected
    by_analysis = (f"{1e3 * guessed.seconds:,.1f}", f"{guessed.hbm / GIB:.1f}")
    named = trial.settings if with_batch else trial.settings.changed(batch=None)
    return (str(named), *told, *by_analysis, last)

"""The result of ``xla_fsdp.tune``."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..compiling.plan_cache import write_whole
from ..reporting.tables import GIB, aligned
from .search import Measured, Trial, too_much
from .settings import ShardingSettings, changes, value_text

_SHOWN = 6  # candidates that were not compiled
_HEAD = ("step, ms", "compute", "exposed", "GiB", "estimate, ms", "GiB", "")


@dataclass(frozen=True)
class Tuning:
    """The result of :func:`xla_fsdp.tune`; ``print`` it.

    Attributes:
        settings: the best, or None if nothing that was compiled fits, or nothing is faster than
            your own step.
        own: your own step (``baseline``), with ``own_batch`` samples of a device.
        trials: every candidate, the best first.
        capacity: bytes of HBM that a step may use on one device.
        compilations: how many there were, of which ``from_cache`` were cached results.
        samples: whether the batch is known, so that times per sample are compared.
        advice: if nothing fits, what would fit.
        notes: remarks on the search, and warnings of the plan of your own step.
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
        return self.trials[0] if self.settings is not None else None

    def __str__(self) -> str:
        what = f"{self.title}: " if self.title else ""
        lines = [self._verdict(), f"{what}{self.topology}, {self.devices} devices", ""]
        lines += self._table()
        for text in [*self.advice, *self._remarks()]:
            lines += textwrap.wrap(text, 100, initial_indent="  * ", subsequent_indent="    ")
        if self.settings is not None:
            lines += ["", "To set them:", "", textwrap.indent(self.code, "    ").rstrip()]
        return "\n".join(lines)

    @property
    def code(self) -> str:
        """Python code that sets :attr:`settings`; "" without settings."""
        if self.settings is None:
            return ""
        lines = ["from xla_fsdp import ShardingSettings"]
        if self.settings.compiler_options:
            lines.append("from xla_fsdp.compiler_options import add_to_environment")
        lines += ["", "settings = ShardingSettings("]
        for name, value in changes(self.settings, ShardingSettings()).items():
            lines.append(f"    {name}={value_text(value)},")
        lines.append(")")
        if self.settings.compiler_options:
            lines.append("add_to_environment(settings.compiler_options)  # before launch")
        lines.append("model = settings.wrap(model)  # add your compute_dtype and other options")
        return "\n".join(lines) + "\n"

    def _verdict(self) -> str:
        best = self.best
        if best is None or best.measured is None:
            if self.own is None or not self.own.fits:
                return f"NOTHING FITS in {self.capacity / GIB:.1f} GiB a device on {self.topology}"
            step = f"{1e3 * self.own.seconds:,.2f} ms a step (model)"
            return (
                f"BEST: your own step as it is: {step}; no settings that were compiled are faster"
            )
        model = "model"
        if best.measured.extrapolated:
            model += ", extrapolated: it was NOT compiled with all blocks"
        step = f"{1e3 * best.measured.seconds:,.2f} ms a step ({model})"
        if self.samples:
            step += f", {1e6 * best.per_sample:,.1f} us a sample of a device's batch"
        if self.own is not None and self.own.fits:
            share = best.per_sample / (self.own.seconds / self.own_batch)
            step += f", {share:.2f} times the time of your own step"
        elif self.own is not None:
            step += f"; your own step {self._unfit(self.own)}"
        return f"BEST: {best.settings}: {step}"

    def _unfit(self, own: Measured) -> str:
        return "does not fit" + (f" {too_much(own.hbm, self.capacity)}" if own.hbm else "")

    def _table(self) -> list[str]:
        tried = [trial for trial in self.trials if trial.tried]
        shown = [*tried, *[trial for trial in self.trials if not trial.tried][:_SHOWN]]
        usual = ShardingSettings(batch=shown[0].settings.batch if shown else None)
        changed = {name for trial in shown for name in changes(trial.settings, usual)}
        names = [one.name for one in fields(ShardingSettings) if one.name in changed]
        rows: list[Sequence[str]] = [("", *names, *_HEAD)]
        if self.own is not None:
            last = "best" if self.own.fits else self._unfit(self.own)
            if self.own.fits and self.best is not None:
                times = self.own.seconds / self.own_batch / self.best.per_sample
                last = f"{times:.2f} times the time of the best"
            rows.append(("your own step", *[""] * len(names), *_told(self.own), "", "", last))
        for trial in shown:
            values = (value_text(getattr(trial.settings, name)) for name in names)
            guessed, found = trial.estimate, trial.measured
            best = trial.settings == self.settings
            last = "best" if best else trial.rejected
            if found is not None and found.extrapolated:
                last += " (extrapolated)"
            estimate = (f"{1e3 * guessed.seconds:,.1f}", f"{guessed.hbm / GIB:.1f}")
            rows.append(("BEST" if best else "", *values, *_told(found), *estimate, last))
        numeric = [False] * (1 + len(names)) + [True] * (len(_HEAD) - 1) + [False]
        return [*aligned(rows, numeric), ""] if len(rows) > 1 else []

    def _remarks(self) -> list[str]:
        left = sum(not trial.tried for trial in self.trials)
        others = "1 more candidate was" if left == 1 else f"{left} more candidates were"
        remarks = [
            f"{self.compilations} of {self.budget} compilations, {self.from_cache} of them from "
            f"the cache; {others} only estimated"
            + (f", of which {_SHOWN} are shown." if left > _SHOWN else "."),
            "The first four columns of figures are of the compiled program, with plan's time "
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
        """Write :meth:`to_json` to a file, atomically; FileNotFoundError if there is no folder."""
        write_whole(Path(path), f"{self.to_json()}\n".encode())


def _told(found: Measured | None) -> Sequence[str]:
    if found is None:
        return ["", "", "", ""]
    times = (found.seconds, found.compute, found.exposed)
    cells = [f"{1e3 * one:,.2f}" if found.seconds else "" for one in times]
    return [*cells, f"{found.hbm / GIB:.2f}" if found.hbm else ""]

"""The tables of a verification, cell by cell, for text and page alike."""

from __future__ import annotations

from ..planning.reporting.amounts import UNKNOWN, figure, milliseconds, percent
from ..planning.reporting.tables import Section
from .findings import Measured
from .records import Rate


def sections(found: Measured) -> list[Section]:
    """Those that have something to show."""
    all = [_rates(found), _collectives(found), _steps(found), _about(found)]
    return [section for section in all if section.rows]


def _rates(found: Measured) -> Section:
    rows = []
    for rate in found.rates:
        share = None if rate.published is None else rate.value / rate.published
        rows.append((rate.name, _speed(rate), percent(share) if share is not None else UNKNOWN))
    return Section("One device", ("attained", "of the published figure"), tuple(rows))


def _speed(rate: Rate) -> str:
    if rate.unit == "FLOP":
        return figure(rate.value / 1e12, 2, "TFLOP/s")
    return figure(rate.value / 1e9, 2, "GB/s")


def _collectives(found: Measured) -> Section:
    rows = []
    for time in found.collectives:
        rows.append(
            (
                f"{time.kind}, {time.axis}",
                figure(time.bytes / 1024, 0, "KiB"),
                milliseconds(time.seconds, 4),
                milliseconds(time.modelled, 4),
                figure(time.sent / time.seconds / 1e9, 2, "GB/s"),
            )
        )
    columns = ("size", "measured", "modelled", "sent by a rank")
    return Section("Collectives", columns, tuple(rows))


def _steps(found: Measured) -> Section:
    rows = []
    for run in found.steps:
        hbm = None if run.hbm is None else run.hbm / 2**20
        planned = None if run.planned_hbm is None else run.planned_hbm / 2**20
        rows.append(
            (
                f"{run.name}, {run.lane}",
                milliseconds(run.seconds),
                milliseconds(run.host),
                milliseconds(run.planned),
                figure(hbm, 0, "MiB"),
                figure(planned, 0, "MiB"),
            )
        )
    columns = ("a step", "traced in", "planned", "HBM at most", "planned HBM")
    return Section("Steps", columns, tuple(rows))


def _about(found: Measured) -> Section:
    where = found.where
    rows = [("device", f"{where.device or UNKNOWN} ({where.family})"), ("ranks", str(where.ranks))]
    rows += [("slice", where.topology or UNKNOWN), ("date", where.date)]
    if found.planned_for and found.planned_for != where.topology:
        rows.append(("plans are of", found.planned_for))
    rows += [*where.versions.items(), *where.environment.items()]
    return Section("Where", ("",), tuple((name, value) for name, value in rows))

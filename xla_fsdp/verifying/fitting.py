"""From measured times to the figures that the time model takes.

The model's seconds of a collective are ``launch + hops * hop + load / W`` (``tpu/links.py``); what
hops and load are of each that was measured is asked of that very model, so that a plan with the
figures found here gives the measured times as well as any figures could.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import numpy

from ..tpu.calibration import Calibration
from ..tpu.topology import Slice
from .collectives import modelled
from .records import CollectiveTime, Rate

_FIGURES = 3  # launch, hop, 1 / W


def calibrate(
    family: str, times: Sequence[CollectiveTime], rates: Sequence[Rate], slice: Slice | None
) -> Calibration:
    """The figures that fit best; ``None`` for those of which nothing was measured."""
    launch, hop, bandwidth = (None, None, None) if slice is None else links(times, slice)
    devices = 1 if slice is None else slice.chip.devices
    best = {rate.name: rate.value for rate in rates}
    products = [rate.value for rate in rates if rate.unit == "FLOP"]

    def of_a_chip(value: float | None) -> float | None:
        return None if value is None else value * devices

    return Calibration(
        family=family,
        link_bandwidth=bandwidth,
        launch_latency=launch,
        hop_latency=hop,
        hbm_bandwidth=of_a_chip(best.get("HBM, read and written")),
        matrix_flops=of_a_chip(max(products, default=None)),
        to_device=best.get("host to device"),
        to_host=best.get("device to host"),
    )


def links(
    times: Sequence[CollectiveTime], slice: Slice
) -> tuple[float | None, float | None, float | None]:
    """Launch and hop latency in seconds, bytes a second of a link one way.

    From groups along one axis: over several axes the compiler has the choice of algorithms, and
    inside of a chip no link is used. By least squares of relative errors, none below zero.
    """
    lengths = [n for n in slice.device_shape if n > 1]
    along = [t for t in times if t.seconds > 0 and (t.axis != "all" or len(lengths) == 1)]
    rows = [(row, t.seconds) for t in along if (row := _terms(t, slice)) is not None]
    if len({tuple(row) for row, _ in rows}) < _FIGURES:
        return None, None, None
    matrix = numpy.array([[term / seconds for term in row] for row, seconds in rows])
    found = _least_squares(matrix)
    if found is None or not found[2]:
        return None, None, None
    return float(found[0]), float(found[1]), float(1 / found[2])


def _terms(time: CollectiveTime, slice: Slice) -> list[float] | None:
    """How often launch and hop count in ``time``, and the bytes on the busiest link."""

    def seconds(launch: float = 0.0, hop: float = 0.0, bandwidth: float = math.inf) -> float:
        chip = replace(slice.chip, launch_latency=launch, hop_latency=hop, link_bandwidth=bandwidth)
        return modelled(time, replace(slice, chip=chip)) or 0.0

    if seconds():  # not over links
        return None
    terms = [seconds(launch=1.0), seconds(hop=1.0), seconds(bandwidth=1.0)]
    return terms if terms[2] else None


def _least_squares(matrix: numpy.ndarray) -> numpy.ndarray | None:
    """``x >= 0`` for which ``matrix @ x`` is closest to ones: of all choices of what is zero."""
    best, least = None, math.inf
    for count in range(1, matrix.shape[1] + 1):
        for columns in combinations(range(matrix.shape[1]), count):
            part = matrix[:, columns]
            scale = numpy.abs(part).max(axis=0)
            if not scale.all():
                continue
            values = numpy.linalg.lstsq(part / scale, numpy.ones(len(part)), rcond=None)[0] / scale
            error = float(((part @ values - 1) ** 2).sum())
            if (values >= 0).all() and error < least - 1e-12:
                best, least = numpy.zeros(matrix.shape[1]), error
                best[list(columns)] = values
    return best

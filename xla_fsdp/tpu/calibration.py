"""Measured figures of a kind of chip, which replace published ones in a plan.

``python -m xla_fsdp.preflight --measure`` writes them.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

from ..files import parse_record
from ..wording import to_one_line
from .chips import CHIPS, Chip
from .topology import Slice

_FORMAT, _VERSION = "xla_fsdp calibration", 1
# A figure that differs more from the published one is a mistake.
_MOST = 20.0


class CalibrationError(ValueError):
    """A calibration is damaged, of other chips, or implausible."""


@dataclass(frozen=True)
class Calibration:
    """Measured figures of one kind of chip; ``None`` where nothing was measured.

    Attributes:
        family: ``Chip.family``, or "cpu" for CPU ranks (never planned).
        link_bandwidth: bytes a second of one link one way, as collectives attain it.
        launch_latency, hop_latency: seconds, see :class:`~.chips.Chip`.
        hbm_bandwidth: bytes a second of one chip, read and written counted both.
        matrix_flops: bfloat16 operations a second of one chip in a large matmul.
        to_device, to_host: bytes a second of one device from and to host memory.
        source: a file's name, or "measured".
        about: versions, date and similar.
    """

    family: str
    link_bandwidth: float | None = None
    launch_latency: float | None = None
    hop_latency: float | None = None
    hbm_bandwidth: float | None = None
    matrix_flops: float | None = None
    to_device: float | None = None
    to_host: float | None = None
    source: str = "measured"
    about: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if self.family not in (*CHIPS, "cpu"):
            known = ", ".join((*CHIPS, "cpu"))
            raise CalibrationError(f"{self.source}: family {self.family!r}, known are {known}")
        for name in FIGURES:
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            least_is_allowed = name.endswith("latency")  # 0: too short to be measured
            if value is not None and not (
                number and math.isfinite(value) and (value > 0 or least_is_allowed and value == 0)
            ):
                raise CalibrationError(
                    f"{self.source}: {name} is {value!r}, allowed are null and positive numbers; "
                    "measure again"
                )

    def apply(self, chip: Chip) -> Chip:
        """``chip`` with these figures. What is not measured stays as published.

        Raises:
            CalibrationError: this is of another kind of chip, or a figure is implausible.
        """
        if self.family != chip.family:
            of = "CPU ranks, which says nothing of a TPU" if self.family == "cpu" else self.family
            raise CalibrationError(
                f"calibration {self.source} is of {of}; the plan is for {chip.family}: give a file "
                "that was measured on such chips, or none"
            )
        measured = {n: value for n in _CHIP if (value := getattr(self, n)) is not None}
        if self.matrix_flops is not None:
            by_cycles = chip.matrix_cycles * chip.flops
            measured["clock_hz"] = chip.clock_hz * self.matrix_flops / by_cycles
        for name, value in measured.items():
            published = getattr(chip, name)
            if not name.endswith("latency") and not 1 / _MOST < value / published < _MOST:
                raise CalibrationError(
                    f"calibration {self.source}: {name} is {value:.4g}, published is "
                    f"{published:.4g}: too far apart to be true; measure again"
                )
        sources = {**chip.sources, **dict.fromkeys(measured, f"measured: {self.source}")}
        return replace(chip, sources=MappingProxyType(sources), **measured)

    def note(self, chip: Chip) -> str:
        shown = []
        for name, scale, unit in (
            ("link_bandwidth", 1e9, "GB/s a link"),
            ("launch_latency", 1e-6, "us a collective"),
            ("hop_latency", 1e-6, "us a hop"),
            ("hbm_bandwidth", 1e9, "GB/s of HBM"),
        ):
            value = getattr(self, name)
            if value is not None:
                published = getattr(chip, name) / scale
                shown.append(f"{value / scale:.3g} {unit} (published: {published:.3g})")
        if self.matrix_flops is not None:
            share = self.matrix_flops / chip.flops
            shown.append(f"matmuls at {share:.0%} of the peak ({chip.matrix_cycles:.0%})")
        return f"Times are calibrated by {self.source}: {'; '.join(shown) or 'nothing measured'}."

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON that :meth:`load` reads."""
        data = {**asdict(replace(self, about={})), "about": dict(self.about)}
        del data["source"]
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "calibration": data}, indent=1)
        Path(path).write_text(text + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads what :meth:`save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            CalibrationError: it is no calibration, or of another version, or damaged.
        """
        wanted = "expected what python -m xla_fsdp.preflight --measure --calibration writes"
        content = Path(path).read_bytes()
        data = parse_record(content, str(path), _FORMAT, _VERSION, wanted, CalibrationError)
        source = os.path.basename(os.fspath(path))
        try:
            found = data["calibration"]
            about = {str(name): str(value) for name, value in found.pop("about", {}).items()}
            return cls(**found, about=MappingProxyType(about), source=source)
        except (TypeError, KeyError, AttributeError) as error:
            said = to_one_line(error, 100)
            raise CalibrationError(f"{source} is damaged ({said}): measure again") from error


_CHIP = ("link_bandwidth", "launch_latency", "hop_latency", "hbm_bandwidth")
FIGURES = (*_CHIP, "matrix_flops", "to_device", "to_host")


def calibrated(where: Slice, calibration: Calibration | None) -> Slice:
    """Errors as :meth:`Calibration.apply`."""
    return where if calibration is None else replace(where, chip=calibration.apply(where.chip))


def load_calibration(calibration: Calibration | str | os.PathLike[str]) -> Calibration:
    """Loads a path; errors as :meth:`Calibration.load`."""
    if isinstance(calibration, Calibration):
        return calibration
    if not isinstance(calibration, (str, os.PathLike)):
        raise TypeError(
            f"calibration must be a file's path or a Calibration, got {calibration!r:.60}"
        )
    return Calibration.load(calibration)

"""The figures of one compiled step that a report prints and plots."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..records import CompilerMemory, HostNeeds, Part, Schedule, Timing
from .amounts import GIB, MIB


@dataclass(frozen=True, repr=False)
class Findings:
    """The results for a compiled step on a slice. All bytes are of one device and one step.

    Raises:
        ValueError: no devices, or no memory.
    """

    topology: str  # as the user named it
    chip: str
    devices: int
    hbm_capacity: int  # usable bytes a device
    hbm_source: str
    memory: CompilerMemory
    schedule: Schedule
    timing: Timing
    bound_wire_bytes: int | None  # the bytes of ZeRO; None if unknown
    bound_label: str
    link_model: str  # one sentence: assumptions of the interconnect model, and their sources
    compile_seconds: float
    program_bytes: int
    ranks_traced: tuple[int, ...]
    executables: int  # distinct programs of the traced ranks
    from_cache: bool = False
    title: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    # The value of each option that was set, as reported by libtpu, and who set it, in brackets.
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    chip_config: str = ""  # how the cores of a chip form devices; "" if there is only one way
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    suggestions: tuple[str, ...] = ()  # what to change, those that save most time first
    refusal: str = ""  # the compiler's message, if the step did not fit while it compiled
    host: HostNeeds | None = None  # if the optimizer steps on the host
    parts: tuple[Part, ...] = ()  # if the step consists of several programs

    def __post_init__(self) -> None:
        for name in ("devices", "hbm_capacity"):
            if getattr(self, name) < 1:
                message = f"{name} is {getattr(self, name)!r}: a report needs at least 1"
                raise ValueError(message)

    @property
    def fits(self) -> bool:
        """Whether the step can be loaded and run."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        """Whether the step fits in HBM."""
        return not self.refusal and self.memory.required <= self.hbm_capacity

    @property
    def host_required(self) -> int:
        """Bytes of host memory: offloaded state, and offloaded inputs of layers."""
        if self.host is None:
            return 0
        return self.host.required + self.host.ranks * self.memory.host_temporaries

    @property
    def fits_host(self) -> bool:
        """Whether host memory is large enough; True if nothing is offloaded."""
        return self.host is None or self.host_required <= self.host.capacity

    @property
    def headroom(self) -> float:
        """The share of HBM that stays free; negative if the step does not fit."""
        return 1 - self.memory.required / self.hbm_capacity

    @property
    def sized(self) -> bool:
        """Whether the required memory is known; it is not if the compiler stopped early."""
        return self.memory.required > 0 or not self.refusal

    @property
    def placed(self) -> bool:
        """Whether the compiler made a schedule."""
        return self.schedule.length > 0

    @property
    def timed(self) -> bool:
        """Whether the compiler estimated cycles, as it does for steps that fit."""
        # If the step does not fit, only Pallas kernels have times, and those are modelled.
        return not self.refusal and self.timing.compute > 0

    @property
    def wire_bytes(self) -> int:
        """Bytes that a device sends in a step; loops count per iteration."""
        if self.parts:
            return sum(part.wire_bytes * part.times for part in self.parts)
        return sum(c.wire_bytes * c.times for c in self.schedule.collectives)

    @property
    def wire_ratio(self) -> float | None:
        """``wire_bytes`` over the bound; None if one of them is unknown."""
        if not self.bound_wire_bytes or not self.placed:
            return None
        return self.wire_bytes / self.bound_wire_bytes

    @property
    def verdict(self) -> str:
        """One line: whether it fits, and how well."""
        of = f"of {self.hbm_capacity / GIB:.1f} GiB a device on {self.topology}"
        required = f"{self.memory.required / GIB:.1f}"
        if self.memory.required < GIB / 10:
            required = f"{self.memory.required / MIB:.1f} MiB"
        if self.host is not None and self.fits_device and not self.fits_host:
            return (
                f"DOES NOT FIT: {self.host_required / 1e9:.0f} GB of {self.host.capacity / 1e9:.0f}"
                f" GB that a host of {self.topology} has"
            )
        if self.fits:
            return f"FITS: {required} {of} ({100 * self.headroom:.0f} % headroom)"
        missing = (self.memory.required - self.hbm_capacity) / GIB
        if missing <= 0:
            return f"DOES NOT FIT: {self.topology} has {self.hbm_capacity / GIB:.1f} GiB a device"
        return f"DOES NOT FIT: {required} {of} ({missing:.2f} GiB too much)"

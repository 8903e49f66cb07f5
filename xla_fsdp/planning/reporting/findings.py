"""What was found out about one compiled step: the figures that a report prints and draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..records import CompilerMemory, HostNeeds, Part, Schedule, Timing
from .amounts import GIB, MIB


@dataclass(frozen=True, repr=False)
class Findings:
    """What a compiled step needs on a slice. All bytes are of one device and one step.

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
    bound_wire_bytes: int | None  # of ZeRO; None where it is not known
    bound_label: str
    link_model: str  # one sentence: what the interconnect model assumes, and whence
    compile_seconds: float
    program_bytes: int
    ranks_traced: tuple[int, ...]
    executables: int  # distinct programs among them
    from_cache: bool = False
    title: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    # Value of each option that somebody set, as libtpu states it, and in brackets who set it.
    compiler_options: Mapping[str, str] = field(default_factory=dict)
    chip_config: str = ""  # how the cores of a chip make one device, "" where there is no choice
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    refusal: str = ""  # the compiler's message, if the step did not fit while it compiled
    host: HostNeeds | None = None  # where the optimizer steps there
    parts: tuple[Part, ...] = ()  # where the step is cut into programs

    def __post_init__(self) -> None:
        for name in ("devices", "hbm_capacity"):
            if getattr(self, name) < 1:
                message = f"{name} is {getattr(self, name)!r}: a report needs at least 1 of it"
                raise ValueError(message)

    @property
    def fits(self) -> bool:
        """Whether the step can be loaded and run."""
        return self.fits_device and self.fits_host

    @property
    def fits_device(self) -> bool:
        """Whether HBM suffices."""
        return not self.refusal and self.memory.required <= self.hbm_capacity

    @property
    def host_required(self) -> int:
        """Bytes of a host's memory: of offloaded state, and of inputs that wait there."""
        if self.host is None:
            return 0
        return self.host.required + self.host.ranks * self.memory.host_temporaries

    @property
    def fits_host(self) -> bool:
        """Whether the memory of a host suffices, where that is looked at."""
        return self.host is None or self.host_required <= self.host.capacity

    @property
    def headroom(self) -> float:
        """The share of HBM that stays free; below 0 where the step does not fit."""
        return 1 - self.memory.required / self.hbm_capacity

    @property
    def sized(self) -> bool:
        """Whether it is known what the step needs: not if the compiler gave up early."""
        return self.memory.required > 0 or not self.refusal

    @property
    def placed(self) -> bool:
        """Whether the compiler got as far as a schedule."""
        return self.schedule.length > 0

    @property
    def timed(self) -> bool:
        """Whether the compiler estimated the compute, as it does for steps that fit."""
        # What is refused has no estimates but those of Pallas kernels, which are the model's.
        return not self.refusal and self.timing.compute > 0

    @property
    def wire_bytes(self) -> int:
        """What a device sends in a step, loops counted as often as they run."""
        if self.parts:
            return sum(part.wire_bytes * part.times for part in self.parts)
        return sum(c.wire_bytes * c.times for c in self.schedule.collectives)

    @property
    def wire_ratio(self) -> float | None:
        """``wire_bytes`` over the bound; None where one of them is unknown."""
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

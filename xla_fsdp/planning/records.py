"""Data classes for one compiled step.

All bytes are those of one device (one rank). Places are positions in the schedule of the entry
computation, in which loop bodies are inlined.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from ..tpu.links import OneCollective

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
PHASES = ("forward", "backward", "optimizer", "")
WORK = ("matmul", "kernel", "elementwise", "copy", "attention")


@dataclass(frozen=True)
class Op:
    """An instruction that takes time and is not a collective.

    ``cycles``: of one execution, by the compiler; 0 if unknown. ``times``: executions in a step.
    """

    index: int
    name: str
    opcode: str
    cycles: int
    times: int = 1
    module: str = ""
    phase: str = ""  # one of PHASES
    recomputed: bool = False
    # One of WORK, or "". A fusion with a matmul is a matmul; "attention" is without a kernel.
    work: str = ""
    padding: float = 0.0  # share of a matmul that pads its tiles


@dataclass(frozen=True, kw_only=True)
class CompiledCollective(OneCollective):
    """One collective. An asynchronous one counts once, even if the compiler split it into pieces.

    ``kind`` (one of KINDS) is the kind after compilation, ``asked`` the kind that was traced, "" if
    the program does not contain it. ``wire_bytes`` is what a device sends in one execution:
    all-gather B(n-1)/n of its output, reduce-scatter B(n-1)/n of its input, all-reduce twice that,
    all-to-all B(n-1)/n, collective-permute B.
    """

    index: int
    done: int  # where compute waits for it; equal to index if synchronous
    name: str
    asked: str
    dtype: str  # as HLO writes it: "bf16", "f32"
    group_size: int
    wire_bytes: int
    asynchronous: bool
    fused: bool = False  # in a fusion with compute
    overlap_cycles: int = 0  # of compute between index and done
    times: int = 1
    module: str = ""
    phase: str = ""


@dataclass(frozen=True)
class HostCopy:
    """A copy between HBM and host memory. ``bytes``: of one execution, unpadded."""

    index: int
    done: int  # where compute waits for it; equal to index if synchronous
    bytes: int
    to_host: bool
    times: int = 1


@dataclass(frozen=True)
class Buffer:
    """A piece of HBM that is live from place ``born`` to place ``dies`` inclusive."""

    name: str
    bytes: int  # with padding
    born: int
    dies: int
    category: str  # "argument", "output" or "temporary"
    shape: str  # as in HLO: "bf16[8192,4096]"
    opcode: str = ""
    module: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Schedule:
    length: int
    ops: tuple[Op, ...]
    collectives: tuple[CompiledCollective, ...]
    buffers: tuple[Buffer, ...]  # in HBM only
    curve: tuple[int, ...]  # bytes of HBM in use at every place
    peak_index: int
    notes: tuple[str, ...] = ()
    to_host: int = 0  # bytes copied in a step, unpadded
    to_device: int = 0
    host_copies: tuple[HostCopy, ...] = ()

    def live_at_peak(self) -> list[Buffer]:
        at = self.peak_index
        live = [b for b in self.buffers if b.born <= at <= b.dies]
        return sorted(live, key=lambda b: -b.bytes)


@dataclass(frozen=True)
class CompilerMemory:
    """HBM of one device in bytes, as reported by the compiler (CompiledMemoryStats)."""

    arguments: int
    outputs: int
    aliased: int  # outputs in buffers of arguments
    temporaries: int  # including fragmentation
    code: int
    # The largest sum of live buffers, without code and fragmentation. With host_temporaries it is
    # computed from the schedule: the compiler's figure counts some of them.
    peak: int
    # Offloaded inputs in host memory.
    host_temporaries: int = 0
    # Other parts of a streamed step on the device.
    other_programs: int = 0

    @property
    def required(self) -> int:
        """Bytes that must be free before the step can be loaded and run."""
        own = self.arguments + self.outputs - self.aliased + self.temporaries + self.code
        return own + self.other_programs


@dataclass(frozen=True)
class ProgramPart:
    """Equal programs of a streamed step."""

    name: str  # "backward of blocks.3"
    times: int  # executions in a step
    required: int  # HBM
    # Of one execution; seconds are modelled, without transfers to and from the host.
    seconds: float
    wire_bytes: int
    to_device: int  # shards
    to_host: int  # gradients


@dataclass(frozen=True)
class HostNeeds:
    """Host memory in bytes that one rank needs if the optimizer steps on the host."""

    shards: int
    gradients: int
    state: int
    buffers: int  # at most
    to_host: int  # gradients sent in a step
    to_device: int  # shards sent in a step, in the dtype of the gather
    ranks: int = 1
    capacity: int = 0
    source: str = ""  # of the capacity
    link: float = 0.0  # bytes per second between device and host, one way
    link_source: str = ""

    @property
    def required(self) -> int:
        return self.ranks * (self.shards + self.gradients + self.state + self.buffers)

    @property
    def seconds(self) -> float:
        """Transfers one after the other, which are not in the compiled program."""
        return (self.to_host + self.to_device) / self.link if self.link else 0.0


@dataclass(frozen=True)
class Slot:
    """An interval of one lane of the modelled timeline, in seconds."""

    lane: str  # "compute", "collective", or copies to or from the host
    begin: float
    end: float
    index: int
    label: str
    module: str = ""
    phase: str = ""
    asynchronous: bool = False
    recomputed: bool = False


@dataclass(frozen=True)
class Timing:
    """Modelled times of one step, in seconds; nothing is measured."""

    compute: float  # estimated cycles at the chip's clock
    collective: float  # as if nothing overlapped
    overlapped: float  # collective time during which the device computes
    exposed: float  # collective time that compute waits for
    step: float  # compute + exposed + copies
    model_flops: float  # this device's part
    mfu: float  # model_flops / (step * peak of the device)
    slots: Sequence[Slot] = ()
    copies: float = 0.0  # in which compute waits for copies to and from the host


def reader(kind: Any) -> Callable[[Any], Any]:
    """A function that converts a JSON value to the type ``kind``, without unknown fields.

    It raises TypeError, KeyError, ValueError or AttributeError.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if isinstance(kind, type) and is_dataclass(kind):
        readers = {name: reader(hint) for name, hint in typing.get_type_hints(kind).items()}
        return lambda value: kind(
            **{name: read(value[name]) for name, read in readers.items() if name in value}
        )
    if origin is types.UnionType:
        one = reader(inner[0])
        return lambda value: None if value is None else one(value)
    if origin in (tuple, Sequence):
        one = reader(inner[0])
        return lambda value: tuple([one(item) for item in _require_type(value, list)])
    if origin is Mapping:
        one = reader(inner[1])
        return lambda value: {key: one(item) for key, item in _require_type(value, dict).items()}
    if kind is bytes:
        return lambda value: _require_type(value, str).encode("latin-1")
    return lambda value: _require_type(value, (int, float) if kind is float else kind)


def _require_type(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        name = getattr(kind, "__name__", "a number")
        raise TypeError(f"{value!r:.60} where {name} belongs")
    return value

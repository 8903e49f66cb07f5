"""Data classes for one compiled step.

``program/`` fills them from the scheduled program, ``timing`` adds times, and ``reporting/`` prints
and plots them and stores them as JSON. All bytes are bytes of one device (one rank). All places are
positions in the schedule of the entry computation, in which loop bodies are inlined.
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

    ``cycles`` is the compiler's estimate for one execution (0 if there is none). ``times`` is the
    number of executions in a step (trip counts of the enclosing loops, multiplied).
    """

    index: int  # place in the schedule
    name: str
    opcode: str
    cycles: int
    times: int = 1
    module: str = ""  # dotted name of the module it was traced in
    phase: str = ""  # one of PHASES
    recomputed: bool = False  # by a checkpointed module, in the backward
    # One of WORK; a fusion with a matmul is a matmul; "" if unknown. "attention": without a kernel.
    work: str = ""
    padding: float = 0.0  # the share of a matmul that computes padding of its tiles


@dataclass(frozen=True, kw_only=True)
class Collective(OneCollective):
    """One collective. An asynchronous one counts once, even if the compiler split it into pieces.

    ``kind``, one of KINDS, is the kind after compilation: a reduce-scatter that the compiler
    replaced by an all-reduce and a slice is an all-reduce. ``asked`` is the kind that was traced,
    or "" if the program does not contain it. ``wire_bytes`` is what a device sends in one
    execution: all-gather B(n-1)/n of its output, reduce-scatter B(n-1)/n of its input, all-reduce
    twice that, all-to-all B(n-1)/n, collective-permute B.
    """

    index: int  # where it starts in the schedule
    done: int  # where compute waits for its result; equal to index if synchronous
    name: str
    asked: str
    dtype: str  # as HLO writes it: "bf16", "f32"
    group_size: int
    wire_bytes: int
    asynchronous: bool
    fused: bool = False  # inside a fusion with compute (the compiler's AllReduceScatterFusion)
    overlap_cycles: int = 0  # estimated cycles of compute scheduled between index and done
    times: int = 1
    module: str = ""
    phase: str = ""


@dataclass(frozen=True)
class HostCopy:
    """A copy between HBM and host memory. ``bytes``: of one execution, without padding."""

    index: int  # where it starts in the schedule
    done: int  # where its result is waited for; equal to index if synchronous
    bytes: int
    to_host: bool
    times: int = 1


@dataclass(frozen=True)
class Buffer:
    """A piece of HBM that is live from place ``born`` to place ``dies`` (included)."""

    name: str
    bytes: int  # including the padding of its tiled layout
    born: int
    dies: int
    category: str  # "argument", "output" or "temporary"
    shape: str  # as HLO writes it, e.g. "bf16[8192,4096]"
    opcode: str = ""
    module: str = ""
    phase: str = ""


@dataclass(frozen=True)
class Schedule:
    """The scheduled program."""

    length: int  # places in the schedule
    ops: tuple[Op, ...]
    collectives: tuple[Collective, ...]
    buffers: tuple[Buffer, ...]  # in HBM only
    curve: tuple[int, ...]  # bytes of HBM in use at every place: the sum of live buffers
    peak_index: int  # where the curve is highest
    notes: tuple[str, ...] = ()  # what the text did not say and had to be assumed
    to_host: int = 0  # bytes copied from HBM to the host's memory in a step, without padding
    to_device: int = 0  # and back
    host_copies: tuple[HostCopy, ...] = ()

    def live_at_peak(self) -> list[Buffer]:
        """The buffers that are live at the peak, largest first."""
        at = self.peak_index
        live = [b for b in self.buffers if b.born <= at <= b.dies]
        return sorted(live, key=lambda b: -b.bytes)


@dataclass(frozen=True)
class CompilerMemory:
    """HBM of one device in bytes, as reported by the compiler (CompiledMemoryStats)."""

    arguments: int
    outputs: int
    aliased: int  # part of outputs that reuses the buffers of donated arguments
    temporaries: int  # including fragmentation
    code: int  # the executable itself
    # The largest sum of live buffers, without code and fragmentation. With host_temporaries it is
    # computed from the schedule, because the compiler's figure counts some of them.
    peak: int
    # Offloaded inputs in host memory until the backward, by the buffer assignment.
    host_temporaries: int = 0
    # On the device at that time, but not of this program: other parts of a streamed step.
    beside: int = 0

    @property
    def required(self) -> int:
        """Bytes that must be free before the step can be loaded and run."""
        own = self.arguments + self.outputs - self.aliased + self.temporaries + self.code
        return own + self.beside


@dataclass(frozen=True)
class Part:
    """One program of a streamed step, and all programs that are equal to it."""

    name: str  # "backward of blocks.3"
    times: int  # how often it runs in a step
    required: int  # bytes of HBM while it runs
    seconds: float  # modelled time of one execution, without transfers to and from the host
    wire_bytes: int  # bytes that a device sends to others in one execution
    to_device: int  # bytes of shards that the host sends for one execution
    to_host: int  # bytes of gradients that one execution sends to the host


@dataclass(frozen=True)
class HostNeeds:
    """Host memory that one rank needs if the optimizer steps on the host, and that of the host.

    All sizes are in bytes. The transfers are not part of the compiled program.
    """

    shards: int
    gradients: int
    state: int  # optimizer state
    buffers: int  # transfer buffers, at most
    to_host: int  # gradients sent in a step
    to_device: int  # shards sent in a step, in the dtype of the gather
    ranks: int = 1  # ranks on a host
    capacity: int = 0  # memory of the host
    source: str = ""  # where the capacity is published
    link: float = 0.0  # bytes per second between a rank's device and the host, one way
    link_source: str = ""

    @property
    def required(self) -> int:
        """Bytes that all ranks of a host need together."""
        return self.ranks * (self.shards + self.gradients + self.state + self.buffers)

    @property
    def seconds(self) -> float:
        """The time of the transfers of a step, one after the other."""
        return (self.to_host + self.to_device) / self.link if self.link else 0.0


@dataclass(frozen=True)
class Slot:
    """An interval of modelled time in one lane of the timeline, in seconds from the start."""

    lane: str  # "compute", "collective", or copies to or from the host
    begin: float
    end: float
    index: int  # place in the schedule
    label: str
    module: str = ""
    phase: str = ""
    asynchronous: bool = False
    recomputed: bool = False


@dataclass(frozen=True)
class Timing:
    """Modelled times of one step, in seconds. Nothing of this was measured."""

    compute: float  # the compiler's estimated cycles at the chip's clock
    collective: float  # by the interconnect model, as if nothing overlapped
    overlapped: float  # collective time that compute hides in this schedule
    exposed: float  # the rest of it
    step: float  # compute + exposed + copies
    model_flops: float  # floating-point operations of the model, this device's part
    mfu: float  # model_flops / (step * peak of the device)
    slots: Sequence[Slot] = ()
    copies: float = 0.0  # what copies to and from the host add to the step


def reader(kind: Any) -> Callable[[Any], Any]:
    """A function that converts a value from JSON to the type of an annotation.

    It ignores fields that a data class does not have any more, of files of older versions, and
    raises TypeError, KeyError, ValueError or AttributeError for other values.
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
        return lambda value: tuple([one(item) for item in _checked(value, list)])
    if origin is Mapping:
        one = reader(inner[1])
        return lambda value: {key: one(item) for key, item in _checked(value, dict).items()}
    return lambda value: _checked(value, (int, float) if kind is float else kind)


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        name = getattr(kind, "__name__", "a number")
        raise TypeError(f"{value!r:.60} where {name} belongs")
    return value

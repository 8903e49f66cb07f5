"""What a plan knows about one compiled step, as plain data.

Read off the scheduled program by ``program/``, timed by ``timing``, printed and drawn by
``reporting/``, stored as JSON. All bytes are bytes of one device (one rank), all
places are positions in the schedule of the entry computation, with the bodies of loops in line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
PHASES = ("forward", "backward", "optimizer", "")


@dataclass(frozen=True)
class Op:
    """An instruction that takes time, other than a collective.

    ``cycles`` is the compiler's estimate for one execution (0 where it gives none); ``times`` how
    often the instruction runs (the trip counts of the loops around it).
    """

    index: int  # place in the schedule
    name: str
    opcode: str
    cycles: int
    times: int = 1
    module: str = ""  # dotted name of the module it was traced in
    phase: str = ""  # one of PHASES


@dataclass(frozen=True)
class Collective:
    """One collective. An asynchronous one is counted once, whatever pieces it was cut into.

    ``kind`` is what the compiler made of it (a reduce-scatter that became an all-reduce and a slice
    is an all-reduce), ``asked`` what was traced, as far as the program still says so, else "".
    ``wire_bytes`` is what a device sends in one execution: all-gather B(n-1)/n of its output,
    reduce-scatter B(n-1)/n of its input, all-reduce twice that, all-to-all B(n-1)/n,
    collective-permute B.
    """

    index: int  # where it starts in the schedule
    done: int  # where its result is waited for; equal to index if synchronous
    name: str
    kind: str  # one of KINDS
    asked: str
    dtype: str  # as HLO writes it: "bf16", "f32"
    bytes: int  # B: the larger of operand and result, without layout padding
    groups: tuple[tuple[int, ...], ...]  # ordinals that take part together; () means all
    group_size: int
    wire_bytes: int
    asynchronous: bool
    fused: bool = False  # inside a fusion with compute (the compiler's AllReduceScatterFusion)
    overlap_cycles: int = 0  # estimated cycles of compute scheduled between index and done
    times: int = 1
    emitter: str = ""  # the algorithm the compiler chose, as it calls it
    module: str = ""
    phase: str = ""
    source: str = ""  # file:line that traced it, "" if unknown
    across_slices: bool = False  # over the data-centre network, through the hosts


@dataclass(frozen=True)
class Buffer:
    """A piece of HBM over the places of the schedule where it is live, both ends included."""

    name: str
    bytes: int  # with the padding of its tiled layout
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
    curve: tuple[int, ...]  # bytes of HBM in use at every place, by adding up live buffers
    peak_index: int  # where the curve is highest
    aliased: Mapping[int, int]  # output number to the argument number whose buffer it takes
    notes: tuple[str, ...] = ()  # what the text did not say and had to be assumed
    to_host: int = 0  # bytes copied from HBM to the host's memory in a step, without padding
    to_device: int = 0  # and back

    def live_at_peak(self) -> list[Buffer]:
        """The buffers that are live at the peak, largest first."""
        at = self.peak_index
        live = [b for b in self.buffers if b.born <= at <= b.dies]
        return sorted(live, key=lambda b: -b.bytes)


@dataclass(frozen=True)
class CompilerMemory:
    """HBM of one device in bytes, as the compiler itself states it (CompiledMemoryStats)."""

    arguments: int
    outputs: int
    aliased: int  # part of outputs that takes the buffers of donated arguments
    temporaries: int  # with what fragmentation costs
    code: int  # the executable itself
    # Most live at one time, without code and fragmentation. With host_temporaries, of which the
    # compiler's figure counts some, that of the schedule's curve.
    peak: int
    # In the host's memory, by the buffer assignment: inputs that wait for the backward.
    host_temporaries: int = 0
    # On the device meanwhile, and nothing of the program's: other parts of a streamed step.
    beside: int = 0

    @property
    def required(self) -> int:
        """What must be free before the step can be loaded and run."""
        own = self.arguments + self.outputs - self.aliased + self.temporaries + self.code
        return own + self.beside


@dataclass(frozen=True)
class Part:
    """One of the programs that a streamed step is cut into, and all that are equal to it."""

    name: str  # "backward of blocks.3"
    times: int  # how often it runs in a step
    required: int  # bytes of HBM while it runs
    seconds: float  # modelled, of one execution, without transfers to and from the host
    wire_bytes: int  # that a device sends to others in one execution
    to_device: int  # bytes of shards that the host sends for one
    to_host: int  # bytes of gradients that one makes for the host


@dataclass(frozen=True)
class HostNeeds:
    """What one rank needs of its host where its optimizer steps there, in bytes, and of the host.

    The transfers are not part of the compiled program.
    """

    shards: int
    gradients: int
    state: int  # the optimizer's
    buffers: int  # what is on its way, at most
    to_host: int  # gradients, in a step
    to_device: int  # shards in the dtype they are gathered in, in a step
    ranks: int = 1  # of a host
    capacity: int = 0  # memory of the host
    source: str = ""  # of the capacity
    link: float = 0.0  # bytes a second between a rank's device and the host, one way
    link_source: str = ""

    @property
    def required(self) -> int:
        """Of all ranks of a host."""
        return self.ranks * (self.shards + self.gradients + self.state + self.buffers)

    @property
    def seconds(self) -> float:
        """A step's transfers, one after the other."""
        return (self.to_host + self.to_device) / self.link if self.link else 0.0


@dataclass(frozen=True)
class Slot:
    """A stretch of modelled time in one lane of the timeline, in seconds from the start."""

    lane: str  # "compute" or "collective"
    begin: float
    end: float
    index: int  # place in the schedule
    label: str
    module: str = ""
    phase: str = ""
    asynchronous: bool = False


@dataclass(frozen=True)
class Timing:
    """Modelled times of one step, in seconds. A model, not a measurement."""

    compute: float  # the compiler's estimated cycles at the chip's clock
    collective: float  # by the interconnect model, as if nothing overlapped
    overlapped: float  # collective time that compute hides in this schedule
    exposed: float  # the rest of it
    step: float  # compute + exposed
    model_flops: float  # floating-point operations of the model, this device's part
    mfu: float  # model_flops / (step * peak of the device)
    slots: Sequence[Slot] = ()

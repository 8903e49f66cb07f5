"""Published figures of TPU chips, for plans.

Sources: "Cloud": cloud.google.com/tpu/docs/v2 ... /tpu7x. "Scaling book": "How to Scale Your
Model", jax-ml.github.io/scaling-book/tpus. "CACM": Jouppi et al., CACM 63 (7), 2020, and "ISCA":
Jouppi et al., "TPU v4", ISCA 2023, arXiv 2304.01433, both as commonly cited. "tpu_info":
jax/_src/pallas/mosaic/tpu_info.py. "libtpu": read off the compiler of libtpu 0.0.21 (or 0.0.51),
without a TPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType

GIB = 2**30
# Of a vector register of 32-bit values: columns and rows.
LANES, SUBLANES = 128, 8
# Of the attention kernel: multiples of the first, up to the second; compiled for v4, v5e and v6e.
HEAD_DIM, LARGEST_HEAD_DIM = 64, 256

# Besides hops and bytes. Scaling book, part 3, pop quiz 2: 8 us profiled for 3 x 32 KiB over 3
# hops, of which hops and bytes are 5.2. One measurement, on v5e.
LAUNCH = 3e-6
# From chip to chip through two hosts. An assumption: nothing public says.
DCN_LATENCY = 50e-6

_LIMIT = "libtpu: the limit in its out-of-memory message, times the devices of a chip; "
_LIMIT_51 = _LIMIT.replace("libtpu:", "libtpu 0.0.51:")
_SHARED = {
    "hop_latency": (
        "Scaling book, an exercise's assumption for v5e (0.5 to 1 us by edition); a rough figure"
    ),
    "pcie_bandwidth": (
        "Scaling book, an exercise of part 2 for v6e: 15 GB/s a chip and way; taken for all chips"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Chip:
    """Every constant of one TPU generation, per chip unless the name says ``device``.

    To add a generation, add a record below and put it into ``CHIPS``; no other file names one.

    Attributes:
        accelerator: prefix of its slices' names, such as "v5litepod".
        generation: torch_xla's number.
        device_kind: its name in libtpu and jax.
        pci_device: jax/_src/hardware_utils.py; None where two generations have the same.
        flops: peak bfloat16 operations a second, a multiply-add counting as two.
        devices: XLA devices, so ranks; two TensorCores of v4 and v5p are one (megacore).
        clock_hz: TensorCore cycles a second.
        matrix_cycles: the share of ``flops`` that libtpu's ``estimated_cycles`` give a bfloat16
            matmul of 8192 x 8192 with default options (docs/design/time-model.md).
        matrix_unit: rows of a matrix unit (Cloud).
        published: published over modelled seconds of a step, the median, and the number of runs
            (docs/design/published-runs.md).
        usable_hbm_bytes: for arguments, outputs and temporaries of a program.
        hbm_bandwidth: bytes a second.
        chip_config: the ``chip_config_name`` with which libtpu lists production's devices.
        other_configs: ``usable_hbm_bytes`` with other such names.
        pod: chips along each axis of the largest pod.
        cube: edge in chips of the cubes that optical switches join, or 0.
        shapes: of the named slices, in chips, without complete cubes.
        largest_slice: in chips.
        sub_host: whether a slice may be a single chip.
        link_bandwidth: bytes a second of one inter-chip (ICI) link each way; two links an axis.
        die_bandwidth: bytes a second between the devices of a chip; 0: through the memory.
        hop_latency: seconds for the first byte to the next chip.
        launch_latency: seconds of a collective besides hops and bytes.
        dcn_latency: seconds for the first byte to another slice.
        dcn_bandwidth: bytes a second of a chip to other slices, each way; 0 if not joined.
        host_memory: GB (10^9 bytes) of the virtual machine, by its chips (Cloud, "VM types").
        pcie_bandwidth: bytes a second between a chip and its host, one way.
        scoped_vmem_kib: VMEM of one operation for large matmuls, or None
            (docs/design/benchmarks.md, "Matmuls and VMEM").
        overlaps_gathers: all-gathers run during compute (docs/design/benchmarks.md).
        ring_bytes: gradients from this size on are reduced along rows, then columns of chips, which
            makes steps 3 % shorter or more (docs/design/communication.md); 0: never.
        along_all_axes: SparseCores run collectives over a full slice along all axes in parallel;
            none becomes an all-reduce. Seen on tpu7x:2x2x1 and 4x4x4.
        gathers_along_one_ring: all-gathers over a torus are one ring
            (docs/design/communication.md).
        small_gathers_reduce: small all-gathers over many ranks become all-reduces.
        crashes_on_fused_loops: the compiler crashes if it fuses gathers inside a loop with element
            loops.
        refused_by: versions of libtpu that do not compile for the chip.
        attention_kernel: Mosaic compiles it ("Unsupported matmul RHS type on target" on v2 and v3).
        softmax_divides: rows of a softmax are divided by their sums.
        stores_linear_inputs: for the backward, if the layer narrows. Workload S on v6e-8: 20.7
            million cycles instead of 23.3, for 195 MiB more; on v4 and v5e 1 % slower.
    """

    family: str
    accelerator: str
    generation: int
    device_kind: str
    pci_device: str | None

    flops: float
    tensor_cores: int
    devices: int
    clock_hz: float
    matrix_cycles: float
    matrix_unit: int = 128
    published: tuple[float, int] | None = None

    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bandwidth: float
    chip_config: str | None = None
    other_configs: Mapping[str, int] = field(default_factory=dict)

    pod: tuple[int, ...]
    cube: int = 0
    shapes: tuple[tuple[int, ...], ...]
    largest_slice: int
    sub_host: bool = False
    link_bandwidth: float
    hop_latency: float = 1e-6
    launch_latency: float = LAUNCH
    die_bandwidth: float = 0.0
    dcn_bandwidth: float = 0.0
    dcn_latency: float = DCN_LATENCY

    host_memory: Mapping[int, int]
    pcie_bandwidth: float = 15e9

    scoped_vmem_kib: int | None = None
    overlaps_gathers: bool = False
    ring_bytes: int = 0
    along_all_axes: bool = False
    gathers_along_one_ring: bool = False
    small_gathers_reduce: bool = False
    crashes_on_fused_loops: bool = False

    refused_by: tuple[str, ...] = ()

    attention_kernel: bool = True
    softmax_divides: bool = False
    stores_linear_inputs: bool = False

    sources: Mapping[str, str]

    def __post_init__(self) -> None:
        for name in ("other_configs", "host_memory", "sources"):
            shared = _SHARED if name == "sources" else {}
            table = MappingProxyType({**shared, **getattr(self, name)})
            object.__setattr__(self, name, table)

    @property
    def device_flops(self) -> float:
        return self.flops / self.devices

    def device_usable_hbm_bytes(self, chip_config: str | None = None) -> int:
        """``chip_config``: the runtime's."""
        usable = self.other_configs.get(chip_config or "", self.usable_hbm_bytes)
        return usable // self.devices

    @property
    def device_hbm_bandwidth(self) -> float:
        return self.hbm_bandwidth / self.devices

    @property
    def device_host_bandwidth(self) -> float:
        return self.pcie_bandwidth / self.devices

    @property
    def torus_dimension(self) -> int:
        return len(self.pod)

    @cached_property
    def slices(self) -> Mapping[int, tuple[int, ...]]:
        """The shape in chips of each named slice, by its TensorCores: the 32 of "v3-32".

        Of each number of cubes a * b * c the shape with the smallest sum, as in
        cloud.google.com/tpu/docs/types-topologies and MaxText's accelerator_to_spec_map.py.
        """
        shapes, edge = [*self.shapes], self.cube
        for count in range(1, self.largest_slice // edge**3 + 1 if edge else 1):
            splits = [
                (a, b, count // (a * b))
                for a in range(1, round(count ** (1 / 3)) + 1)
                if count % a == 0
                for b in range(a, int((count // a) ** 0.5) + 1)
                if count // a % b == 0
            ]
            shapes.append(tuple(edge * length for length in min(splits, key=sum)))
        return MappingProxyType({prod(shape) * self.tensor_cores: shape for shape in shapes})

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which axes of a slice of ``shape`` chips are rings.

        v4 and v5p: all, if the slice consists of complete cubes; v5e and v6e: those of 16 chips
        (Scaling book). v2 and v3: those as long as the pod's, an assumption.
        """
        if self.cube:
            whole = all(length % self.cube == 0 for length in shape)
            return tuple(whole for _ in shape)
        return tuple(length == full for length, full in zip(shape, self.pod, strict=True))


# Cloud, up to one cube.
_UP_TO_A_CUBE = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))
# Cloud: "2D slice shapes".
_UP_TO_256 = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))

V2 = Chip(
    family="v2",
    accelerator="v2",
    generation=2,
    device_kind="TPU v2",
    pci_device=None,
    flops=46e12,  # CACM and tpu_info
    tensor_cores=2,
    devices=2,  # libtpu: v2:2x2 lists 8 devices
    # CACM: 700 MHz; 46e12 / (2 x 2 x 128 x 128) = 702 MHz
    clock_hz=700e6,
    matrix_cycles=0.98,
    hbm_bytes=16 * GIB,  # CACM: 16 GiB; libtpu: 7.48G and 530M reserved for each core
    usable_hbm_bytes=2 * int(7.48 * GIB),
    hbm_bandwidth=700e9,  # CACM; tpu_info says 716
    pod=(16, 16),  # CACM; Scaling book: 2D torus
    shapes=((2, 2), (4, 4), (8, 8), (8, 16), (16, 16)),
    largest_slice=256,
    link_bandwidth=62e9,
    host_memory={4: 334},
    small_gathers_reduce=True,
    attention_kernel=False,
    sources={
        "usable_hbm_bytes": _LIMIT + "7.48G, as in ColabFold issue 62 on hardware",
        "link_bandwidth": "CACM: 496 Gbit/s a link and direction; no second source",
        "host_memory": "as commonly cited, 96 vCPUs and 334 GB",
    },
)

V3 = Chip(
    family="v3",
    accelerator="v3",
    generation=3,
    device_kind="TPU v3",
    pci_device=None,
    flops=123e12,  # Cloud; Scaling book and tpu_info say 140
    tensor_cores=2,
    devices=2,  # libtpu: v3:2x2 lists 8 devices
    # CACM: 940 MHz; 123e12 / (2 x 4 x 128 x 128) = 938 MHz
    clock_hz=940e6,
    matrix_cycles=0.97,
    published=(1.01, 1),
    hbm_bytes=32 * GIB,
    usable_hbm_bytes=2 * int(15.48 * GIB),
    hbm_bandwidth=900e9,  # Cloud; tpu_info says 825
    pod=(32, 32),  # Cloud: 1024 chips; Scaling book: 32 x 32
    shapes=((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)),
    largest_slice=1024,
    link_bandwidth=82e9,
    host_memory={4: 335},
    small_gathers_reduce=True,
    attention_kernel=False,
    sources={
        "usable_hbm_bytes": _LIMIT + "15.48G, as in LargeWorldModel/LWM issue 60 on hardware",
        "link_bandwidth": (
            "CACM: 656 Gbit/s a link and direction; Cloud's 340 TB/s of all-reduce a pod / 1024 "
            "chips / 4 links = 83 GB/s agrees; ISCA says 70 GB/s, the Scaling book 100"
        ),
        "host_memory": "T. S. Nguyen, June 2021, inside a TPU VM: 96 vCPUs and 335 GB",
    },
)

V4 = Chip(
    family="v4",
    accelerator="v4",
    generation=4,
    device_kind="TPU v4",
    pci_device="0x005e",
    flops=275e12,
    tensor_cores=2,
    devices=1,  # libtpu: v4:2x2x1 with megacore lists 4 devices
    # ISCA: 1050 MHz; 275e12 / (2 x 8 x 128 x 128) = 1049 MHz
    clock_hz=1050e6,
    matrix_cycles=0.93,
    published=(1.2, 3),
    hbm_bytes=32 * GIB,
    usable_hbm_bytes=int(30.75 * GIB),
    hbm_bandwidth=1200e9,
    chip_config="megacore",
    other_configs={"megacore_dense": int(31.75 * GIB)},
    pod=(16, 16, 16),  # Cloud: 4096 chips; Scaling book; ISCA: 6 links a chip
    cube=4,
    shapes=_UP_TO_A_CUBE,
    largest_slice=4096,
    link_bandwidth=45e9,
    dcn_bandwidth=6.25e9,
    host_memory={4: 407},
    sources={
        "usable_hbm_bytes": (
            _LIMIT + "30.75G with chip_config_name megacore, as in EasyDeL issue 166 on a v4-32; "
            "31.75G with megacore_dense, which torch_xla 2.9 asks for"
        ),
        "link_bandwidth": (
            "Scaling book: 45 GB/s one way; Cloud's 1.1 PB/s of all-reduce a pod / 4096 chips / 6 "
            "links = 45 GB/s agrees; ISCA says 50 GB/s nominal"
        ),
        "dcn_bandwidth": "Scaling book: 6.25 GB/s a chip",
        "host_memory": "as commonly cited of ct4p-hightpu-4t, 240 vCPUs and 407 GB",
    },
)

V5E = Chip(
    family="v5e",
    accelerator="v5litepod",
    generation=5,
    device_kind="TPU v5 lite",
    pci_device="0x0063",
    flops=197e12,
    tensor_cores=1,
    devices=1,  # libtpu: v5e:2x4 lists 8 devices
    # Scaling book: 1.5 GHz; 197e12 / (2 x 4 x 128 x 128) = 1503 MHz
    clock_hz=1500e6,
    matrix_cycles=0.88,
    published=(0.91, 3),
    hbm_bytes=16 * GIB,  # Cloud: 16 GB (GiB by libtpu's limit)
    usable_hbm_bytes=int(15.75 * GIB),
    hbm_bandwidth=819e9,
    pod=(16, 16),
    shapes=_UP_TO_256,
    largest_slice=256,
    sub_host=True,
    link_bandwidth=45e9,
    dcn_bandwidth=3.125e9,
    host_memory={1: 48, 4: 192, 8: 384},
    scoped_vmem_kib=49152,
    overlaps_gathers=True,
    # Four blocks of ViT-10B on v5e:16x16 took 107.8 ms a step with no gradients around rows, 104.6
    # with those of 210 MB, 109.3 with smaller ones too.
    ring_bytes=192 << 20,
    gathers_along_one_ring=True,
    crashes_on_fused_loops=True,
    sources={
        "usable_hbm_bytes": _LIMIT + "15.75G",
        "link_bandwidth": (
            "Scaling book: 45 GB/s one way; Cloud: 400 GB/s both ways a chip / 4 / 2 = 50 nominal"
        ),
        "dcn_bandwidth": (
            "Cloud: 2 x 100 Gbps a host of 8 chips, 6.4 Tbps a pod; Scaling book: 3.125 GB/s a chip"
        ),
        "host_memory": "Cloud: ct5lp-hightpu-1t, -4t, -8t with 48, 192, 384 GB",
    },
)

V5P = Chip(
    family="v5p",
    accelerator="v5p",
    generation=5,
    device_kind="TPU v5",
    pci_device="0x0062",
    flops=459e12,
    tensor_cores=2,
    devices=1,  # libtpu: v5p:2x2x1 lists 4 devices
    clock_hz=1750e6,  # 459e12 / (2 x 8 x 128 x 128) = 1751 MHz
    matrix_cycles=0.9,
    published=(1.01, 1),
    hbm_bytes=96 * GIB,  # libtpu: 95.74G and 263M reserved; Cloud says 95 GiB
    usable_hbm_bytes=int(95.74 * GIB),
    hbm_bandwidth=2765e9,
    # Cloud: 8960 chips, the largest job 6144; Scaling book: 16 x 20 x 28, 6 neighbours
    pod=(16, 20, 28),
    cube=4,
    shapes=_UP_TO_A_CUBE,
    largest_slice=6144,
    link_bandwidth=90e9,
    dcn_bandwidth=6.25e9,
    host_memory={4: 448},
    scoped_vmem_kib=49152,
    overlaps_gathers=True,
    stores_linear_inputs=True,
    sources={
        "usable_hbm_bytes": _LIMIT + "95.74G",
        "link_bandwidth": (
            "Scaling book: 90 GB/s one way; Cloud: 1200 GB/s both ways a chip / 6 / 2 = 100 nominal"
        ),
        "dcn_bandwidth": "Cloud: 50 Gbps a chip; Scaling book: 6.25 GB/s",
        "host_memory": "as commonly cited of ct5p-hightpu-4t, 208 vCPUs and 448 GB",
    },
)

V6E = Chip(
    family="v6e",
    accelerator="v6e",
    generation=6,
    device_kind="TPU v6 lite",
    pci_device="0x006f",
    flops=918e12,
    tensor_cores=1,
    devices=1,  # libtpu: v6e:2x4 lists 8 devices
    # 918e12 / (2 x 4 x 256 x 256) = 1751 MHz; Cloud's two units cannot reach libtpu's 456,000
    # operations a cycle.
    clock_hz=1750e6,
    matrix_cycles=0.7,
    published=(1.07, 7),
    matrix_unit=256,
    hbm_bytes=32 * GIB,  # Cloud: 32 GB (GiB by libtpu's limit)
    usable_hbm_bytes=int(31.25 * GIB),
    hbm_bandwidth=1638e9,
    pod=(16, 16),
    shapes=_UP_TO_256,
    largest_slice=256,
    sub_host=True,
    link_bandwidth=90e9,
    dcn_bandwidth=12.5e9,
    host_memory={1: 176, 4: 720, 8: 1440},
    scoped_vmem_kib=98304,
    overlaps_gathers=True,
    crashes_on_fused_loops=True,
    softmax_divides=True,
    stores_linear_inputs=True,
    sources={
        "usable_hbm_bytes": _LIMIT + "31.25G",
        "link_bandwidth": (
            "Scaling book: 90 GB/s one way; Cloud: 800 GB/s both ways a chip / 4 / 2 = 100 nominal"
        ),
        "dcn_bandwidth": (
            "Cloud: 4 x 200 Gbps a host of 8 chips, 25.6 Tbps a pod; Scaling book: 12.5 GB/s a chip"
        ),
        "host_memory": "as commonly cited of ct6e-standard-1t, -4t, -8t, 176, 720, 1440 GB",
    },
)

TPU7X = Chip(
    family="tpu7x",
    accelerator="tpu7x",
    generation=7,
    device_kind="TPU7x",
    pci_device="0x0076",
    flops=2307e12,  # Cloud; 4,614 of fp8
    tensor_cores=2,
    devices=2,  # libtpu 0.0.51: tpu7x:2x2x1 lists 8 devices
    # 2307e12 / (2 x 8 x 256 x 256) = 2200 MHz; libtpu 0.0.51's cycles reach 92 % of four units.
    clock_hz=2200e6,
    matrix_cycles=0.81,
    published=(1.09, 2),
    matrix_unit=256,
    hbm_bytes=192 * GIB,
    usable_hbm_bytes=2 * int(94.74 * GIB),
    # Cloud; a copy reaches 6,420 (tpu-recipes, microbenchmarks/ironwood)
    hbm_bandwidth=7380e9,
    die_bandwidth=1080e9,
    # Cloud: 9,216 chips; AXLearn and MaxText name slices up to 16x24x24
    pod=(16, 24, 24),
    cube=4,
    shapes=_UP_TO_A_CUBE,
    largest_slice=9216,
    link_bandwidth=90e9,
    dcn_bandwidth=12.5e9,
    host_memory={4: 960},
    scoped_vmem_kib=61440,
    overlaps_gathers=True,
    along_all_axes=True,
    refused_by=("0.0.21",),
    sources={
        "usable_hbm_bytes": _LIMIT_51 + "94.74G",
        "link_bandwidth": (
            "MaxText: 180 GB/s an axis, of two links (custom_model.md); tpu-recipes measure an "
            "all-gather on 2x2x1 at 179; Cloud: 1200 GB/s both ways a chip / 6 / 2 = 100 nominal"
        ),
        "die_bandwidth": "MaxText: six times an axis between the dies of a chip (custom_model.md)",
        "dcn_bandwidth": "Cloud: 100 Gbps a chip",
        "host_memory": "Cloud: 960 GB a virtual machine of 4 chips",
    },
)

_BY_FAMILY = {chip.family: chip for chip in (V2, V3, V4, V5E, V5P, V6E, TPU7X)}
CHIPS: Mapping[str, Chip] = MappingProxyType(_BY_FAMILY)


def chip_of(device_kind: str) -> Chip | None:
    """None for a CPU and new chips."""
    return next((chip for chip in CHIPS.values() if chip.device_kind == device_kind), None)

"""What a TPU chip can do: the published figures that a plan is held against.

Every figure is for one *chip*, as the public pages state it; the ``device_`` properties give the
share of one XLA device, which is one rank. On v2 and v3 each of a chip's two TensorCores is a
device with half of the chip's memory and arithmetic. On v4 and v5p the two TensorCores make one
device (megacore). v5e and v6e chips have a single TensorCore.

Where a figure comes from is in ``Chip.sources``, by field. "Cloud" is the chip's own page,
cloud.google.com/tpu/docs/v2 ... /v6e. "Scaling book" is "How to Scale Your Model", part 2,
jax-ml.github.io/scaling-book/tpus. "CACM" is Jouppi et al., "A Domain-Specific Supercomputer for
Training Deep Neural Networks", CACM 63 (7), 2020. "ISCA" is Jouppi et al., "TPU v4", ISCA 2023,
arXiv 2304.01433. "tpu_info" is jax/_src/pallas/mosaic/tpu_info.py of later JAX releases. "libtpu"
was read off the compiler of libtpu 0.0.21, without a TPU. CACM's and ISCA's figures are as commonly
cited: the papers were not at hand when this table was made, so each stands beside a second source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

GIB = 2**30

# Seconds that a collective takes besides hops and bytes. Scaling book, part 3, pop quiz 2: 32 KiB
# from each of 4 v5e chips in line, profiled at 8 us; 3 hops of 1 us and 3 x 32 KiB at 45 GB/s are
# 5.2 of them. One measurement, on one generation.
LAUNCH = 3e-6
# Seconds from the memory of one chip through two hosts to that of another. An assumption: nothing
# public says.
DCN_LATENCY = 50e-6

# libtpu prints the limit with two decimals when a program does not fit: "Used 120.00G of 15.75G
# hbm"; seen by compiling a program with an argument of 120 GiB for each chip.
_LIMIT = "libtpu: the limit in its out-of-memory message, times the devices of a chip; "
_MXU = "derived: flops / (2 x multipliers of a chip); "
# One latency for all chips: the only public figure.
_HOP = "Scaling book, an exercise's assumption for v5e (0.5 to 1 us by edition); a rough figure"


def _nothing() -> Mapping[str, int]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Chip:
    """One TPU generation, per chip unless the name says ``device``.

    ``family``: "v2", "v3", "v4", "v5e", "v5p" or "v6e".
    ``device_kind``: what libtpu and jax call its devices.
    ``flops``: peak bfloat16 floating-point operations a second, a multiply-add counting as two.
    ``hbm_bytes``: high-bandwidth memory, bytes. ``usable_hbm_bytes``: what the compiler lets a
    program take of it (arguments, outputs and temporaries), bytes.
    ``hbm_bandwidth``: bytes a second.
    ``tensor_cores``: TensorCores; ``devices``: XLA devices, so ranks, in production.
    ``clock_hz``: TensorCore cycles a second: seconds = the compiler's ``estimated_cycles`` /
    ``clock_hz``.
    ``links``: inter-chip (ICI) links; ``link_bandwidth``: bytes a second of one link in one
    direction, both directions at once; ``hop_latency``: seconds for the first byte to the
    neighbouring chip; ``launch_latency``: seconds of a collective besides hops and bytes;
    ``dcn_latency``: seconds for the first byte to another slice.
    ``matrix_cycles``: the share of ``flops`` that libtpu's ``estimated_cycles`` at ``clock_hz``
    give a product of bfloat16 matrices of 8192 x 8192, with libtpu's default options
    (docs/plan-time-model.md).
    ``pod``: chips along each axis of the largest pod; its length is the dimension of the torus.
    ``cube``: 0, or the edge in chips of the cubes that optical switches join (v4, v5p).
    ``largest_slice``: most chips in one slice.
    ``dcn_bandwidth``: bytes a second that a chip sends to other slices, its share of the host's
    network, both ways at once; 0 where slices are not joined.
    ``sub_host``: whether a slice may be a single chip, less than a host.
    ``chip_config``: the ``chip_config_name`` libtpu needs to list production's devices, or None;
    ``other_configs``: further ones, and ``usable_hbm_bytes`` with them.
    ``sources``: for each figure above, where it comes from.
    """

    family: str
    device_kind: str
    flops: float
    hbm_bytes: int
    usable_hbm_bytes: int
    hbm_bandwidth: float
    tensor_cores: int
    devices: int
    clock_hz: float
    links: int
    link_bandwidth: float
    hop_latency: float
    pod: tuple[int, ...]
    cube: int
    largest_slice: int
    sub_host: bool
    chip_config: str | None
    dcn_bandwidth: float = field(kw_only=True, default=0.0)
    launch_latency: float = field(kw_only=True, default=LAUNCH)
    dcn_latency: float = field(kw_only=True, default=DCN_LATENCY)
    matrix_cycles: float = field(kw_only=True)
    other_configs: Mapping[str, int] = field(kw_only=True, default_factory=_nothing)
    sources: Mapping[str, str]

    @property
    def device_flops(self) -> float:
        """Peak bfloat16 operations a second of one device."""
        return self.flops / self.devices

    def device_usable_hbm_bytes(self, chip_config: str | None = None) -> int:
        """The most that a program on one device may take of its memory, bytes.

        ``chip_config``: that of the runtime, where it has the choice; default: ``chip_config``.
        """
        usable = self.other_configs.get(chip_config or "", self.usable_hbm_bytes)
        return usable // self.devices

    @property
    def device_hbm_bandwidth(self) -> float:
        """Memory bandwidth of one device, bytes a second."""
        return self.hbm_bandwidth / self.devices

    @property
    def torus_dimension(self) -> int:
        """2 or 3: the axes of the inter-chip network; each chip has two links an axis."""
        return len(self.pod)

    def wraps(self, shape: tuple[int, ...]) -> tuple[bool, ...]:
        """Which axes of a slice are rings, for a slice of ``shape`` chips (one number an axis).

        v4 and v5p: every axis, if the slice is made of whole 4x4x4 cubes, since the optical
        switches between cubes provide the wrap-around links; otherwise none (Scaling book).
        v5e and v6e: an axis as long as the pod's 16 (Scaling book: "a v5e 8x16 will have a
        wraparound on the longer axis").
        v2 and v3: the pod is a torus (CACM) of fixed cables, so by the same reasoning an axis
        as long as the pod's 16 or 32; nothing public says so for slices.
        """
        if self.cube:
            whole = all(length % self.cube == 0 for length in shape)
            return tuple(whole for _ in shape)
        return tuple(length == full for length, full in zip(shape, self.pod, strict=True))


def _chip(*, sources: Mapping[str, str], **figures: Any) -> Chip:
    return Chip(sources=MappingProxyType(dict(sources)), **figures)


V2 = _chip(
    family="v2",
    device_kind="TPU v2",
    flops=46e12,
    hbm_bytes=16 * GIB,
    usable_hbm_bytes=2 * int(7.48 * GIB),
    hbm_bandwidth=700e9,
    tensor_cores=2,
    devices=2,
    clock_hz=700e6,
    links=4,
    link_bandwidth=62e9,
    hop_latency=1e-6,
    pod=(16, 16),
    cube=0,
    largest_slice=256,
    sub_host=False,
    chip_config=None,
    matrix_cycles=0.98,
    sources={
        "flops": "CACM and tpu_info: 46 TFLOP/s",
        "hbm_bytes": "CACM: 16 GiB; libtpu: 7.48G and 530M reserved for each of 2 cores",
        "usable_hbm_bytes": _LIMIT + "7.48G, as in ColabFold issue 62 on hardware",
        "hbm_bandwidth": "CACM: 700 GB/s; tpu_info says 716",
        "devices": "libtpu: v2:2x2 lists 8 devices",
        "clock_hz": "CACM: 700 MHz; " + _MXU + "46e12 / (2 x 2 x 128 x 128) = 702 MHz",
        "links": "Scaling book: v2 and v3 link 4 neighbours, 2D torus",
        "link_bandwidth": "CACM: 496 Gbit/s a link and direction; no second source",
        "hop_latency": _HOP,
        "pod": "CACM: 16 x 16 chips",
    },
)

V3 = _chip(
    family="v3",
    device_kind="TPU v3",
    flops=123e12,
    hbm_bytes=32 * GIB,
    usable_hbm_bytes=2 * int(15.48 * GIB),
    hbm_bandwidth=900e9,
    tensor_cores=2,
    devices=2,
    clock_hz=940e6,
    links=4,
    link_bandwidth=82e9,
    hop_latency=1e-6,
    pod=(32, 32),
    cube=0,
    largest_slice=1024,
    sub_host=False,
    chip_config=None,
    matrix_cycles=0.97,
    sources={
        "flops": "Cloud: 123 TFLOP/s; Scaling book and tpu_info say 140",
        "hbm_bytes": "Cloud: 32 GiB",
        "usable_hbm_bytes": _LIMIT + "15.48G, as in LargeWorldModel/LWM issue 60 on hardware",
        "hbm_bandwidth": "Cloud: 900 GB/s; tpu_info says 825",
        "devices": "libtpu: v3:2x2 lists 8 devices",
        "clock_hz": "CACM: 940 MHz; " + _MXU + "123e12 / (2 x 4 x 128 x 128) = 938 MHz",
        "links": "Cloud: 2D torus",
        "link_bandwidth": (
            "CACM: 656 Gbit/s a link and direction; Cloud's 340 TB/s of all-reduce a pod / 1024 "
            "chips / 4 links = 83 GB/s agrees; ISCA says 70 GB/s, the Scaling book 100"
        ),
        "hop_latency": _HOP,
        "pod": "Cloud: 1024 chips; Scaling book: 32 x 32",
    },
)

V4 = _chip(
    family="v4",
    device_kind="TPU v4",
    flops=275e12,
    hbm_bytes=32 * GIB,
    usable_hbm_bytes=int(30.75 * GIB),
    hbm_bandwidth=1200e9,
    tensor_cores=2,
    devices=1,
    clock_hz=1050e6,
    links=6,
    dcn_bandwidth=6.25e9,
    link_bandwidth=45e9,
    hop_latency=1e-6,
    pod=(16, 16, 16),
    cube=4,
    largest_slice=4096,
    sub_host=False,
    chip_config="megacore",
    other_configs=MappingProxyType({"megacore_dense": int(31.75 * GIB)}),
    matrix_cycles=0.93,
    sources={
        "flops": "Cloud: 275 TFLOP/s",
        "hbm_bytes": "Cloud: 32 GiB",
        "usable_hbm_bytes": (
            _LIMIT + "30.75G with chip_config_name megacore, as in EasyDeL issue 166 on a v4-32; "
            "31.75G with megacore_dense, which torch_xla 2.9 asks for"
        ),
        "hbm_bandwidth": "Cloud: 1200 GB/s",
        "devices": "libtpu: v4:2x2x1 with megacore lists 4 devices, as production does",
        "clock_hz": "ISCA: 1050 MHz; " + _MXU + "275e12 / (2 x 8 x 128 x 128) = 1049 MHz",
        "links": "ISCA: 6 links",
        "link_bandwidth": (
            "Scaling book: 45 GB/s one way; Cloud's 1.1 PB/s of all-reduce a pod / 4096 chips / 6 "
            "links = 45 GB/s agrees; ISCA says 50 GB/s nominal"
        ),
        "hop_latency": _HOP,
        "pod": "Cloud: 4096 chips; Scaling book: 16 x 16 x 16",
        "dcn_bandwidth": "Scaling book: 6.25 GB/s a chip",
    },
)

V5E = _chip(
    family="v5e",
    device_kind="TPU v5 lite",
    flops=197e12,
    hbm_bytes=16 * GIB,
    usable_hbm_bytes=int(15.75 * GIB),
    hbm_bandwidth=819e9,
    tensor_cores=1,
    devices=1,
    clock_hz=1500e6,
    links=4,
    dcn_bandwidth=3.125e9,
    link_bandwidth=45e9,
    hop_latency=1e-6,
    pod=(16, 16),
    cube=0,
    largest_slice=256,
    sub_host=True,
    chip_config=None,
    matrix_cycles=0.88,
    sources={
        "flops": "Cloud: 197 TFLOP/s",
        "hbm_bytes": "Cloud: 16 GB (GiB by libtpu's limit)",
        "usable_hbm_bytes": _LIMIT + "15.75G",
        "hbm_bandwidth": "Cloud: 819 GB/s",
        "devices": "libtpu: v5e:2x4 lists 8 devices",
        "clock_hz": "Scaling book: 1.5 GHz; " + _MXU + "197e12 / (2 x 4 x 128 x 128) = 1503 MHz",
        "links": "Cloud: 4 ports",
        "link_bandwidth": (
            "Scaling book: 45 GB/s one way; Cloud: 400 GB/s both ways a chip / 4 / 2 = 50 nominal"
        ),
        "hop_latency": _HOP,
        "pod": "Cloud: 256 chips, 2D torus, 16x16 the largest slice",
        "dcn_bandwidth": (
            "Cloud: 2 x 100 Gbps a host of 8 chips, 6.4 Tbps a pod; Scaling book: 3.125 GB/s a chip"
        ),
    },
)

V5P = _chip(
    family="v5p",
    device_kind="TPU v5",
    flops=459e12,
    hbm_bytes=96 * GIB,
    usable_hbm_bytes=int(95.74 * GIB),
    hbm_bandwidth=2765e9,
    tensor_cores=2,
    devices=1,
    clock_hz=1750e6,
    links=6,
    dcn_bandwidth=6.25e9,
    link_bandwidth=90e9,
    hop_latency=1e-6,
    pod=(16, 20, 28),
    cube=4,
    largest_slice=6144,
    sub_host=False,
    chip_config=None,
    matrix_cycles=0.9,
    sources={
        "flops": "Cloud: 459 TFLOP/s",
        "hbm_bytes": "Scaling book: 96 GB; libtpu: 95.74G and 263M reserved; Cloud says 95 GiB",
        "usable_hbm_bytes": _LIMIT + "95.74G",
        "hbm_bandwidth": "Cloud: 2765 GB/s",
        "devices": "libtpu: v5p:2x2x1 lists 4 devices, with and without megacore",
        "clock_hz": _MXU + "459e12 / (2 x 8 x 128 x 128) = 1751 MHz",
        "links": "Scaling book: 6 neighbours",
        "link_bandwidth": (
            "Scaling book: 90 GB/s one way; Cloud: 1200 GB/s both ways a chip / 6 / 2 = 100 nominal"
        ),
        "hop_latency": _HOP,
        "pod": "Cloud: 8960 chips, the largest job 6144; Scaling book: 16 x 20 x 28",
        "dcn_bandwidth": "Cloud: 50 Gbps a chip; Scaling book: 6.25 GB/s",
    },
)

V6E = _chip(
    family="v6e",
    device_kind="TPU v6 lite",
    flops=918e12,
    hbm_bytes=32 * GIB,
    usable_hbm_bytes=int(31.25 * GIB),
    hbm_bandwidth=1638e9,
    tensor_cores=1,
    devices=1,
    clock_hz=1750e6,
    links=4,
    dcn_bandwidth=12.5e9,
    link_bandwidth=90e9,
    hop_latency=1e-6,
    pod=(16, 16),
    cube=0,
    largest_slice=256,
    sub_host=True,
    chip_config=None,
    matrix_cycles=0.7,
    sources={
        "flops": "Cloud: 918 TFLOP/s",
        "hbm_bytes": "Cloud: 32 GB (GiB by libtpu's limit)",
        "usable_hbm_bytes": _LIMIT + "31.25G",
        "hbm_bandwidth": "Cloud: 1638 GB/s",
        "devices": "libtpu: v6e:2x4 lists 8 devices",
        "clock_hz": (
            _MXU + "918e12 / (2 x 4 x 256 x 256) = 1751 MHz. Cloud states two 256x256 units, "
            "which alone would need 3.5 GHz; libtpu's own cycles for matrix products reach 456,000 "
            "operations a cycle, 87 % of four units' 524,288 and above two units' 262,144"
        ),
        "links": "Cloud: 4 ports",
        "link_bandwidth": (
            "Scaling book: 90 GB/s one way; Cloud: 800 GB/s both ways a chip / 4 / 2 = 100 nominal"
        ),
        "hop_latency": _HOP,
        "pod": "Cloud: 256 chips, 2D torus, 16x16 the largest slice",
        "dcn_bandwidth": (
            "Cloud: 4 x 200 Gbps a host of 8 chips, 25.6 Tbps a pod; Scaling book: 12.5 GB/s a chip"
        ),
    },
)

CHIPS: Mapping[str, Chip] = MappingProxyType(
    {chip.family: chip for chip in (V2, V3, V4, V5E, V5P, V6E)}
)

assert all(chip.links == 2 * chip.torus_dimension for chip in CHIPS.values())
assert all(chip.largest_slice <= prod(chip.pod) for chip in CHIPS.values())

"""What the host of TPU chips has: memory, and how fast it reaches them.

Memory is that of the virtual machine, whose chips ``Slice.chips_per_host`` says. "Cloud" is the
chip's own page, cloud.google.com/tpu/docs/v4 ... /v6e, "VM types". Those of v4, v5p and v6e are
as commonly cited: the pages were not at hand when this table was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from .topology import Slice

GB = 10**9

# Memory in GB by chips of the machine.
_MEMORY: Mapping[str, Mapping[int, int]] = MappingProxyType(
    {
        "v2": {4: 334},
        "v3": {4: 335},
        "v4": {4: 407},
        "v5e": {1: 48, 4: 192, 8: 384},
        "v5p": {4: 448},
        "v6e": {1: 176, 4: 720, 8: 1440},
    }
)
_SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "v2": "as commonly cited, 96 vCPUs and 334 GB",
        "v3": "T. S. Nguyen, June 2021, inside a TPU VM: 96 vCPUs and 335 GB",
        "v4": "as commonly cited of ct4p-hightpu-4t, 240 vCPUs and 407 GB",
        "v5e": "Cloud: ct5lp-hightpu-1t, -4t, -8t with 48, 192, 384 GB",
        "v5p": "as commonly cited of ct5p-hightpu-4t, 208 vCPUs and 448 GB",
        "v6e": "as commonly cited of ct6e-standard-1t, -4t, -8t, 176, 720, 1440 GB",
    }
)

# Bytes a second between a chip and its host, one way; a v2 or v3 chip has two devices. No page of
# Cloud has a figure.
PCIE = 15e9
PCIE_SOURCE = (
    "Scaling book, an exercise of part 2 for v6e: 15 GB/s a chip and way; taken for all chips"
)


@dataclass(frozen=True)
class Host:
    """One virtual machine of a slice.

    ``memory``: bytes. ``devices``: ranks on it. ``link``: bytes a second between one device and the
    host, one way. ``source``: where ``memory`` comes from.
    """

    memory: int
    devices: int
    link: float
    source: str


def host_of(where: Slice) -> Host:
    """The host of a slice; all have the same."""
    chip, chips = where.chip, prod(where.chips_per_host)
    return Host(
        # A single chip of v4 or v5p is one of a machine with four: tpu/topology.py.
        memory=_MEMORY[chip.family].get(chips, max(_MEMORY[chip.family].values())) * GB,
        devices=chips * chip.devices,
        link=PCIE / chip.devices,
        source=_SOURCES[chip.family],
    )

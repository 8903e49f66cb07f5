"""Prints the numbers of hosts, chips of a host, ranks of a chip and slices: v4-256: "32 4 1 1"."""

import sys
from math import prod

from xla_fsdp.tpu.topology import UnknownTopologyError, resolve


def slice_hosts(name: str) -> tuple[int, int, int, int]:
    """The numbers of hosts of all slices, chips of a host, ranks of a chip, and slices.

    A slice smaller than a host has fewer chips of that host.
    """
    slice = resolve(name)
    return slice.hosts, prod(slice.chips_per_host), slice.chip.devices, slice.count


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: slice_hosts.py SLICE")
    try:
        print(*slice_hosts(sys.argv[1]))
    except UnknownTopologyError as error:
        sys.exit(f"slice_hosts.py: {error}")

"""Prints the numbers of hosts, chips of a host, ranks of a chip and slices: v4-256: "32 4 1 1".

A slice smaller than a host has fewer chips of that host.
"""

import sys
from math import prod

from xla_fsdp.tpu.topology import UnknownTopologyError, resolve

if len(sys.argv) != 2:
    sys.exit("usage: slice_hosts.py SLICE")
try:
    slice = resolve(sys.argv[1])
except UnknownTopologyError as error:
    sys.exit(f"slice_hosts.py: {error}")
print(slice.hosts, prod(slice.chips_per_host), slice.chip.devices, slice.count)

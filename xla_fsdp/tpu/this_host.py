"""Which TPU chips this host has, as the PCI bus lists them: known before libtpu is loaded."""

from __future__ import annotations

from pathlib import Path

_BUS = Path("/sys/bus/pci/devices")
_VENDOR = "0x1ae0"
# By PCI device, as JAX has them (jax/_src/hardware_utils.py). v2 and v3 have one number.
FAMILIES = {"0x005e": "v4", "0x0062": "v5p", "0x0063": "v5e", "0x006f": "v6e"}


def family(bus: Path = _BUS) -> str | None:
    """Family of this host's chips, such as "v6e"; None without TPU, and for v2, v3 and others."""
    for vendor in sorted(bus.glob("*/vendor")):
        if vendor.read_text().strip() == _VENDOR:
            found = FAMILIES.get((vendor.parent / "device").read_text().strip())
            if found:
                return found
    return None

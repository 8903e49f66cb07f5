"""The TPU slice that a name means. Nothing here imports jax, torch or libtpu.

``v2-N``, ``v3-N``, ``v4-N``, ``v5p-N`` and ``tpu7x-N`` count TensorCores, ``v5litepod-N`` and
``v6e-N`` chips (cloud.google.com/tpu/docs). ``family:AxB`` or ``family:AxBxC`` states the shape in
chips. ``KxNAME`` is K such slices.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from .chips import CHIPS, Chip

# libtpu's default: chips of one host along x, y, z.
_HOST = (2, 2, 1)


def _chip_called(name: str) -> Chip | None:
    """The chip whose slices are called so: "v5e-16" is a v5litepod-16."""
    same = (chip for chip in CHIPS.values() if name in (chip.family, chip.accelerator))
    return next(same, None)


class UnknownTopologyError(ValueError):
    """A name that means no slice.

    ``name``: as given. ``reason``: one clause. ``closest``: names that do resolve, best first.
    """

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        self.closest = _closest(name)
        hint = f" Did you mean {', '.join(self.closest)}?" if self.closest else ""
        super().__init__(f"topology {name!r}: {reason}.{hint} {_offer()}")


@dataclass(frozen=True)
class Slice:
    """``count`` TPU slices of ``shape`` chips, joined by the data-center network.

    ``shape``: along each axis of the network, x first; v4-8 is (2, 2, 1). ``wraps``: whether an
    axis is a ring. Links, coordinates and ``libtpu_name`` are those of one slice; ranks of the
    first come first.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    wraps: tuple[bool, ...]
    count: int = 1

    @property
    def chips(self) -> int:
        """Of all slices."""
        return prod(self.shape) * self.count

    @property
    def devices(self) -> int:
        """The world size."""
        return self.chips * self.chip.devices

    @property
    def libtpu_name(self) -> str:
        """``topology_name`` for ``jax.experimental.topologies.get_topology_desc``."""
        return f"{self.chip.family}:{'x'.join(map(str, self.shape))}"

    @property
    def options(self) -> dict[str, object]:
        """Further keyword arguments for ``get_topology_desc``, apart from ``platform``.

        Without ``wrap``, libtpu 0.0.21 made an all-gather over v4:4x4x4 an all-reduce of a padded
        tensor.
        """
        x, y, z = self._xyz(0, self.wraps)
        options: dict[str, object] = {
            "chips_per_host_bounds": list(self.chips_per_host),
            "wrap": [int(x), int(y), int(z)],
        }
        if self.chip.chip_config is not None:
            options["chip_config_name"] = self.chip.chip_config
        if self.count > 1:
            options["num_slices"] = self.count
        return options

    @property
    def chips_per_host(self) -> tuple[int, int, int]:
        """Chips of one host along x, y, z (cloud.google.com/tpu/docs/v5e, /v6e).

        A single chip of v4 or v5p is a part of a host (``TPU_CHIPS_PER_PROCESS_BOUNDS=1,1,1``).
        """
        if prod(self.shape) == 1 or self.chip.sub_host and prod(self.shape) == 8:
            return self._xyz(1, self.shape)
        return _HOST

    @property
    def hosts(self) -> int:
        return self.chips // prod(self.chips_per_host)

    @property
    def host_memory(self) -> int:
        """Bytes of memory of one host. A single chip of v4 or v5p is one of a host with four."""
        memory = self.chip.host_memory
        return memory.get(prod(self.chips_per_host), max(memory.values())) * 10**9

    @property
    def device_shape(self) -> tuple[int, int, int, int]:
        return (*self._xyz(1, self.shape), self.chip.devices)

    def coordinates(self) -> tuple[tuple[int, int, int, int], ...]:
        """(x, y, z, core) of each rank of a slice, by device id: core fastest, then x, y, z.

        As in libtpu 0.0.21. A topology description lists ``devices`` host by host: sort them by
        ``id``.
        """
        x_size, y_size, z_size, cores = map(range, self.device_shape)
        slowest_first = product(z_size, y_size, x_size, cores)
        return tuple((x, y, z, core) for z, y, x, core in slowest_first)

    @staticmethod
    def _xyz(fill: int, values: tuple[int, ...]) -> tuple[int, int, int]:
        x, y, z = (*values, fill)[:3]
        return x, y, z


def slice_names() -> tuple[str, ...]:
    """Without shapes and the alias v5e-N."""
    return tuple(f"{chip.accelerator}-{size}" for chip in CHIPS.values() for size in chip.slices)


def resolve(name: str) -> Slice:
    """The slice that ``name`` means, such as "v3-128", "v5litepod-8", "v5e-8" or "v4:4x4x8".

    Raises ``UnknownTopologyError`` for a size or shape that no such slice has, and ``TypeError``
    for anything but a string.
    """
    if not isinstance(name, str):
        raise TypeError(f"topology must be a name such as 'v3-128', got {name!r}")
    given = name.strip()
    text = given.lower()
    several = re.fullmatch(r"([0-9]{1,4})x([a-z].+)", text)
    if several:
        count, one = int(several[1]), resolve(several[2])
        if count < 1:
            raise UnknownTopologyError(given, f"{count} slices")
        if count > 1 and not one.chip.dcn_bandwidth:
            family = one.chip.family
            reason = f"{family} slices are not joined to train one model (v4 and later are)"
            raise UnknownTopologyError(given, reason)
        return replace(one, name=given, count=count)
    family, colon, size = text.partition(":" if ":" in text else "-")
    chip = _chip_called(family)
    if chip is None:
        raise UnknownTopologyError(given, f"there is no TPU family {family!r}")
    if colon == ":":
        if not re.fullmatch(r"[0-9]{1,6}(x[0-9]{1,6})*", size):
            reason = f"after the colon go the chips along each axis, such as 4x4, not {size!r}"
            raise UnknownTopologyError(given, reason)
        shape = tuple(int(length) for length in size.split("x"))
        if chip.torus_dimension == 2 and len(shape) == 3 and shape[2] == 1:
            shape = shape[:2]
        if wrong := _why_not_shape(chip, shape):
            raise UnknownTopologyError(given, wrong)
    elif size in map(str, chip.slices):
        shape = chip.slices[int(size)]
    else:
        counted = "chips" if chip.tensor_cores == 1 else "TensorCores"
        reason = f"there is no {family} slice of {size or 'no'} {counted}"
        raise UnknownTopologyError(given, reason)
    return Slice(given, chip, shape, chip.wraps(shape))


def _why_not_shape(chip: Chip, shape: tuple[int, ...]) -> str | None:
    edge, number = chip.cube, prod(shape)
    if len(shape) != chip.torus_dimension:
        return f"a {chip.family} slice has {chip.torus_dimension} axes, not {len(shape)}"
    if min(shape) < 1:
        return "every axis needs at least one chip"
    if number == 1 and not chip.sub_host and not edge:
        return f"the smallest {chip.family} slice is one host of 2x2 chips"
    if number > 1 and (shape[0] % 2 or shape[1] % 2):
        return "a host holds 2x2 chips, so the first two axes must be even"
    if not edge and any(n > full for n, full in zip(shape, chip.pod, strict=True)):
        return f"a {chip.family} pod has {'x'.join(map(str, chip.pod))} chips"
    if edge and any(n > edge for n in shape) and any(n % edge for n in shape):
        axes = f"the axes of a {chip.family} slice are"
        return f"{axes} all at most {edge} or all multiples of {edge} chips"
    if edge and number > chip.largest_slice:
        return f"it has {number} chips; the largest {chip.family} slice has {chip.largest_slice}"
    return None


def _closest(name: str) -> tuple[str, ...]:
    text = name.strip().lower()
    family, _, size = text.partition("-")
    chip = _chip_called(family)
    if chip is not None and size.isascii() and size.isdigit():
        nearest = sorted(chip.slices, key=lambda known: abs(known - int(size)))[:3]
        return tuple(f"{chip.accelerator}-{known}" for known in nearest)
    shapes = [
        f"{chip.family}:{'x'.join(map(str, shape))}"
        for chip in CHIPS.values()
        for shape in chip.slices.values()
        if prod(shape) <= 512
    ]
    candidates = list(dict.fromkeys([*slice_names(), *shapes]))
    return tuple(difflib.get_close_matches(text, candidates, n=3, cutoff=0.5))


def _offer() -> str:
    """All that resolves; complete cubes are too many to list."""
    parts = []
    for chip in CHIPS.values():
        cube = chip.cube**3 * chip.tensor_cores
        few = ", ".join(str(size) for size in chip.slices if not cube or size < cube)
        cubes = f" and multiples of {cube} to {max(chip.slices)}" if cube else ""
        parts.append(f"{chip.accelerator}-{few}{cubes}")
    families = ", ".join(f"{family}:" for family in CHIPS)
    others = ", ".join(
        f"{chip.family}-N is {chip.accelerator}-N"
        for chip in CHIPS.values()
        if chip.family != chip.accelerator
    )
    return (
        f"There are {'; '.join(parts)} ({others}); "
        f"or the shape in chips after {families}, such as v5e:2x4 or v4:4x4x8; 2xv5litepod-256 is "
        "two slices joined by the data-center network."
    )

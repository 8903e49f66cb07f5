"""TPU compiler options, for planning and for ``xla_fsdp.launch``.

Without launch: ``export LIBTPU_INIT_ARGS="$(python -m xla_fsdp.compiler_options)"``
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .deprecated import new_name
from .tpu.chips import CHIPS, Chip, chip_of
from .tpu.libtpu_flags import (
    ARGUMENTS,
    library,
    parse_arguments,
    refusal,
    to_arguments,
    with_undefok,
)

OPTIONS: Mapping[str, str] = MappingProxyType({
    # Prefetches operands in one piece: slices take tables of 32 KiB. Workload S on v5e:2x4: 1,025
    # MiB of temporaries instead of 1,045. libtpu does not accept one slice on v5p.
    "xla_tpu_sliced_prefetch_max_slices": "0",
})  # fmt: skip

_VMEM = "xla_tpu_scoped_vmem_limit_kib"
_BUS, _VENDOR = Path("/sys/bus/pci/devices"), "0x1ae0"

# Collectives on v6e's SparseCores, because libtpu 0.0.51 (not 0.0.21) cannot overlap gathers
# otherwise. Workload S on v6e-8: 11.82 ms a step instead of 13.03; never run on a TPU by us.
ON_SPARSE_CORES: Mapping[str, str] = MappingProxyType({
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": "true",
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
    "xla_tpu_enable_all_gather_offload_tracing": "true",
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "false",
    "xla_enable_async_all_gather": "true",
    "xla_tpu_use_tc_device_shape_on_sc": "true",
    "xla_sc_disable_megacore_partitioning": "true",
    "xla_sc_enable_instruction_fusion": "false",
    "xla_sc_disjoint_spmem": "false",
})  # fmt: skip

# Overlaps gathers with element loops; steps are rarely shorter (benchmarks/LOG.md).
_BESIDE_ELEMENTS = "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions"


class RefusedOptionError(ValueError):
    """libtpu does not accept a value or the form of a flag.

    The flag is in ``LIBTPU_INIT_ARGS`` or in ``plan(compiler_options=)``.
    """


def add_to_environment(options: Mapping[str, str] = OPTIONS) -> None:
    """Adds ``options`` to ``LIBTPU_INIT_ARGS``, before ``xla_fsdp.launch``, for it and its ranks.

    Flags in that variable take precedence; those that libtpu does not know are ignored, with a
    warning.

    Raises:
        RefusedOptionError: libtpu refuses the value or the form of a flag.
    """
    given = os.environ.get(ARGUMENTS, "")
    os.environ[ARGUMENTS], _ = accepted(libtpu_init_args(given, options))


def accepted(
    arguments: str, libtpu: str | None = None, named: str = ARGUMENTS
) -> tuple[str, tuple[str, ...]]:
    """``arguments`` that a libtpu takes, and the flags in them that it will ignore, with a warning.

    ``libtpu``: its path, or this environment's. Without libtpu all flags count as known.
    ``named``: where the flags are from. Raises RefusedOptionError for a value or form that it
    refuses.
    """
    refused = refusal(arguments, libtpu or library())
    if refused.illegal:
        raise RefusedOptionError(
            f"libtpu refuses {named}={arguments!r}: {'; '.join(refused.illegal)}; correct it, or "
            "leave it out"
        )
    if refused.unknown:
        warnings.warn(
            f"libtpu does not know {', '.join(refused.unknown)}: ignored",
            stacklevel=3,
        )
    for word in re.findall(r"(?<!\S)xla_\w+=\S*", arguments):  # for libtpu it is no option
        warnings.warn(f"libtpu ignores {word}: write --{word} in LIBTPU_INIT_ARGS", stacklevel=3)
    return with_undefok(arguments, refused.unknown), refused.unknown


def limit_scoped_vmem(kib: int) -> Mapping[str, str]:
    """The option that gives one operation up to ``kib`` KiB of VMEM."""
    if type(kib) is not int or kib < 1:
        raise ValueError(f"kib must be a number of KiB from 1 on, such as 49152, got {kib!r}")
    return {_VMEM: str(kib)}


def for_large_matmuls(family: str | None = None) -> Mapping[str, str]:
    """For programs whose activations do not fit into VMEM anyway: ``Chip.scoped_vmem_kib``.

    ``family``: such as "v6e"; default: this host's. Nothing on v2, v3, v4 and without TPU. Raises
    ValueError for an unknown family.
    """
    if family and family not in CHIPS:
        raise ValueError(f"family must be one of {', '.join(CHIPS)}, got {family!r}")
    chip = CHIPS.get(family) if family else this_hosts_chip()
    return limit_scoped_vmem(chip.scoped_vmem_kib) if chip and chip.scoped_vmem_kib else {}


def require_loops_compile(device_kind: str) -> None:
    """Raises RuntimeError if ``LIBTPU_INIT_ARGS`` would make the compiler crash on loops."""
    given, chip = parse_arguments(os.environ.get(ARGUMENTS, "")), chip_of(device_kind)
    if chip and chip.crashes_on_fused_loops and given.get(_BESIDE_ELEMENTS) == "true":
        raise RuntimeError(
            f"on {device_kind} the TPU compiler crashes on loops if LIBTPU_INIT_ARGS has "
            f"--{_BESIDE_ELEMENTS}=true; take it out"
        )


def libtpu_init_args(given: str, options: Mapping[str, str] = OPTIONS) -> str:
    """``given`` arguments of libtpu, after those of ``options`` that it does not name.

    Of two values libtpu takes the last, and it ignores what follows a ``--``.
    """
    known = parse_arguments(given)
    added = {name: value for name, value in options.items() if name not in known}
    return " ".join([*to_arguments(added), *given.split()])


def main() -> int:
    """Prints ``LIBTPU_INIT_ARGS`` with the options; returns 2 if libtpu refuses it, else 0."""
    try:
        print(accepted(libtpu_init_args(os.environ.get(ARGUMENTS, "")))[0])
    except RefusedOptionError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def this_hosts_chip(bus: Path = _BUS) -> Chip | None:
    """This host's chip, without libtpu; None without TPU, for v2, v3 and unknown chips."""
    numbers = [(device / "device").read_text().strip() for device in _google_devices(bus)]
    return next((chip for chip in CHIPS.values() if chip.pci_device in numbers), None)


def may_have_chips(bus: Path = _BUS) -> bool:
    """Whether this host has a PCI device of Google: a TPU chip, or a network card."""
    return bool(_google_devices(bus))


def _google_devices(bus: Path) -> list[Path]:
    vendors = bus.glob("*/vendor")
    return [vendor.parent for vendor in vendors if vendor.read_text().strip() == _VENDOR]


def __getattr__(name: str) -> object:
    new = new_name("xla_fsdp.compiler_options", name)
    if new is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals()[new]


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m xla_fsdp.compiler_options",
        description="Prints the LIBTPU_INIT_ARGS that xla_fsdp.launch sets.",
    ).parse_args()
    sys.exit(main())

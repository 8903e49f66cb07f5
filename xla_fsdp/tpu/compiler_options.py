"""Options of the TPU compiler that it does not use by default.

The same in planning and at launch. ``xla_fsdp.launch`` puts the options into ``LIBTPU_INIT_ARGS``;
for programs started otherwise: ``export LIBTPU_INIT_ARGS="$(python -m xla_fsdp.compiler_options)"``
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .chips import CHIPS, Chip, chip_of
from .libtpu_flags import ARGUMENTS, library, read, refusal, without, without_dashes, written

OPTIONS: Mapping[str, str] = MappingProxyType({
    # Operands are prefetched in one piece, not in up to four slices one after the other: for
    # each the compiler sets aside two tables of 16 KiB that share memory with nothing.
    # Workload S on v5e:2x4: 1,025 instead of 1,045 MiB of temporaries, recomputed 367 instead of
    # 391, and 0.3 and 2 % fewer cycles. One slice would do the same, but libtpu
    # does not accept it on v5p.
    "xla_tpu_sliced_prefetch_max_slices": "0",
})  # fmt: skip

_VMEM = "xla_tpu_scoped_vmem_limit_kib"
# How this host lists its chips.
_BUS, _VENDOR = Path("/sys/bus/pci/devices"), "0x1ae0"

# Collectives on the SparseCores of v6e, beside computations, for libtpu 0.0.51. That one does not
# overlap gathers with matmuls on v6e any more, which 0.0.21 does: asked to, it refuses
# ("Continuation fusion ... not supported/recommended on platforms other than TPU v5e"). So without
# these options all bytes are sent synchronously there (docs/how-to/compiler-options.md). The names
# are those that MaxText publishes; never run on a TPU by us. Workload S on v6e-8: 11.82 ms a step
# (0.0.21: 12.57; 0.0.51 without: 13.03).
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

# Nothing, for scripts from when loops needed an option of launch undone.
FOR_LOOPS: Mapping[str, str] = MappingProxyType({})
# Gathers overlapped with loops over elements. It overlaps more of the bytes with compute, and
# except for recomputed blocks the step is as long or longer (benchmarks/LOG.md). With it the
# compiler crashes on loops for some chips: ``Chip.crashes_on_fused_loops``.
_BESIDE_ELEMENTS = "xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions"


class RefusedOptionError(ValueError):
    """``LIBTPU_INIT_ARGS`` has a value or a form that libtpu does not take."""


def add_to_environment(options: Mapping[str, str] = OPTIONS) -> None:
    """Adds ``options`` to ``LIBTPU_INIT_ARGS``, before ``xla_fsdp.launch``, for it and its ranks.

    What is in that variable already stays as it is and counts more. Flags that the installed libtpu
    does not know, whoever put them there, are marked to be ignored, with one warning.

    Raises:
        RefusedOptionError: (a ValueError) libtpu refuses the value or the form of a flag.
    """
    given = os.environ.get(ARGUMENTS, "")
    os.environ[ARGUMENTS], _ = accepted(libtpu_init_args(given, options))


def accepted(arguments: str, libtpu: str | None = None) -> tuple[str, tuple[str, ...]]:
    """``arguments`` that a libtpu takes, and the flags in them that it will ignore.

    ``libtpu``: its path; default: that of this environment. Warns of ignored flags once, and of
    options without dashes. Without libtpu all flags count as known.

    Raises:
        RefusedOptionError: (a ValueError) libtpu refuses the value or the form of a flag.
    """
    refused = refusal(arguments, libtpu or library())
    if refused.illegal:
        raise RefusedOptionError(
            f"libtpu refuses LIBTPU_INIT_ARGS={arguments!r}: {'; '.join(refused.illegal)}"
        )
    if refused.unknown:
        warnings.warn(
            f"libtpu does not know {', '.join(refused.unknown)}: ignored",
            stacklevel=3,
        )
    for word in without_dashes(arguments):
        warnings.warn(f"libtpu ignores {word}: write --{word} in LIBTPU_INIT_ARGS", stacklevel=3)
    return without(arguments, refused.unknown), refused.unknown


def limit_scoped_vmem(kib: int) -> Mapping[str, str]:
    """The option that gives one operation up to ``kib`` KiB of VMEM."""
    return {_VMEM: str(kib)}


def for_large_matmuls(family: str | None = None) -> Mapping[str, str]:
    """For programs whose activations do not fit into VMEM anyway: ``Chip.scoped_vmem_kib``.

    ``family``: of the chips, such as "v6e"; default: those of this host. Nothing on v2, v3 and v4,
    and without TPU.
    """
    chip = CHIPS.get(family) if family else this_hosts_chip()
    return limit_scoped_vmem(chip.scoped_vmem_kib) if chip and chip.scoped_vmem_kib else {}


def require_loops_compile(device_kind: str) -> None:
    """Raises where the compiler would crash later, with a message that does not help.

    Raises:
        RuntimeError: ``LIBTPU_INIT_ARGS`` asks for gathers beside loops on v5e or v6e.
    """
    given, chip = read(os.environ.get(ARGUMENTS, "")), chip_of(device_kind)
    if chip and chip.crashes_on_fused_loops and given.get(_BESIDE_ELEMENTS) == "true":
        raise RuntimeError(
            f"on {device_kind} the TPU compiler crashes on loops if LIBTPU_INIT_ARGS has "
            f"--{_BESIDE_ELEMENTS}=true; take it out"
        )


def libtpu_init_args(given: str, options: Mapping[str, str] = OPTIONS) -> str:
    """``given``, arguments of libtpu, and before them those of ``options`` that it does not name.

    Before them: of two values libtpu takes the last, and after a ``--`` none.
    """
    known = read(given)
    added = {name: value for name, value in options.items() if name not in known}
    return " ".join([*written(added), *given.split()])


def main() -> int:
    """Prints what ``LIBTPU_INIT_ARGS`` is to be: ``python -m xla_fsdp.compiler_options``.

    Returns the exit code: 0, or 2 if libtpu refuses what is in that variable already.
    """
    try:
        print(accepted(libtpu_init_args(os.environ.get(ARGUMENTS, "")))[0])
    except RefusedOptionError as error:
        print(f"error: {error}; correct or unset it", file=sys.stderr)
        return 2
    return 0


def this_hosts_chip(bus: Path = _BUS) -> Chip | None:
    """This host's chip, known before libtpu is loaded; None without TPU, and for v2, v3 and those
    that have no record."""
    for vendor in sorted(bus.glob("*/vendor")):
        if vendor.read_text().strip() == _VENDOR:
            number = (vendor.parent / "device").read_text().strip()
            for chip in CHIPS.values():
                if chip.pci_device == number:
                    return chip
    return None


def may_have_chips(bus: Path = _BUS) -> bool:
    """Whether this host has a PCI device of Google: a TPU chip, or a network card of its cloud."""
    return any(vendor.read_text().strip() == _VENDOR for vendor in bus.glob("*/vendor"))

"""Plan LLaMA with attention in plain operations, with the kernel, and with a fused cross entropy:
``python -m benchmarks.llama 1B v5litepod-16``.

No TPU is needed: it prints the compiler's memory and the modelled step. MFU counts only the scores
that causal attention uses, about half; a second MFU counts all, as MaxText's step logs do. Blocks
are scanned, so each is recomputed in the backward. Copies are operations that only move values to
another place or layout. Widths are those of Llama 3.2 1B, Llama 2 7B and Llama 3.1 8B and 70B
(``config.json`` of the published weights), embeddings not tied; 16B is MaxText's
(``published_runs.py``).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

import xla_fsdp
from xla_fsdp.tpu.topology import resolve

from .decoder import Decoder, decoder_step
from .published_runs import MAXTEXT_16B
from .tables import head, line, require_slices

GIB = 2**30

_SIZES = {"groups": 8, "vocabulary": 128256, "theta": 500000.0}
MODELS = {
    "1B": Decoder(16, 2048, 32, 64, 8192, length=2048, batch=4, **_SIZES),
    "7B": Decoder(32, 4096, 32, 128, 11008, 32000, length=4096, batch=2),
    "8B": Decoder(32, 4096, 32, 128, 14336, length=8192, batch=2, **_SIZES),
    "70B": Decoder(80, 8192, 64, 128, 28672, length=8192, batch=1, **_SIZES),
    "16B": MAXTEXT_16B,
}
WAYS = {
    "written out": {"kernel": False, "fused": False},
    "kernel": {"kernel": True, "fused": False},
    "kernel, fused cross entropy": {"kernel": True, "fused": True},
}
COLUMNS = (
    "step, ms (model)", "MFU, %", "with all of attention", "exposed collectives, ms",
    "tokens/s a device", "copies, ms",
)  # fmt: skip
_COPIES = ("copy", "transpose", "reshape")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.llama", description=__doc__)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("slice")
    parser.add_argument("--way", action="append", choices=WAYS, help="default: all")
    parser.add_argument("--batch", type=int, help="sequences per device")
    parser.add_argument("--keep", nargs="+", default=[], metavar="NAME", help="values that are not "
                        "recomputed: attention, q, k, v, out, gate, up, down")  # fmt: skip
    parser.add_argument("--by_heads", action="store_true", help="compute heads in the matmuls, as "
                        "in models of transformers")  # fmt: skip
    parser.add_argument("--prefetch", action="store_true", help="scan_blocks(prefetch=True)")
    parser.add_argument("--offload", action="store_true", help="scan_blocks(offload=True)")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE",
                        help="a compiler option")  # fmt: skip
    parser.add_argument("--compiler", help="as in xla_fsdp.plan: a version of libtpu, ...")
    flags = parser.parse_args(arguments)
    require_slices(parser, [flags.slice])
    sizes = replace(
        MODELS[flags.model],
        batch=flags.batch or MODELS[flags.model].batch,
        keep=tuple(flags.keep),
        prefetch=flags.prefetch,
        offload=flags.offload,
        by_heads=flags.by_heads,
    )
    options = dict(option.split("=", 1) for option in flags.option)
    print(head(["", *COLUMNS, "HBM, GiB", "fits"]))
    for way in flags.way or WAYS:
        step = decoder_step(replace(sizes, **WAYS[way]))
        try:
            report = xla_fsdp.plan(
                step, flags.slice, ranks=[0], title=way, compiler_options=options,
                compiler=flags.compiler,
            )  # fmt: skip
        except xla_fsdp.UnusableCompilerError as error:
            parser.exit(2, f"{parser.prog}: {error}\n")
        figures = ["unknown"] * len(COLUMNS)
        if report.timed:
            figures = [f"{value:,.1f}" for value in timed(report, sizes)]
        memory = f"{report.memory.required / GIB:,.1f}"
        print(line([way, *figures, memory, "yes" if report.fits else "no"]), flush=True)


def timed(report: xla_fsdp.Report, sizes: Decoder) -> Iterator[float]:
    """The figures of :data:`COLUMNS`."""
    timing, chip = report.timing, resolve(report.topology).chip
    yield 1e3 * timing.step
    yield 100 * timing.mfu
    yield 100 * sizes.flops() / timing.step / chip.device_flops
    yield 1e3 * timing.exposed
    yield sizes.tokens / timing.step
    copied = sum(o.cycles * o.times for o in report.schedule.ops if o.opcode in _COPIES)
    yield 1e3 * copied / chip.clock_hz


if __name__ == "__main__":
    sys.exit(main())

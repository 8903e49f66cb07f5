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
from collections.abc import Callable, Sequence
from dataclasses import replace

from xla_fsdp import Report
from xla_fsdp.tpu.chips import Chip
from xla_fsdp.tpu.topology import resolve

from .decoder import Decoder, decoder_step
from .published_runs import MAXTEXT_16B
from .tables import GIB, Table, add_options, head, line, plan_of, require_slices

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
    add_options(parser)
    parser.add_argument("--compiler", help="as in xla_fsdp.plan: a version of libtpu, ...")
    flags = parser.parse_args(arguments)
    require_slices(parser, [flags.slice], [flags.compiler])
    sizes = replace(
        MODELS[flags.model],
        batch=flags.batch or MODELS[flags.model].batch,
        keep=tuple(flags.keep),
        prefetch=flags.prefetch,
        offload=flags.offload,
        by_heads=flags.by_heads,
    )
    plans = {
        way: plan_of(
            decoder_step(replace(sizes, **options)), ranks=[0], title=way,
            compiler_options=dict(flags.option),
        )
        for way, options in WAYS.items()
    }  # fmt: skip
    table = Table((flags.slice,), plans, figures_of(sizes, resolve(flags.slice).chip))
    print(head(["", *table.figures]))
    for _, way, report in table.reports(names=flags.way or (), compilers=[flags.compiler]):
        print(line([way, *table.cells(report)]), flush=True)


def figures_of(sizes: Decoder, chip: Chip) -> dict[str, Callable[[Report], str]]:
    """The columns: figures of time, which are unknown for plans that do not fit, and of memory."""

    def copies(report: Report) -> float:
        copied = (op for op in report.schedule.ops if op.opcode in _COPIES)
        return 1e3 * sum(op.cycles * op.times for op in copied) / chip.clock_hz

    times: dict[str, Callable[[Report], float]] = {
        "step, ms (model)": lambda r: 1e3 * r.timing.step,
        "MFU, %": lambda r: 100 * r.timing.mfu,
        "with all of attention": lambda r: 100 * sizes.flops() / r.timing.step / chip.device_flops,
        "exposed collectives, ms": lambda r: 1e3 * r.timing.exposed,
        "tokens/s a device": lambda r: sizes.tokens / r.timing.step,
        "copies, ms": copies,
    }

    def shown(figure: Callable[[Report], float]) -> Callable[[Report], str]:
        return lambda report: f"{figure(report):,.1f}" if report.timed else "unknown"

    return {
        **{label: shown(figure) for label, figure in times.items()},
        "HBM, GiB": lambda r: f"{r.memory.required / GIB:,.1f}",
        "fits": lambda r: "yes" if r.fits else "no",
    }


if __name__ == "__main__":
    sys.exit(main())

"""Print the share of a chip's peak that the compiler's cycles give large matmuls and a sum:
``python -m benchmarks.cycles v6e-8 [--option name=value ...]``.

Matmuls are of bfloat16; the sum is of float32, and its peak is the bandwidth of HBM. No TPU is
needed.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence

from xla_fsdp import Report
from xla_fsdp.planning.foreign import plan_partitioned
from xla_fsdp.planning.tracing.traced import PartitionedProgram
from xla_fsdp.tpu.chips import Chip
from xla_fsdp.tpu.topology import resolve

from .tables import add_options, head, line, require_slices

# (m, k, n): matmul of (m, k) and (k, n). The last three are of LLaMA 8B and MaxText's 16B.
MATMULS = (
    (8192, 8192, 8192),
    (4096, 4096, 4096),
    (8192, 1024, 4096),
    (8192, 4096, 1024),
    (24576, 4096, 14336),
    (24576, 14336, 4096),
    (12288, 4096, 28672),
)
EDGE = 8192  # of the summed matrices


def program() -> str:
    """The StableHLO of all operations, each with two arguments of its own."""
    operations = [
        (f"stablehlo.dot_general {{}}, contracting_dims = [1] x [0] : ({left}, {right}) -> {out}",
         (left, right, out))
        for left, right, out in (
            (f"tensor<{m}x{k}xbf16>", f"tensor<{k}x{n}xbf16>", f"tensor<{m}x{n}xbf16>")
            for m, k, n in MATMULS
        )
    ]  # fmt: skip
    matrix = f"tensor<{EDGE}x{EDGE}xf32>"
    operations.append((f"stablehlo.add {{}} : {matrix}", (matrix,) * 3))
    arguments, body = [], []
    for number, (operation, (left, right, _)) in enumerate(operations):
        for name, shape in ((f"%a{number}", left), (f"%b{number}", right)):
            arguments.append(f'{name}: {shape} {{mhlo.sharding = "{{replicated}}"}}')
        body.append(f"%r{number} = " + operation.format(f"%a{number}, %b{number}"))
    names = ", ".join(f"%r{number}" for number in range(len(operations)))
    shapes = ", ".join(out for _, (_, _, out) in operations)
    lines = "\n    ".join([*body, f"return {names} : {shapes}"])
    function = f"func.func @main({', '.join(arguments)}) -> ({shapes})"
    return f"module @step {{\n  {function} {{\n    {lines}\n  }}\n}}\n"


def planned(slice: str, options: dict[str, str]) -> Report:
    text = program().encode()
    operations = PartitionedProgram(
        stablehlo=text,
        fingerprint=hashlib.sha256(text).hexdigest(),
        shardy=False,
        devices=resolve(slice).devices,
        arguments=tuple(f"argument {n}" for n in range(2 * len(MATMULS) + 2)),
        donated={},
        elements=1,
        itemsize=2,
        model_flops=1.0,
    )
    return plan_partitioned(operations, slice, compiler_options=options)


def shares(report: Report, chip: Chip) -> list[str]:
    """Shares of the peaks, of matmuls and sum, which are found by the shapes of their results."""
    outputs = {b.name: b.shape for b in report.schedule.buffers if b.category == "output"}
    seconds = {
        outputs[op.name]: op.cycles / chip.clock_hz
        for op in report.schedule.ops
        if op.cycles and op.name in outputs
    }
    found = [2 * m * k * n / chip.device_flops / seconds[f"bf16[{m},{n}]"] for m, k, n in MATMULS]
    moved = 3 * 4 * EDGE**2  # bytes: two matrices read, one written
    found.append(moved / chip.device_hbm_bandwidth / seconds[f"f32[{EDGE},{EDGE}]"])
    return [f"{share:.0%}" for share in found]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cycles", description=__doc__)
    parser.add_argument("slice", nargs="+", help="such as v6e-8")
    add_options(parser)
    flags = parser.parse_args(arguments)
    require_slices(parser, flags.slice)
    print(head(["", *(f"{m}×{k} · {k}×{n}" for m, k, n in MATMULS), "a + b, of HBM"]))
    for name in flags.slice:
        chip = resolve(name).chip
        print(line([chip.family, *shares(planned(name, dict(flags.option)), chip)]), flush=True)


if __name__ == "__main__":
    main()

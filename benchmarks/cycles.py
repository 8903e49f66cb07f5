"""Compare libtpu's ``estimated_cycles`` with the peaks of a chip:
``python -m benchmarks.cycles v6e-8 [--option name=value ...]``.

Prints the speed of bfloat16 matmuls as a share of the chip's peak, and of element-wise operations
on 8192 x 8192 elements as a share of the HBM bandwidth. The operations do not depend on each other;
all are in one program. No TPU is needed, and nothing is measured on one. ``--option``: a compiler
option of libtpu, such as ``xla_tpu_scoped_vmem_limit_kib=98304``.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence

from xla_fsdp.planning.foreign import plan_partitioned
from xla_fsdp.planning.reporting.report import Report
from xla_fsdp.planning.tracing.traced import PartitionedProgram
from xla_fsdp.tpu.chips import Chip
from xla_fsdp.tpu.topology import resolve

from .tables import head, line, require_slices

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
EDGE = 8192
# Name, dtype, the operation in StableHLO, tensors read and written.
ELEMENTS = (
    ("a + b", "f32", "stablehlo.add", 3),
    ("a + a", "f32", "double", 2),
    ("a · b, bfloat16", "bf16", "stablehlo.multiply", 3),
)


def program() -> str:
    """The StableHLO of all operations, each with separate arguments."""
    arguments: list[str] = []
    results: list[tuple[str, str]] = []
    body: list[str] = []

    def argument(shape: str) -> str:
        arguments.append(f'%a{len(arguments)}: {shape} {{mhlo.sharding = "{{replicated}}"}}')
        return f"%a{len(arguments) - 1}"

    for m, k, n in MATMULS:
        left, right, out = (f"tensor<{a}x{b}xbf16>" for a, b in ((m, k), (k, n), (m, n)))
        names = f"{argument(left)}, {argument(right)}"
        results.append((f"%r{len(results)}", out))
        how = "contracting_dims = [1] x [0]"
        line = f"{results[-1][0]} = stablehlo.dot_general {names}, {how}"
        body.append(f"{line} : ({left}, {right}) -> {out}")
    for _, dtype, what, _ in ELEMENTS:
        shape = f"tensor<{EDGE}x{EDGE}x{dtype}>"
        first = argument(shape)
        second = first if what == "double" else argument(shape)
        results.append((f"%r{len(results)}", shape))
        operator = "stablehlo.add" if what == "double" else what
        body.append(f"{results[-1][0]} = {operator} {first}, {second} : {shape}")
    names = ", ".join(name for name, _ in results)
    shapes = ", ".join(shape for _, shape in results)
    lines = "\n    ".join([*body, f"return {names} : {shapes}"])
    function = f"func.func @main({', '.join(arguments)}) -> ({shapes})"
    return f"module @step {{\n  {function} {{\n    {lines}\n  }}\n}}\n"


def planned(slice: str, options: dict[str, str]) -> Report:
    text = program().encode()
    one = PartitionedProgram(
        stablehlo=text,
        fingerprint=hashlib.sha256(text).hexdigest(),
        shardy=False,
        devices=resolve(slice).devices,
        arguments=tuple(f"argument {n}" for n in range(text.count(b"%a"))),
        donated={},
        elements=1,
        itemsize=2,
        model_flops=1.0,
    )
    return plan_partitioned(one, slice, compiler_options=options)


def shares(report: Report, chip: Chip) -> list[str]:
    """Shares of the peaks, in the order of :data:`MATMULS` and :data:`ELEMENTS`.

    Operations are identified by their kind and the shape of their results.
    """
    outputs = {b.name: b.shape for b in report.schedule.buffers if b.category == "output"}
    cycles: dict[tuple[bool, str], list[int]] = {}
    for op in report.schedule.ops:
        if op.cycles and op.name in outputs:
            key = (op.opcode in ("add", "multiply"), outputs[op.name])
            cycles.setdefault(key, []).append(op.cycles)
    cells = []
    for m, k, n in MATMULS:
        (found,) = cycles[False, f"bf16[{m},{n}]"]
        cells.append(2 * m * k * n / chip.device_flops / (found / chip.clock_hz))
    for _, dtype, _, tensors in ELEMENTS:
        found = max(cycles[True, f"{dtype}[{EDGE},{EDGE}]"])
        width = 4 if dtype == "f32" else 2
        moved = tensors * EDGE**2 * width / chip.device_hbm_bandwidth
        cells.append(moved / (found / chip.clock_hz))
    return [f"{cell:.0%}" for cell in cells]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cycles", description=__doc__)
    parser.add_argument("slice", nargs="+", help="such as v6e-8")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    flags = parser.parse_args(arguments)
    require_slices(parser, flags.slice)
    options = dict(option.split("=", 1) for option in flags.option)
    columns = [f"{m}×{k} · {k}×{n}" for m, k, n in MATMULS] + [name for name, *_ in ELEMENTS]
    print(head(["", *columns]))
    for name in flags.slice:
        chip = resolve(name).chip
        print(line([chip.family, *shares(planned(name, options), chip)]), flush=True)


if __name__ == "__main__":
    main()

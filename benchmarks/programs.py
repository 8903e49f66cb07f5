"""Read figures of the compiled step from the files that XLA dumps while it compiles.

``XLA_FLAGS=--xla_dump_to=DIR --xla_dump_hlo_as_text`` writes, for each program that runs: the
traced HLO, the optimized and scheduled HLO, and the buffer assignment.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

_BITS = {"pred": 8, "bf16": 16}
_KINDS = ("all-gather", "reduce-scatter", "all-reduce")
_COLLECTIVE = re.compile(r" = (.*?) (all-gather|reduce-scatter|all-reduce)(?:-start)?\((.*)")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")


def step_program(dump: Path) -> dict:
    """Figures of the program compiled last, which is the step after the first ones.

    Collectives and bytes sent in a step; bytes that one rank needs (shards and optimizer state, old
    and new since nothing is donated, plus temporaries), and the temporaries alone; traced
    instructions; and how often the program was compiled.
    """
    optimized = sorted(dump.glob("*cpu_after_optimizations.txt"))
    if not optimized:
        raise FileNotFoundError(f"XLA dumped no program into {dump}")
    last = str(optimized[-1]).removesuffix("cpu_after_optimizations.txt")
    traced = Path(last + "before_optimizations.txt")
    report = Path(last + "cpu_after_optimizations-memory-usage-report.txt").read_text()
    total = re.search(r"Total bytes used: (\d+)", report)
    assigned = Path(last + "cpu_after_optimizations-buffer-assignment.txt").read_text()
    temporary = re.findall(r"^allocation \d+: size (\d+), preallocated-temp", assigned, re.M)
    same = _digest(traced)
    return {
        **collectives(optimized[-1].read_text()),
        # XLA on CPU widens some collectives to float32; the traced program has the real dtypes.
        "traced_wire_bytes": collectives(traced.read_text())["wire_bytes"],
        "program_bytes": int(total[1]) if total else None,
        "temp_bytes": sum(map(int, temporary)),
        "traced_instructions": sum(" = " in line for line in traced.open()),
        "step_executables": sum(_digest(f) == same for f in dump.glob("*before_optimizations.txt")),
    }


def collectives(hlo: str) -> dict:
    """Number of collectives by kind, and the bytes that a rank sends.

    In a ring of n ranks an all-gather sends (n-1)/n of its output, a reduce-scatter (n-1)/n of its
    input, and an all-reduce twice that.
    """
    counts = dict.fromkeys(_KINDS, 0)
    sent = 0.0
    for line in hlo.splitlines():
        found = _COLLECTIVE.search(line)
        if not found:
            continue
        result, kind, rest = found.groups()
        counts[kind] += 1
        group = _GROUP.search(rest)
        n = len(group[1].split(",")) if group else 1
        bytes_ = sum(_bytes(dtype, dims) for dtype, dims in _SHAPE.findall(result))
        # A reduce-scatter's result is one n-th of its input.
        sent += {"all-gather": (n - 1) / n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}[
            kind
        ] * bytes_
    return {"collectives": counts, "wire_bytes": round(sent)}


def _bytes(dtype: str, dims: str) -> int:
    bits = _BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 8)
    return math.prod(int(d) for d in dims.split(",") if d) * bits // 8


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

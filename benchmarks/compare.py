"""Compare with the FSDP class of torch_xla, on CPU ranks: ``python -m benchmarks.compare``.

Times are from one launch in which both classes train the same model in turns. Memory and programs
are from one launch for each class. Host time is measured without a launch, as on a TPU. Only the
ratios are meaningful: the ranks share the cores of the machine with each other and with everything
else that runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from .lanes import IN_TREE, OURS, Workload, memory_environment
from .programs import step_program
from .tables import head, line

RESULTS = Path(__file__).parent / "results"
MIB = 2**20

# label, how to get it from a lane's figures, decimals; below 1 is better in every row
ROWS = [
    ("step time, ms", lambda f: f["step_ms"], 0),
    ("host tracing a step as on a TPU, CPU ms", lambda f: f["trace_ms"], 1),
    ("peak memory of the step program, MiB a rank", lambda f: f["program_bytes"] / MIB, 1),
    ("of which temporaries, MiB a rank", lambda f: f["temp_bytes"] / MIB, 1),
    (
        "peak resident memory above idle, MiB all ranks",
        lambda f: (f["peak_rss_bytes"] - f["idle_rss_bytes"]) / MIB,
        1,
    ),
    ("bytes sent a step, as traced, MB a rank", lambda f: f["traced_wire_bytes"] / 1e6, 2),
    ("all-gathers a step", lambda f: f["collectives"]["all-gather"], 0),
    ("reduce-scatters a step", lambda f: f["collectives"]["reduce-scatter"], 0),
    ("all-reduces a step", lambda f: f["collectives"]["all-reduce"], 0),
    ("instructions traced a step", lambda f: f["traced_instructions"], 0),
    ("executables of the step over all ranks", lambda f: f["step_executables"], 0),
]


def markdown(ours: dict, in_tree: dict) -> str:
    """Ours, in-tree and their ratio."""
    lines = [head(["", "ours", "in-tree", "ratio"])]
    for label, get, decimals in ROWS:
        a, b = get(ours), get(in_tree)
        ratio = f"{a / b:.2f}" if b else "-"
        lines.append(line([label, f"{a:.{decimals}f}", f"{b:.{decimals}f}", ratio]))
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    default = Workload()
    for name in ("ranks", "blocks", "width", "heads", "batch", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    parser.add_argument(
        "--steps", type=int, default=20, help="timed steps of each class, over all rounds"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often the classes take turns")
    parser.add_argument("--checkpoint", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--compute_dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON and table")
    return parser.parse_args()


def compare(work: Workload, steps: int, rounds: int) -> dict[str, dict]:
    """All figures, by lane."""
    figures: dict[str, dict] = {}
    for name in (OURS, IN_TREE):
        with tempfile.TemporaryDirectory() as dump:
            environment = memory_environment(Path(dump))
            figures[name] = _measure("memory", work, name, environment=environment)
            figures[name] |= step_program(Path(dump))
    for found in (
        _measure("tracing_times", work, steps),
        _measure("step_times", work, steps, rounds),
    ):
        for name, more in found.items():
            figures[name] |= more
    return figures


def _measure(
    name: str, work: Workload, *arguments: object, environment: Mapping[str, str] = os.environ
) -> dict:
    """Calls a function of ``lanes.py`` in a separate process."""
    print(f"measuring {name}", file=sys.stderr)
    values = map(json.dumps, (name, asdict(work), *arguments))
    command = [sys.executable, "-m", "benchmarks.lanes", *values]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed ({run.returncode}):\n{run.stderr}")
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    flags = parse()
    work = Workload(**{name: getattr(flags, name) for name in Workload.__dataclass_fields__})
    figures = compare(work, flags.steps, flags.rounds)
    table = markdown(figures[OURS], figures[IN_TREE])
    pairs = zip(figures[OURS]["losses"], figures[IN_TREE]["losses"], strict=True)
    largest = max(abs(a - b) / abs(b) for a, b in pairs)
    figures |= {"largest_relative_loss_difference": largest, "workload": asdict(work)}
    flags.out.mkdir(parents=True, exist_ok=True)
    name = f"{work.blocks}x{work.width}-{work.ranks}ranks"
    name += "-checkpoint" if work.checkpoint else ""
    name += f"-{work.compute_dtype}" if work.compute_dtype else ""
    (flags.out / f"{name}.md").write_text(table + "\n")
    (flags.out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(f"{table}\n\nlargest relative difference of losses: {largest:.1e}")


if __name__ == "__main__":
    main()

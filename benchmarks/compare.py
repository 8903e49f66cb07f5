"""Compare with the FSDP class of torch_xla, on CPU ranks: ``python -m benchmarks.compare``.

Times are from one launch in which both classes train the same model in turns. Memory and programs
are from one launch for each class, because memory is measured per process. Host time is also
measured in a process without a launch, as on a TPU. Only the ratios are meaningful: the ranks share
the cores of the machine with each other and with everything else that runs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from .lanes import IN_TREE, OURS, Workload
from .programs import step_program

MB = 1 / 2**20

# label, how to get it from a lane's figures, decimals
ROWS = [
    ("step time, ms", lambda f: f["step_ms"], 0),
    ("host tracing a step as on a TPU, CPU ms", lambda f: f["trace_ms"], 1),
    ("host tracing a step inside the launch, CPU ms a rank", lambda f: f["launch_trace_ms"], 1),
    ("peak memory of the step program, MiB a rank", lambda f: f["program_bytes"] * MB, 1),
    ("of which temporaries, MiB a rank", lambda f: f["temp_bytes"] * MB, 1),
    (
        "peak resident memory above idle, MiB all ranks",
        lambda f: (f["peak_rss_bytes"] - f["idle_rss_bytes"]) * MB,
        1,
    ),
    ("wire bytes a step, as traced, MB a rank", lambda f: f["traced_wire_bytes"] / 1e6, 2),
    ("wire bytes a step, as compiled for CPU, MB a rank", lambda f: f["wire_bytes"] / 1e6, 2),
    ("all-gathers a step", lambda f: f["collectives"]["all-gather"], 0),
    ("reduce-scatters a step", lambda f: f["collectives"]["reduce-scatter"], 0),
    ("all-reduces a step", lambda f: f["collectives"]["all-reduce"], 0),
    ("instructions traced a step", lambda f: f["traced_instructions"], 0),
    ("compile time, s", lambda f: f["compile_s"], 1),
    ("executables of the step over all ranks", lambda f: f["step_executables"], 0),
]


def markdown(ours: dict, in_tree: dict) -> str:
    """Ours, in-tree and their ratio; below 1 is better in every row."""
    lines = ["| | ours | in-tree | ratio |", "|---|---:|---:|---:|"]
    for label, get, decimals in ROWS:
        a, b = get(ours), get(in_tree)
        ratio = f"{a / b:.2f}" if b else "-"
        lines.append(f"| {label} | {a:.{decimals}f} | {b:.{decimals}f} | {ratio} |")
    return "\n".join(lines)


RESULTS = Path(__file__).parent / "results"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
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
    return parser.parse_args(arguments)


def compare(work: Workload, steps: int, rounds: int) -> dict[str, dict]:
    """All figures, by lane."""
    figures = {name: _alone(name, work) for name in (OURS, IN_TREE)}
    for name, traced in _child("benchmarks.tracing", [steps], work, os.environ).items():
        figures.setdefault(name, {}).update(traced)
    for name, timed in _timed(work, steps, rounds).items():
        figures[name].update(timed)
    return figures


def _timed(work: Workload, steps: int, rounds: int) -> dict[str, dict]:
    import xla_fsdp

    from .timing import measure, summary

    print("running both classes in one launch", file=sys.stderr)
    a_round = max(1, round(steps / rounds))
    names = [OURS, IN_TREE]
    by_rank = xla_fsdp.launch(
        measure, (work, names, rounds, a_round, threading.Lock()), num_devices=work.ranks
    )
    return {name: summary(by_rank, name) for name in names}


def _alone(name: str, work: Workload) -> dict:
    from .footprint import environment

    with tempfile.TemporaryDirectory() as dump:
        memory = _child("benchmarks.footprint", [], work, environment(Path(dump)), name)
        return {**memory, **step_program(Path(dump))}


def _child(module: str, more: list, work: Workload, environment, *first: str) -> dict:
    print(f"running {' '.join([module, *first])}", file=sys.stderr)
    command = [sys.executable, "-m", module, *first, json.dumps(work.arguments), *map(str, more)]
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
    figures["largest_relative_loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
    figures["workload"] = work.arguments
    flags.out.mkdir(parents=True, exist_ok=True)
    name = f"{work.blocks}x{work.width}-{work.ranks}ranks"
    name += "-checkpoint" if work.checkpoint else ""
    name += f"-{work.compute_dtype}" if work.compute_dtype else ""
    (flags.out / f"{name}.md").write_text(table + "\n")
    (flags.out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(table)
    print(f"\nlargest relative difference of losses: "
          f"{figures['largest_relative_loss_difference']:.1e}")  # fmt: skip


if __name__ == "__main__":
    main()

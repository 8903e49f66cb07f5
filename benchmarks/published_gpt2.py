"""Compare the time model with GPT-2 runs on v4: ``python -m benchmarks.published_gpt2``.

The runs used in-tree FSDP. Each run of ``gpt2.py`` is planned on its slice, and the modelled step
is compared with the published one. Times are linear in the number of blocks, since all blocks are
equal. So a deep model may be planned at two small depths and extrapolated (``--depths 2 4``); the
table says so. Memory is not linear. Results are merged into
``benchmarks/results/published-gpt2.json``, and the table has all results in that file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from .gpt2 import DROPOUT, PEAK, RUNS, Run, step_for
from .memory import Peak

RESULTS = Path(__file__).parent / "results" / "published-gpt2.json"
GIB = 2**30
NO_DROPOUT = " without dropout"  # added to a run's name
# Figures of a plan that grow with each block by the same amount.
LINEAR = (
    "step_ms",
    "compute_ms",
    "collective_ms",
    "exposed_ms",
    "model_tflop",
    "sent_bytes",
)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_gpt2", description=__doc__
    )
    parser.add_argument(
        "names", nargs="*", metavar="name", help=f"runs: {', '.join(RUNS)}; default: all"
    )
    parser.add_argument(
        "--depths", type=int, nargs="+", metavar="N", help="numbers of blocks; default: all"
    )
    parser.add_argument("--no_dropout", action="store_true", help="plan without dropout")
    parser.add_argument("--one", type=int, metavar="N", help=argparse.SUPPRESS)  # in a child
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file; the table is in the same folder"
    )
    flags = parser.parse_args(arguments)
    wrong = [name for name in flags.names if name not in RUNS]
    if wrong:
        parser.error(f"no such run: {', '.join(wrong)}; allowed are {', '.join(RUNS)}")
    return flags


def planned(run: Run, layers: int, dropout: float) -> dict:
    """Make one plan in this process; return its figures."""
    import xla_fsdp

    title = f"GPT-2 {run.name}, {layers} blocks"
    step = step_for(run, layers, dropout)
    with Peak(_children_peak, 0.3) as compiler:
        report = xla_fsdp.plan(step, run.slice, ranks=(0,), launcher="torch_xla", title=title)
    time, memory = report.timing, report.memory
    figures = {
        "layers": layers,
        "step_ms": time.step * 1e3,
        "compute_ms": time.compute * 1e3,
        "collective_ms": time.collective * 1e3,
        "exposed_ms": time.exposed * 1e3,
        "model_tflop": time.model_flops / 1e12,
        "required_bytes": memory.required,
        "capacity_bytes": report.hbm_capacity,
        "sent_bytes": report.wire_bytes,
        "compile_s": report.compile_seconds,
        "parent_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": dict(report.versions),
    }
    if not report.from_cache:
        figures["compiler_rss_bytes"] = compiler.value
    return figures


def _children_peak() -> int:
    """Peak resident memory in bytes of the child process that uses most.

    Not ``getrusage(RUSAGE_CHILDREN)``: a child starts with the peak of the parent that forked it.
    """
    mine, peak = f"PPid:\t{os.getpid()}\n", 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            text = status.read_text()
            if mine in text and (found := re.search(r"VmHWM:\s*(\d+) kB", text)):
                peak = max(peak, int(found[1]) * 1024)
    return peak


def extrapolated(plans: list[dict], layers: int) -> dict:
    """The figures at ``layers``: planned, or extrapolated from the two deepest plans."""
    exact = [plan for plan in plans if plan["layers"] == layers]
    if exact:
        return exact[0]
    low, high = sorted(plans, key=lambda plan: plan["layers"])[-2:]
    ratio = (layers - low["layers"]) / (high["layers"] - low["layers"])
    line = {name: low[name] + ratio * (high[name] - low[name]) for name in LINEAR}
    return {**high, **line}


def collect(flags: argparse.Namespace) -> dict[str, list[dict]]:
    """Make the plans; return them by label, with those that are already in the file."""
    known = json.loads(flags.out.read_text()) if flags.out.exists() else {}
    more = ["--no_dropout"] if flags.no_dropout else []
    for name in flags.names or RUNS:
        label = name + NO_DROPOUT if flags.no_dropout else name
        for layers in flags.depths or [RUNS[name].layers]:
            plans = {plan["layers"]: plan for plan in known.get(label, [])}
            # Figures of the compiler's process are not in cached results, so the old ones are used.
            plans[layers] = {**plans.get(layers, {}), **_child(name, layers, more)}
            known[label] = [plans[n] for n in sorted(plans)]
            flags.out.write_text(json.dumps(known, indent=1) + "\n")
    return known


def _child(name: str, layers: int, more: list[str]) -> dict:
    # A separate process, to measure its peak memory.
    command = [sys.executable, "-m", "benchmarks.published_gpt2", name, "--one", str(layers), *more]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


COLUMNS = (
    "model, slice, batch a device",
    "blocks planned",
    "step: published, ms",
    "modelled, ms",
    "error",
    "compute, ms",
    "collectives, ms",
    "exposed, ms",
    "MFU: published",
    "modelled, as published",
    "with attention",
    "HBM, GiB",
    "fits",
    "compile, s",
    "peak RSS, GiB: tracing",
    "compiler",
)
NOTE = (
    "An error above 0: the model takes longer than the run did. `*`: layers and width derived, not "
    "published. MFU as published counts 6 FLOPs a parameter and token; with attention, every "
    "matmul of the forward three times. HBM: of a device, of {capacity:.2f} GiB; full depth only, "
    "because the compiler keeps more buffers live if the program fits anyway. Compile time and RSS "
    "are of the deepest plan."
)


def markdown(known: dict[str, list[dict]]) -> str:
    """The table and the meaning of its columns."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---" + "|---:" * (len(COLUMNS) - 2) + "|"]
    capacity = 0.0
    checks = []
    for label in [*RUNS, *(name + NO_DROPOUT for name in RUNS)]:
        run, plans = RUNS[label.removesuffix(NO_DROPOUT)], known.get(label, [])
        if len(plans) > 1 or any(plan["layers"] == run.layers for plan in plans):
            lines.append("| " + " | ".join(_row(label, run, plans)) + " |")
            checks.append(_check(label, run, plans))
            capacity = plans[0]["capacity_bytes"] / GIB
    return "\n".join([*lines, "", NOTE.format(capacity=capacity), *filter(None, checks)])


def _check(label: str, run: Run, plans: list[dict]) -> str:
    """The errors of extrapolation, if the full depth is planned as well."""
    full = [plan for plan in plans if plan["layers"] == run.layers]
    small = [plan for plan in plans if plan["layers"] < run.layers]
    if not full or len(small) < 2:
        return ""
    guess = extrapolated(small, run.layers)
    pairs = [(name, 100 * (guess[name] / full[0][name] - 1)) for name in LINEAR]
    at = " and ".join(str(plan["layers"]) for plan in small[-2:])
    return f"\n{label}, extrapolated from {at} blocks, compared with its full depth: " + ", ".join(
        f"{name} {error:+.1f} %" for name, error in pairs
    )


def _row(label: str, run: Run, plans: list[dict]) -> list[str]:
    f = extrapolated(plans, run.layers)
    seconds = f["step_ms"] / 1e3
    deep = [p["layers"] for p in plans if p["layers"] <= run.layers]
    full = run.layers in deep
    blocks = "all" if full else f"{deep[-2]} and {deep[-1]} of {run.layers}"
    fits = f["required_bytes"] <= f["capacity_bytes"]
    compiler = f.get("compiler_rss_bytes")
    return [
        f"{label}{'*' if run.derived else ''}, {run.slice}, {run.batch}",
        blocks,
        f"{run.step_ms:.0f}",
        f"{f['step_ms']:.0f}",
        f"{100 * (f['step_ms'] / run.step_ms - 1):+.0f} %",
        f"{f['compute_ms']:.0f}",
        f"{f['collective_ms']:.0f}",
        f"{f['exposed_ms']:.0f}",
        f"{run.mfu:.1f} %",
        f"{run.published_mfu(seconds):.1f} %",
        f"{100 * f['model_tflop'] * 1e12 / (seconds * PEAK):.1f} %",
        f"{f['required_bytes'] / GIB:.1f}" if full else "-",
        ("yes" if fits else "no") if full else "-",
        f"{f['compile_s']:.0f}",
        f"{f['parent_rss_bytes'] / GIB:.1f}",
        f"{compiler / GIB:.1f}" if compiler else "-",
    ]


def main() -> None:
    flags = parse()
    if flags.one is not None:
        dropout = 0.0 if flags.no_dropout else DROPOUT
        print(json.dumps(planned(RUNS[flags.names[0]], flags.one, dropout)))
        return
    table = markdown(collect(flags))
    flags.out.with_suffix(".md").write_text(table + "\n")
    print(table)


if __name__ == "__main__":
    main()

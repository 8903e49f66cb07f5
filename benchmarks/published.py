"""Compare the time model with published speeds: ``python -m benchmarks.published [NAME ...]``.

Each run of ``published_runs.py`` is planned on its slice, without a TPU, and the modelled step is
compared with the published one. Plans are cached; rows are stored in
``benchmarks/results/published.json``, and ``published.md`` is a table of all stored rows. A plan
takes minutes the first time. ``--list`` lists the runs; ``--known`` only writes the table again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import xla_fsdp
from xla_fsdp.tpu.chips import CHIPS
from xla_fsdp.tpu.topology import resolve

from .decoder import Decoder
from .published_runs import NOT_PLANNED, RUNS, Run, halves, step_of
from .tables import head, line

RESULTS = Path(__file__).parent / "results" / "published.json"
GIB = 2**30
NOTE = (
    "Seconds of a step. An error above 0: the model takes longer than the run did. `less kept`: "
    "without the matmuls that the run did not recompute; errors are of this time. `MFU`: of the "
    "modelled step, with half of causal attention where a kernel computes it. `host`: waits for "
    "copies between HBM and host memory."
)
TOO_MUCH = (
    "(too much): more than the chip has, with inputs in host memory as in the run (405B), or older "
    "than the rule that a plan that does not fit is made again with inputs there. Errors and "
    "corrections count them."
)


def planned(run: Run) -> dict:
    """The figures of a plan, in seconds and bytes.

    The published run fitted. So if the plan does not, it is made again with the inputs of blocks in
    host memory, and the row has ``"offloaded": True``.
    """
    row = _planned_once(run)
    can_offload = isinstance(run.sizes, Decoder) and not run.sizes.offload
    if row.get("fits") or not can_offload:
        return row
    offloaded = _planned_once(replace(run, sizes=replace(run.sizes, offload=True)))
    return {**offloaded, "offloaded": True, "step_in_hbm": row.get("step")}


def _planned_once(run: Run) -> dict:
    report = xla_fsdp.plan(
        step_of(run.sizes, run.replicas),
        run.slice,
        ranks=[0],
        compiler_options=run.options,
        title=run.name,
        compiler=run.libtpu or sys.executable,
    )
    if report.refusal:
        return {"refusal": report.refusal.splitlines()[0][:300]}
    chip = resolve(run.slice).chip
    again = sum(
        op.cycles * op.times
        for op in report.schedule.ops
        if op.recomputed and op.module.rpartition(".")[2] in run.kept
    )
    return {
        "step": report.timing.step,
        "compute": report.timing.compute,
        "collective": report.timing.collective,
        "exposed": report.timing.exposed,
        "host": report.timing.copies,
        "again": again / chip.clock_hz,
        "model_flops": report.timing.model_flops,
        "peak": chip.device_flops,
        "hbm": report.memory.required,
        "fits": report.fits,
        "options": dict(run.options),
        "compile_s": report.compile_seconds,
        "libtpu": report.versions["libtpu"],
        "notes": list(report.notes),
    }


def ratio(run: Run, row: dict) -> float:
    """Modelled over published time, without operations that the run did not recompute."""
    return (row["step"] - row["again"]) / run.seconds


def markdown(rows: dict[str, dict]) -> str:
    """Tables of all rows, of the errors by chip and by half, and of the order of settings."""
    good = {name: row for name, row in rows.items() if name in RUNS and "step" in row}
    fit, held = halves(list(good))
    labels = ["run", "half", "published", "step, s", "modelled, s", "less kept"]
    labels += ["error", "MFU, %", "exposed", "host", "HBM, GiB"]
    lines = [head(labels, names=3)]
    lines += [line(_row(RUNS[name], good[name], name in fit)) for name in RUNS if name in good]
    errors_of = ["mean error", "mean absolute error", "worst", "within 15 %"]
    lines += ["", head(["", "runs", *errors_of])]
    groups = {chip: [n for n in good if RUNS[n].chip == chip] for chip in _chips()}
    groups |= {"corrected on": sorted(fit), "held out": sorted(held)}
    newer = {chip.family for chip in CHIPS.values() if chip.generation >= 5}
    groups["held out, v5e and later"] = [n for n in sorted(held) if RUNS[n].chip in newer]
    groups["held out, plans that fit"] = [n for n in sorted(held) if good[n]["fits"]]
    for label, names in groups.items():
        if names:
            errors = [100 * (ratio(RUNS[n], good[n]) - 1) for n in names]
            near = sum(abs(error) <= 15 for error in errors)
            means = statistics.mean(errors), statistics.mean(map(abs, errors))
            cells = [f"{means[0]:+.0f} %", f"{means[1]:.1f} %", f"{max(errors, key=abs):+.0f} %"]
            lines.append(line([label, f"{len(names)}", *cells, f"{near} of {len(names)}"]))
    lines += _corrected(good, held)
    lines += ["", NOTE]
    if any(row.get("options", {}) != RUNS[name].options for name, row in good.items()):
        lines += ["", "(1) Planned without the compiler options of the run."]
    if any(row.get("offloaded") for row in good.values()):
        lines += ["", "(2) Planned with the inputs of blocks in host memory, to fit."]
    if not all(row["fits"] for row in good.values()):
        lines += ["", TOO_MUCH]
    lines += orders(good)
    for name, row in rows.items():
        if "step" not in row:
            lines.append(f"\nDid not fit, so no time: {name}: {row.get('refusal', '')}")
    return "\n".join(lines)


def correction(good: dict[str, dict], chip: str) -> tuple[float, int]:
    """Published seconds of a step on ``chip`` over modelled ones, and of how many runs.

    The median of the runs that may be used for corrections (:func:`halves`), without those whose
    seconds are an upper bound. (1.0, 0) if there are none. ``Chip.published`` has this figure.
    """
    fit, _ = halves(list(good))
    found = [
        1 / ratio(RUNS[name], good[name])
        for name in sorted(fit)
        if RUNS[name].chip == chip and not RUNS[name].bound
    ]
    return (statistics.median(found), len(found)) if found else (1.0, 0)


def _corrected(good: dict[str, dict], held: set[str]) -> list[str]:
    """A table of the held-out runs with the corrections of the other half."""
    labels = ["chip", "published / modelled, median", "of runs", "held-out runs"]
    labels += ["mean absolute error", "corrected", "worst, corrected", "within 15 %, corrected"]
    lines = ["", head(labels)]
    every: list[tuple[float, float]] = []

    def row(label: str, factor: str, runs: str, pairs: list[tuple[float, float]]) -> str:
        plain, corrected = ([100 * (one[i] - 1) for one in pairs] for i in (0, 1))
        near = sum(abs(error) <= 15 for error in corrected)
        cells = ["-"] * 4
        if pairs:
            cells = [f"{statistics.mean(map(abs, each)):.1f} %" for each in (plain, corrected)]
            cells += [f"{max(corrected, key=abs):+.0f} %", f"{near} of {len(pairs)}"]
        return line([label, factor, runs, f"{len(pairs)}", *cells])

    for chip in _chips():
        factor, runs = correction(good, chip)
        names = [name for name in sorted(held) if RUNS[name].chip == chip]
        ratios = [ratio(RUNS[name], good[name]) for name in names]
        pairs = [(one, one * factor) for one in ratios]
        every += pairs
        if runs:
            lines.append(row(chip, f"{factor:.2f}", f"{runs}", pairs))
    return [*lines, row("all", "", "", every)]


def orders(good: dict[str, dict]) -> list[str]:
    """Lines on each source with several settings of a model on a slice: fastest first, a token."""
    groups: dict[tuple[str, str, int], list[str]] = {}
    for name, run in RUNS.items():
        if name in good:
            size = getattr(run.sizes, "parameters", 0)
            groups.setdefault((run.slice, run.source, size), []).append(name)

    def published(name: str) -> float:  # seconds for each token of a device
        return RUNS[name].seconds / RUNS[name].sizes.tokens

    def modelled(name: str) -> float:
        return ratio(RUNS[name], good[name]) * published(name)

    lines = []
    for names in groups.values():
        if len(names) > 1:
            first, second = sorted(names, key=published), sorted(names, key=modelled)
            same = "the same" if first == second else "; ".join(second)
            lines.append(f"\nBy published time of a token: {'; '.join(first)}. Modelled: {same}.")
    return lines


def _chips() -> list[str]:
    return list(dict.fromkeys(run.chip for run in RUNS.values()))


def _row(run: Run, row: dict, fit: bool) -> list[str]:
    marks = " (1)" * (row.get("options", {}) != run.options) + " (2)" * bool(row.get("offloaded"))
    return [
        run.name + marks,
        "corrected on" if fit else "held out",
        run.published,
        f"{'at most ' if run.bound else ''}{run.seconds:.3f}",
        f"{row['step']:.3f}",
        f"{row['step'] - row['again']:.3f}" if row["again"] else "-",
        f"{100 * (ratio(run, row) - 1):+.0f} %",
        f"{100 * row['model_flops'] / (row['step'] * row['peak']):.1f}",
        f"{row['exposed']:.3f}",
        f"{row['host']:.3f}" if row.get("host") else "-",
        f"{row['hbm'] / GIB:.1f}{'' if row['fits'] else ' (too much)'}",
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names; default: all")
    parser.add_argument(
        "--list", action="store_true", help="list the runs, and those that are not planned"
    )
    parser.add_argument("--known", action="store_true", help="plan nothing, only write the table")
    parser.add_argument("--missing", action="store_true", help="plan only runs without a row")
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="JSON file; the table is in the same folder"
    )
    flags = parser.parse_args(arguments)
    asked = [n for n in RUNS if not flags.names or any(_means(part, n) for part in flags.names)]
    if not asked:
        parser.error(f"no run has {' or '.join(flags.names)} in its name; --list shows all")
    if flags.list:
        _show()
        return
    rows = json.loads(flags.out.read_text()) if flags.out.exists() else {}
    for number, name in enumerate([] if flags.known else asked, 1):
        if flags.missing and name in rows:
            continue
        print(f"{number} of {len(asked)}: {name}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        rows[name] = planned(RUNS[name])
        flags.out.write_text(json.dumps(rows, indent=1) + "\n")
        step = rows[name].get("step")
        said = f"{step:.3f} s, published {RUNS[name].seconds:.3f}" if step else "does not fit"
        took = time.perf_counter() - began
        print(f"  {said} ({took:.0f} s)", file=sys.stderr, flush=True)
    table = markdown(rows)
    flags.out.with_suffix(".md").write_text(table + "\n")
    print(table)


def _means(part: str, name: str) -> bool:
    """Whether the argument ``part`` means the run ``name``: a full name means only that run."""
    return part == name if part in RUNS else part in name


def _show() -> None:
    for run in RUNS.values():
        print(f"{run.name}: {run.published}, {run.source}")
        for label, text in (("assumed", run.assumed), ("differs", run.differs)):
            if text:
                print(f"    {label}: {text}")
    for name, why in NOT_PLANNED.items():
        print(f"not planned: {name}: {why}")


if __name__ == "__main__":
    main()

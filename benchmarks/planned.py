"""Compare with other FSDP implementations on the TPU compiler: ``python -m benchmarks.planned``.

Plans workload S for several slices, sharded in four ways: this wrapper, the class of torch_xla,
torch_xla's SPMD variant ("FSDPv2"), and plain JAX, with jit's default compiler options or with
MaxText's. There are tables for parameters gathered twice (ZeRO-3), for parameters kept for the
backward (ZeRO-2), for rematerialised blocks, for blocks in one loop, and for adapters beside frozen
layers (LoRA). No TPU is needed. A compilation takes half a minute to three minutes on two cores;
results are cached. Tables and pictures are written to ``benchmarks/results``.

``--compiler VERSION`` chooses the TPU compiler. Given twice, each row is planned by both, and the
figures in which they differ by more than 3 % are listed. ``--table compilers`` has our plans of
workload S, ViT-L/16 and GPT-2 medium, for such a comparison. ``--table routes`` compares
``collective_routes="auto"`` with ``"default"``, on the slices of v5e and v6e where they differ.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import xla_fsdp
from xla_fsdp import Report
from xla_fsdp.tpu.topology import resolve

from .decoder import Decoder, decoder_step
from .model import Block, BlockOfParts, LowRankBlock, adamw_step
from .peers import JAX, SPMD, maxtext_options, plan_peer
from .peers.sizes import AGAIN, KEPT, REMATERIALISED, SCANNED
from .tables import MB, MIB, Plan, Table, by_compiler, cycles, head, line, plan_of, require_slices
from .workload_s import IN_TREE, OURS, scanned_step, step_of

RESULTS = Path(__file__).parent / "results"
SLICES = (
    "v3-8", "v3-128", "v4-128", "v5litepod-8", "v5litepod-64", "v5litepod-256", "v5p-128", "v6e-8",
)  # fmt: skip
# Those of v5e and v6e on which collective_routes="auto" is not "default".
ROUTED = (
    "v5litepod-16", "v5litepod-64", "v5litepod-128", "v5litepod-256", "v6e-16", "v6e-64",
    "v6e-128", "v6e-256",
)  # fmt: skip
TUNED = "JAX, MaxText's options"
DEFAULT_ROUTES = "ours, default routes"
SEPARATE = "ours, separate q, k, v"  # weights of queries, keys and values, as in JAX's row
VIT, GPT = "ViT-L/16", "GPT-2 medium"
GPT_SIZES = Decoder(24, 1024, 16, 64, 4096, 50304, length=1024, batch=8, gpt=True)
LORA = "LoRA"
LARGE = 0.03  # of two compilers' figures
NOTE = (
    "sent: bytes a device sends in a step; bound: two all-gathers and one reduce-scatter of every "
    "parameter in bfloat16 (ZeRO-2 sends one gather less); asynchronous, fused (inside a "
    "computation): of the bytes; synchronous: all that are not asynchronous; milliseconds: of the "
    "time model in docs/design/time-model.md."
)

Reports = dict[str, dict[str, Report]]  # by slice and name

# label, how to get it from a report, decimals
FIGURES: list[tuple[str, Callable[[Report], float], int]] = [
    ("sent, MB", lambda r: r.wire_bytes / MB, 1),
    ("sent / bound", lambda r: r.wire_ratio or 0.0, 2),
    ("asynchronous, %", lambda r: _percent(r, "asynchronous"), 0),
    ("fused, %", lambda r: _percent(r, "fused"), 0),
    ("synchronous collectives", lambda r: _synchronous(r), 0),
    ("temporaries, MiB", lambda r: r.memory.temporaries / MIB, 0),
    ("HBM required, MiB", lambda r: r.memory.required / MIB, 0),
    ("compute, M cycles", lambda r: cycles(r) / 1e6, 1),
    ("collectives, ms", lambda r: 1e3 * r.timing.collective, 1),
    ("step, ms", lambda r: 1e3 * r.timing.step, 1),
    ("MFU, %", lambda r: 100 * r.timing.mfu, 1),
]


def _percent(report: Report, how: str) -> float:
    some = report.schedule.collectives
    share = sum(c.wire_bytes * c.times for c in some if getattr(c, how))
    return 100 * share / report.wire_bytes if report.wire_bytes else 0.0


def _synchronous(report: Report) -> int:
    return sum(c.times for c in report.schedule.collectives if not c.asynchronous)


def _figure(get: Callable[[Report], float], decimals: int, report: Report) -> str:
    return f"{get(report):,.{decimals}f}"


def plans_of(names: Sequence[str], way: str) -> dict[str, Plan]:
    """Plans of workload S by name; ``way``: what is saved for the backward (``peers/sizes.py``).

    Each is compiled with the options that its users have on a TPU host: those of torch_xla for all
    but JAX, and in addition those of ``xla_fsdp.launch`` for ours. The SPMD variant is the same in
    all tables: there, the compiler decides what is saved for the backward.
    """
    step = partial(step_of, checkpoint=way == REMATERIALISED, reshard_after_forward=way != KEPT)
    if way == LORA:
        step = partial(step, kind=LowRankBlock)
    ours = scanned_step() if way == SCANNED else step(OURS)
    title = "workload S, {}".format
    plans: dict[str, Plan] = {
        OURS: plan_of(ours, title=title(OURS)),
        SEPARATE: plan_of(step(OURS, kind=BlockOfParts), title=title(SEPARATE)),
        DEFAULT_ROUTES: plan_of(
            step(OURS, collective_routes="default"), title=title(DEFAULT_ROUTES)
        ),
        IN_TREE: plan_of(step(IN_TREE), title=title(IN_TREE), launcher="torch_xla"),
        SPMD: partial(plan_peer, SPMD, launcher="torch_xla", title=title(SPMD)),
        JAX: partial(plan_peer, JAX, way=way, launcher="other", title=title(JAX)),
        TUNED: partial(_plan_tuned, way=way, title=title(TUNED)),
        VIT: plan_of(vit_step, title=VIT),
        GPT: _plan_gpt,
    }
    return {name: plans[name] for name in names}


def _plan_tuned(where: str, **options) -> Report:
    tuned = maxtext_options(resolve(where).chip.family)
    return plan_peer(JAX, where, launcher="other", compiler_options=tuned, **options)


def _plan_gpt(where: str, compiler: str | None = None) -> Report:
    sizes = replace(GPT_SIZES, kernel=resolve(where).chip.attention_kernel)
    return xla_fsdp.plan(decoder_step(sizes), where, title=GPT, compiler=compiler)


def vit_step() -> torch.Tensor:
    """A training step of ViT-L/16 with scanned blocks, 64 images of 224 x 224 per device."""
    width, classes = 1024, 1000
    narrow: dict = {"compute_dtype": torch.bfloat16}
    blocks = xla_fsdp.scan_blocks((Block(width, 16, causal=False) for _ in range(24)), **narrow)
    embed = nn.Linear(3 * 16 * 16, width)  # of patches
    body = nn.Sequential(embed, blocks, nn.LayerNorm(width), nn.Linear(width, classes))
    model = xla_fsdp.XlaFullyShardedDataParallel(body, **narrow)

    def loss() -> torch.Tensor:
        labels = torch.zeros(64, dtype=torch.long).to("xla")
        logits = model(torch.zeros(64, 14 * 14, 3 * 16 * 16).to("xla")).mean(1)
        return nn.functional.cross_entropy(logits.float(), labels)

    return adamw_step(model, loss)


def _table(slices: tuple[str, ...], names: tuple[str, ...], way: str = AGAIN) -> Table:
    figures = {label: partial(_figure, get, decimals) for label, get, decimals in FIGURES}
    return Table(slices, plans_of(names, way), figures)


PLAIN, COMPILERS, ROUTES = "plain", "compilers", "routes"
TABLES = {
    PLAIN: _table(SLICES, (OURS, SEPARATE, IN_TREE, SPMD, JAX)),
    "rematerialised": _table(SLICES, (OURS, SEPARATE, IN_TREE, JAX), REMATERIALISED),
    "one loop": _table(SLICES, (OURS, JAX, TUNED), SCANNED),
    "ZeRO-2": _table(SLICES, (OURS, SEPARATE, IN_TREE, JAX, TUNED), KEPT),
    LORA: _table(("v3-8", "v5litepod-8", "v6e-8"), (OURS, IN_TREE), LORA),
    ROUTES: _table(ROUTED, (OURS, DEFAULT_ROUTES)),
    COMPILERS: _table(("v3-8", "v5litepod-8", "v5litepod-64", "v6e-8"), (OURS, VIT, GPT)),
}


def markdown(reports: Reports) -> str:
    """A table with a row for each slice and name, and a column for each figure."""
    lines = [head(["slice", "", *(label for label, *_ in FIGURES)], names=2)]
    for where, by_name in reports.items():
        for name, report in by_name.items():
            lines.append(line([where, name, *TABLES[PLAIN].cells(report)]))
    return "\n".join(lines)


def page(tables: dict[str, Reports]) -> str:
    """All tables as one text."""
    titles = {kind: f"Workload S, {kind}" for kind in TABLES} | {COMPILERS: "Ours"}
    parts = [f"{titles[kind]}:\n\n{markdown(reports)}" for kind, reports in tables.items()]
    rows = (by_name for reports in tables.values() for by_name in reports.values())
    made = {report.versions.get("libtpu", "") for row in rows for report in row.values()}
    compilers = f"Compiled by libtpu {' and '.join(sorted(made - {''}))}."
    return "\n\n".join([*parts, NOTE, compilers])


def differences(reports: Reports, names: Sequence[str], compilers: Sequence[str]) -> str:
    """A table of the figures in which two compilers differ by more than :data:`LARGE`."""
    lines = [head(["slice", "", "figure", *compilers, "ratio"], names=3)]
    for where, by_name in reports.items():
        for name in names:
            pair = [by_name.get(by_compiler(name, compiler)) for compiler in compilers]
            if None in pair:
                continue
            for label, get, decimals in FIGURES:
                old, new = map(get, pair)
                if abs(new - old) > LARGE * max(old, new):
                    cells = [f"{figure:,.{decimals}f}" for figure in (old, new)]
                    cells.append(f"{new / old:.2f}" if old else "-")
                    lines.append(line([where, name, label, *cells]))
    return "\n".join(lines)


def stem(kind: str) -> str:
    """The beginning of the file names of a table's pictures."""
    return "planned-S" if kind == PLAIN else f"planned-S-{kind.replace(' ', '-')}"


def plan_table(
    kind: str,
    slices: Sequence[str],
    names: Sequence[str],
    out: Path,
    compilers: Sequence[str] = (),
) -> Reports:
    """Plans a table, or some slices and names of it; plots ours to ``out``.

    ``compilers``: versions of libtpu; default: that of plans. With several, a row for each.
    """
    reports: Reports = {}
    for where, row, report in TABLES[kind].reports(slices, names, compilers or (None,)):
        reports.setdefault(where, {})[row] = report
        if row == OURS:
            report.plot(out / f"{stem(kind)}-{where}.png")
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__)
    parser.add_argument("slices", nargs="*", help="default: all slices of each table")
    every = sorted({name for table in TABLES.values() for name in table.plans})
    parser.add_argument(
        "--only", action="append", choices=every, default=[], help="plan only this (repeatable)"
    )
    usual = [kind for kind in TABLES if kind not in (COMPILERS, ROUTES)]
    parser.add_argument(
        "--table", action="append", choices=list(TABLES), help=f"default: {', '.join(usual)}"
    )
    parser.add_argument(
        "--compiler", action="append", default=[], metavar="VERSION",
        help="as in xla_fsdp.plan; twice: plan each row by both, and compare",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for tables and pictures")
    flags = parser.parse_args()
    if len(flags.compiler) > 2:
        parser.error("--compiler can be given at most twice")
    require_slices(parser, flags.slices, flags.compiler)
    flags.out.mkdir(parents=True, exist_ok=True)
    tables = {
        kind: plan_table(kind, flags.slices, flags.only, flags.out, flags.compiler)
        for kind in flags.table or usual
    }
    text, name = page(tables), "planned-S"
    if len(flags.compiler) == 2:
        parts = [differences(table, every, flags.compiler) for table in tables.values()]
        text = "\n\n".join([text, f"Different by more than {LARGE:.0%}:", *parts])
        name = "compilers"
    (flags.out / f"{name}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

"""Compare with other FSDP implementations on the TPU compiler: ``python -m benchmarks.planned``.

Plans workload S for several slices, sharded in four ways: this wrapper, the class of torch_xla,
torch_xla's SPMD variant ("FSDPv2"), and plain JAX, with jit's default compiler options or with
MaxText's. There are tables for parameters gathered twice (ZeRO-3), for parameters kept for the
backward (ZeRO-2), for rematerialised blocks, for blocks in one loop, and for adapters of rank 16
beside frozen layers (LoRA). No TPU is needed. A compilation takes half a minute to three minutes on
two cores; results are cached. Tables and pictures are written to ``benchmarks/results``.

``--compiler VERSION`` chooses the TPU compiler. Given twice, each row is planned by both, and the
figures in which they differ by more than 3 % are listed. ``--table compilers`` has our plans of
workload S, ViT-L/16 and GPT-2 medium, for such a comparison. ``--table routes`` compares
``collective_routes="auto"`` with ``"default"``, on the slices of v5e and v6e where they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

import xla_fsdp
from xla_fsdp import Report
from xla_fsdp.plan_compiler import find_compiler
from xla_fsdp.tpu.topology import resolve

from .decoder import Decoder, decoder_step
from .model import Block, adamw_step
from .peers import JAX, SPMD, maxtext_options, plan_peer
from .peers.sizes import AGAIN, KEPT, REMATERIALISED, SCANNED
from .tables import cycles, head, line, require_slices
from .workload_s import IN_TREE, OURS, scanned_step, step_of

RESULTS = Path(__file__).parent / "results"
SLICES = (
    "v3-8", "v3-128", "v4-128", "v5litepod-8", "v5litepod-64", "v5litepod-256", "v5p-128", "v6e-8",
)  # fmt: skip
TUNED = "JAX, MaxText's options"
DEFAULT_ROUTES = "ours, default routes"
PARTS = "ours, by parts"  # queries, keys and values, as in JAX's row
VIT, GPT = "ViT-L/16", "GPT-2 medium"
GPT_SIZES = Decoder(24, 1024, 16, 64, 4096, 50304, length=1024, batch=8, gpt=True)


@dataclass(frozen=True)
class Table:
    """The slices and names of a table, and what is saved for the backward (``peers/sizes.py``)."""

    slices: tuple[str, ...]
    names: tuple[str, ...]
    way: str = AGAIN


PLAIN, LORA, COMPILERS, ROUTES = "plain", "LoRA", "compilers", "routes"
LORA_RANK = 16
TABLES = {
    PLAIN: Table(SLICES, (OURS, PARTS, IN_TREE, SPMD, JAX)),
    "rematerialised": Table(SLICES, (OURS, PARTS, IN_TREE, JAX), REMATERIALISED),
    "one loop": Table(SLICES, (OURS, JAX, TUNED), SCANNED),
    "ZeRO-2": Table(SLICES, (OURS, PARTS, IN_TREE, JAX, TUNED), KEPT),
    LORA: Table(("v3-8", "v5litepod-8", "v6e-8"), (OURS, IN_TREE)),
    ROUTES: Table(
        (
            "v5litepod-16",
            "v5litepod-64",
            "v5litepod-128",
            "v5litepod-256",
            "v6e-16",
            "v6e-64",
            "v6e-128",
            "v6e-256",
        ),  # fmt: skip
        (OURS, DEFAULT_ROUTES),
    ),
    COMPILERS: Table(("v3-8", "v5litepod-8", "v5litepod-64", "v6e-8"), (OURS, VIT, GPT)),
}
MB, MIB = 1e6, 2**20
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


def plan_one(name: str, where: str, table: Table, compiler: str | None = None) -> Report:
    """Plan workload S, sharded by ``name``, on a slice.

    Each is compiled with the options that its users have on a TPU host: those of torch_xla for all
    but JAX, and in addition those of ``xla_fsdp.launch`` for ours. The SPMD variant is the same in
    all tables: there, the compiler decides what is saved for the backward.

    ``name`` may also be another model that is sharded by this package: ``VIT`` or ``GPT``.
    """
    how: dict = {"title": f"workload S, {name}", "compiler": compiler}
    if name in (VIT, GPT):
        kernel = resolve(where).chip.attention_kernel
        step = vit_step if name == VIT else decoder_step(replace(GPT_SIZES, kernel=kernel))
        return xla_fsdp.plan(step, where, **{**how, "title": name})
    if name == SPMD:
        return plan_peer(SPMD, where, launcher="torch_xla", **how)
    if name in (JAX, TUNED):
        how["launcher"] = "other"
        options = maxtext_options(resolve(where).chip.family) if name == TUNED else None
        return plan_peer(JAX, where, way=table.way, compiler_options=options, **how)
    if table.way == SCANNED:
        return xla_fsdp.plan(scanned_step(), where, **how)
    wrapper = IN_TREE if name == IN_TREE else OURS
    options = {"collective_routes": "default"} if name == DEFAULT_ROUTES else {}
    how["launcher"] = "torch_xla" if name == IN_TREE else "xla_fsdp"
    step = step_of(
        wrapper,
        checkpoint=table.way == REMATERIALISED,
        reshard_after_forward=table.way != KEPT,
        parts=name == PARTS,
        lora_rank=LORA_RANK if table is TABLES[LORA] else 0,
        **options,
    )
    return xla_fsdp.plan(step, where, **how)


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


def markdown(reports: Reports) -> str:
    """A table with a row for each slice and name, and a column for each figure."""
    lines = [head(["slice", "", *(label for label, *_ in FIGURES)], names=2)]
    for where, by_name in reports.items():
        for name, report in by_name.items():
            cells = [f"{get(report):,.{decimals}f}" for _, get, decimals in FIGURES]
            lines.append(line([where, name, *cells]))
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


def by_compiler(name: str, compiler: str | None) -> str:
    """The name of a row if rows are planned by several compilers."""
    return f"{name}, {compiler}" if compiler else name


def stem(kind: str) -> str:
    """The beginning of the file names of a table's pictures."""
    return "planned-S" if kind == PLAIN else f"planned-S-{kind.replace(' ', '-')}"


def plan_table(
    kind: str,
    slices: Sequence[str] | None,
    names: Sequence[str] | None,
    out: Path,
    compilers: Sequence[str] = (),
) -> Reports:
    """Plan a table, or some slices and names of it; plot ours to ``out``.

    ``compilers``: versions of libtpu; default: that of plans. With several, a row for each.
    """
    table = TABLES[kind]
    reports: Reports = {}
    for where in slices or table.slices:
        for name in (name for name in table.names if name in (names or table.names)):
            for compiler in compilers or (None,):
                row = by_compiler(name, compiler if len(compilers) > 1 else None)
                print(f"{row}, {kind}, on {where}", file=sys.stderr)
                report = plan_one(name, where, table, compiler)
                reports.setdefault(where, {})[row] = report
                if name == OURS and len(compilers) < 2:
                    report.plot(out / f"{stem(kind)}-{where}.png")
    return reports


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planned", description=__doc__)
    parser.add_argument("slices", nargs="*", help="default: all slices of each table")
    every = sorted({name for table in TABLES.values() for name in table.names})
    parser.add_argument(
        "--only", action="append", choices=every, help="plan only this (repeatable)"
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
    require_slices(parser, flags.slices)
    if len(flags.compiler) > 2:
        parser.error("--compiler can be given at most twice")
    flags.out.mkdir(parents=True, exist_ok=True)
    try:
        for compiler in flags.compiler:
            find_compiler(compiler)
        tables = {
            kind: plan_table(kind, flags.slices, flags.only, flags.out, flags.compiler)
            for kind in flags.table or usual
        }
    except xla_fsdp.UnusableCompilerError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    text, name = page(tables), "planned-S"
    if len(flags.compiler) == 2:
        parts = [differences(table, every, flags.compiler) for table in tables.values()]
        text, name = (
            "\n\n".join([text, f"Different by more than {LARGE:.0%}:", *parts]),
            "compilers",
        )
    (flags.out / f"{name}.md").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()

"""The side-by-side benchmark runs end to end; no time it measured is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = "--ranks 2 --blocks 1 --width 32 --heads 2 --batch 1 --sequence 8 --steps 2 --rounds 2"
HLO = """
  %all-gather.1 = f32[8,128]{1,0} all-gather(%a), channel_id=1, replica_groups={{0,1,2,3}}, dimensions={0}
  %reduce-scatter.2 = bf16[2,128]{1,0} reduce-scatter(%b), replica_groups={{0,1,2,3}}, to_apply=%add
  %all-reduce.3 = (f32[4]{0}, f32[2]{0}) all-reduce(%c, %d), replica_groups={{0,1}}, to_apply=%add
  %fusion.4 = f32[8,128]{1,0} fusion(%all-gather.1), calls=%all-gather
"""  # noqa: E501


@pytest.mark.full
def test_side_by_side_run_gives_every_figure_and_equal_losses(tmp_path):
    command = [sys.executable, "-m", "benchmarks.compare", *TINY.split(), "--out", str(tmp_path)]
    quick_compiles = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    run = subprocess.run(command, cwd=ROOT, env=quick_compiles, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

    from benchmarks.compare import ROWS

    lines = run.stdout.splitlines()
    for label, *_ in ROWS:
        assert any(line.startswith(f"| {label} |") for line in lines), label
    figures = json.loads((tmp_path / "1x32-2ranks.json").read_text())
    assert (tmp_path / "1x32-2ranks.md").read_text().splitlines() == lines[: len(ROWS) + 2]
    # Same weights, same batches: the two classes are two ways to compute one thing.
    assert len(figures["ours"]["losses"]) >= 3
    assert figures["largest_relative_loss_difference"] < 1e-5
    # Read off the programs, so exact: ranks share one, and ours sends no more than in-tree.
    ours, in_tree = figures["ours"], figures["in-tree"]
    assert ours["step_executables"] == 1
    assert 0 < ours["traced_wire_bytes"] <= in_tree["traced_wire_bytes"]


@pytest.mark.slow
def test_a_wrong_slice_is_one_line_and_code_2(script_server):
    for module, *rest in (["planned"], ["plans", "depth"], ["llama", "1B"]):
        command = ["-m", f"benchmarks.{module}", *rest, "v9-8"]
        run = script_server.run(command, cwd=ROOT, env=os.environ, timeout=900)
        assert run.returncode == 2 and not run.stdout
        assert run.stderr.count("\n") == 1
        assert run.stderr.startswith(f"python -m benchmarks.{module}: ") and "v9-8" in run.stderr


def test_pictures_of_tables_have_no_spaces_in_their_names():
    from benchmarks.planned import TABLES, stem

    stems = {stem(kind) for kind in TABLES}
    assert stems >= {"planned-S", "planned-S-one-loop"} and not any(" " in one for one in stems)


def test_collectives_and_wire_bytes_are_counted_from_the_program():
    from benchmarks.programs import collectives

    found = collectives(HLO)
    assert found["collectives"] == {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 1}
    # 3/4 of 4096 gathered; 3 times the 512 bytes of a quarter; 2 * 1/2 of 24 all-reduced.
    assert found["wire_bytes"] == 3072 + 1536 + 24

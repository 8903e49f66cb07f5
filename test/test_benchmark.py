"""The side-by-side benchmark runs end to end; no time it measured is asserted."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TINY = "--ranks 2 --blocks 1 --width 32 --heads 2 --batch 1 --sequence 8 --steps 2 --rounds 2"


@pytest.mark.full
def test_side_by_side_run_gives_every_figure_and_equal_losses():
    command = [sys.executable, "-m", "benchmarks.compare", *TINY.split()]
    quick_compiles = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    run = subprocess.run(command, cwd=ROOT, env=quick_compiles, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr

    from benchmarks.compare import ROWS

    lines = run.stdout.splitlines()
    for label, *_ in ROWS:
        assert any(line.startswith(f"| {label} |") for line in lines), label
    # Same weights, same batches: the two classes are two ways to compute one thing.
    assert float(lines[-1].removeprefix("largest relative difference of losses: ")) < 1e-5


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

"""Releases of libraries that lack a name which an integration changes or uses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("missing_names.py")


def run(*arguments):
    environment = dict(os.environ, PJRT_DEVICE="CPU", PYTHONPATH=str(SCRIPT.parent.parent))
    done = subprocess.run(
        [sys.executable, SCRIPT, *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_missing_name_of_any_library_is_reported_and_nothing_is_changed():
    lines, _ = run("imports")
    assert len(lines) >= 10
    assert [line for line in lines if not line.endswith(": nothing is changed")] == []
    for integration in ("transformers", "accelerate", "models", "peft", "attention"):
        assert any(line.startswith(f"{integration} without") for line in lines)


def test_a_sharded_model_that_could_not_be_adapted_raises_in_its_methods(tmp_path):
    folder = tmp_path / "saved"
    lines, warned = run("models", str(folder))
    missing = "has no transformers.modeling_utils.ModuleUtilsMixin.num_parameters"
    assert missing in warned and "save_pretrained and generate of sharded models raise" in warned
    assert len(lines) == 4  # two errors of each of two ranks
    for method, text in zip(["save_pretrained", "generate"] * 2, lines, strict=True):
        assert text.startswith(f"{method} of GPT2LMHeadModel would use the shards")
        assert missing in text and "pip install 'xla_fsdp[hf]'" in text
    assert not folder.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"saved-plain0", "saved-plain1"}

"""The command: what it prints, its exit codes, and that it needs neither torch_xla nor asserts."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from consolidating import assert_same, loaded, run_cli
from per_rank_files import SUFFIX, expected_state_dict, path_of, rank_files, save, small_model

from xla_fsdp.consolidate import __main__ as cli


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **environment},
    )


def run(*arguments, flags=()):
    """The command as users run it, with warnings as errors."""
    return python("-W", "error", *flags, "-m", "xla_fsdp.consolidate", *arguments)


def test_command_of_the_readme(tmp_path):
    prefix = save(rank_files(small_model(), 4), tmp_path)
    target = tmp_path / "full.pth"
    done = run("--ckpt_prefix", prefix, "--ckpt_suffix", SUFFIX, "--save_path", target)
    assert done.returncode == 0, done.stderr
    # 9 parameters: the tied ones are counted once. 15 + 16 + 3 + 4 + 0 + 1 elements.
    assert done.stdout == (
        f"wrote {target}: 9 parameters (39 elements), {target.stat().st_size} bytes\n"
    )
    assert done.stderr.splitlines() == [
        f"found 4 rank files matching {prefix}{SUFFIX}",
        "assembled 9 parameters",
    ]
    assert_same(loaded(target), expected_state_dict(small_model()))


@pytest.mark.slow
def test_refusal_of_the_command(tmp_path):
    prefix = save(rank_files(small_model(), 2), tmp_path)
    path_of(tmp_path, 1, 2).unlink()
    done = run("--ckpt_prefix", prefix, flags=["-OO"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"MissingRankError: {path_of(tmp_path, 0, 2)}: written by 2 ranks,"
        " but there is no file of rank 1. Copy the files of all ranks.\n"
    )
    assert list(tmp_path.iterdir()) == [path_of(tmp_path, 0, 2)]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--ckpt_pre", "p"], *(["--ckpt_prefix", "p", "--tied", t] for t in ("a", "=a"))],
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    said = capsys.readouterr()
    assert (exit_.value.code, said.out) == (2, "") and "usage:" in said.err


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("", "two\\nlines.pth"),
        ("unknown://bucket/run", "OptionsError: path "),
        ("file://run", "OptionsError: path "),
    ],
)
def test_message_is_one_line(tmp_path, capsys, path, words):
    (tmp_path / "two\nlines.pth").write_bytes(b"")
    code, out, err = run_cli(capsys, "--ckpt_prefix", path or f"{tmp_path}/")
    assert (code, out, len(err)) == (2, [], 1)
    assert words in err[0] and path in err[0]


def test_interrupt(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupt)
    code, out, err = run_cli(capsys, "--ckpt_prefix", "p")
    assert (code, out, err) == (130, [], ["interrupted, nothing written"])


def test_import_does_not_start_torch_xla():
    script = "import sys, xla_fsdp.consolidate; print('torch_xla' in sys.modules)"
    # torch itself may import any installed backend; the user decides that.
    done = python("-c", script, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.stdout == "False\n", done.stderr

"""The command: what it prints, its exit codes, and that it needs neither torch_xla nor asserts."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_consolidate_support import (
    SUFFIX,
    assert_same,
    expected_state_dict,
    path_of,
    rank_files,
    run_cli,
    save,
    small_model,
)

import xla_fsdp.consolidate
from xla_fsdp.consolidate import __main__ as cli

pytestmark = pytest.mark.filterwarnings("error")
FOLDER = Path(xla_fsdp.consolidate.__file__).parent
SOURCES = sorted(p for part in (".", "legacy", "stream") for p in (FOLDER / part).glob("*.py"))


def run(*arguments, flags=()):
    """The command as users run it, with warnings as errors."""
    return subprocess.run(
        [sys.executable, "-W", "error", *flags, "-m", "xla_fsdp.consolidate", *map(str, arguments)],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )


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
    found = torch.load(target, weights_only=True)["model"]
    assert_same(found, expected_state_dict(small_model()))


@pytest.mark.parametrize("flags", [(), ("-O",), ("-OO",)])
def test_refusal_of_the_command(tmp_path, flags):
    prefix = save(rank_files(small_model(), 2), tmp_path)
    path_of(tmp_path, 1, 2).unlink()
    done = run("--ckpt_prefix", prefix, flags=flags)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        f"MissingRankError: {path_of(tmp_path, 0, 2)}: written by 2 ranks,"
        " but there is no file of rank 1. Copy the files of all ranks.\n"
    )
    assert list(tmp_path.iterdir()) == [path_of(tmp_path, 0, 2)]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--ckpt_suffix", "*"],
        ["--ckpt_prefix"],
        ["--ckpt_prefix", "p", "--nonsense"],
        ["--ckpt_prefix", "p", "surplus"],
        ["--ckpt_pre", "p"],
        ["--ckpt_prefix", "p", "--tied", "a"],
        ["--ckpt_prefix", "p", "--tied", "=a"],
    ],
)
def test_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "usage:" in captured.err


def test_help(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert all(option in out for option in ("--ckpt_prefix", "--ckpt_suffix", "--save_path"))


def test_default_save_path(tmp_path, capsys):
    prefix = save(rank_files(small_model(), 2), tmp_path)
    for said in ("wrote {}: ", "up to date: {}"):
        code, out, _ = run_cli(capsys, "--ckpt_prefix", prefix)
        assert code == 0
        assert out[-1].startswith(said.format(f"{prefix}_consolidated.pth"))


def test_message_is_one_line_whatever_the_file_is_called(tmp_path, capsys):
    (tmp_path / "two\nlines.pth").write_bytes(b"")
    code, out, err = run_cli(capsys, "--ckpt_prefix", f"{tmp_path}/")
    assert (code, out, len(err)) == (2, [], 1)
    assert "two\\nlines.pth" in err[0]


def test_interrupt(tmp_path, capsys, monkeypatch):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupt)
    code, out, err = run_cli(capsys, "--ckpt_prefix", "p")
    assert (code, out, err) == (130, [], ["interrupted, nothing written"])


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_sources(source):
    """No assert (gone under -O), no torch_xla, nothing of the parent package."""
    text = source.read_text()
    assert max(map(len, text.splitlines())) <= 100
    for node in ast.walk(ast.parse(text)):
        assert not isinstance(node, ast.Assert), f"{source}:{node.lineno}"
        if isinstance(node, ast.Import):
            assert not any(name.name.startswith("torch_xla") for name in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level <= (1 if source.parent == FOLDER else 2)
            assert node.level or not node.module.startswith(("torch_xla", "xla_fsdp"))


def test_import_does_not_start_torch_xla():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, xla_fsdp.consolidate; print('torch_xla' in sys.modules)",
        ],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
        # torch itself may import any installed backend; that is the user's switch, not ours.
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    assert done.stdout == "False\n", done.stderr


MEASURE = """
import re, sys, threading, time
from xla_fsdp.consolidate import consolidate_sharded_model_checkpoints

def private():
    # Memory of the process itself, without mapped files, which the kernel can drop at any time.
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024

peak = start = private()
done = False

def watch():
    global peak
    while not done:
        peak = max(peak, private())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
consolidate_sharded_model_checkpoints(sys.argv[1])
done = True
thread.join()
print(peak - start)
"""


def test_memory_is_the_result_alone(tmp_path):
    """A model of 64 MiB with Adam state on 4 ranks, 192 MiB of files, takes 64 MiB."""
    mib = 2**20
    files = []
    for rank in range(4):
        parameters, model = {}, {}
        for index in range(8):
            name = f"w{index}"
            model[name] = torch.ones(mib // 2)  # 2 MiB of an 8 MiB parameter
            member = {"names": [name], "shape": [2 * mib], "offset": 0}
            parameters[name] = {"layout": "flat", "numel": 2 * mib, "members": [member]}
        metadata = {
            "format": "xla_fsdp",
            "version": 1,
            "world_size": 4,
            "rank": rank,
            "parameters": parameters,
            "buffers": {},
        }
        adam = {name: [shard * 2, shard * 3] for name, shard in model.items()}
        files.append({"model": model, "shard_metadata": metadata, "optimizer": adam})
    prefix = save(files, tmp_path)
    del files, model, adam
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, prefix],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    assert 64 * mib <= int(done.stdout) < (64 + 16) * mib

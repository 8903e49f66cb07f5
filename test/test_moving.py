"""The scripts of the pages on migration: one job that moves trains as one that stays."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch_xla.runtime as xr
from conftest import ROOT
from moving_scripts import PAGES, scripts, train

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import extras

# torch speaks of its own deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")


def by_position(rank, folder):
    """What a rank file of the in-tree class holds, loaded without looking at names."""
    import torch
    from torch import nn

    path = f"{folder}/before/rank-{xr.global_ordinal()}-of-2.pth"
    content = torch.load(path, weights_only=True)
    inner = FSDP(nn.Linear(13, 31)), nn.GELU(), FSDP(nn.Linear(31, 7)), nn.LayerNorm(7)
    model = FSDP(nn.Sequential(*inner))
    model.load_state_dict(content["model"])
    optimizer, fresh = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    optimizer.load_state_dict(content["optimizer"])
    model(torch.ones(2, 13).to("xla")).square().mean().backward()
    with pytest.raises(RuntimeError, match="in another order: .*load_full_optim_state_dict"):
        optimizer.step()
    fresh.step()


def staying(network):
    model = network["build"]()
    optimizer = network["adamw"](model)
    return [network["step"](model, optimizer, number, 0, 1, "cpu") for number in range(8)]


def mean(per_rank):
    return [sum(of_step) / len(of_step) for of_step in zip(*per_rank, strict=True)]


@pytest.mark.slow
def test_a_rank_s_file_loads_by_position(run_ranks, tmp_path):
    for name, text in scripts().items():
        (tmp_path / name).write_text(text.replace("runs/", f"{tmp_path}/"))
    for function, *more in ((train, "before"), (by_position,)):
        run_ranks(function, 2, str(tmp_path), *more)


@pytest.mark.slow
def test_the_commands_of_the_pages_in_an_empty_folder(tmp_path):
    """As a user: each block saved under its name, each command as printed, in their order."""
    pages = [(ROOT / page).read_text(encoding="utf-8") for page in PAGES]
    for name, text in scripts().items():
        (tmp_path / name).write_text(text)
    network = {}
    exec(scripts()["network.py"], network)
    expected = staying(network)
    commands = re.findall(r"^(?:python|torchrun) .+$|(?<=`)(?:python|torchrun) [^`]+\.py(?=`)",
                          "\n".join(pages), re.M)  # fmt: skip
    started = [re.sub(r" --ckpt.*", "", command) for command in commands]
    assert started == [
        "python before.py", "python -m xla_fsdp.consolidate", "python after.py", "python leave.py",
        "torchrun --nproc-per-node=2 there.py", "python back.py",
    ]  # fmt: skip
    of_pages = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # Standalone: not at the one port that all of torchrun's jobs would share.
    of_pages |= {"PYTHONPATH": str(ROOT), "HOME": os.environ["HOME"], "PET_STANDALONE": "1"}
    printed = [
        subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=of_pages, check=True, timeout=600,
            stdout=subprocess.PIPE, text=True,
        ).stdout
        for command in commands
    ]  # fmt: skip
    # Lists, not lines: the processes of torchrun write into one line at times.
    losses = [
        [ast.literal_eval(one) for one in re.findall(r"\[\d[^\[\]]*\]", text)] for text in printed
    ]
    means = [loss for per_rank in losses for loss in mean(per_rank)]
    assert means == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "xla, torch, said",
    [
        ("2.9.0", "2.9.0+cpu", None),
        ("2.8.1", "2.8.0", None),
        (None, "2.15.0", None),
        ("2.9.0", "2.15.0", "built for torch 2.9 and does not load with torch 2.15.0"),
        ("2.7.0", "2.7.1", "torch_xla 2.7.0 is too old"),
    ],
)
def test_versions_of_torch_xla(monkeypatch, xla, torch, said):
    def version(name):
        if name == "torch_xla" and xla is None:
            raise extras.metadata.PackageNotFoundError(name)
        return {"torch_xla": xla, "torch": torch}[name]

    monkeypatch.setattr(extras.metadata, "version", version)
    if said is None:
        return extras.require_torch_xla()
    with pytest.raises(ImportError, match=said):
        extras.require_torch_xla()

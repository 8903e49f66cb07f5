"""The scripts of docs/moving.md: one job that moves trains as one that stays."""

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading

import pytest
from conftest import ROOT

# torch speaks of its own deprecated calls.
pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated")

_importing = threading.Lock()


def scripts():
    """The blocks of the page that begin with the name of a file, by that name."""
    page = (ROOT / "docs/moving.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", page, re.M | re.S))


def train(rank, folder, name):
    """What ``train`` of one of them returns, on this rank."""
    with _importing:  # ranks are threads
        sys.path.insert(0, folder)
        try:
            spec = importlib.util.spec_from_file_location(name, f"{folder}/{name}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(folder)
            sys.modules.pop("network")  # of this folder
    return module.train(rank)


def by_position(rank, folder):
    """What a rank file of the in-tree class holds, loaded without looking at names."""
    import torch
    import torch_xla.runtime as xr
    from torch import nn

    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

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


def torchrun(folder, name, processes):
    """What each of them prints; as torchrun starts them, but wherever the host's name leads."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(processes),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    started = [
        subprocess.Popen(
            [sys.executable, f"{folder}/{name}.py"],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    ended = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * processes, ended
    return [out for out, _ in ended]


def staying(network):
    """The losses of one process that sees all data."""
    model = network["build"]()
    optimizer = network["adamw"](model)
    return [network["step"](model, optimizer, number, 0, 1, "cpu") for number in range(8)]


def mean(per_rank):
    return [sum(of_step) / len(of_step) for of_step in zip(*per_rank, strict=True)]


def test_a_job_that_moves_trains_as_one_that_stays(run_ranks, tmp_path):
    found = scripts()
    assert list(found) == [
        f"{name}.py" for name in "network before after leave there back".split()
    ]
    for name, text in found.items():
        (tmp_path / name).write_text(text.replace("runs/", f"{tmp_path}/"))
    (tmp_path / "before").mkdir()
    folder = str(tmp_path)
    network = {}
    exec(found["network.py"], network)
    expected = staying(network)

    def losses(name, ranks):
        found = run_ranks(train, ranks, folder, name)
        return mean(found) if found[0] else None

    assert losses("before", 2) == pytest.approx(expected[:2], rel=1e-5)
    run_ranks(by_position, 2, folder)
    page = (ROOT / "docs/moving.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python (-m xla_fsdp.consolidate .* --optimizer)$", page, re.M)
    arguments = shlex.split(command.replace("runs/", f"{tmp_path}/"))
    subprocess.run([sys.executable, *arguments], check=True, cwd=ROOT)
    assert losses("after", 3) == pytest.approx(expected[2:4], rel=1e-5)
    losses("leave", 2)
    said = torchrun(folder, "there", 2)
    there = [json.loads(re.search(r"^losses (.+)$", text, re.M)[1]) for text in said]
    assert mean(there) == pytest.approx(expected[4:6], rel=1e-5)
    assert losses("back", 3) == pytest.approx(expected[6:8], rel=1e-5)

"""The checks of ``benchmarks.torch_versions``: a part on ranks here, the others as a script.

The script ``elsewhere.py WRITTEN OWN`` runs in environments with another torch and without
torch_xla. The last line of its output is JSON.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

_importing = threading.Lock()
MORE_RANKS = 3
GONE, SHARDED = "trained on in plain torch", "trained on by `fully_shard`, on CPUs"
# The first torch whose FSDP2 is correct on CPUs. Before 2.7 it needs a GPU; 2.7 and 2.8 sum
# gradients over gloo instead of averaging them.
FIRST_ON_CPU = (2, 9)


# --- on ranks, in this environment


def train(rank: int, folder: str, name: str) -> Any:
    """Call ``train`` of a script of docs/how-to/migrate-to-torchtpu.md on this rank."""
    return _module(folder, name).train(rank)


def _module(folder: str, name: str) -> Any:
    """A new module of the file, which may import the others of the folder."""
    with _importing:  # ranks are threads
        sys.path.insert(0, folder)
        try:
            spec = importlib.util.spec_from_file_location(name, f"{folder}/{name}.py")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        finally:
            sys.path.remove(folder)
            sys.modules.pop("network", None)
    return module


def stay(folder: str) -> None:
    """Write the losses that there.py must have: those of one process with all data."""
    network = _module(folder, "network")
    model = network.build()
    optimizer = network.adamw(model)
    losses = [network.step(model, optimizer, number, 0, 1, "cpu") for number in range(6)]
    Path(folder, "losses.json").write_text(json.dumps(losses[4:]))


class Several(nn.Module):
    """A model with tied weights, a narrow dtype, buffers and a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.narrow = nn.Linear(6, 6).to(torch.bfloat16)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.norm(self.embed(tokens)) * self.gain
        return self.head(self.narrow(hidden.to(torch.bfloat16)).float())


def write_more(rank: int, folder: str) -> None:
    """Write a checkpoint, rank files and a plain file of the model :class:`Several`."""
    import torch_xla

    import xla_fsdp

    torch.manual_seed(0)
    model = xla_fsdp.XlaFullyShardedDataParallel(Several())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.arange(8).to("xla")).square().mean().backward()
    optimizer.step()
    torch_xla.sync()
    xla_fsdp.save_checkpoint(f"{folder}/more", model, optimizer, step=1)
    own = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    on_host = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.cpu(), own)
    on_host["shard_metadata"] = model.get_shard_metadata()
    torch.save(on_host, f"{folder}/more-rank-{rank}-of-{MORE_RANKS}.pth")
    state = xla_fsdp.full_state_dict(model)
    optim = xla_fsdp.full_optim_state_dict(model, optimizer)
    if rank == 0:
        torch.save({"model": state, "optimizer": optim["state"]}, f"{folder}/more.pt")


def come_back(rank: int, written: str, own: str) -> None:
    """Load the checkpoint of that torch's FSDP2 here; raise ValueError if values differ."""
    import xla_fsdp

    network = _module(written, "network")
    model = xla_fsdp.XlaFullyShardedDataParallel(network.build(), flatten_parameters=True)
    optimizer = network.adamw(model)
    xla_fsdp.from_dcp(f"{own}/there", model, optimizer, allow_pickle=True)
    expected = torch.load(f"{own}/there.pt", weights_only=True)
    _require_equal(xla_fsdp.full_state_dict(model, rank0_only=False), expected["model"])
    state = xla_fsdp.full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
    _require_equal(state, expected["optimizer"])


# --- in the other environment


def _require_equal(found: Any, expected: Any, where: str = "") -> None:
    if isinstance(expected, torch.Tensor):
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            raise ValueError(f"{where} differs")
        return
    if set(found) != set(expected):
        raise ValueError(f"{where} has {sorted(found)}, not {sorted(expected)}")
    for name in expected:
        _require_equal(found[name], expected[name], f"{where}/{name}")


def _consolidate(*arguments: str) -> str:
    """Run the command and return what it prints; warnings are errors."""
    from xla_fsdp.consolidate.__main__ import main

    said, wrong = io.StringIO(), io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
            code = main(arguments)
    if code:
        raise ValueError(wrong.getvalue().strip().splitlines()[-1])
    return said.getvalue()


class Checks:
    """One method for each row. ``written``: the folder of the inputs; ``own``: an empty folder."""

    def __init__(self, written: Path, own: Path):
        self.written, self.own = written, own
        self.expected = torch.load(written / "more.pt", weights_only=True)

    def verify(self) -> None:
        command = [sys.executable, "-m", "xla_fsdp.consolidate", "--verify"]
        subprocess.run([*command, f"--ckpt_prefix={self.written}/more"], check=True)

    def safetensors(self) -> None:
        from safetensors.torch import load_file

        path = f"{self.own}/more.safetensors"
        _consolidate(f"--ckpt_prefix={self.written}/more", f"--save_path={path}")
        found = load_file(path)
        found["head.weight"] = found["embed.weight"]  # tied, according to its metadata
        _require_equal(found, self.expected["model"])

    def pth(self) -> None:
        _consolidate(
            *(f"--ckpt_prefix={self.written}/more", f"--save_path={self.own}/joined"),
            *("--format=pth", "--optimizer"),
        )
        found = torch.load(f"{self.own}/joined/model.pth", weights_only=True, mmap=True)
        _require_equal(found["model"], self.expected["model"])
        found = torch.load(f"{self.own}/joined/optimizer.pth", weights_only=True)
        _require_equal(found["state"], self.expected["optimizer"])

    def reshard(self) -> None:
        from xla_fsdp.consolidate import consolidate_checkpoint, reshard_checkpoint

        cut = reshard_checkpoint(f"{self.written}/more", 2, f"{self.own}/cut").path
        _consolidate("--verify", f"--ckpt_prefix={cut}")
        joined = consolidate_checkpoint(cut, f"{self.own}/again.pth").path
        found = torch.load(joined, weights_only=True)["model"]
        _require_equal(found, self.expected["model"])

    def rank_files(self) -> None:
        from xla_fsdp.consolidate import consolidate_sharded_model_checkpoints

        prefix, suffix = f"{self.written}/more-rank-", "*-of-*.pth"
        save_path = f"{self.own}/from-ranks.pth"
        found, _ = consolidate_sharded_model_checkpoints(prefix, suffix, save_path)
        _require_equal(found, self.expected["model"])
        found = torch.load(save_path, weights_only=True, mmap=True)["model"]
        _require_equal(found, self.expected["model"])

    def in_tree(self) -> None:
        prefix = [f"--ckpt_prefix={self.written}/before/", "--ckpt_suffix=rank-*-of-*.pth"]
        _consolidate(*prefix, "--optimizer", f"--save_path={self.own}/in-tree")
        for name in ("model.pth", "optimizer.pth"):
            found = torch.load(f"{self.own}/in-tree/{name}", weights_only=True)
            expected = torch.load(f"{self.written}/joined/{name}", weights_only=True)
            for key in ("model", "state"):
                _require_equal(found.get(key, {}), expected.get(key, {}))

    def dcp(self) -> None:
        import torch.distributed.checkpoint as dcp

        _consolidate(f"--ckpt_prefix={self.written}/after", f"--save_path={self.own}/after.pth")
        expected = torch.load(f"{self.own}/after.pth", weights_only=True)["model"]
        found = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load({"model": found}, checkpoint_id=f"{self.written}/leaving")
        _require_equal(found, expected)

    def plain(self) -> None:
        """Run there.py of docs/how-to/migrate-to-torchtpu.md in one process, without
        ``fully_shard``."""
        text = (self.written / "there.py").read_text()
        text = re.sub("^from .*import fully_shard$", "", text, flags=re.M)
        self._train(text.replace("fully_shard(layer, mesh=mesh)", "pass"), 1)

    def fully_shard(self) -> None:
        """Run there.py unchanged, in two processes."""
        shutil.rmtree(self.own / "there", ignore_errors=True)
        self._train((self.written / "there.py").read_text(), 2)

    def _train(self, text: str, processes: int) -> None:
        """Train and save to ``there``; save the expected values to there.pt."""
        told = (
            "    from torch.distributed.checkpoint.state_dict import StateDictOptions\n"
            "    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)\n"
            "    weights, state = get_state_dict(model, optimizer, options=whole)\n"
            "    if rank == 0:\n"
            "        told = {'model': dict(weights), 'optimizer': state['state']}\n"
            f"        torch.save(told, {str(self.own / 'there.pt')!r})\n"
        )
        last = "    dist.destroy_process_group()\n"
        text = text.replace(f"{self.written}/there", f"{self.own}/there")
        (self.own / "there.py").write_text(text.replace(last, told + last))
        said = torchrun(str(self.own / "there.py"), processes, str(self.written))
        losses = [json.loads(re.search(r"^losses (.+)$", one, re.M)[1]) for one in said]
        found = [sum(each) / processes for each in zip(*losses, strict=True)]
        expected = json.loads((self.written / "losses.json").read_text())
        if any(abs(one - other) > 1e-5 for one, other in zip(found, expected, strict=True)):
            raise ValueError(f"losses {found}, not {expected}")


def torchrun(script: str, processes: int, path: str = "") -> list[str]:
    """Start processes as torchrun does, on localhost; return what each prints."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shared = {
        **os.environ,
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)},
        **{"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    }
    started = [
        subprocess.Popen(
            [sys.executable, script],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    ended = [process.communicate(timeout=240) for process in started]
    failed = [err for process, (_, err) in zip(started, ended, strict=True) if process.returncode]
    if failed:
        raise RuntimeError(failed[0].strip())
    return [out for out, _ in ended]


def version_of(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def tried(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:  # any error is shown in the table
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[-1]}"
    return "yes"


def main(written: str, own: str) -> None:
    assert importlib.util.find_spec("torch_xla") is None, "this environment has torch_xla"
    checks = Checks(Path(written), Path(own))
    rows = {
        "`--verify`": checks.verify,
        "checkpoint to safetensors": checks.safetensors,
        "checkpoint to `.pth`, with the optimizer": checks.pth,
        "`--reshard`": checks.reshard,
        "rank files": checks.rank_files,
        "rank files of the in-tree class": checks.in_tree,
        "`dcp.load` of what `to_dcp` wrote": checks.dcp,
        GONE: checks.plain,
        SHARDED: checks.fully_shard,
    }
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < FIRST_ON_CPU:
        del rows[SHARDED]
    versions = {
        "torch": torch.__version__.partition("+")[0],
        "Python": platform.python_version(),
        **{name: version_of(name) for name in ("numpy", "safetensors", "xxhash", "fsspec")},
    }
    found = {name: tried(check) for name, check in rows.items()}
    print(json.dumps({"versions": versions, "checks": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])

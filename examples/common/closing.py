"""The end of a run: consolidates the model, evaluates it in plain torch, and prints a table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table

import xla_fsdp

from .script import Stop

flags.DEFINE_bool("no_ckpt_consolidation", False, "do not join the ranks' files into one model")

# Images times parameters that one core evaluates in about a minute.
EVALUATED = 10**11


def consolidate(
    options: SimpleNamespace, saved: str, network: dict[str, Any], data: dict[str, Any]
) -> str | None:
    """Joins a checkpoint into one model with the command line tool; returns the model's folder.

    It writes ``network`` and ``data`` there, for evaluate.py. It returns ``None`` if the checkpoint
    is not on this machine, or with --no_ckpt_consolidation.
    """
    folder = folder_of(options, saved)
    if folder is None:
        return None
    describe(folder, network, data)
    command = [sys.executable, "-m", "xla_fsdp.consolidate", "--ckpt_prefix", saved]
    command += ["--save_path", os.path.join(folder, "weights"), "--format", "safetensors"]
    _run(command, "consolidation")
    return folder


def folder_of(options: SimpleNamespace, saved: str) -> str | None:
    """The folder for the consolidated model of a checkpoint, or ``None``."""
    nowhere = "://" in saved or options.no_ckpt_consolidation
    return None if nowhere else f"{os.path.dirname(saved)}_consolidated"


def describe(folder: str, network: dict[str, Any], data: dict[str, Any]) -> None:
    """Creates the folder, and ``network.json`` in it."""
    os.makedirs(folder, exist_ok=True)
    described = {"network": network, "tokens" if data["kind"] == "tokens" else "images": data}
    Path(folder, "network.json").write_text(json.dumps(described, indent=1))


def evaluate_in_plain_torch(folder: str) -> dict[str, Any]:
    """Runs evaluate.py on a consolidated model, in a process without torch_xla."""
    script = Path(__file__).resolve().parent.parent / "evaluate.py"
    return json.loads(_run([sys.executable, str(script), folder], "evaluation in plain torch"))


def summarize(
    title: str,
    options: SimpleNamespace,
    meters: Any,
    saved: str,
    folder: str | None,
) -> None:
    """Evaluates the consolidated model in ``folder`` in plain torch, and prints a table.

    ``meters`` are ``Meters`` or ``Updates``, which compare this result with that of the sharded
    model; the results must agree.
    """
    parameters = count_parameters(saved)
    rows = {meters.UNIT: str(meters.length), "parameters": f"{parameters:,}"}
    rows |= {"ranks": str(meters.world_size), "programs": _programs(options.compilation_cache)}
    if meters.loss is not None:  # this run trained
        rows |= {"training time": f"{meters.seconds:.1f} s", meters.SPEED: f"{meters.speed:,.0f}"}
        rows["final training loss"] = f"{meters.loss:.4f}"
    rows["checkpoint"] = saved
    if "://" in saved:
        command = f"python -m xla_fsdp.consolidate --ckpt_prefix {saved} --save_path model"
        rows["to consolidate"] = command
    rows[f"{meters.RESULT}, sharded"] = meters.result
    difference = ""
    if folder:
        size = sum(file.stat().st_size for file in Path(folder, "weights").iterdir())
        rows["consolidated"] = f"{folder} ({size / 1024:,.0f} KiB)"
        images = json.loads(Path(folder, "network.json").read_text()).get("images", {})
        fake = images.get("kind") == "folders" and images["datadir"] is None
        if fake or parameters * meters.samples > EVALUATED:
            command = f"python examples/evaluate.py {folder}"
            rows["in plain torch"] = f"{command} --datadir=DIR" if fake else command
        else:
            dtype = getattr(options, "compute_dtype", "float32")
            result, difference = meters.compare(evaluate_in_plain_torch(folder), dtype)
            rows[f"{meters.RESULT}, plain torch"] = result
            rows["agree"] = "no" if difference else "yes"
    table = Table(title=title, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows.items():
        table.add_row(*row)
    width = None if sys.stdout.isatty() else 100
    Console(file=sys.stdout, width=width).print(table, highlight=False)
    if difference:
        raise Stop(f"{difference}, so the checkpoint differs from the trained model")


def count_parameters(saved: str) -> int:
    """The number of parameters of the full model in a checkpoint."""
    from xla_fsdp.consolidate.format.reader import ShardedCheckpoint

    return sum(one.numel for one in ShardedCheckpoint(saved).manifest.parameters.values())


def _programs(cache: str) -> str:
    """The numbers of programs that were compiled, and loaded from the cache."""
    compiled, cached = xla_fsdp.compilation_counts()
    from_cache = "" if cache == "none" else f", {cached} from the cache in {cache}"
    return f"{compiled} compiled{from_cache}"


def _run(command: list[str], what: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Stop(f"{what} failed (exit code {done.returncode}): {done.stderr.strip()}")
    return done.stdout

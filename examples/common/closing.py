"""The end of a run: one model of all ranks' parts, what plain torch says of it, and a table."""

from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

from . import checkpoints, compiled, networks, test_images
from .progress import TrainingProgress, print_table
from .script import Stop

if TYPE_CHECKING:
    from .fitting import Task

# Images times parameters that one core evaluates in a minute or so.
EVALUATED = 10**11


def summarize(
    task: Task,
    options: SimpleNamespace,
    progress: TrainingProgress,
    epochs: int,
    world_size: int,
    loss: float | None,
    correct: int,
    saved: str,
) -> None:
    """Prints the closing table, with the accuracy that plain torch gets from the saved model.

    Args:
        loss: the mean of the last epoch; ``None`` if this run had none to train.
        correct: of ``task.images``, by the sharded model.
        saved: the last checkpoint.

    Raises:
        Stop: plain torch gets another accuracy; or consolidation or that evaluation failed.
    """
    parameters = count_parameters(saved)
    remote = checkpoints.is_remote(saved)
    rows = [
        ("epochs", f"{epochs}"),
        ("parameters", f"{parameters:,}"),
        ("ranks", f"{world_size}"),
        *(() if loss is None else [("training time", f"{progress.seconds:.1f} s")]),
        ("programs", compiled.summary(options)),
        *(() if loss is None else _of_the_last_epoch(progress, loss)),
        ("checkpoint", saved),
        *([] if remote else [("size, each rank", _sizes(saved))]),
        ("accuracy, sharded", f"{correct / task.images:.2%} ({correct} of {task.images})"),
    ]
    agree, again = True, {}
    if remote:
        command = f"python -m xla_fsdp.consolidate --ckpt_prefix {saved} --save_path model"
        rows.append(("to consolidate", command))
    elif not options.no_ckpt_consolidation:
        folder = f"{os.path.dirname(saved)}_consolidated"
        networks.describe(folder, task.network, task.description)
        weights = os.path.join(folder, networks.WEIGHTS)
        checkpoints.consolidate(saved, weights)
        size = sum(entry.stat().st_size for entry in os.scandir(weights))
        rows.append(("consolidated", f"{folder} ({size / 1024:,.0f} KiB)"))
        known = test_images.are_known(task.description)
        if known and parameters * task.images <= EVALUATED:
            again = evaluate_in_plain_torch(folder)
            # XLA and torch sum in other orders: an image on the border may fall on either side.
            allowed = max(1, task.images // (2000 if task.exact else 50))
            agree = abs(again["correct"] - correct) <= allowed
            rows += [
                (
                    "accuracy, plain torch",
                    f"{again['accuracy']:.2%} ({again['correct']} of {task.images})",
                ),
                ("agree", "yes" if agree else "no"),
            ]
        else:
            command = f"python examples/evaluate.py {folder}" + ("" if known else " --datadir=DIR")
            rows.append(("in plain torch", command))
    print_table(task.title, rows)
    if not agree:
        raise Stop(
            f"the sharded model got {correct} of {task.images} right, the consolidated one "
            f"{again['correct']}: the checkpoint is not the model that was trained"
        )


def _of_the_last_epoch(progress: TrainingProgress, loss: float) -> list[tuple[str, str]]:
    return [
        ("samples/s, last epoch", f"{progress.samples_per_second:,.0f}"),
        ("final training loss", f"{loss:.4f}"),
    ]


def count_parameters(saved: str) -> int:
    """Of the whole model in a checkpoint."""
    from xla_fsdp.consolidate.format.reader import ShardedCheckpoint

    return sum(one.numel for one in ShardedCheckpoint(saved).manifest.parameters.values())


def evaluate_in_plain_torch(folder: str) -> dict:
    """Runs evaluate.py, a process without torch_xla, on a consolidated model."""
    examples = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    command = [sys.executable, os.path.join(examples, "evaluate.py"), folder]
    return json.loads(checkpoints.run_command(command, "evaluation in plain torch"))


def _sizes(saved: str) -> str:
    """How large the files of the ranks are, one by one unless they are many."""
    files = sorted(name for name in os.listdir(saved) if name.startswith("rank-"))
    sizes = [os.path.getsize(os.path.join(saved, name)) / 1024 for name in files]
    if len(sizes) > 8:
        return f"{min(sizes):,.0f} to {max(sizes):,.0f} KiB, {len(sizes)} files"
    return ", ".join(f"{size:,.0f} KiB" for size in sizes)

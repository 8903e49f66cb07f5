"""Saved on N ranks in one wrapping, resumed on M in another: training goes on all the same."""

import pytest
import torch
from checkpoint_runs import WRAPPINGS, Run, averaged, heavy_ball, nesterov

OPTIMIZERS = {"nested": None, "flat": nesterov, "rows": averaged, "root": heavy_ball}


def _save_all(rank, size, folder, wrappings):
    losses = {}
    for kind, optimizer in wrappings:
        run = Run(kind, rank, size, **({"optimizer": optimizer} if optimizer else {}))
        run.train(0, 2)
        run.save(f"{folder}/{kind}-{size}", 2, extra={"size": size, "shape": (1, 2)})
        losses[kind] = run.train(2, 4)
    return losses


def _resume(rank, size, folder, kind, saved, optimizer):
    run = Run(kind, rank, size, seed=9, **({"optimizer": optimizer} if optimizer else {}))
    found = run.load(f"{folder}/{saved}")
    assert found.step == 2 and found.extra["shape"] == (1, 2)
    return run.train(2, 4)


def test_every_number_of_ranks_onto_every_other(run_ranks, tmp_path):
    counts = (1, 2, 3, 4, 8)
    expected = {
        size: run_ranks(_save_all, size, size, tmp_path, [("nested", None)])[0]["nested"]
        for size in counts
    }
    for size in counts:
        for saved in counts:
            for rank, losses in enumerate(
                run_ranks(_resume, size, size, tmp_path, "nested", f"nested-{saved}", None)
            ):
                if size == saved:
                    assert losses == expected[saved], (saved, size, rank)
                else:
                    torch.testing.assert_close(losses, expected[saved], rtol=2e-5, atol=1e-5)

"""Lightning's Trainer and Fabric with our strategies, against plain Lightning in one process."""

import pytest
import torch
import torch_xla.runtime as xr
from lightning_models import (
    CLIP,
    Block,
    fit,
    strategy,
    trainer_for,
)

from xla_fsdp import full_state_dict

TIMEOUT = 400


def plain(folder, **options):
    """How plain Lightning trains on one process."""
    found, model = fit(trainer_for(folder, devices=1, **options))
    return found | {"weights": model.state_dict()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def reference(folder):
    clipped = {"gradient_clip_val": CLIP, "accumulate_grad_batches": 2}
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    return {"norm": plain(folder / "norm", **clipped), "value": plain(folder / "value", **by_value)}


def assert_alike(found, wanted, tail=False):
    for name, near in (("losses", 1e-5), ("norms", 1e-4)):
        own = wanted[name][-len(found[name]) :] if tail else wanted[name]
        torch.testing.assert_close(found[name], own, rtol=near, atol=near)
    assert found["seen"] == pytest.approx(wanted["seen"], abs=1e-4)
    for name, value in wanted["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=1e-4, atol=1e-4)


def ours(folder, options, ckpt_path=None, **told):
    trainer = trainer_for(folder, strategy(**options), **told)
    found, _ = fit(trainer, xr.world_size(), ckpt_path=ckpt_path)
    return found | {"weights": full_state_dict(trainer.model)}


def training(rank, folder):
    clipped = {"gradient_clip_val": CLIP, "accumulate_grad_batches": 2}
    recomputed = {"activation_checkpointing_policy": {Block}}
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    sharded = {"state_dict_type": "sharded", "sharding_strategy": "SHARD_GRAD_OP"}
    return {
        "norm": ours(folder / "full", recomputed, **clipped),
        "value": ours(folder / "sharded", sharded, **by_value),
    }


@pytest.mark.parametrize("ranks", [1, 4])
def test_training_is_that_of_one_process(run_ranks, reference, folder, ranks):
    found = run_ranks(training, ranks, folder / str(ranks), timeout=TIMEOUT)
    for name, wanted in reference.items():
        assert_alike(found[0][name], wanted)
    for rank in range(ranks):
        assert found[rank]["norm"]["losses"] == found[0]["norm"]["losses"]

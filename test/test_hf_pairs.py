"""The script on pairs of sentences, as its page starts it, against plain training."""

import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest
import torch
from conftest import EXAMPLES
from safetensors.torch import load_file

from xla_fsdp.consolidate.format.reader import ShardedCheckpoint

SMALL = {"pairs": 45, "batch_size": 8, "epochs": 2, "max_length": 32, "dropout": 0.0, "seed": 3}
STEPS = SMALL["pairs"] // SMALL["batch_size"]  # an epoch
SAVED = 4  # between checkpoints: the latest is within the second epoch


def flags(folder, *more):
    given = [f"--{name}={value}" for name, value in SMALL.items()]
    return [*given, f"--output_dir={folder}", f"--checkpointing_steps={SAVED}", *more]


def in_plain_torch(common, folder):
    """What the script does, in one process: losses, what it says of the test, weights."""
    pairs, script = common.pairs, common.train_pairs
    tokenizer = script.AutoTokenizer.from_pretrained(folder / "tokenizer")
    rows, tests = (
        pairs.encoded(pairs.read(folder / "data", part), tokenizer, SMALL["max_length"])
        for part in ("train", "dev")
    )
    torch.manual_seed(SMALL["seed"])
    model = script.build(Namespace(model=None, **SMALL), tokenizer)
    optimizer = torch.optim.AdamW(script.groups(model), lr=1e-3)
    total = STEPS * SMALL["epochs"]
    scheduler = script.get_linear_schedule_with_warmup(optimizer, total // 10, total)
    collate = torch.utils.data.default_collate
    losses, found = [], []
    for epoch in range(SMALL["epochs"]):
        model.train()
        order = torch.randperm(
            len(rows), generator=torch.Generator().manual_seed(SMALL["seed"] + epoch)
        )
        for chosen in order.split(SMALL["batch_size"])[:STEPS]:
            loss = model(**collate([rows[row] for row in chosen])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step(), scheduler.step(), optimizer.zero_grad()
            losses.append(loss.item())
        batch = collate(tests)
        with torch.no_grad():
            chosen, labels = model.eval()(**batch).logits.argmax(-1), batch["labels"]
        right = (chosen * labels).sum().item()
        found.append(
            {
                "accuracy": (chosen == labels).double().mean().item(),
                "f1": 2 * right / (chosen.sum() + labels.sum()).item(),
            }
        )
    return losses, found, model.state_dict()


def resumed(rank, folder, more):
    from accelerate.state import AcceleratorState, GradientState

    from xla_fsdp.integrations.launch import environment_of, read_config, run_script

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.update(environment_of(read_config(str(EXAMPLES / "accelerate" / "fsdp2.yaml"))))
    run_script(rank, str(EXAMPLES / "train_pairs.py"), "main", flags(folder, *more))


@pytest.mark.slow
def test_the_documented_command_is_plain_training(common, run_ranks, tmp_path):
    root = EXAMPLES.parent
    done = subprocess.run(
        [sys.executable, "-m", "xla_fsdp.integrations.launch", "--config_file"]
        + ["examples/accelerate/fsdp.yaml", "examples/train_pairs.py", *flags(tmp_path)]
        # Where there is none yet it is a first start: one command for all of them.
        + ["--resume_from_checkpoint=latest"],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert done.returncode == 0, done.stderr
    losses, metrics, weights = in_plain_torch(common, tmp_path)
    assert done.stdout.count("epoch 1: ") == 1

    def compare(skipped):
        results = json.loads((tmp_path / "results.json").read_text())
        assert [one["epoch"] for one in results] == list(range(skipped // STEPS, SMALL["epochs"]))
        for one in results:
            first = max(skipped, one["epoch"] * STEPS)
            expected = losses[first : (one["epoch"] + 1) * STEPS]
            assert one["loss"] == pytest.approx(sum(expected) / len(expected), rel=1e-5)
            for name, value in metrics[one["epoch"]].items():
                assert one[name] == pytest.approx(value, abs=1e-9), name
        saved = load_file(tmp_path / "model" / "model.safetensors")
        for name, value in weights.items():
            torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5, msg=name)

    compare(0)
    latest = 2 * STEPS // SAVED * SAVED
    assert ShardedCheckpoint(tmp_path / f"step_{latest}/xla_fsdp").manifest.world_size == 4
    # A save that was cut off is passed over, though it is the newest.
    cut = shutil.copytree(tmp_path / f"step_{latest}", tmp_path / f"step_{latest + SAVED}")
    for manifest in (cut / "xla_fsdp").rglob("manifest.json"):
        manifest.unlink()
    run_ranks(resumed, 1, str(tmp_path), ["--resume_from_checkpoint=latest"], timeout=1500)
    compare(latest)


def test_goes_on_from_the_latest_save_that_came_to_its_end(common, tmp_path):
    """Of a model that is not sharded; Accelerate writes its random states last."""
    script = common.train_pairs
    args = Namespace(resume_from_checkpoint="latest", output_dir=str(tmp_path / "new"))
    assert script.checkpoint_of(args) is None
    for step in (4, 12, 8):
        (tmp_path / f"new/step_{step}").mkdir(parents=True)
        (tmp_path / f"new/step_{step}/model.safetensors").touch()
        torch.save({"step": step}, tmp_path / f"new/step_{step}/random_states_0.pkl")
    assert script.checkpoint_of(args) == str(tmp_path / "new/step_12")
    os.truncate(tmp_path / "new/step_12/random_states_0.pkl", 100)
    assert script.checkpoint_of(args) == str(tmp_path / "new/step_8")
    (tmp_path / "new/step_8/random_states_0.pkl").unlink()
    assert script.checkpoint_of(args) == str(tmp_path / "new/step_4")
    # Random states alone: of ranks, before there was anything of their parts.
    (tmp_path / "new/step_4/model.safetensors").unlink()
    assert script.checkpoint_of(args) is None
    # Whoever names one gets that.
    assert script.checkpoint_of(Namespace(resume_from_checkpoint="step_12")) == "step_12"


def test_what_is_no_mrpc_is_refused(common, tmp_path, monkeypatch, capsys):
    pairs, script = common.pairs, common.train_pairs
    messages = {"data_dir": "has no train.tsv", "resume_from_checkpoint": "there is no folder"}
    for flag, message in messages.items():
        monkeypatch.setattr(sys, "argv", ["train_pairs.py", f"--{flag}={tmp_path}/missing"])
        with pytest.raises(SystemExit, match="2"):
            script.arguments()
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="has no train.tsv or msr_paraphrase_train.txt"):
        pairs.read(str(tmp_path), "train")
    pairs.write(str(tmp_path), 30, 6)
    made = pairs.read(str(tmp_path), "train")
    assert len(made) == 30 and {one.same for one in made} == {True, False}
    # The corpus itself begins with a byte order mark, and has quotation marks.
    text = "\ufeff" + "\t".join(pairs.COLUMNS) + '\n1\t7\t8\tHe said " no .\tNo , he said .\n'
    path = tmp_path / "msr_paraphrase_test.txt"
    (tmp_path / "dev.tsv").unlink()
    path.write_text(text, encoding="utf-8")
    assert pairs.read(str(tmp_path), "dev") == [('He said " no .', "No , he said .", True)]
    for wrong, message in (
        (text + "2\t1\t1\ta\tb\n", "line 3 must have 0 or 1"),
        ("a\tb\n", "columns"),
    ):
        path.write_text(wrong, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            pairs.read(str(tmp_path), "dev")

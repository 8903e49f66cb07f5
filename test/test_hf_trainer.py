"""The Trainer with an FSDP configuration on XLA, against plain training in one process."""

import contextlib
import functools
import os
import signal
import time
from unittest import mock

import pytest
import torch
import transformers as hf
from hf_models import (
    CLASSES,
    STEPS,
    VERSION,
    Trained,
    assert_alike,
    assert_alike_in_bfloat16,
    batch_of,
    build,
    counts,
    items_in,
    plain,
    rows,
    trainer_for,
)
from huggingface_hub import HfApi
from on_ranks import on_each_rank, slow
from transformers import TrainerCallback

import xla_fsdp

TIMEOUT = 400


def groups_of_trainer(model):
    """The Trainer's: no decay of what is called a bias or a norm, or is in a layer norm."""
    groups = [{"params": [], "weight_decay": 0.3}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        layer = model.get_submodule(name.rpartition(".")[0])
        words = ("bias", "layernorm", "rmsnorm", "norm.")
        spared = isinstance(layer, torch.nn.LayerNorm) or any(w in name.lower() for w in words)
        groups[spared]["params"].append(parameter)
    return groups


reference = functools.partial(
    plain, groups=groups_of_trainer, schedule=lambda step: max(0.0, 1 - step / STEPS), count=True
)


def trained_by(trainer, noted):
    micro = trainer.args.gradient_accumulation_steps
    kept = [loss.item() for loss in trainer.kept]
    losses = [sum(kept[first : first + micro]) for first in range(0, len(kept), micro)]
    return Trained(losses, noted.norms, xla_fsdp.full_state_dict(trainer.model))


def of_all(ranks):
    losses = [sum(step) / len(step) for step in zip(*(one.losses for one in ranks), strict=True)]
    return Trained(losses, ranks[0].norms, ranks[0].weights)


def several(rank, folder, cases):
    found = []
    for number, (name, micro, given) in enumerate(cases):
        path = os.path.join(folder, str(number))
        trainer, noted = trainer_for(name, path, micro, **given)
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        trainer.save_model()
        found.append((trained_by(trainer, noted), loss))
    return found


# The Trainer's argument by which the model itself recomputes its layers.
RECOMPUTED = "activation_checkpointing" if VERSION >= 5 else "gradient_checkpointing"
UNFLATTENED = {"flatten_parameters": False, "backward_prefetch": "backward_post"}
CASES = [
    ("bert", 2, {"fsdp": "shard_grad_op offload"}),
    ("vit", 1, {"settings": UNFLATTENED, "config": {"xla_fsdp_grad_ckpt": True}}),
    ("gpt2", 1, {"bf16": True}),
    ("t5", 1, {}),
    ("gpt2", 1, {"fsdp": "hybrid_shard auto_wrap", "config": {"version": 1}}),
    ("llama", 1, {"bf16": True, RECOMPUTED: True, "config": {"reshard_after_forward": True}}),
]
if VERSION >= 5:  # before, experts need a call of use_static_experts
    CASES.append(("mixtral", 1, {"config": {"activation_checkpointing": True}}))


@pytest.mark.parametrize("ranks, cases", [(2, CASES[:1]), slow(4, CASES[1:])])
def test_training_is_that_of_one_process(run_ranks, tmp_path, ranks, cases):
    found = run_ranks(several, ranks, str(tmp_path), cases, timeout=TIMEOUT)
    for number, (name, micro, given) in enumerate(cases):
        trained, loss = of_all([rank[number][0] for rank in found]), found[0][number][1]
        if "bf16" in given:
            narrow = reference(name, micro=micro, dtype=torch.bfloat16)
            assert_alike_in_bfloat16(trained, narrow, reference(name, micro=micro))
        else:
            assert_alike(trained, reference(name, micro=micro))
        model, info = CLASSES[name].from_pretrained(
            tmp_path / str(number), output_loading_info=True
        )
        assert not info["missing_keys"] and not info["unexpected_keys"]
        torch.testing.assert_close(dict(model.state_dict()), trained.weights, rtol=0, atol=0)
        batch = batch_of(rows(name, 16))
        if counts(model):
            batch["num_items_in_batch"] = items_in(batch["labels"], name)
        with torch.no_grad():
            digits = 1e-2 if "bf16" in given else 1e-4
            assert loss == pytest.approx(model(**batch).loss.item(), rel=digits)


def resumed(rank, folder, checkpoint):
    whole, all_drawn = trainer_for("bert", folder)
    whole.train()
    trainer, noted = trainer_for("bert", folder)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert trainer.state.global_step == STEPS
    assert noted.drawn == all_drawn.drawn[2:]  # the random numbers go on
    return trained_by(trainer, noted)


class Taken(TrainerCallback):
    """In the second step one rank's process gets SIGTERM; goes on when the rank has heard of it."""

    def __init__(self, rank, preemption):
        self.rank, self.preemption = rank, preemption

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            if self.rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            while self.preemption._preempted.reason is None:
                time.sleep(0.01)


def taken_away(rank, folder):
    from xla_fsdp.integrations.preemption import PreemptionCallback

    trainer, _ = trainer_for("bert", folder)
    preemption = PreemptionCallback()
    trainer.add_callback(preemption)
    trainer.add_callback(Taken(rank, preemption))
    trainer.train()


@pytest.mark.slow
def test_a_run_that_is_taken_away_goes_on(run_ranks, tmp_path):
    expected = reference("bert")
    with pytest.raises(xla_fsdp.Preempted) as end:
        run_ranks(taken_away, 2, str(tmp_path), timeout=TIMEOUT)
    assert end.value.code == 75 and end.value.reason.startswith("SIGTERM on rank ")
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-2"
    names = {path.name for path in checkpoint.iterdir()}
    assert {"config.json", "model.safetensors", "training_args.bin", "xla_fsdp"} <= names
    more = str(tmp_path / "more")
    found = run_ranks(resumed, 2, more, str(checkpoint), timeout=TIMEOUT)
    rest = Trained(expected.losses[2:], expected.norms[2:], expected.weights)
    assert_alike(of_all(found), rest)


def evaluates_first(rank, folder):
    config = {"sync_module_states": "true", "limit_all_gathers": False}
    trainer, _ = trainer_for("llama", folder, bf16=True, max_steps=1, config=config)
    loss = trainer.evaluate()["eval_loss"]  # shards the model
    options = trainer.model.fsdp_options
    assert options.compute_dtype is torch.bfloat16 and options.sync_module_states
    assert not options.limit_all_gathers and not options.fp32_reduce_scatter
    trainer.train()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert trainer.predict(rows("llama", 3)).predictions.shape[0] == 3
    trainer.hub_model_id = "somebody/llama"
    with contextlib.ExitStack() as on_rank_0:
        if rank == 0:
            named = hasattr(hf.trainer, "upload_folder")  # before Transformers 5
            upload = mock.patch.object(
                hf.trainer if named else HfApi,
                "upload_folder",
                lambda *_, **given: os.listdir(given["folder_path"]),
            )
            on_rank_0.enter_context(upload)
        return loss, trainer.push_to_hub()


@pytest.mark.slow
def test_evaluation_before_training_and_the_hub(run_ranks, tmp_path):
    (loss, uploaded), (_, other) = run_ranks(evaluates_first, 2, str(tmp_path), timeout=TIMEOUT)
    whole = {"README.md", "config.json", "generation_config.json", "model.safetensors"}
    assert whole | {"training_args.bin"} <= set(uploaded) and other is None
    with torch.no_grad():
        batch = batch_of(rows("llama", 16))
        batch["num_items_in_batch"] = items_in(batch["labels"])
        assert loss == pytest.approx(build("llama")(**batch).loss.item(), rel=1e-2)  # bfloat16


@on_each_rank(2, timeout=TIMEOUT)
def test_what_does_not_go_is_refused(rank, size, folder):
    for given, message in (
        ({"settings": {"reshard": True}}, "has no option 'reshard', got reshard=True. "),
        ({"settings": {"compute_dtype": "int8"}}, "compute_dtype"),
        ({"settings": {"backward_prefetch": "always"}}, "backward_prefetch must be one of"),
        ({"settings": {"sharding_strategy": "SOME"}}, "must be one of FULL_SHARD, "),
        ({"config": {"sync_module_states": "perhaps"}}, "sync_module_states'] must be true or f"),
        ({"config": {"xla_fsdp_setings": {}}}, "does not support on XLA: xla_fsdp_setings."),
        ({"config": {"transformer_layer_cls_to_wrap": "GPT3Block"}}, "no layer of GPT2LMHeadModel"),
        ({"torch_compile": True}, "torch_compile=True is not supported"),
        ({"fp16": True}, "use bf16=True"),
    ):
        with pytest.raises((ValueError, TypeError)) as failed:
            trainer, _ = trainer_for("gpt2", folder, **given)
            trainer.train()
        assert message in str(failed.value), str(failed.value)


@pytest.mark.slow
def test_the_environment_does_the_import(run_script):
    done = run_script(
        "import transformers, xla_fsdp\n"
        "print(transformers.Trainer._wrap_model.__code__.co_filename)\n",
        env={"XLA_FSDP_DROP_IN": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("integrations/changes.py")


def generating(rank, folder):
    options = {"predict_with_generate": True, "generation_max_length": 5, "generation_num_beams": 2}
    trainer, _ = trainer_for("t5", folder, cls=hf.Seq2SeqTrainer, max_steps=1, **options)
    trainer.train()
    trainer.save_model()
    predicted = trainer.predict(rows("t5", 8))
    return predicted.predictions, predicted.metrics["test_loss"]


@pytest.mark.slow
def test_prediction_generates(run_ranks, tmp_path):
    found, _ = run_ranks(generating, 2, str(tmp_path), timeout=TIMEOUT)[0]
    model = hf.T5ForConditionalGeneration.from_pretrained(tmp_path)
    tokens = batch_of(rows("t5", 8))["input_ids"]
    expected = model.generate(tokens, max_length=5, num_beams=2)
    assert found[:, :5].tolist() == expected.tolist()
    assert (found[:, 5:] == model.config.pad_token_id).all()  # the Trainer pads to 20

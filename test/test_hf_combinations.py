"""Combinations of integration, adapter, loss, saving, resuming and number of ranks, compared with
plain torch in one process on the global batch: docs/reference/tested-combinations.md."""

import functools
import os
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT
from hf_models import (
    BATCH,
    InOrder,
    Trained,
    accelerator_for,
    assert_alike,
    batch_of,
    build,
    by_class,
    items_in,
    optimizer_for,
    rows,
    trainer_for,
)
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

TIMEOUT = 400
STEPS, SAVED = 3, 2


class IgnoresItems(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        logits = super().forward(input_ids=input_ids).logits
        return {"loss": cross_entropy(logits, labels, "mean"), "logits": logits}


def cross_entropy(logits, labels, reduction):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction=reduction
    )


def uses_items(outputs, labels, num_items_in_batch):
    return cross_entropy(outputs["logits"], labels, "sum") / num_items_in_batch


def ignores_items(outputs, labels, num_items_in_batch):
    return cross_entropy(outputs["logits"], labels, "mean")


def uses_items_in_part(outputs, labels, num_items_in_batch):
    penalty = outputs["logits"].square().mean()
    return uses_items(outputs, labels, num_items_in_batch) + 0.1 * penalty


class OwnMean(InOrder):
    """Overrides ``compute_loss`` as most tutorials do."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = cross_entropy(outputs["logits"], labels, "mean")
        return (loss, outputs) if return_outputs else loss


class OwnMeanDivided(OwnMean):
    """Has the Trainer divide the loss by the number of micro-batches."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


class SuperAndPenalty(InOrder):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + 0.1 * outputs["logits"].square().mean()
        return (loss, outputs) if return_outputs else loss


# Losses, adapters and ways to save the model have the names of the page.
IN_PART = "compute_loss_func, in part by num_items_in_batch"
FUNCTIONS = {
    "compute_loss_func, ignores num_items_in_batch": ignores_items,
    IN_PART: uses_items_in_part,
}
OWN_MEAN = "overridden compute_loss: its own mean"
PENALTY = "overridden compute_loss: super() and a penalty"
OVERRIDDEN = {
    OWN_MEAN: OwnMean,
    f"{OWN_MEAN}, model_accepts_loss_kwargs=False": OwnMeanDivided,
    PENALTY: SuperAndPenalty,
}
# Means over a rank's labels are the global mean only if ranks have equally many.
RAGGED = ("the model's", IN_PART, PENALTY)

ADAPTERS = {
    "LoRA": {},
    "LoRA, modules_to_save": {"modules_to_save": ["lm_head", "input_layernorm"]},
    "LoRA, trainable_token_indices": {"trainable_token_indices": [3, 5, 7]},
}


def model_for(adapter, loss):
    model = build("llama")
    if loss == "the model's, ignores num_items_in_batch":
        model.__class__ = IgnoresItems
    if adapter == "no adapter":
        return model
    torch.manual_seed(1)
    if adapter == "prompt tuning":
        prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        return get_peft_model(model, prompt)
    config = LoraConfig(
        r=2,
        target_modules=["q_proj", "down_proj"],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
        **ADAPTERS[adapter],
    )
    return get_peft_model(model, config)


def data_for(loss):
    # More than are used: at the end of its loader Accelerate makes a step of each micro-batch.
    found = [dict(row) for row in rows("llama", BATCH * (STEPS + 1))]
    if loss in RAGGED:
        for number, row in enumerate(found):
            row["labels"] = row["labels"].clone()
            row["labels"][: number % 5] = -100
    return found


def loss_of(model, loss, batch, micro=1, items=None):
    """In plain torch, on the global batch. ``micro``: of as many micro-batches the Trainer adds
    what an overridden ``compute_loss`` returns."""
    items = items_in(batch["labels"]) if items is None else items
    if loss == PENALTY:
        outputs = model(**batch, num_items_in_batch=items)
        return outputs.loss + micro * 0.1 * outputs.logits.square().mean()
    if loss in OVERRIDDEN:
        times = micro if loss == OWN_MEAN else 1
        logits = model(input_ids=batch["input_ids"]).logits
        return times * cross_entropy(logits, batch["labels"], "mean")
    if loss == "the model's":
        return model(**batch, num_items_in_batch=items).loss
    if loss == "the model's, ignores num_items_in_batch":
        return model(**batch)["loss"]
    labels = batch["labels"]
    outputs = model(input_ids=batch["input_ids"])
    if loss == "label smoothing":
        return LabelSmoother(0.1)(outputs, labels, shift_labels=True)
    return FUNCTIONS[loss](outputs, labels, items)


@functools.cache
def reference(adapter, loss, fresh_at=None, micro=1):
    """Losses and norms of the steps, and the weights after each. ``fresh_at``: the step that makes
    a new optimizer, as after a checkpoint without optimizer state. ``micro``: see ``loss_of``."""
    model, data = model_for(adapter, loss).train(), data_for(loss)
    trained, weights = Trained(), []
    for step in range(STEPS):
        if step in (0, fresh_at):
            optimizer = optimizer_for([p for p in model.parameters() if p.requires_grad])
            optimizer.param_groups[0]["weight_decay"] = 0.0
        batch = batch_of(data[step * BATCH : (step + 1) * BATCH])
        value = loss_of(model, loss, batch, micro)
        value.backward()
        trained.losses.append(value.item())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        trained.norms.append(norm.item())
        optimizer.step()
        optimizer.zero_grad()
        weights.append({name: v.detach().clone() for name, v in model.state_dict().items()})
    return trained, weights


def expected(cell, first=0, last=STEPS):
    _, adapter, loss, micro, save = cell
    fresh_at = first if save == "save_only_model" and first else None
    trained, weights = reference(adapter, loss, fresh_at, micro if loss in OVERRIDDEN else 1)
    losses, norms = trained.losses[first:last], trained.norms[first:last]
    if save == "best model at the end":
        model, last = model_for(adapter, loss), 1
        model.load_state_dict(weights[0])
        with torch.no_grad():
            losses = [*losses, loss_of(model.eval(), loss, batch_of(rows("llama", 16))).item()]
    return Trained(losses, norms, weights[last - 1])


def arguments_for(cell):
    _, _, loss, _, save = cell
    given = {
        "learning_rate": 0.02,
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "constant",
        "max_steps": STEPS,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "label_smoothing_factor": 0.1 if loss == "label smoothing" else 0.0,
        "save_only_model": save == "save_only_model",
    }
    if save == "best model at the end":  # the first step's, whose loss is the highest
        given |= {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
        given |= {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
        given |= {"greater_is_better": True}
    return given


def with_trainer(cell, folder, checkpoint=None):
    import xla_fsdp

    _, adapter, loss, micro, save = cell
    trainer, noted = trainer_for(
        "llama",
        folder,
        micro,
        cls=OVERRIDDEN.get(loss, InOrder),
        model=model_for(adapter, loss),
        more={"compute_loss_func": FUNCTIONS.get(loss), "train_dataset": data_for(loss)},
        **arguments_for(cell),
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model(os.path.join(folder, "model"))
    assert trainer.state.global_step == STEPS
    kept = [value.item() for value in trainer.kept]
    losses = [sum(kept[at : at + micro]) for at in range(0, len(kept), micro)]
    if save == "best model at the end":
        losses.append(trainer.evaluate()["eval_loss"])
    return Trained(losses, noted.norms, xla_fsdp.full_state_dict(trainer.model))


def with_accelerate(cell, folder, checkpoint=None):
    _, adapter, loss, micro, save = cell
    accelerator = accelerator_for(steps=micro, **by_class("llama"))
    model = model_for(adapter, loss).train()
    optimizer = optimizer_for([p for p in model.parameters() if p.requires_grad])
    optimizer.param_groups[0]["weight_decay"] = 0.0
    size = BATCH // accelerator.num_processes // micro
    loader = torch.utils.data.DataLoader(data_for(loss), batch_size=size, collate_fn=batch_of)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    first = 0
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
        first = SAVED
        loader = accelerator.skip_first_batches(loader, first * micro)
    trained, losses, batches = Trained(), [], iter(loader)
    for step in range(first, STEPS):
        together = [next(batches) for _ in range(micro)]
        items = sum(items_in(batch["labels"]) for batch in together)
        items = accelerator.gather(items).sum()
        for batch in together:
            with accelerator.accumulate(model):
                value = loss_of(model, loss, batch, items=items)
                if loss == "the model's":  # divided by items: multiplied as Accelerate's guide says
                    value = value * micro * accelerator.num_processes
                accelerator.backward(value)
                losses.append(accelerator.reduce(value.detach(), "mean") / micro)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        trained.losses.append(sum(one.item() for one in losses))
        trained.norms.append(norm.item())
        losses = []
        if step + 1 == SAVED:
            accelerator.save_state(os.path.join(folder, f"checkpoint-{SAVED}"))
    trained.weights = state = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model)
    path = os.path.join(folder, "model")
    if "state_dict=" in save:
        main = accelerator.is_main_process
        inner.save_pretrained(path, state_dict=state, is_main_process=main)
    elif save == "save_state, save_model":
        accelerator.save_model(model, path)
    else:
        inner.save_pretrained(path)
    accelerator.wait_for_everyone()
    return trained


WITH = {"Trainer": with_trainer, "Accelerate": with_accelerate}


def several(rank, folder, cells, checkpoints=None):
    found = []
    for number, cell in enumerate(cells):
        path = os.path.join(folder, str(number))
        checkpoint = None
        if checkpoints:
            checkpoint = os.path.join(checkpoints, str(number), f"checkpoint-{SAVED}")
        found.append(WITH[cell[0]](cell, path, checkpoint))
    return found


def table():
    """The rows of the documentation: cells by the number of ranks, and of ranks that resume (0:
    none). A cell: integration, adapter, loss, micro-batches, and how the model is saved."""
    found = {}
    page = ROOT / "docs" / "reference" / "tested-combinations.md"
    for line in page.read_text().replace("`", "").splitlines():
        integration, *row = (part.strip() for part in line.strip("|").split("|"))
        if integration in WITH and "without torch_xla" not in line:
            adapter, loss, micro, saved, ranks = row
            cell = integration, adapter, loss, int(micro), saved
            first, _, again = ranks.partition(" → ")
            found.setdefault((int(first), int(again or 0)), []).append(cell)
    return found


TABLE = table()


def compare(cells, of_ranks, folder, first=0):
    wrong = []
    for number, cell in enumerate(cells):
        ranks = [found[number] for found in of_ranks]
        losses = [sum(step) / len(step) for step in zip(*(r.losses for r in ranks), strict=True)]
        right = expected(cell, first)
        try:
            assert_alike(Trained(losses, ranks[0].norms, ranks[0].weights), right)
            check_files(cell, folder / str(number) / "model", right.weights)
        except Exception as error:
            wrong.append(f"{cell}, from step {first}: {error!r:.300}")
    assert not wrong, "\n".join(wrong)


def check_files(cell, folder, weights):
    """The files are those that one process writes, and the libraries load them."""
    integration, adapter, loss, _, save = cell
    there = {path.name for path in folder.iterdir()} - {"training_args.bin"}
    if save == "save_state, save_model":
        assert there == {"model.safetensors"}
        found = load_file(folder / "model.safetensors")
    elif adapter == "no adapter":
        assert there == {"config.json", "generation_config.json", "model.safetensors"}
        found = type(model_for(adapter, loss)).from_pretrained(folder).state_dict()
    else:
        assert there == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
        if integration == "Trainer":
            (weights_there,) = {path.name for path in folder.parent.glob("checkpoint-3/*model*")}
            assert weights_there == "adapter_model.safetensors"
        plain = model_for(adapter, loss)
        plain.load_state_dict(weights)
        plain.save_pretrained(folder.parent / "plain")
        saved = load_file(folder / "adapter_model.safetensors")
        assert saved.keys() == load_file(folder.parent / "plain/adapter_model.safetensors").keys()
        base = model_for("no adapter", loss)
        found = PeftModel.from_pretrained(base, folder).state_dict()
    torch.testing.assert_close(dict(found), weights, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, again", TABLE)
def test_a_cell_is_plain_training(run_ranks, tmp_path, ranks, again):
    cells = TABLE[ranks, again]
    found = run_ranks(several, ranks, str(tmp_path / "first"), cells, timeout=TIMEOUT)
    compare(cells, found, tmp_path / "first")
    if again:
        folders = str(tmp_path / "again"), str(tmp_path / "first")
        found = run_ranks(several, again, folders[0], cells, folders[1], timeout=TIMEOUT)
        compare(cells, found, tmp_path / "again", SAVED)


LORA = ("Trainer", "LoRA", "the model's", 1, "save_model, checkpoint")


def in_one_process(folder):
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, adam_epsilon=1e-3, **arguments_for(LORA)
    )
    model = model_for("LoRA", "the model's")
    data = {"train_dataset": data_for("the model's"), "data_collator": batch_of}
    trainer = InOrder(model, arguments, **data)
    trainer.train()
    trainer.save_model(os.path.join(folder, "model"))


def from_one_process(rank, folder, checkpoint):
    from rank_warnings import warnings_of_ranks

    with warnings_of_ranks(rank) as said:
        found = with_trainer(LORA, folder, checkpoint)
    if rank == 0:
        assert any("has no random state of XLA" in text for text in said), said
    return [found]


@pytest.mark.slow
def test_a_checkpoint_of_a_machine_without_torch_xla(run_script, run_ranks, tmp_path):
    done = run_script(
        "import sys\n"
        "sys.modules['torch_xla'] = None\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        f"import test_hf_combinations as tests\n"
        f"tests.in_one_process({str(tmp_path)!r})\n"
    )
    assert done.returncode == 0, done.stderr
    check_files(LORA, tmp_path / "model", expected(LORA).weights)
    checkpoint = tmp_path / f"checkpoint-{SAVED}"
    assert "xla" not in torch.load(checkpoint / "rng_state.pth", weights_only=False)
    again = tmp_path / "again"
    found = run_ranks(from_one_process, 2, str(again / "0"), str(checkpoint), timeout=TIMEOUT)
    compare([LORA], found, again, SAVED)


ONLY_MODEL = ("Trainer", "no adapter", "label smoothing", 1, "save_only_model")


def in_an_old_folder(rank, folder):
    """Saves only the model into a folder that has the full checkpoint of another run."""
    from rank_warnings import warnings_of_ranks

    from xla_fsdp.integrations.transformers import _ranks_that_saved

    cell = ("Trainer", "no adapter", "the model's", 1, "save_model, checkpoint")
    with_trainer(cell, folder)
    with_trainer(ONLY_MODEL, folder)
    checkpoint = os.path.join(folder, f"checkpoint-{SAVED}")
    with warnings_of_ranks(rank) as said:
        found = with_trainer(ONLY_MODEL, folder, checkpoint)
    assert _ranks_that_saved(checkpoint) == 2
    if rank == 0:
        for lacking in ("no optimizer state", "no random state"):
            assert any(lacking in text for text in said), said
    return [found]


@pytest.mark.slow
def test_save_only_model_leaves_nothing_of_another_run(run_ranks, tmp_path):
    found = run_ranks(in_an_old_folder, 2, str(tmp_path / "0"), timeout=TIMEOUT)
    compare([ONLY_MODEL], found, tmp_path, SAVED)


def test_the_number_of_ranks_that_saved(tmp_path):
    """As recorded, whatever else is there; of older versions, as their files tell."""
    from xla_fsdp.integrations.transformers import _ranks_that_saved

    assert _ranks_that_saved(str(tmp_path)) is None
    (tmp_path / "rng_state.pth").touch()
    assert _ranks_that_saved(str(tmp_path)) == 1
    (tmp_path / "xla_fsdp_ranks.json").write_text('{"world_size": 4}')
    assert _ranks_that_saved(str(tmp_path)) == 4


def test_an_attribute_that_the_installed_transformers_ignores(monkeypatch):
    """Transformers 4 does not divide the loss of a class with ``loss_is_scaled_for_ga = False``."""
    from xla_fsdp.integrations.transformers import _compute_loss, _note_micro_batches

    trainer = SimpleNamespace(
        loss_is_scaled_for_ga=False,
        current_gradient_accumulation_steps=2,
        model_accepts_loss_kwargs=True,
        compute_loss_func=None,
        args=SimpleNamespace(average_tokens_across_devices=False),
    )

    def step(trainer):
        return _compute_loss(lambda *_: 8.0, trainer, None, {}, False, 4)

    monkeypatch.setattr(Trainer, "loss_is_scaled_for_ga", None, raising=False)
    assert _note_micro_batches(step, trainer) == 8.0
    monkeypatch.delattr(Trainer, "loss_is_scaled_for_ga")
    assert _note_micro_batches(step, trainer) == 4.0
    assert step(trainer) == 8.0  # in an evaluation


class NotesDtype(IgnoresItems):
    def forward(self, input_ids=None, labels=None, num_items_in_batch=None, **kwargs):
        self.noted = num_items_in_batch.dtype, num_items_in_batch.item()
        return super().forward(input_ids, labels)


def in_bfloat16(rank, folder):
    model = model_for("no adapter", "the model's")
    model.__class__ = NotesDtype
    trainer, _ = trainer_for("llama", folder, 2, model=model, bf16=True, max_steps=1)
    trainer.train()
    return model.noted


@pytest.mark.slow
def test_the_number_of_items_is_not_rounded_to_bfloat16(run_ranks, tmp_path):
    noted = torch.float32, items_in(rows("llama")[0]["labels"]) * BATCH / 4
    assert run_ranks(in_bfloat16, 2, str(tmp_path), timeout=TIMEOUT) == [noted] * 2

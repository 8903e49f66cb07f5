"""Trainers and Accelerators with an FSDP configuration on XLA, for tests."""

import torch
import transformers as hf
from hf_models import BATCH, CLIP, LAYERS, batch_of, build, rows
from transformers import Trainer, TrainerCallback, TrainingArguments


class InOrder(Trainer):
    """Does not shuffle, and keeps the losses, of which the logs have four digits."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("kept", []).append(loss)
        return loss

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Noted(TrainerCallback):
    """What a run logs, and that callbacks are called."""

    def __init__(self):
        self.norms, self.evaluated, self.drawn = [], [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.drawn.append(torch.rand(()).item())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])
        if "eval_loss" in logs:
            self.evaluated.append(logs["eval_loss"])


def trainer_for(
    name, folder, micro=1, settings=None, config=None, cls=InOrder, model=None, more=None, **given
):
    """``model``: another one than ``build(name)``; ``more``: of the Trainer, not its arguments."""
    import torch_xla.runtime as xr
    from accelerate.state import AcceleratorState, GradientState

    import xla_fsdp.integrations.transformers  # noqa: F401

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    fsdp_config = {
        "xla": True,
        "xla_fsdp_settings": settings or {},
        "transformer_layer_cls_to_wrap": [LAYERS[name]],
    }
    options = {
        "fsdp": True,
        "fsdp_config": fsdp_config | (config or {}),
        "per_device_train_batch_size": BATCH // xr.world_size() // micro,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": micro,
        "num_train_epochs": 1,
        "learning_rate": 0.02,
        "adam_epsilon": 1e-3,
        "weight_decay": 0.3,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    noted = Noted()
    seq2seq = issubclass(cls, hf.Seq2SeqTrainer)
    arguments = hf.Seq2SeqTrainingArguments if seq2seq else TrainingArguments
    given_to_it = {
        "model": model or build(name),
        "args": arguments(str(folder), **(options | given)),
        "train_dataset": rows(name),
        "eval_dataset": rows(name, 16),
        "data_collator": batch_of,
        "callbacks": [noted],
    }
    trainer = cls(**(given_to_it | (more or {})))
    return trainer, noted


def accelerator_for(mixed_precision="no", steps=1, **plugin):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import FullyShardedDataParallelPlugin

    import xla_fsdp.integrations.accelerate  # noqa: F401

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    return Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**plugin),
        mixed_precision=mixed_precision,
        gradient_accumulation_steps=steps,
    )


def by_class(name):
    return {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": [LAYERS[name]],
    }

"""Releases of libraries that lack a name which an integration changes or uses.

As a script, in a process of its own, it deletes names first: ``test_missing_names.py imports``, or
``models FOLDER``.
"""

import contextlib
import importlib
import os
import subprocess
import sys

import accelerate.checkpointing
import peft.peft_model
import pytest
import torch
import transformers.trainer
from accelerate.data_loader import MpDeviceLoaderWrapper
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils.dataclasses import KwargsHandler
from conftest import ROOT
from peft.tuners.tuners_utils import BaseTuner
from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin
from transformers.modeling_utils import AttentionInterface, ModuleUtilsMixin, PreTrainedModel

import xla_fsdp

pytestmark = pytest.mark.slow

Trainer, Accelerator = transformers.Trainer, accelerate.Accelerator
Peft = peft.peft_model.PeftModel
OWNERS = [
    *(Trainer, transformers.TrainingArguments, PreTrainedModel, GenerationMixin, ModuleUtilsMixin),
    *(Accelerator, AcceleratorState, PartialState, GradientState, AcceleratedOptimizer),
    *(MpDeviceLoaderWrapper, KwargsHandler, accelerate.FullyShardedDataParallelPlugin),
    *(Peft, BaseTuner, transformers.trainer, accelerate.checkpointing, torch.nn.functional),
]
NAMES = [
    ("transformers", Trainer, "_load_best_model"),
    ("transformers", Trainer, "_get_output_dir"),
    ("transformers", Trainer, "loss_is_scaled_for_ga"),
    ("transformers", Accelerator, "get_state_dict"),
    ("accelerate", Accelerator, "get_state_dict"),
    ("accelerate", Accelerator, "register_load_state_pre_hook"),
    ("models", ModuleUtilsMixin, "num_parameters"),
    ("models", GenerationMixin, "_has_unfinished_sequences"),
    ("models", Cache, "get_mask_sizes"),
    ("peft", Peft, "load_adapter"),
    ("peft", Peft, "get_base_model"),
    ("attention", importlib.import_module("transformers.masking_utils"), "and_masks"),
]
if importlib.util.find_spec("transformers.integrations.moe") is not None:
    moe = importlib.import_module("transformers.integrations.moe")
    NAMES += [("models", moe, "use_experts_implementation"), ("models", moe, "ExpertsInterface")]


@contextlib.contextmanager
def without(owner, name):
    value = vars(owner)[name]
    annotations = vars(owner).get("__annotations__", {})
    annotation = annotations.pop(name, None)
    delattr(owner, name)
    try:
        yield
    finally:
        setattr(owner, name, value)
        if annotation is not None:
            annotations[name] = annotation


def state():
    """What an integration may change: attributes, and functions for attention and experts."""
    found = {owner: dict(vars(owner)) for owner in OWNERS}
    found["attention"] = set(AttentionInterface().keys())
    if "moe" in globals():
        found["experts"] = dict(moe.ALL_EXPERTS_FUNCTIONS)
    return found


def imports():
    """Prints a line for each integration that raised and changed nothing."""
    for integration, owner, name in NAMES:
        if name not in vars(owner):  # in another release only
            continue
        with without(owner, name):
            before = state()
            try:
                importlib.import_module(f"xla_fsdp.integrations.{integration}").install()
            except ImportError as error:
                assert type(error).__name__ == "MissingNamesError" and name in str(error), error
                assert "pip install 'xla_fsdp[" in str(error)
                after = state()
                changed = [key for key in before if before[key] != after[key]]
                print(f"{integration} without {name}:", changed or "nothing is changed")
            else:
                sys.exit(f"{integration} without {name}: nothing was raised")


def save_and_generate(rank, folder):
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = xla_fsdp.XlaFullyShardedDataParallel(transformers.GPT2LMHeadModel(config))
    raised = []
    for call in (
        lambda: model.module.save_pretrained(folder),
        lambda: model.module.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=1),
    ):
        try:
            call()
        except RuntimeError as error:
            raised.append(str(error))
    transformers.GPT2LMHeadModel(config).save_pretrained(f"{folder}-plain{rank}")
    return raised


def models(folder):
    del ModuleUtilsMixin.num_parameters
    for raised in xla_fsdp.launch(save_and_generate, (folder,), num_devices=2):
        print(*raised, sep="\n")


def run(*arguments):
    environment = dict(os.environ, PJRT_DEVICE="CPU", PYTHONPATH=str(ROOT))
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(), done.stderr


def test_a_missing_name_of_any_library_is_reported_and_nothing_is_changed():
    lines, _ = run("imports")
    assert len(lines) >= 10
    assert [line for line in lines if not line.endswith(": nothing is changed")] == []
    for integration in ("transformers", "accelerate", "models", "peft", "attention"):
        assert any(line.startswith(f"{integration} without") for line in lines)


def test_a_sharded_model_that_could_not_be_adapted_raises_in_its_methods(tmp_path):
    folder = tmp_path / "saved"
    lines, warned = run("models", str(folder))
    missing = "has no transformers.modeling_utils.ModuleUtilsMixin.num_parameters"
    assert missing in warned and "save_pretrained and generate of sharded models raise" in warned
    assert len(lines) == 4  # two errors of each of two ranks
    for method, text in zip(["save_pretrained", "generate"] * 2, lines, strict=True):
        assert text.startswith(f"{method} of GPT2LMHeadModel would use the shards")
        assert missing in text and "pip install 'xla_fsdp[hf]'" in text
    assert not folder.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"saved-plain0", "saved-plain1"}


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])

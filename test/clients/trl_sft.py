"""TRL's SFTTrainer with adapters of peft, against one process without XLA.

The Trainer's settings are those of its page in the documentation.
"""

import os
import subprocess
import sys
import tempfile

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel
from trl import SFTConfig, SFTTrainer

RANKS, STEPS, BATCH, LENGTH = 2, 3, 4, 8
CONFIG = transformers.LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
    bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip
SHARDED = {
    "fsdp": True,
    "fsdp_config": {"xla": True, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}


def build() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(CONFIG)


def adapters() -> LoraConfig:
    return LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip


class InOrder(SFTTrainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def dataset() -> Dataset:
    """Rows of equal length, of which the first three words are the prompt of every second one."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, 50, (STEPS * BATCH, LENGTH), generator=generator).tolist()
    prompts = [3 * (number % 2) for number in range(len(rows))]
    return Dataset.from_list(
        [
            {"input_ids": row, "labels": [-100] * prompt + row[prompt:]}
            for row, prompt in zip(rows, prompts, strict=True)
        ]
    )


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {f"<{number}>": number for number in range(CONFIG.vocab_size)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<2>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<2>", eos_token="<1>", unk_token="<2>"
    )


def train(folder: str, ranks: int = 1, **settings) -> tuple[list[float], SFTTrainer]:
    arguments = SFTConfig(
        folder, per_device_train_batch_size=BATCH // ranks, max_steps=STEPS, learning_rate=0.02,
        lr_scheduler_type="constant", adam_epsilon=1e-3, logging_steps=1, report_to="none",
        bf16=False, max_length=None, shuffle_dataset=False, save_strategy="no",
        disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True}, **settings,
    )  # fmt: skip
    torch.manual_seed(1)
    trainer = InOrder(
        build(), arguments, train_dataset=dataset(), processing_class=tokenizer(),
        peft_config=adapters(),
    )  # fmt: skip
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer


def on_rank(rank: int, folder: str):
    import xla_fsdp
    import xla_fsdp.integrations.transformers

    losses, trainer = train(folder, RANKS, **SHARDED)
    trainer.save_model()
    return losses, xla_fsdp.full_state_dict(trainer.model, rank0_only=False)


def in_plain_torch(path: str) -> None:
    losses, trainer = train(os.path.dirname(path), use_cpu=True)
    torch.save((losses, trainer.model.state_dict()), path)


def main() -> None:
    import xla_fsdp

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "plain.pt")
        environment = {**os.environ, "USE_TORCH_XLA": "0"}
        subprocess.run([sys.executable, __file__, path], env=environment, check=True)
        expected, right = torch.load(path)
        (losses, state), _ = xla_fsdp.launch(on_rank, (folder,), num_devices=RANKS)
        loaded = PeftModel.from_pretrained(build(), folder).state_dict()
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, dict(right), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(dict(loaded), state, rtol=0, atol=1e-6)


if __name__ == "__main__":
    in_plain_torch(sys.argv[1]) if len(sys.argv) > 1 else main()

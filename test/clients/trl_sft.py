"""TRL's SFTTrainer with adapters of peft, against plain torch.

The Trainer's settings are those of its page in the documentation.
"""

import tempfile

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from trl import SFTConfig, SFTTrainer

import xla_fsdp
import xla_fsdp.integrations.transformers

RANKS, STEPS, BATCH, LENGTH = 2, 3, 4, 8
CONFIG = transformers.LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
    bos_token_id=0, eos_token_id=1, pad_token_id=2,
)  # fmt: skip


def build() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(CONFIG)


def adapters() -> LoraConfig:
    return LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False,
        task_type="CAUSAL_LM",
    )  # fmt: skip


def rows() -> torch.Tensor:
    return torch.randint(3, 50, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


class InOrder(SFTTrainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {f"<{number}>": number for number in range(CONFIG.vocab_size)}
    inner = Tokenizer(models.WordLevel(words, unk_token="<2>"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<2>", eos_token="<1>", unk_token="<2>"
    )


def main(rank: int, folder: str, adapted: bool):
    arguments = SFTConfig(
        folder,
        fsdp=True,
        fsdp_config={"xla": True, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=BATCH // RANKS, max_steps=STEPS, learning_rate=0.02,
        lr_scheduler_type="constant", adam_epsilon=1e-3, logging_steps=1, report_to="none",
        bf16=False, max_length=None, shuffle_dataset=False, save_strategy="no",
        disable_tqdm=True, dataset_kwargs={"skip_prepare_dataset": True},
        use_cpu=False,
    )  # fmt: skip
    data = [{"input_ids": row.tolist(), "labels": row.tolist()} for row in rows()]
    torch.manual_seed(1)
    trainer = InOrder(
        build(), arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer(),
        peft_config=adapters() if adapted else None,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, xla_fsdp.full_state_dict(trainer.model, rank0_only=False)


def in_plain_torch(adapted: bool):
    model = build()
    torch.manual_seed(1)
    model = (get_peft_model(model, adapters()) if adapted else model).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, eps=1e-3, weight_decay=0.0)
    losses = []
    for batch in rows().split(BATCH):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, dict(model.state_dict())


if __name__ == "__main__":
    for adapted in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            (losses, state), _ = xla_fsdp.launch(main, (folder, adapted), num_devices=RANKS)
            expected, right = in_plain_torch(adapted)
            torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
            assert state.keys() == right.keys()
            for name, value in right.items():
                torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)
            if adapted:
                loaded = PeftModel.from_pretrained(build(), folder)
            else:
                loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
            for name, value in loaded.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6, msg=name)

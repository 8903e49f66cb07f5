"""Small Hugging Face models from configurations, their data, how they train in plain torch, and
Trainers and Accelerators with an FSDP configuration on XLA.

Everything is imported here, before ranks start: transformers imports names late, and not safely
from several threads.
"""

import functools
import sys
from dataclasses import dataclass, field

import torch
import transformers as hf
from transformers.models.auto.configuration_auto import AutoConfig  # noqa: F401

VERSION = int(hf.__version__.partition(".")[0])
STEPS = 3
BATCH = 8  # of all ranks together
LENGTH = 6
ROWS = BATCH * STEPS
CLIP = 0.3
WIDE, SPREAD = 0.4, 0.2  # of the weights: to generate, and to train
GPT2Model = hf.GPT2Model

WORDS = dict(vocab_size=50, eos_token_id=1, pad_token_id=2)
SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
# Random numbers of dropout would be other ones on every number of ranks.
BERT = SIZES | dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
LLAMA = WORDS | SIZES | dict(max_position_embeddings=64, num_key_value_heads=1, bos_token_id=0)
GPT2 = WORDS | dict(n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0)
T5 = WORDS | dict(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, dropout_rate=0.0)
FEW = dict(num_local_experts=4, num_experts_per_tok=2)
MANY = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
ROUTED = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, n_group=1)
LATENT = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8)

MODELS = {
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Block",
        GPT2 | dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    ),
    "bert": ("BertForSequenceClassification", "BertLayer", BERT | dict(vocab_size=50)),
    "llama": ("LlamaForCausalLM", "LlamaDecoderLayer", LLAMA),
    "t5": ("T5ForConditionalGeneration", "T5Block", T5 | dict(decoder_start_token_id=2)),
    "vit": (
        "ViTForImageClassification",
        "ViTLayer",
        BERT | dict(image_size=8, patch_size=4, num_labels=3),
    ),
    "mixtral": ("MixtralForCausalLM", "MixtralDecoderLayer", LLAMA | FEW),
    "qwen3_moe": ("Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer", LLAMA | MANY | dict(head_dim=8)),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3DecoderLayer",
        LLAMA
        | ROUTED
        | LATENT
        | dict(topk_group=1, first_k_dense_replace=0, num_key_value_heads=2),
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssDecoderLayer",
        LLAMA | FEW | dict(head_dim=8, sliding_window=8),
    ),
}
CLASSES, LAYERS, LAYER_CLASSES = {}, {}, {}


def add_models(models):
    for name, (model, layer, _) in models.items():
        CLASSES[name] = cls = getattr(hf, model)
        LAYERS[name] = layer
        LAYER_CLASSES[name] = getattr(sys.modules[cls.__module__], layer)
    MODELS.update(models)


add_models(MODELS)


def build(name, spread=None):
    """The same weights at every call.

    With a large ``spread`` of the weights the model is in evaluation, and logits are far enough
    apart for all ways of computing to choose the same tokens. In training it would multiply
    rounding errors from step to step.
    """
    torch.manual_seed(0)
    weights = {}
    if spread is not None:
        weights["initializer_range"] = spread
        if name == "t5":
            weights = {"initializer_factor": spread * 7.5}
    cls = CLASSES[name]
    model = cls(cls.config_class(**MODELS[name][2], **weights))
    return model if spread is None else model.eval()


def wrap(model, name, **options):
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import transformer_auto_wrap_policy

    layers = {LAYER_CLASSES[name]}
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
    return FSDP(model, auto_wrap_policy=policy, **options)


def tokens(step=0):
    return torch.randint(3, 50, (4, LENGTH), generator=torch.Generator().manual_seed(step))


def rows(name, number=ROWS):
    generator = torch.Generator().manual_seed(5)
    if name == "vit":
        pixels = torch.randn(number, 3, 8, 8, generator=generator)
        labels = torch.randint(3, (number,), generator=generator)
        return [{"pixel_values": p, "labels": y} for p, y in zip(pixels, labels, strict=True)]
    words = torch.randint(3, 50, (number, LENGTH), generator=generator)
    if name == "bert":
        return [{"input_ids": row, "labels": row.sum() % 2} for row in words]
    return [{"input_ids": row, "labels": row.flip(0) if name == "t5" else row} for row in words]


def batch_of(some):
    return {key: torch.stack([row[key] for row in some]) for key in some[0]}


def counts(model):
    """Whether the model's loss uses the number of labels: others may take it and ignore it."""
    return isinstance(model, (hf.GPT2LMHeadModel, hf.LlamaForCausalLM, hf.MixtralForCausalLM))


def items_in(labels, name="llama"):
    """How many labels the Trainer counts: since Transformers 5 without the first word, which no
    causal model predicts, unless the model does not name its loss, as GPT-2."""
    causal = name in ("llama", "mixtral") and VERSION >= 5
    return (labels[..., 1:] if causal else labels).ne(-100).sum()


def sgd_losses(model, ids, synced=lambda: None, steps=3, lr=0.1):
    """Of training on ``ids(number)``; ``synced`` is called after each step."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    losses = []
    for number in range(steps):
        part = ids(number)
        loss = model(input_ids=part, labels=part, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        synced()
    return [loss.item() for loss in losses]


def groups_of(model, decay=0.3):
    """Without decay of biases and norms, as everybody does."""
    spared = ("bias", "LayerNorm.weight", "ln_1.weight", "ln_2.weight", "norm.weight")
    plain = [p for n, p in model.named_parameters() if n.endswith(spared)]
    decayed = [p for n, p in model.named_parameters() if not n.endswith(spared)]
    return [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]


@dataclass
class Trained:
    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)


def optimizer_for(groups):
    """A large epsilon: of a gradient that is all rounding error Adam would make a full step."""
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


@functools.cache
def plain(
    name, clip=CLIP, micro=1, steps=STEPS, groups=groups_of, schedule=None, count=False, dtype=None
):
    """The whole batch in one process, in plain torch on the CPU; each once.

    ``count``: as the Trainer does it, losses are sums, divided by the number of labels.
    ``dtype``: of the copies of the parameters that the model computes with.
    """
    model, data = build(name), rows(name)
    model.train()
    optimizer = optimizer_for(groups(model))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule else None
    trained = Trained()

    def loss_of(**batch):
        if dtype is None:
            return model(**batch).loss
        narrow = {name: p.to(dtype) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, narrow, (), batch).loss

    for step in range(steps):
        part = data[step * BATCH : (step + 1) * BATCH]
        losses = []
        for number in range(micro):
            size = BATCH // micro
            batch = batch_of(part[number * size : (number + 1) * size])
            if count and counts(model):
                loss = loss_of(**batch, num_items_in_batch=micro * items_in(batch["labels"], name))
            else:
                loss = loss_of(**batch) / micro
            loss.backward()
            losses.append(loss.item())
        trained.losses.append(sum(losses))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        trained.norms.append(norm.item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
    trained.weights = {n: v.detach().clone() for n, v in model.state_dict().items()}
    return trained


def assert_alike(found, expected):
    def close(one, other, tolerance, what):
        one, other = torch.as_tensor(one), torch.as_tensor(other)
        message = lambda text: f"{what}: {text}"  # noqa: E731
        torch.testing.assert_close(
            one, other, rtol=tolerance, atol=tolerance, check_dtype=False, msg=message
        )

    close(found.losses, expected.losses, 1e-5, "losses")
    close(found.norms, expected.norms, 1e-4, "norms")
    assert found.weights.keys() == expected.weights.keys()
    for name, value in expected.weights.items():
        close(found.weights[name], value, 1e-4, name)


def assert_alike_in_bfloat16(found, narrow, wide):
    """Weights at most twice as far from ``narrow``, plain training in bfloat16, as that is from
    ``wide``, in float32; losses and norms, only a few numbers, at most four times: ranks round
    sums in another order."""

    def far(one, other):
        one, other = (torch.as_tensor(each, dtype=torch.float64) for each in (one, other))
        return torch.linalg.vector_norm(one - other).item()

    def whole(weights):
        return torch.cat([value.double().reshape(-1) for _, value in sorted(weights.items())])

    assert found.weights.keys() == narrow.weights.keys()
    for what in ("losses", "norms"):
        one, near, away = (getattr(each, what) for each in (found, narrow, wide))
        assert 0 < far(near, away) and far(one, near) <= 4 * far(near, away), what
    one, near, away = (whole(each.weights) for each in (found, narrow, wide))
    assert 0 < far(near, away) and far(one, near) <= 2 * far(near, away)


class InOrder(hf.Trainer):
    """Does not shuffle, and keeps the losses, of which the logs have four digits."""

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.__dict__.setdefault("kept", []).append(loss)
        return loss

    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


class Noted(hf.TrainerCallback):
    def __init__(self):
        self.norms, self.drawn = [], []

    def on_step_begin(self, args, state, control, **kwargs):
        self.drawn.append(torch.rand(()).item())

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "grad_norm" in logs:
            self.norms.append(logs["grad_norm"])


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
    arguments = hf.Seq2SeqTrainingArguments if seq2seq else hf.TrainingArguments
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

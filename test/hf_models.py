"""Small Hugging Face models from configurations, their data, and how they train in plain torch."""

from dataclasses import dataclass, field

import torch
import transformers as hf

STEPS = 4
BATCH = 8  # of all ranks together
LENGTH = 6
VOCABULARY = 24
WIDTH = 16
ROWS = BATCH * STEPS
CLIP = 0.3
LAYERS = {"gpt2": "GPT2Block", "bert": "BertLayer", "llama": "LlamaDecoderLayer"}
LAYERS |= {"t5": "T5Block", "vit": "ViTLayer"}


def build(name):
    """A model without dropout: its random numbers would be other ones on every number of ranks."""
    torch.manual_seed(7)
    sizes = {"num_hidden_layers": 2, "hidden_size": WIDTH, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 2 * WIDTH}
    words = {"vocab_size": VOCABULARY, "max_position_embeddings": 8}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "gpt2":
        none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        sizes = {"n_layer": 2, "n_embd": WIDTH, "n_head": 2, "n_positions": 8}
        ends = {"bos_token_id": 1, "eos_token_id": 2}
        config = hf.GPT2Config(vocab_size=VOCABULARY, **sizes, **none, **ends)
        return hf.GPT2LMHeadModel(config)
    if name == "bert":
        return hf.BertForSequenceClassification(hf.BertConfig(**sizes, **words, **dropout))
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **words, num_key_value_heads=1))
    if name == "t5":
        sizes = {"num_layers": 2, "d_model": WIDTH, "num_heads": 2, "d_ff": 2 * WIDTH, "d_kv": 8}
        sizes |= {"dropout_rate": 0.0, "decoder_start_token_id": 0}
        return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCABULARY, **sizes))
    pictures = {"image_size": 8, "patch_size": 4, "num_labels": 3}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, **pictures, **dropout))


def rows(name, number=ROWS):
    """The data set: a dictionary for each row."""
    generator = torch.Generator().manual_seed(5)
    if name == "vit":
        pixels = torch.randn(number, 3, 8, 8, generator=generator)
        labels = torch.randint(3, (number,), generator=generator)
        return [{"pixel_values": p, "labels": y} for p, y in zip(pixels, labels, strict=True)]
    tokens = torch.randint(3, VOCABULARY, (number, LENGTH), generator=generator)
    if name == "bert":
        return [{"input_ids": row, "labels": row.sum() % 2} for row in tokens]
    return [{"input_ids": row, "labels": row.flip(0) if name == "t5" else row} for row in tokens]


def batch_of(some):
    """Rows as one batch."""
    return {key: torch.stack([row[key] for row in some]) for key in some[0]}


def counts(model):
    """Whether the model's loss uses the number of labels: others may take it and ignore it."""
    return isinstance(model, (hf.GPT2LMHeadModel, hf.LlamaForCausalLM))


def items_in(labels, name="llama"):
    """How many labels the Trainer counts: since Transformers 5 without the first word, which no
    causal model predicts, unless the model does not name its loss, as GPT-2."""
    causal = name == "llama" and int(hf.__version__.partition(".")[0]) >= 5
    return (labels[..., 1:] if causal else labels).ne(-100).sum()


def groups_of(model, decay=0.3):
    """Without decay of biases and norms, as everybody does."""
    spared = ("bias", "LayerNorm.weight", "ln_1.weight", "ln_2.weight", "norm.weight")
    plain = [p for n, p in model.named_parameters() if n.endswith(spared)]
    decayed = [p for n, p in model.named_parameters() if not n.endswith(spared)]
    return [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]


@dataclass
class Trained:
    """What a training leaves behind."""

    losses: list = field(default_factory=list)
    norms: list = field(default_factory=list)
    weights: dict = field(default_factory=dict)


def optimizer_for(groups):
    """A large epsilon: of a gradient that is all rounding error Adam would make a full step."""
    return torch.optim.AdamW(groups, lr=0.02, eps=1e-3)


def plain(
    name, clip=CLIP, micro=1, steps=STEPS, groups=groups_of, schedule=None, count=False, dtype=None
):
    """The whole batch in one process, in plain torch on the CPU.

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
    """Losses to 1e-5, norms and weights to 1e-4."""

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
    """Losses, norms and weights nearer to ``narrow``, plain training in bfloat16, than twice as far
    as that is from ``wide``, in float32: sums of four ranks are rounded in another order."""

    def far(one, other):
        one, other = (torch.as_tensor(each, dtype=torch.float64) for each in (one, other))
        return torch.linalg.vector_norm(one - other).item()

    def whole(weights):
        return torch.cat([value.double().reshape(-1) for _, value in sorted(weights.items())])

    assert found.weights.keys() == narrow.weights.keys()
    for what in ("losses", "norms"):
        one, near, away = (getattr(each, what) for each in (found, narrow, wide))
        assert 0 < far(near, away) and far(one, near) <= 2 * far(near, away), what
    one, near, away = (whole(each.weights) for each in (found, narrow, wide))
    assert 0 < far(near, away) and far(one, near) <= 2 * far(near, away)

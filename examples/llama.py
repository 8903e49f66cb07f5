"""The LLaMA model of the library transformers, for rows that contain several documents.

Parameter names are those of the library, so models can be exchanged with the Hugging Face hub.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import tokens
import torch
from common.script import Stop, to_one_line
from peft import LoraConfig, PeftModelForCausalLM
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

import xla_fsdp
from xla_fsdp.consolidate import CheckpointError
from xla_fsdp.integrations import attention


class Size(NamedTuple):
    layers: int
    width: int
    heads: int
    groups: int  # heads of keys and values
    inner: int


# From config.json of Llama 3.2 1B, 3.1 8B and 3.1 70B; embeddings are not tied here.
SIZES = {
    "tiny": Size(2, 128, 4, 2, 384),
    "1B": Size(16, 2048, 32, 8, 8192),
    "8B": Size(32, 4096, 32, 8, 14336),
    "70B": Size(80, 8192, 64, 8, 28672),
}
VOCABULARY = 128_256


def new(
    size: str, vocabulary: int | None, positions: int, found: tokens.Tokens | None
) -> LlamaConfig:
    """The configuration of a new model for the tokens ``found``.

    By default, a tiny model has the vocabulary of the tokens.
    """
    sizes = SIZES[size]
    if not vocabulary and size == "tiny":
        vocabulary = found.vocabulary if found else tokens.byte_level().get_vocab_size()
    return LlamaConfig(
        num_hidden_layers=sizes.layers,
        hidden_size=sizes.width,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        intermediate_size=sizes.inner,
        vocab_size=vocabulary or VOCABULARY,
        max_position_embeddings=positions,
        rope_theta=500_000.0,
        rms_norm_eps=1e-5,
        bos_token_id=None,
        eos_token_id=found.end if found else None,
        dtype=torch.float32,
        attn_implementation="xla_fsdp",
    )


def of_folder(folder: str) -> LlamaConfig:
    """The configuration of the model in a folder in the format of the hub."""
    try:
        model_type = json.loads(Path(folder, "config.json").read_text()).get("model_type")
        if model_type != "llama":
            raise ValueError(f"config.json has model_type {model_type!r}, not 'llama'")
        config = LlamaConfig.from_pretrained(folder, attn_implementation="xla_fsdp")
    except (OSError, ValueError) as error:
        raise Stop(f"--folder={folder} has no model: {to_one_line(error)}", code=2) from error
    config.dtype = torch.float32  # the dtype of shards; the model computes in --compute_dtype
    return config


def require_fit(
    config: LlamaConfig, length: int, tokenizer: str | None, found: tokens.Tokens | None
) -> None:
    """Raises Stop if the tokens ``found`` do not fit the model.

    Rows may be too long, the vocabulary may be too large, or the tokens may come from another
    tokenizer than the model's, the file ``tokenizer``. A plan needs no tokens.
    """
    if length > config.max_position_embeddings:
        raise Stop(
            f"--tokens_per_sample={length} is longer than the model's "
            f"{config.max_position_embeddings} positions",
            code=2,
        )
    if found and found.vocabulary > config.vocab_size:
        raise Stop(
            f"{found.folder} has a vocabulary of {found.vocabulary}, more than the model's "
            f"{config.vocab_size}",
            code=2,
        )
    if found and tokenizer:
        if tokens.open_tokenizer(tokenizer).get_vocab() != found.tokenizer().get_vocab():
            raise Stop(
                f"{found.folder} was created with another tokenizer than {tokenizer}, so the token "
                "numbers differ; give a new folder as --data",
                code=2,
            )


def tokenizer_of(folder: str | None) -> str | None:
    """The path of the tokenizer in a folder in the format of the hub, if there is one."""
    path = os.path.join(folder or "", "tokenizer.json")
    return path if folder and os.path.exists(path) else None


def make_folder(path: str, config: LlamaConfig, seed: int) -> None:
    """Writes an untrained model, and a tokenizer of bytes."""
    folder = Path(path)
    if folder.exists():
        raise Stop(f"--make_folder={folder} exists already; give a new folder", code=2)
    torch.manual_seed(seed)
    tokenizer = tokens.byte_level()
    config._attn_implementation = "sdpa"
    config.eos_token_id = tokenizer.token_to_id(tokens.END)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))


def remove_hub_files(folder: str) -> None:
    """Removes the files that :func:`add_hub_files` has added at an earlier end of the run.

    Consolidation did not write them, so it would not replace them.
    """
    for name in ("config.json", "tokenizer.json"):
        Path(folder, name).unlink(missing_ok=True)


def add_hub_files(folder: str, config: LlamaConfig, found: tokens.Tokens) -> None:
    """Adds the files that make a folder of weights a model in the format of the hub."""
    config.architectures = [LlamaForCausalLM.__name__]
    config.save_pretrained(folder)
    shutil.copy(os.path.join(found.folder, "tokenizer.json"), folder)


def without_values(config: LlamaConfig) -> "Llama":
    """The model on the meta device, except for values that are computed and not saved."""
    attention.install()  # in every rank, because ranks may be processes
    with torch.device("meta"):
        model = Llama(config)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


def count_parameters(config: LlamaConfig, keep: list[str]) -> int:
    """The number of parameters. Raises Stop if ``keep`` has a name that no block has."""
    model = without_values(config)
    known = ["attention", *(name for name, _ in model.model.layers[0].named_modules() if name)]
    if unknown := sorted(set(keep) - set(known)):
        raise Stop(f"--keep={unknown[0]} is unknown; blocks have {', '.join(known)}", code=2)
    return sum(parameter.numel() for parameter in model.parameters())


def initializer(
    model: nn.Module, inner: LlamaForCausalLM, new: bool
) -> Callable[[nn.Module], None]:
    """Returns a ``param_init_fn`` that initializes submodules as their libraries do.

    If the model is not ``new``, it initializes only adapters: other values are loaded later.
    """
    adapters = {module: name for name, module in model.named_modules() if ".lora_" in name}

    def begin(module: nn.Module) -> None:
        if not new and module not in adapters:
            return xla_fsdp.defer_init(module)
        module.to_empty(device="cpu", recurse=False)
        if module not in adapters:
            inner._init_weights(module)
        elif ".lora_B." in adapters[module]:
            nn.init.zeros_(module.weight)  # so that adapters change nothing at first
        else:
            module.reset_parameters()

    return begin


def with_adapters(model: nn.Module, rank: int) -> PeftModelForCausalLM:
    """Adds LoRA adapters to all linear layers except the last; only they are trained."""
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return PeftModelForCausalLM(model, config)


def generate(
    model: nn.Module, prompt: list, config: LlamaConfig, most: int, temperature: float, seed: int
) -> list[int]:
    """Generates tokens with the library's function, with a cache of keys and values.

    All ranks get the same tokens. It stops at the model's last position.
    """
    torch.manual_seed(seed)
    ends = config.eos_token_id  # Llama 3.1 has three
    row = torch.tensor([prompt])
    generated = model.generate(
        input_ids=row,
        attention_mask=torch.ones_like(row),
        do_sample=bool(temperature),
        temperature=temperature or None,
        max_new_tokens=min(most, config.max_position_embeddings - len(prompt)),
        eos_token_id=ends,
        pad_token_id=ends[0] if isinstance(ends, list) else ends,
    )
    return generated[0].tolist()


def describe(config: LlamaConfig, lora_rank: int) -> dict[str, object]:
    """The properties by which a checkpoint identifies its model."""
    names = (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
        "vocab_size",
        "tie_word_embeddings",
    )
    sizes = {name: getattr(config, name) for name in names}
    # Transformers 5 has both in one attribute.
    positions = getattr(config, "rope_parameters", None) or {
        "rope_theta": config.rope_theta,
        "rope_scaling": config.rope_scaling,
    }
    return {"kind": "llama", "lora_rank": lora_rank, **sizes, **positions}


def load(model: nn.Module, folder: str) -> None:
    """Loads weights from a folder in the format of the hub; each rank reads only its shards.

    Adapters are not in the folder, and are not changed.
    """
    # Maps names in the folder to names in this model, which differ after peft has wrapped it.
    own = [name for name, _ in model.named_parameters() if ".lora_" not in name]
    called = {
        name.removeprefix("base_model.model.").replace(".base_layer.", "."): name for name in own
    }
    adapters = len(own) < len(list(model.parameters()))
    matching = {"strict": False, "rename": lambda name: called.get(name, name)} if adapters else {}
    try:
        found = xla_fsdp.load_weights(model, folder, **matching)
    except CheckpointError as error:
        raise Stop(f"--folder={folder}: {to_one_line(error, None)}", code=2) from error
    missing = [name for name in found.missing_keys if ".lora_" not in name]
    if missing or found.unexpected_keys:
        names = ", ".join((missing + found.unexpected_keys)[:3])
        raise Stop(f"--folder={folder} does not fit the model: {names}", code=2)


class Llama(LlamaForCausalLM):
    """The library's model, with a loss that never stores all logits.

    ``model.layers`` is one module that runs all blocks, created by ``ShardingSettings.join``.
    """

    def loss(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        segments: torch.Tensor,
        positions: torch.Tensor,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """The cross entropy of ``labels``: the next tokens, or -100 to ignore.

        All arguments are (batch, length). ``segments``: the number of each token's document in its
        row; a token attends only to its document. ``positions``: the place in the document.
        """
        from xla_fsdp.layers import linear_cross_entropy

        x = self.model.embed_tokens(input_ids)
        turns = self.model.rotary_emb(x, positions)
        # attn_implementation="xla_fsdp" interprets an integer mask as segments.
        mask = segments.to(torch.int32)
        x = self.model.layers(x, attention_mask=mask, position_embeddings=turns)
        x = self.model.norm(x)
        return linear_cross_entropy(x, self.lm_head.weight, labels, reduction=reduction)

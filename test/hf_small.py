"""Small models of transformers, built from configurations, and how they are wrapped.

Everything is imported here, before ranks start: transformers imports names late, and not safely
from several threads.
"""

from functools import partial

import torch
from transformers.models.auto.configuration_auto import AutoConfig  # noqa: F401
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
)
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block, GPT2LMHeadModel, GPT2Model
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer, GptOssForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralForCausalLM
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeForCausalLM,
)
from transformers.models.t5.configuration_t5 import T5Config
from transformers.models.t5.modeling_t5 import T5Block, T5ForConditionalGeneration

__all__ = ["BLOCKS", "GPT2Model", "batch", "build", "wrap"]

WORDS = dict(vocab_size=50, eos_token_id=1, pad_token_id=2)
ATTENTION = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
WIDTHS = dict(hidden_size=16, intermediate_size=24, max_position_embeddings=64)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def _gpt2(**weights):
    sizes = dict(n_embd=16, n_layer=2, n_head=2, n_positions=64)
    return GPT2LMHeadModel(GPT2Config(bos_token_id=0, **sizes, **WORDS, **NO_DROPOUT, **weights))


def _llama(**weights):
    return LlamaForCausalLM(LlamaConfig(bos_token_id=0, **WIDTHS, **ATTENTION, **WORDS, **weights))


def _mixtral(**weights):
    experts = dict(num_local_experts=4, num_experts_per_tok=2)
    return MixtralForCausalLM(
        MixtralConfig(bos_token_id=0, **WIDTHS, **ATTENTION, **WORDS, **weights, **experts)
    )


def _qwen3_moe(**weights):
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(head_dim=8, **WIDTHS, **ATTENTION, **WORDS, **weights, **experts)
    )


def _deepseek_v3(**weights):
    experts = dict(n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=12)
    experts |= dict(n_group=1, topk_group=1, first_k_dense_replace=0)
    ranks = dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4)
    attention = dict(ATTENTION, num_key_value_heads=2, v_head_dim=8)
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(**WIDTHS, **attention, **ranks, **WORDS, **weights, **experts)
    )


def _gpt_oss(**weights):
    experts = dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=8)
    return GptOssForCausalLM(
        GptOssConfig(head_dim=8, **WIDTHS, **ATTENTION, **WORDS, **weights, **experts)
    )


def _t5(initializer_range):
    sizes = dict(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    words = dict(WORDS, decoder_start_token_id=2)
    return T5ForConditionalGeneration(
        T5Config(**sizes, **words, initializer_factor=initializer_range * 7.5)
    )


BLOCKS = {
    "deepseek_v3": (_deepseek_v3, DeepseekV3DecoderLayer),
    "gpt_oss": (_gpt_oss, GptOssDecoderLayer),
    "qwen3_moe": (_qwen3_moe, Qwen3MoeDecoderLayer),
    "gpt2": (_gpt2, GPT2Block),
    "llama": (_llama, LlamaDecoderLayer),
    "mixtral": (_mixtral, MixtralDecoderLayer),
    "t5": (_t5, T5Block),
}


def build(name, spread=0.4):
    """The same weights at every call, in evaluation.

    Large ones put logits far enough apart for all ways of computing to choose the same tokens. In
    training they would multiply rounding errors from step to step.
    """
    torch.manual_seed(0)
    return BLOCKS[name][0](initializer_range=spread).eval()


def wrap(model, name, **options):
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import transformer_auto_wrap_policy

    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={BLOCKS[name][1]})
    return FSDP(model, auto_wrap_policy=policy, **options)


def batch(step=0):
    """Tokens [4, 6]."""
    return torch.randint(3, 50, (4, 6), generator=torch.Generator().manual_seed(step))

"""Families of decoder-only models generate, train and save as the plain model."""

import hf_models
import pytest
import torch
from hf_models import LLAMA, WIDE, WORDS
from test_hf_loading import SPREAD, trained
from test_hf_models import WAYS, generate_on_ranks, generated

FULL, SLOW = pytest.mark.full, pytest.mark.slow
HEADS = LLAMA | dict(head_dim=8)
SLIDING = HEADS | dict(sliding_window=8)
NEOX = WORDS | dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, bos_token_id=0)
WITHOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)
FAMILIES = {
    "mistral": ("MistralForCausalLM", "MistralDecoderLayer", LLAMA | dict(sliding_window=8)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2DecoderLayer", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3DecoderLayer", HEADS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2DecoderLayer", SLIDING),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3DecoderLayer", SLIDING),
    "phi3": ("Phi3ForCausalLM", "Phi3DecoderLayer", LLAMA | dict(resid_pdrop=0.0)),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2DecoderLayer", LLAMA),
    "granite": ("GraniteForCausalLM", "GraniteDecoderLayer", LLAMA),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXLayer",
        NEOX | WITHOUT | dict(intermediate_size=24, max_position_embeddings=64),
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTDecoderLayer",
        NEOX | dict(ffn_dim=24, max_position_embeddings=64, word_embed_proj_dim=16, dropout=0.0),
    ),
}
hf_models.add_models(FAMILIES)


def on_ranks(rank, name, folder):
    import torch_xla

    from xla_fsdp import full_state_dict

    tokens = generate_on_ranks(rank, [name])
    model = hf_models.wrap(hf_models.build(name, SPREAD).train(), name)
    ids = [hf_models.tokens(number).chunk(2)[rank].to(torch_xla.device()) for number in range(3)]
    losses = trained(model, ids.__getitem__, torch_xla.sync)
    model.save_pretrained(folder)
    return tokens, losses, full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name == "gemma2" else FULL) for name in FAMILIES]
)
def test_a_family_is_as_in_plain_torch(run_ranks, tmp_path, name):
    results = run_ranks(on_ranks, 2, name, str(tmp_path), timeout=1500)
    plain = hf_models.build(name, WIDE)
    for rank, (tokens, _, _) in enumerate(results):
        for way in WAYS:
            assert torch.equal(tokens[name, way], generated(plain, rank, way)), (way, rank)
    plain = hf_models.build(name, SPREAD).train()
    expected = trained(plain, hf_models.tokens)
    (_, first, state), (_, second, _) = results
    for one, other, loss in zip(first, second, expected, strict=True):
        assert (one + other) / 2 == pytest.approx(loss, rel=1e-5)
    saved = type(plain).from_pretrained(tmp_path).state_dict()
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-4, atol=1e-5, msg=key)
        assert torch.equal(saved[key], state[key]), key

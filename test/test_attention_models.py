"""Attention in models of torch and transformers: by the kernel where it can, else as before."""

import pytest
import torch
import torch.nn.functional as F
from on_ranks import on_each_rank, raises, without_ranks
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.integrations import attention as integration
from xla_fsdp.layers import attention
from xla_fsdp.planning.tracing.step import trace_step
from xla_fsdp.tpu.topology import resolve


@pytest.fixture
def installed():
    integration.install()
    yield
    integration.uninstall()


def llama(implementation):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=50, max_position_embeddings=256,
        attn_implementation=implementation,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def padded(left):
    tokens = torch.randint(0, 50, (2, 128), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(tokens)
    if left:
        mask[0, :30] = 0
    else:
        mask[0, -30:] = 0
    return {"input_ids": tokens, "attention_mask": mask}


def packed():
    positions = torch.cat([torch.arange(n) for n in (50, 70, 8)])[None]
    tokens = torch.randint(0, 50, (1, 128), generator=torch.Generator().manual_seed(2))
    return {"input_ids": tokens, "position_ids": positions, "use_cache": False}


CALLS = {
    "causal": {"input_ids": padded(False)["input_ids"]},
    "padded at the end": padded(False),
    "padded at the start": padded(True),
    "packed": packed(),
    "packed without a word of it": {**packed(), "position_ids": None},
}


def test_masks_of_transformers(installed, monkeypatch):
    seen = []
    ours = attention.scaled_dot_product_attention

    def noting(*args, **kwargs):
        seen.append(kwargs)
        return ours(*args, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", noting)
    for name, call in CALLS.items():
        results = []
        for implementation in ("eager", "xla_fsdp"):
            model = llama(implementation)
            logits = model(**call).logits
            kept = call.get("attention_mask", torch.ones_like(call["input_ids"])).bool()
            logits[kept].square().mean().backward()
            results.append([logits.detach()[kept], *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*reversed(results), rtol=1e-4, atol=1e-5, msg=name)
    assert len(seen) == 2 * len(CALLS)
    assert all(one["is_causal"] and one.get("attn_mask") is None for one in seen)
    # The release decides whether positions without a break are one segment or none.
    assert [one["segment_ids"] is not None for one in seen[:-2:2]] == [False] + [True] * 3


def test_what_the_kernel_cannot_say_is_computed_as_before(installed):
    tokens = padded(True)["input_ids"][:, :20]
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    options = dict(attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
    plain, ours = llama("sdpa"), llama("xla_fsdp")
    assert torch.equal(plain.generate(tokens, **options), ours.generate(tokens, **options))
    own = torch.zeros(2, 1, 20, 20).masked_fill_(torch.ones(20, 20).triu(2) > 0, -torch.inf)
    torch.testing.assert_close(
        llama("xla_fsdp")(tokens, attention_mask=own).logits,
        llama("eager")(tokens, attention_mask=own).logits,
    )
    module = llama("xla_fsdp").model.layers[0].self_attn
    x = torch.zeros(2, 2, 20, 64)
    with pytest.raises(ValueError, match="attn_implementation='sdpa'"):
        integration._transformers_attention(module, x, x, x, mask)


def test_what_would_be_left_out_is_refused(installed):
    """Of what "eager" computes, "sdpa" of the library leaves out some without an error."""
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 8}
    tokens = torch.tensor([[1, 2, 3]])

    def gpt2(**more):
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(**sizes, **more, attn_implementation="xla_fsdp")).eval()

    gpt2()(tokens)
    for model, given, named in (
        (gpt2(), {"head_mask": torch.tensor([[1.0, 0.0]])}, "head_mask"),
        (gpt2(scale_attn_weights=False), {}, "scale_attn_weights=False"),
        (gpt2(scale_attn_by_inverse_layer_idx=True), {}, "scale_attn_by_inverse_layer_idx=True"),
    ):
        raises(ValueError, f"GPT2Attention .*{named}.*'eager'", model, tokens, **given)
    x = torch.zeros(1, 1, 4, 8)
    for name in ("softcap", "s_aux", "output_attentions"):  # of Gemma 2, gpt-oss, CLIP
        with pytest.raises(ValueError, match=f"Module uses attention with {name}, .*'eager'"):
            integration._transformers_attention(torch.nn.Module(), x, x, x, None, **{name: 1.0})


@on_each_rank(1)
def test_shapes_that_torch_broadcasts(rank):
    before = F.scaled_dot_product_attention
    q, one = torch.randn(2, 2, 8, 4), torch.randn(1, 1, 8, 4)
    expected = F.scaled_dot_product_attention(q, one, one, is_causal=True)
    for _ in range(2):
        integration.install()
    try:
        on_the_cpu = F.scaled_dot_product_attention(q, one, one, is_causal=True)
        assert torch.equal(on_the_cpu, expected)
        found = F.scaled_dot_product_attention(
            *(tensor.to("xla") for tensor in (q, one, one)), is_causal=True
        )
    finally:
        integration.uninstall()
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-6)
    assert F.scaled_dot_product_attention is before


@pytest.mark.slow
@without_ranks
def test_on_a_tpu_it_is_the_kernel():
    def step(implementation, call):
        def run():
            model = FSDP(llama(implementation), compute_dtype=torch.bfloat16)
            tensors = {key: value for key, value in call.items() if torch.is_tensor(value)}
            inputs = call | {key: value.to("xla") for key, value in tensors.items()}
            model(**inputs).logits.float().square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

        return run

    def kernels(implementation, call):
        program = trace_step(step(implementation, call), 0, 4, resolve("v5litepod-4")).program
        return program.hlo.count(b"tpu_custom_call")

    integration.install()
    # A layer: one kernel forward, two backward.
    assert kernels("sdpa", CALLS["causal"]) == 6
    assert kernels("xla_fsdp", packed()) == 6

"""Models of transformers while they are sharded: their own methods answer as on the plain model."""

import copy
import os

import hf_models
import pytest
import torch
from hf_models import LLAMA, WORDS
from on_ranks import on_each_rank, only_full, slow
from safetensors.torch import load_file

from xla_fsdp.testing import CollectiveMismatchError


def prompts(rank):
    """Other batches and lengths on every rank; the first prompt is padded on the left."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(3, 50, (2 + rank % 2, 5 + rank), generator=generator)
    mask = torch.ones_like(ids)
    ids[0, :2], mask[0, :2] = 2, 0
    return {"input_ids": ids, "attention_mask": mask}


WAYS = {
    "greedy": dict(max_new_tokens=12, do_sample=False),
    "sample": dict(max_new_tokens=9, do_sample=True, top_k=20, temperature=0.8),
    "beams": dict(max_new_tokens=8, num_beams=3, do_sample=False, num_return_sequences=2),
    "static cache": dict(max_new_tokens=5, do_sample=False, cache_implementation="static"),
}
SLIDING = LLAMA | dict(head_dim=8, sliding_window=8)
NEOX = WORDS | dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, bos_token_id=0)
WITHOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)
FAMILIES = {
    "mistral": ("MistralForCausalLM", "MistralDecoderLayer", LLAMA | dict(sliding_window=8)),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2DecoderLayer", LLAMA),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3DecoderLayer", LLAMA | dict(head_dim=8)),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2DecoderLayer", LLAMA),
    "granite": ("GraniteForCausalLM", "GraniteDecoderLayer", LLAMA),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2DecoderLayer", SLIDING),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3DecoderLayer", SLIDING),
    "phi3": ("Phi3ForCausalLM", "Phi3DecoderLayer", LLAMA | dict(resid_pdrop=0.0)),
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
EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss"]


def generated(model, rank, way):
    torch.manual_seed(7 + rank)
    # Ranks end at different steps.
    more = {"max_new_tokens": WAYS[way]["max_new_tokens"] + 2 * rank}
    return model.generate(**prompts(rank), **{**WAYS[way], **more})


def generate_on_ranks(rank, name):
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp import compilation_counts
    from xla_fsdp.integrations.experts import use_static_experts

    model = hf_models.wrap(hf_models.build(name, hf_models.WIDE), name)
    if hf_models.VERSION < 5 and name in EXPERTS[:3]:
        use_static_experts(model)
    found = {way: generated(model, rank, way) for way in WAYS}
    if name == "gpt2":  # inside, on the device, and nothing new for another number of tokens
        xm.rendezvous("counts are the process's")
        before = sum(compilation_counts())
        xm.rendezvous("counted")
        inputs = {key: value.to(torch_xla.device()) for key, value in prompts(rank).items()}
        again = model.module.generate(**inputs, max_new_tokens=11 + 2 * rank, do_sample=False)
        assert again.device.type == "xla"
        found["again"] = again.cpu()
        xm.rendezvous("generated")
        assert sum(compilation_counts()) == before
    if name == "t5":
        found["begun"] = begun(model, rank)
    return found


def begun(model, rank):
    """Translations that begin with given tokens."""
    inputs = prompts(rank)
    start = torch.full((len(inputs["input_ids"]), 3 + rank), 9)
    return model.generate(**inputs, decoder_input_ids=start, max_new_tokens=5, do_sample=False)


@pytest.mark.parametrize(
    "name, ranks",
    [
        ("gpt2", 2),
        *(slow(name, 2) for name in ("t5", "llama", "gemma2", "mixtral")),
        *(only_full(name, 2) for name in (*EXPERTS[1:], *FAMILIES) if name != "gemma2"),
        only_full("gpt2", 1),
    ],
)
def test_tokens_are_those_of_the_plain_model(run_ranks, name, ranks):
    model = hf_models.build(name, hf_models.WIDE)
    for rank, found in enumerate(run_ranks(generate_on_ranks, ranks, name, timeout=1500)):
        for way in WAYS:
            assert torch.equal(found[way], generated(model, rank, way)), (way, rank)
        if name == "t5":
            assert torch.equal(found["begun"], begun(model, rank))
        if name == "gpt2":
            fewer = {"max_new_tokens": 11 + 2 * rank, "do_sample": False}
            assert torch.equal(found["again"], model.generate(**prompts(rank), **fewer))


def others(rank, folder):
    from xla_fsdp.integrations.generation import set_length_buckets

    plain = hf_models.build("gpt2", hf_models.WIDE)
    counts = plain.num_parameters(), plain.num_parameters(exclude_embeddings=True)
    state = plain.state_dict()
    state = {name: value.clone() for name, value in state.items()}
    model = hf_models.wrap(plain, "gpt2")
    assert (model.num_parameters(), model.num_parameters(exclude_embeddings=True)) == counts
    # Whole weights, whoever is asked, on another dtype too.
    model.save_pretrained(f"{folder}/wrapper")
    model.module.save_pretrained(f"{folder}/inside", max_shard_size="4KB")
    model.module.transformer.save_pretrained(f"{folder}/part", True, None)
    if rank == 0:
        for kind in ("wrapper", "inside"):
            loaded, info = type(plain).from_pretrained(f"{folder}/{kind}", output_loading_info=True)
            assert not any(info.values()), info
            for name, value in loaded.state_dict().items():
                assert torch.equal(value, state[name])
        assert "model.safetensors.index.json" in os.listdir(f"{folder}/inside")
        part = hf_models.GPT2Model.from_pretrained(f"{folder}/part")
        for name, value in part.state_dict().items():
            assert torch.equal(value, state[f"transformer.{name}"])
    for wrong in ({"is_main_process": False}, {"state_dict": model.state_dict()}):
        with pytest.raises(ValueError, match="is_main_process is false on rank 0|shards of rank"):
            model.save_pretrained(f"{folder}/wrong", **wrong)
    assert not os.path.exists(f"{folder}/wrong")
    with pytest.raises(Exception, match="File exists|rank 0 could not write|Not a directory"):
        model.save_pretrained(f"{folder}/wrapper/config.json/under")
    with pytest.raises(RuntimeError, match="before wrapping"):
        model.resize_token_embeddings(60)
    assert model.module.resize_token_embeddings() is model.module.transformer.wte
    with pytest.raises(RuntimeError, match="uploads from rank 0"):
        model.push_to_hub("somebody/something")
    ids = hf_models.tokens()
    for wrong, text in [
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive"),
        ({"prefill_chunk_size": 2}, "prefill_chunk_size"),
    ]:
        with pytest.raises(ValueError, match=text):
            model.generate(ids, max_new_tokens=2, **wrong)
    for wrong, kind in (([4, 2], ValueError), ([0], ValueError), ([2.0], TypeError)):
        with pytest.raises(kind, match="lengths must be"):
            set_length_buckets(model, wrong)
    set_length_buckets(model, [7, 11])
    scores = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, output_scores=True)
    assert scores.past_key_values is None
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(RuntimeError, match="gradient_checkpointing"):
        model.generate(ids)
    return scores.sequences, torch.stack(scores.scores)


@on_each_rank(2)
def test_masks_of_padded_prompts_that_are_added_to_scores_in_bfloat16(rank):
    model = hf_models.build("llama", hf_models.WIDE)
    model.set_attn_implementation("eager")
    plain = model.generate(**prompts(rank), max_new_tokens=3, do_sample=False)
    exact = hf_models.wrap(model, "llama")
    found = exact.generate(**prompts(rank), max_new_tokens=3, do_sample=False)
    assert torch.equal(found, plain)
    model = hf_models.build("llama", hf_models.WIDE)
    model.set_attn_implementation("eager")
    model = hf_models.wrap(model, "llama", compute_dtype=torch.bfloat16)
    out = model.generate(
        **prompts(rank), max_new_tokens=2, output_scores=True, return_dict_in_generate=True
    )
    assert torch.stack(out.scores).isfinite().all()


@pytest.mark.slow
def test_other_methods(run_ranks, tmp_path):
    model = hf_models.build("gpt2", hf_models.WIDE)
    plain = model.generate(
        hf_models.tokens(), max_new_tokens=3, return_dict_in_generate=True, output_scores=True
    )
    for sequences, scores in run_ranks(others, 2, str(tmp_path)):
        assert torch.equal(sequences, plain.sequences)
        torch.testing.assert_close(scores, torch.stack(plain.scores))
    assert load_file(tmp_path / "wrapper" / "model.safetensors")


@on_each_rank(2)
def test_gradients_of_a_model_resized_and_told_to_recompute_before_it_is_wrapped(rank):
    import torch_xla

    model = hf_models.build("llama", hf_models.WIDE).train()
    model.resize_token_embeddings(60, mean_resizing=False)
    ids = hf_models.tokens()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable()
    sharded = hf_models.wrap(model, "llama")
    part = ids.chunk(2)[rank].to(torch_xla.device())
    sharded(input_ids=part, labels=part, use_cache=False).loss.backward()
    torch_xla.sync()
    with sharded.summon_full_params(sharded, with_grads=True):
        for name, parameter in sharded.named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), expected[name], rtol=1e-4, atol=1e-5)


@on_each_rank(2)
def test_a_part_has_no_full_state_and_modules_of_a_copy_know_the_copy(rank):
    from xla_fsdp import full_state_dict
    from xla_fsdp.sharding.state import find_outer_wrappers

    model = hf_models.wrap(hf_models.build("gpt2", hf_models.WIDE), "gpt2")
    with pytest.raises(ValueError, match="belong to a wrapper around"):
        full_state_dict(model.module)
    twin = copy.deepcopy(model)
    assert find_outer_wrappers(twin.module) == [twin]
    assert find_outer_wrappers(copy.deepcopy(model.module)) == []


def only_rank_0(rank, method, arg):
    model = hf_models.wrap(hf_models.build("gpt2", hf_models.WIDE), "gpt2")
    if rank == 0:
        getattr(model, method)(arg)


def test_called_on_one_rank_only(run_ranks, tmp_path):
    for call in (("save_pretrained", str(tmp_path)), ("generate", hf_models.tokens())):
        with pytest.raises(CollectiveMismatchError, match="xla_fsdp"):
            run_ranks(only_rank_0, 2, *call)
    assert not os.listdir(tmp_path)

"""Adapters of peft on sharded models: trained, saved, loaded and merged as on plain ones."""

import hf_models
import pytest
import torch
from on_ranks import slow
from peft import (
    AdaLoraConfig,
    LoraConfig,
    OFTConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from safetensors.torch import load_file

SPREAD = 0.1
TRAINED = {"steps": 2, "lr": 0.2}


def adapted(name="gpt2", **more):
    targets = {"gpt2": ["c_attn", "c_fc"], "llama": ["q_proj", "down_proj"]}[name]
    model = hf_models.build(name, SPREAD)
    torch.manual_seed(1)
    config = LoraConfig(
        r=2,
        target_modules=targets,
        init_lora_weights=False,
        fan_in_fan_out=name == "gpt2",
        task_type="CAUSAL_LM",
        **more,
    )
    return get_peft_model(model, config).train()


def on_ranks(rank, name, folder, options, more):
    import torch_xla

    from xla_fsdp.integrations.peft import save_merged

    model = hf_models.wrap(adapted(name, **more), name, **options)

    def part(number):
        return hf_models.tokens(number).chunk(2)[rank].to(torch_xla.device())

    losses = hf_models.sgd_losses(model, part, torch_xla.sync, **TRAINED)
    model.save_pretrained(f"{folder}/adapter")
    model.module.save_pretrained(f"{folder}/inside", safe_serialization=False)
    save_merged(model, f"{folder}/merged")
    model.eval()
    tokens = model.generate(input_ids=hf_models.tokens(9), max_new_tokens=5, do_sample=False)
    again = hf_models.wrap(adapted(name, **more), name, **options)
    again.load_adapter(f"{folder}/adapter", "default")
    again.save_pretrained(f"{folder}/again")
    for merge in (again.merge_and_unload, again.merge_adapter):
        with pytest.raises(RuntimeError, match="save_merged"):
            merge()
    with pytest.raises(RuntimeError, match="cannot be added to a wrapped model"):
        again.load_adapter(f"{folder}/adapter", "second")
    return losses, tokens


@pytest.mark.parametrize(
    "name, options, more",
    [
        ("gpt2", {}, {"modules_to_save": ["ln_f"], "trainable_token_indices": {"wte": [3, 5]}}),
        slow("llama", {"flatten_parameters": True}, {}),
    ],
)
def test_lora(run_ranks, tmp_path, name, options, more):
    plain = adapted(name, **more)
    expected = hf_models.sgd_losses(plain, hf_models.tokens, **TRAINED)
    plain.eval().save_pretrained(tmp_path / "plain")
    results = run_ranks(on_ranks, 2, name, str(tmp_path), options, more, timeout=1500)
    for number, loss in enumerate(expected):
        mean = sum(losses[number] for losses, _ in results) / 2
        assert mean == pytest.approx(loss, rel=1e-5)
    files = {
        kind: load_file(tmp_path / kind / "adapter_model.safetensors")
        for kind in ("plain", "adapter", "again")
    }
    assert files["plain"]
    torch.testing.assert_close(files["adapter"], files["plain"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(files["again"], files["adapter"], rtol=0, atol=0)
    reloaded = PeftModel.from_pretrained(hf_models.build(name, SPREAD), tmp_path / "inside")
    ids = hf_models.tokens(9)
    torch.testing.assert_close(reloaded(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)
    merged = type(hf_models.build(name, hf_models.WIDE)).from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(merged(ids).logits, plain(ids).logits, rtol=1e-3, atol=1e-3)
    tokens = plain.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    assert all(torch.equal(found, tokens) for _, found in results)


def prompts_and_refusals(rank, folder):
    from xla_fsdp.integrations.peft import save_merged

    model = hf_models.build("gpt2", hf_models.WIDE)
    model = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    own = model.prompt_encoder.default.embedding.weight.detach().clone()
    model = hf_models.wrap(model, "gpt2")
    model.save_pretrained(f"{folder}/prompts")
    with pytest.raises(TypeError, match="PROMPT_TUNING change no weights"):
        save_merged(model, "nowhere")
    model = hf_models.wrap(hf_models.build("gpt2", hf_models.WIDE), "gpt2")
    config = LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True)
    for one in (model, model.module):
        with pytest.raises(RuntimeError, match="Call get_peft_model first"):
            get_peft_model(one, config)
    with pytest.raises(TypeError, match="wrapper around a PeftModel"):
        save_merged(model, "nowhere")
    model = hf_models.wrap(adapted(), "gpt2")
    with pytest.raises(ValueError, match="does not fit"):
        model.load_adapter(f"{folder}/other", "default")
    return own


def test_prompts_and_refusals(run_ranks, tmp_path):
    adapted("llama").save_pretrained(tmp_path / "other")
    own = run_ranks(prompts_and_refusals, 2, str(tmp_path))[0]
    saved = load_file(tmp_path / "prompts" / "adapter_model.safetensors")
    assert torch.equal(saved["prompt_embeddings"], own)


SPECIAL = {
    "lora": LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False),
    "vera": VeraConfig(r=2, target_modules=["q_proj"], init_weights=False),  # shared by layers
    "dora": LoraConfig(r=2, use_dora=True, target_modules=["lm_head", "embed_tokens"]),
    "adalora": AdaLoraConfig(init_r=2, total_step=9, target_modules=["q_proj"]),
    "oft": OFTConfig(r=0, oft_block_size=4, target_modules=["q_proj"], init_weights=False),
}


def special(kind):
    torch.manual_seed(1)
    model = get_peft_model(hf_models.build("llama", SPREAD), SPECIAL[kind])
    if kind == "lora":  # not active
        other = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"])
        model.add_adapter("other", other)
    return model


def saves_special(rank, folder):
    from xla_fsdp.integrations.peft import save_merged

    for kind in SPECIAL:
        model = hf_models.wrap(special(kind), "llama")
        model.save_pretrained(f"{folder}/{kind}")
        model.load_adapter(f"{folder}/{kind}", "default")
        save_merged(model, f"{folder}/{kind}/merged")


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_adapters_with_buffers_or_not_active(run_ranks, tmp_path):
    run_ranks(saves_special, 2, str(tmp_path))
    for kind in SPECIAL:
        plain = special(kind)
        plain.save_pretrained(tmp_path / "plain")
        saved, own = (
            load_file(folder / "adapter_model.safetensors")
            for folder in (tmp_path / kind, tmp_path / "plain")
        )
        torch.testing.assert_close(saved, own, rtol=0, atol=0)
        merged = load_file(tmp_path / kind / "merged" / "model.safetensors")
        torch.testing.assert_close(merged, {**plain.merge_and_unload().state_dict()})

"""The LLaMA example: packed rows, a new model, then adapters to it, and a folder of the hub."""

import ast
import json
import re
from functools import partial

import pytest
import torch
from example_runs import table

from xla_fsdp.integrations import attention

FLAGS = (
    "--tokens_per_sample=32", "--batch_size=2", "--num_devices=2", "--log_interval=1",
    "--valid_samples=5", "--sample_tokens=60", "--prompt=The rest of this row is full",
    "--warmup_updates=1",
)  # fmt: skip


def validations(done):
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return [one["valid_loss"] for one in found if "valid_loss" in one]


@pytest.mark.full
def test_trains_then_adapts_and_agrees(tmp_path, run_example):
    (tmp_path / "text").mkdir()
    for number in range(40):
        (tmp_path / f"text/{number:02}.txt").write_text(f"{number} and {number + 1}. " * 3)
    run = partial(run_example, "train_llama.py")
    # So little that what is likeliest still changes.
    flags = (*FLAGS, "--lr=0.002", "--save_interval_updates=3")
    first = run(*flags, "--text=text", "--max_update=6")
    rows = table(first)
    assert rows["agree"] == "yes" and rows["parameters"] == "459,648"
    (sample,) = re.findall("sample: (['\"].*)", first.stdout)
    sample = ast.literal_eval(sample)
    assert sample.startswith("The rest of this row is full") and len(sample) <= 32  # positions
    folder = "runs/llama/ckpt_consolidated/weights"
    names = {path.name for path in (tmp_path / folder).iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    lora = ("--lora_rank=2", f"--folder={folder}", "--ckpt_dir=lora/ckpt", "--max_update=2")
    second = run(*FLAGS, *lora)
    assert table(second)["agree"] == "yes"
    before, after = validations(second)
    assert before == pytest.approx(validations(first)[-1], abs=2e-4) and after != before
    adapter = {path.name for path in (tmp_path / "lora/ckpt_consolidated/adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= adapter
    # The end of a run once more, of an older checkpoint: its model takes the other's place.
    again = run(*flags, "--max_update=3", "--resume_update=3", "--prompt=1")
    assert table(again)["agree"] == "yes" and table(again)["updates"] == "3"
    assert {path.name for path in (tmp_path / folder).iterdir()} == names


@pytest.mark.slow
def test_plain_torch_sees_no_other_document(common, tmp_path):
    tokens, folder = common.tokens, str(tmp_path / "data")
    texts = [f"{number} and then {number + 1} of them. " for number in range(100)]
    tokens.write(folder, texts, tokens.byte_level(), tokens.END)
    found = tokens.open_folder(folder)
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 64, "initializer_range": 1.0}  # attends as if it were trained
    config = common.llama.LlamaConfig(vocab_size=found.vocabulary, **sizes)
    model = common.llama.LlamaForCausalLM(config).eval()
    row = torch.tensor(found.valid.tolist())
    described = {"folder": folder, "length": len(row) - 1, "count": 1, "rows": "packed"}
    packed = common.evaluate.validation_loss(model, described, None)
    ends = (row == found.end).nonzero().flatten() + 1
    documents = [one for one in row.tensor_split(ends) if len(one)]
    with torch.no_grad():  # each alone
        logits = [model(one[None]).logits[0, :-1] for one in documents]
    labels = torch.cat([one[1:] for one in documents])
    alone = torch.nn.functional.cross_entropy(torch.cat(logits), labels)
    assert len(documents) > 1 and packed["tokens"] == len(labels)
    assert packed["loss"] == pytest.approx(alone.item(), rel=1e-4)


def test_the_sizes(common):
    llama, millions = common.llama, {}
    for size in llama.SIZES:
        model = llama.without_values(llama.new(size, None, 2048, None))
        millions[size] = round(sum(one.numel() for one in model.parameters()) / 1e6)
        assert not any(buffer.is_meta for buffer in model.buffers())
    attention.uninstall()
    # Published: 1.24 billion with tied embeddings, 8.03 and 70.55 billion.
    assert millions == {"tiny": 0, "1B": 1498, "8B": 8030, "70B": 70554}


def test_a_sample_ends_with_the_positions(common):
    """Of a configuration with several end tokens, as Llama 3.1 has."""
    llama = common.llama
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 99}
    sizes |= {"intermediate_size": 8, "max_position_embeddings": 16}
    config = llama.LlamaConfig(eos_token_id=[98, 97], **sizes)
    torch.manual_seed(0)
    model = llama.LlamaForCausalLM(config).eval()
    told = llama.generate(model, [1, 2, 3], config, most=60, temperature=0.0, seed=1)
    assert told[:3] == [1, 2, 3] and len(told) == 16


@pytest.mark.slow
def test_wrong_inputs_end_in_one_line(refused, tmp_path, common):
    tokens, llama = common.tokens, common.llama
    llama.make_folder(str(tmp_path / "made"), llama.new("tiny", None, 64, None), seed=1)
    text = ["some text " * 500]
    tokens.write(str(tmp_path / "data"), text, tokens.byte_level(), tokens.END)
    other = tokens.byte_level()
    other.add_tokens(["some"])
    tokens.write(str(tmp_path / "other"), text, other, tokens.END)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2/config.json").write_text('{"model_type": "gpt2"}')
    here, folder = "--data=data", "--folder=made"
    refused(
        "train_llama",
        ([here, folder, "--tokens_per_sample=65"], "longer than the model's 64 positions"),
        ([here, "--vocab_size=100"], "has a vocabulary of 257, more than the model's 100"),
        (["--data=other", folder, "--tokens_per_sample=64"], "has a vocabulary of 258, more"),
        ([here, "--folder=gpt2"], "has model_type 'gpt2', not 'llama'"),
        ([here, "--folder=nowhere"], "--folder=nowhere has no model"),
        ([here, "--lora_rank=2"], "--lora_rank needs --folder"),
        ([folder, "--vocab_size=300"], "--folder excludes --vocab_size"),
        (["--make_folder=made"], "--make_folder=made exists already"),
        ([here, "--keep=nothing"], "--keep=nothing is unknown; blocks have attention, self_attn, "),
        ([here, folder, "--lora_rank=2", "--keep=attention"], "--keep needs scanned blocks"),
        (["--tune=v3-8", "--lora_rank=2"], "--tune excludes --lora_rank"),
        (["--tune=v3-9"], "v3-9"),
        ([here, "--settings=no.json"], "--settings=no.json: No such file"),
    )


def test_a_damaged_folder_is_refused(common, monkeypatch):
    llama = common.llama

    def refuse(*args, **kwargs):
        raise llama.CheckpointError("lacks 'model.norm.weight'\nand more")

    monkeypatch.setattr(llama.xla_fsdp, "load_weights", refuse)
    with pytest.raises(common.script.Stop, match="--folder=x: lacks 'model.norm.weight' and more"):
        llama.load(torch.nn.Linear(1, 1), "x")

"""The LLaMA example: packed rows, a new model, then adapters to it, and a folder of the hub."""

import ast
import json
import re
import shutil
import sys
from functools import partial

import pytest
import torch
from conftest import EXAMPLES
from example_runs import table
from processes import run_command

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
    shutil.copytree(tmp_path / folder, tmp_path / "sixth")
    again = run(*flags, "--max_update=3", "--resume_update=3", "--prompt=1")
    assert table(again)["agree"] == "yes" and table(again)["updates"] == "3"
    assert {path.name for path in (tmp_path / folder).iterdir()} == names
    # Samples are of the weights that the run ends with: so the library's own model goes on, too.
    third = ast.literal_eval(re.findall("sample: (['\"].*)", again.stdout)[0])
    asked = ["sixth", FLAGS[6].partition("=")[2], "sixth", "1", folder, "1"]
    done = plain_python(GO_ON, tmp_path, *asked)
    assert done[0] == sample and done[2] == third != done[1]


GO_ON = """
import json, os, sys
os.environ["USE_TORCH_XLA"] = "0"
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

told = []
for folder, prompt in zip(sys.argv[1::2], sys.argv[2::2]):
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    words = Tokenizer.from_file(f"{folder}/tokenizer.json")
    row = torch.tensor([words.encode(prompt).ids])
    how = {"do_sample": False, "max_new_tokens": min(60, 32 - row.shape[1]), "pad_token_id": 0}
    (found,) = model.generate(row, attention_mask=torch.ones_like(row), **how)
    told.append(words.decode(found.tolist()))
print(json.dumps(told))
"""


def plain_python(script, folder, *args):
    """What a script prints last. Not by the script server, whose processes have torch_xla."""
    printed = run_command(sys.executable, "-c", script, *args, cwd=folder).stdout
    return json.loads(printed.splitlines()[-1])


SECOND_OPINION = """
import json, os, sys
os.environ["USE_TORCH_XLA"] = "0"
sys.path.insert(0, sys.argv[1])
import evaluate, tokens, torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

texts = [f"{number} and then {number + 1} of them. " for number in range(100)]
tokens.write("data", texts, tokens.byte_level(), tokens.END)
found = tokens.open_folder("data")
torch.manual_seed(0)
sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
sizes |= {"intermediate_size": 64, "initializer_range": 1.0}  # attends as if it were trained
model = LlamaForCausalLM(LlamaConfig(vocab_size=found.vocabulary, **sizes)).eval()
whole = len(found.valid) - 1
described = {"folder": "data", "length": whole, "count": 1, "rows": "packed"}
said = evaluate.validation_loss(model, described, None)
documents = [[]]
for token in found.valid.tolist():
    documents[-1].append(token)
    if token == found.end:
        documents.append([])
documents.pop()
total = counted = 0
for one in documents:  # each alone
    row = torch.tensor([one])
    logits = model(row).logits[0]
    labels = torch.tensor(one[1:])
    total += F.cross_entropy(logits[:-1], labels, reduction="sum").item()
    counted += len(labels)
print(json.dumps([said["loss"], total / counted, len(documents), said["tokens"], counted]))
"""


@pytest.mark.slow
def test_plain_torch_sees_no_other_document(tmp_path):
    said, alone, documents, *counted = plain_python(SECOND_OPINION, tmp_path, str(EXAMPLES))
    assert documents > 1 and said == pytest.approx(alone, rel=1e-4), (said, alone, counted)


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

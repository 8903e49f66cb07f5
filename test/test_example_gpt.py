"""The GPT example: the family, its token files, and a run the way a user starts it."""

import json
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from example_runs import table
from safetensors.torch import load_file

from xla_fsdp import ShardingSettings

LENGTH = 16


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number} times {number} is {number**2}. " * 4)
    return folder


@pytest.fixture
def written(common, text, tmp_path):
    folder = str(tmp_path / "tokens")
    tokens = common.tokens
    tokens.write(folder, tokens.texts_in(str(text)), tokens.byte_level(), tokens.END)
    return folder


class TestModel:
    @pytest.fixture
    def model(self, common):
        torch.manual_seed(0)
        return common.gpt.GPT(50, LENGTH, layers=2, width=16, heads=2)

    @pytest.mark.slow
    def test_the_family_has_the_published_sizes(self, common):
        gpt = common.gpt
        count = partial(gpt.count_parameters, gpt.VOCABULARY, gpt.POSITIONS)
        assert count(gpt.FAMILY["13B"]) == 13_110_865_920  # fairseq's log says so
        sizes = [count(size) for name, size in gpt.FAMILY.items() if name != "tiny"]
        millions = [round(found / 1e6) for found in sizes]
        assert millions == [164, 407, 838, 1419, 2780, 6864, 13111, 175222]

    def test_a_token_sees_none_that_follows_and_the_loss_is_torchs(self, model):
        rows = torch.randint(0, 50, (3, LENGTH))
        logits = model(rows)
        other = rows.clone()
        other[:, -1] = (other[:, -1] + 1) % 50
        torch.testing.assert_close(model(other)[:, :-1], logits[:, :-1])
        assert not torch.equal(model(other)[:, -1], logits[:, -1])
        labels = rows.roll(-1, 1)
        labels[:, -1] = -100
        cross_entropy = torch.nn.functional.cross_entropy
        expected = cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        torch.testing.assert_close(model(rows, labels), expected)

    def test_completes_as_if_token_by_token(self, common, model):
        complete = partial(common.gpt.complete, model, length=LENGTH, device=torch.device("cpu"))
        known = [3, 1, 4]
        for _ in range(5):
            known.append(int(model(torch.tensor([known]))[0, -1].argmax()))
        assert complete([3, 1, 4], 5) == known
        assert len(complete([3, 1, 4], 99)) == LENGTH  # no more fit
        drawn = [complete([3], 10, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
        assert drawn[0] == drawn[1] != drawn[2]


class TestTokens:
    def test_the_files_are_the_text_and_always_the_same(self, common, written, text, tmp_path):
        tokens = common.tokens
        found = tokens.open_folder(written)
        assert found.vocabulary == 257 and found.train.dtype == np.uint16
        documents = [path.read_text() for path in sorted(text.iterdir())]
        for part, expected in ((found.train, documents[:19]), (found.valid, [documents[19]])):
            numbers = part.tolist()
            assert numbers.count(found.end) == len(expected) * 2
            start = numbers[: sum(len(one) + 1 for one in expected)]
            says = found.tokenizer().decode(start, skip_special_tokens=False)
            assert says == "".join(one + tokens.END for one in expected)
        again = str(tmp_path / "again")
        tokens.write(again, documents, tokens.byte_level(), tokens.END)
        for name in ("train.bin", "valid.bin", "tokens.json"):
            assert Path(again, name).read_bytes() == Path(written, name).read_bytes()
        # What is not letters of English, and what is no text at all.
        assert tokens.byte_level().decode(tokens.byte_level().encode("ü\n漢\0").ids) == "ü\n漢\0"

        assert "assert" in next(tokens.shipped_texts())

    def test_every_row_once_an_epoch_on_any_number_of_ranks(self, common, written):
        tokens = common.tokens
        found = tokens.open_folder(written)
        rows = tokens.Rows(found, "train", LENGTH)
        one = list(tokens.training_batches(rows, 4, 0, 1, seed=1, done=0, batches=2 * len(rows)))
        seen = torch.cat(one)[: len(rows)]
        whole = torch.stack([rows[number] for number in range(len(rows))])
        assert sorted(map(tuple, seen.tolist())) == sorted(map(tuple, whole.tolist()))
        second = torch.cat(one)[len(rows) : 2 * len(rows)]
        assert not torch.equal(seen, second)
        how = {"seed": 1, "done": 0, "batches": 9}
        halves = (tokens.training_batches(rows, 2, rank, 2, **how) for rank in (0, 1))
        both = [torch.cat(pair) for pair in zip(*halves, strict=True)]
        assert torch.equal(torch.cat(one[:9]), torch.cat(both))
        # Resumed after 8 rows, on another number of ranks.
        later = list(tokens.training_batches(rows, 4, 0, 1, seed=1, done=8, batches=5))
        assert all(map(torch.equal, later, one[2:7]))

    def test_what_is_validated_with_counts_once(self, common, written):
        tokens = common.tokens
        found = tokens.open_folder(written)
        rows = tokens.Rows(found, "valid", LENGTH)
        shares = [list(tokens.validation_batches(rows, 5, 2, rank, 3)) for rank in range(3)]
        assert {len(share) for share in shares} == {1}
        pairs = [pair for share in shares for pair in tokens.pairs(share)]
        labels = torch.cat([labels for _, labels in pairs])
        assert (labels != tokens.IGNORED).sum() == 5 * LENGTH
        assert torch.equal(labels[:5], torch.stack([rows[n][1:] for n in range(5)]))

    def test_documents_of_a_row_are_told_apart(self, common):
        row = torch.tensor([[5, 6, 9, 7, 9, 8, 4, 3]])
        ((numbers, labels, segments, places),) = common.tokens.packed([row], 9)
        assert numbers.tolist() == [[5, 6, 9, 7, 9, 8, 4]]
        assert labels.tolist() == [[6, 9, -100, 9, -100, 4, 3]]
        assert segments.tolist() == [[0, 0, 0, 1, 1, 2, 2]]
        assert places.tolist() == [[0, 1, 2, 0, 1, 0, 1]]

    def test_damage_is_named(self, common, written, tmp_path):
        tokens, stop = common.tokens, common.script.Stop
        train = Path(written, "train.bin")
        whole = train.read_bytes()
        train.write_bytes(whole[:-2])
        with pytest.raises(stop, match=f"train.bin has {len(whole) - 2:,} bytes, not") as found:
            tokens.open_folder(written)
        assert found.value.code == 2
        train.write_bytes(whole[:-2] + b"\xff\xff")
        read = tokens.open_folder(written)
        end = read._replace(train=read.train[-LENGTH - 1 :])
        rows = tokens.Rows(end, "train", LENGTH)
        with pytest.raises(stop, match="has token 65535 .*beyond the vocabulary of 257"):
            rows[0]
        with pytest.raises(stop, match="too few for --tokens_per_sample=100000"):
            tokens.Rows(read, "train", 100_000)
        Path(written, "tokens.json").write_text("{}")
        with pytest.raises(stop, match="tokens.json does not describe tokens: 'dtype'"):
            tokens.open_folder(written)
        for texts in ([], ["", " \n"]):
            with pytest.raises(stop, match="all texts for .* are empty"):
                tokens.write(str(tmp_path / "new"), texts, tokens.byte_level(), tokens.END)
        with pytest.raises(stop, match="has no '</s>' to put between documents; set --end_token"):
            tokens.write(str(tmp_path / "new"), ["a"], tokens.byte_level(), "</s>")
        assert not (tmp_path / "new").exists() and not list(tmp_path.glob(".tokens-*"))


def lines(done):
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
def test_trains_resumes_bit_for_bit_and_agrees(text, tmp_path, run_example):
    run = partial(run_example, "train_gpt.py")
    flags = [
        f"--text={text}", "--batch_size=2", "--tokens_per_sample=16", "--update_freq=2",
        "--max_update=4", "--num_devices=2", "--log_interval=1", "--save_interval_updates=2",
        "--validate_interval_updates=2", "--valid_samples=9", "--sample_tokens=3",
        "--warmup_updates=1", "--compute_dtype=float32",
    ]  # fmt: skip
    first = run(*flags)
    rows = table(first)
    assert rows["agree"] == "yes" and rows["updates"] == "4"
    updates = lines(first)
    assert [one["num_updates"] for one in updates] == [1, 2, 2, 3, 4, 4]
    assert {"loss", "ppl", "wps", "gnorm", "lr", "wall"} <= updates[0].keys()
    assert [one["lr"] for one in updates if "lr" in one] == pytest.approx([3e-3, 3e-3, 2e-3, 1e-3])
    assert "sample: 'The " in first.stdout
    folder = tmp_path / "runs/gpt/ckpt_consolidated"
    kept = tmp_path / "kept"
    shutil.move(folder, kept)
    # As a file of --tune says it: a loop, which is what the script does without, and the batch.
    ShardingSettings(batch=2, scan=True, recompute="all").save(tmp_path / "settings.json")
    second = run(*flags[2:], "--resume_update=2", "--settings=settings.json")
    assert table(second)["agree"] == "yes"

    def without_times(found):
        timed = ("wps", "wall", "memory")
        return [{k: v for k, v in one.items() if k not in timed} for one in found]

    assert without_times(lines(second)) == without_times(updates)[3:]
    for name, value in load_file(kept / "weights/model.safetensors").items():
        assert torch.equal(load_file(folder / "weights/model.safetensors")[name], value), name


@pytest.mark.full
@pytest.mark.parametrize("how", ["--cpu_offload --no_reshard_after_forward", "--stream"])
def test_float16_with_the_optimizer_on_the_host(text, run_example, how):
    done = run_example(
        "train_gpt.py", f"--text={text}", "--tokens_per_sample=16",
        "--batch_size=2", "--max_update=2", "--num_devices=1", "--log_interval=1", "--prompt=",
        "--valid_samples=2", "--fp16", "--fp16_init_scale=4", *how.split(), "--warmup_updates=0",
    )  # fmt: skip
    assert table(done)["agree"] == "yes"
    updates = [one for one in lines(done) if "loss" in one]
    assert [one["loss_scale"] for one in updates] == [4.0, 4.0]
    assert updates[1]["loss"] < updates[0]["loss"] and all(one["gnorm"] for one in updates)


@pytest.mark.slow
def test_wrong_inputs_end_in_one_line(refused, tmp_path, common):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("  \n")
    tokens = common.tokens
    tokens.write(str(tmp_path / "data"), ["some text " * 500], tokens.byte_level(), tokens.END)
    shutil.copytree(tmp_path / "data", tmp_path / "odd")
    other = tokens.byte_level()
    other.add_tokens(["some"])
    other.save(str(tmp_path / "odd/tokenizer.json"))
    here = "--data=data"
    refused(
        "train_gpt",
        (["--tokens_per_sample=131"], "--tokens_per_sample=131 is longer than the model's"),
        ([here, "--vocab_size=100"], "has a vocabulary of 257, more than --vocab_size=100"),
        ([here, "--text=empty"], "data has tokens already; leave out --text"),
        (["--data=odd"], "odd/tokenizer.json has 258 tokens, but tokens.json has 257"),
        (["--data=new", "--text=empty"], "--text=empty has no .txt files"),
        (["--data=new", "--tokenizer=a.txt"], "a.txt is not a tokenizer"),
        ([here, "--tokens_per_sample=16", f"--prompt={'a' * 16}"], "--prompt has 16 tokens"),
        (["--adam_betas=(0.9, 1)"], "must be two numbers from 0 to below 1"),
        (["--fp16", "--compute_dtype=float32"], "--fp16 excludes --compute_dtype"),
        (["--offload_activations", "--nocheckpoint_activations"], "excludes --nocheckpoint"),
        (["--offload_activations", "--stream"], "--offload_activations excludes --stream"),
        (["--no_reshard_after_forward", "--stream"], "--stream excludes --no_reshard_after"),
        (["--tune=v3-8", "--stream"], "--tune excludes --stream"),
        (["--max_steps=3"], "Unknown command line flag 'max_steps'"),
    )

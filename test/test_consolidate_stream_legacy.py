"""Per-rank torch files through the streaming: same result as in memory, in every format."""

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_consolidate_refusals import Harmful
from test_consolidate_support import (
    SUFFIX,
    Entry,
    assert_equal,
    assert_same,
    expected_state_dict,
    loaded,
    path_of,
    rank_files,
    run_cli,
    same,
    save,
    small_model,
)

from xla_fsdp.consolidate import (
    consolidate_checkpoint,
    consolidate_sharded_model_checkpoints,
    errors,
    verify_checkpoint,
)
from xla_fsdp.consolidate.stream import tensors


@pytest.fixture(params=["whole", "in pieces"])
def pieces(request, monkeypatch):
    """Also so small that every tensor is read in many."""
    if request.param == "in pieces":
        monkeypatch.setattr(tensors, "PIECE_BYTES", 16)


@pytest.mark.parametrize("seed", range(12))
def test_random_models(tmp_path, seed, pieces):
    pick = random.Random(seed)
    model = small_model(seed)
    pick.shuffle(model)
    files = rank_files(model, pick.choice([1, 2, 3, 4, 8]), pick.choice([1, 4, 128]))
    prefix = save(files, tmp_path)
    result = consolidate_checkpoint(prefix, suffix=SUFFIX)
    assert result.path == f"{prefix}_consolidated.pth"
    assert_same(loaded(result.path), expected_state_dict(model))


def test_the_function_writes_what_the_command_writes(tmp_path):
    files = rank_files(small_model(), 3)
    for file in files:
        file["model"]["q._extra_state"] = {"values": torch.arange(3), "of": (1, "two")}
    prefix = save(files, tmp_path)
    full, path = consolidate_sharded_model_checkpoints(prefix, SUFFIX, tied={"again": "norm.half"})
    written = Path(path).read_bytes()
    options = dict(suffix=SUFFIX, tied={"again": "norm.half"})
    assert consolidate_checkpoint(prefix, **options).up_to_date
    os.unlink(path)
    assert consolidate_checkpoint(prefix, **options).path == path
    assert Path(path).read_bytes() == written
    assert list(loaded(path)) == list(full)


def test_as_safetensors(tmp_path, pieces):
    prefix = save(rank_files(small_model(), 3), tmp_path)
    consolidate_checkpoint(prefix, tmp_path / "m.safetensors", suffix=SUFFIX)
    expected = expected_state_dict(small_model())
    del expected["head.weight"], expected["block.tied.weight"]
    assert_equal(load_file(tmp_path / "m.safetensors"), expected)
    options = dict(max_shard_size="40B", dtype="bfloat16", format="safetensors")
    consolidate_checkpoint(prefix, tmp_path / "out", suffix=SUFFIX, **options)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 3


def test_written_again_files_are_consolidated_again(tmp_path):
    prefix = save(rank_files(small_model(1), 2), tmp_path)
    assert not consolidate_checkpoint(prefix, suffix=SUFFIX).up_to_date
    assert consolidate_checkpoint(prefix, suffix=SUFFIX).up_to_date
    save(rank_files(small_model(2), 2), tmp_path)
    assert not consolidate_checkpoint(prefix, suffix=SUFFIX).up_to_date


def with_optimizer(files, state=None, groups=None, step=5):
    """As torch's Adam numbers its state: parameters in the order of the state_dict."""
    for file in files:
        keys = list(file["shard_metadata"]["parameters"])
        own = {
            number: {
                "step": torch.tensor(float(step)),
                "exp_avg": file["model"][key].float() * 2,
                "exp_avg_sq": file["model"][key].float() * 3,
            }
            for number, key in enumerate(keys)
        }
        group = {"lr": 0.1, "betas": (0.9, 0.99), "params": list(range(len(keys)))}
        file["optimizer"] = {"state": own, "param_groups": groups or [group]}
    return files


def test_optimizer(tmp_path, pieces):
    prefix = save(with_optimizer(rank_files(small_model(), 3, 4)), tmp_path)
    options = dict(suffix=SUFFIX, optimizer=True)
    consolidate_checkpoint(prefix, tmp_path / "out", format="pth", **options)
    found = torch.load(tmp_path / "out" / "optimizer.pth", weights_only=True)
    (group,) = found["param_groups"]
    parameters = [names[0] for e in small_model() if e.layout != "buffer" for names, _ in e.members]
    assert group == {"lr": 0.1, "betas": (0.9, 0.99), "params": parameters}
    model = expected_state_dict(small_model())
    for name in parameters:
        assert found["state"][name]["step"] == 5
        assert same(found["state"][name]["exp_avg"], model[name].float() * 2)
        assert same(found["state"][name]["exp_avg_sq"], model[name].float() * 3)
    consolidate_checkpoint(prefix, tmp_path / "safe", format="safetensors", **options)
    assert len(load_file(tmp_path / "safe" / "optimizer.safetensors")) == 2 * len(parameters)


def two_groups(found):
    (group,) = found["param_groups"]
    parts = group["params"][:2], group["params"][2:]
    found["param_groups"] = [{**group, "params": part} for part in parts]


# How the optimizer state of rank 1 is damaged.
OPTIMIZERS = {
    "several groups": two_groups,
    "fewer parameters": lambda found: found["param_groups"][0]["params"].pop(),
    "one twice": lambda found: found["param_groups"][0]["params"].__setitem__(1, 0),
    "other shape": lambda found: found["state"][0].update(exp_avg=torch.zeros(3, 7)),
    "other step": lambda found: found["state"][0]["step"].add_(1),
    "other keys": lambda found: found["state"][0].pop("exp_avg"),
    "other order": lambda found: found["state"].update({n: found["state"][1 - n] for n in (0, 1)}),
    "surplus": lambda found: found["state"].update({99: {}}),
    "not one": None,
    "missing": None,
}


@pytest.mark.parametrize("what", OPTIMIZERS)
def test_optimizer_that_cannot_be_matched(tmp_path, capsys, what):
    files = with_optimizer(rank_files(small_model(), 2))
    if what in ("not one", "missing"):
        files[1]["optimizer"] = [1] if what == "not one" else None
    else:
        OPTIMIZERS[what](files[1]["optimizer"])
    prefix = save(files, tmp_path)
    before = sorted(tmp_path.iterdir())
    options = ("--ckpt_prefix", prefix, "--optimizer", "--save_path", tmp_path / "out")
    code, out, err = run_cli(capsys, *options)
    assert (code, out) == (2, [])
    assert err[-1].startswith(f"UnmatchedOptimizerError: {path_of(tmp_path, 1, 2)}: ")
    assert sorted(tmp_path.iterdir()) == before
    with pytest.raises(errors.UnmatchedOptimizerError):
        consolidate_checkpoint(prefix, tmp_path / "out", optimizer=True)
    consolidate_checkpoint(prefix, tmp_path / "m.pth")


def test_no_optimizer(tmp_path):
    files = rank_files(small_model(), 2)
    for file in files:
        del file["optimizer"]
    with pytest.raises(errors.OptionsError, match="has no optimizer"):
        consolidate_checkpoint(save(files, tmp_path), tmp_path / "out", optimizer=True)


def test_unsafe_content_only_when_asked_for(tmp_path, capsys):
    files = rank_files(small_model(), 2)
    files[0]["more"] = Harmful(tmp_path / "canary")
    prefix = save(files, tmp_path)
    with pytest.raises(errors.UnsafeFileError, match="--allow_unsafe_pickle"):
        consolidate_checkpoint(prefix, tmp_path / "m.pth")
    with pytest.raises(errors.UnsafeFileError):
        verify_checkpoint(prefix)
    assert not (tmp_path / "canary").exists()
    command = ["--ckpt_prefix", prefix, "--save_path", tmp_path / "m.pth"]
    assert run_cli(capsys, *command)[0] == 2
    code, _, _ = run_cli(capsys, *command, "--allow_unsafe_pickle")
    assert code == 0 and (tmp_path / "canary").exists()
    assert_same(loaded(tmp_path / "m.pth"), expected_state_dict(small_model()))


def test_verify(tmp_path, capsys):
    prefix = save(rank_files(small_model(), 2), tmp_path)
    code, out, err = run_cli(capsys, "--ckpt_prefix", prefix, "--verify")
    assert (code, err, len(out)) == (0, [], 1)
    assert out[0].startswith(f"verified {prefix}*.pth: 2 rank files, CRCs, 9 parameters, ")

    path = path_of(tmp_path, 1, 2)
    data = path.read_bytes()
    value = small_model()[0].members[0][1][-1, 0].numpy().tobytes()  # in rank 1's shard
    at = data.index(value)
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    code, out, err = run_cli(capsys, "--ckpt_prefix", prefix, "--verify")
    assert (code, out, len(err)) == (2, [], 1)
    assert err[0].startswith(f"UnreadableFileError: {path}: the bytes of ")
    assert len(list(tmp_path.iterdir())) == 2


def test_files_from_before_torch_1_6(tmp_path):
    for rank, file in enumerate(rank_files(small_model(), 2)):
        torch.save(file, path_of(tmp_path, rank, 2), _use_new_zipfile_serialization=False)
    consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "m.pth")
    assert_same(loaded(tmp_path / "m.pth"), expected_state_dict(small_model()))
    with pytest.raises(errors.UnreadableFileError, match="not a zip file"):
        verify_checkpoint(tmp_path / "ckpt")


@pytest.mark.parametrize("layout", ["flat", "dim0"])
def test_few_bytes_with_the_shape_of_many(tmp_path, layout):
    """A terabyte of one element; nothing is written, and nothing that large is made."""
    model = [Entry("w", layout, [(("w",), torch.zeros(4, 2))])]
    files = rank_files(model, 2)
    for file in files:
        described = file["shard_metadata"]["parameters"]["w"]
        rows = 1 << 37
        described["numel"] = rows * 2
        described["members"][0]["shape"] = [rows, 2]
        shape = (rows,) if layout == "flat" else (rows // 2, 2)
        file["model"]["w"] = torch.zeros(1).expand(shape)
    with pytest.raises(errors.ShardMismatchError, match="has fewer bytes than that"):
        consolidate_checkpoint(save(files, tmp_path), tmp_path / "m.pth")


def test_tied_names_that_differ(tmp_path):
    model = small_model()
    model[0].alias_keys = ("head.weight",)
    files = rank_files(model, 2)
    consolidate_checkpoint(save(files, tmp_path), tmp_path / "m.pth")
    files[1]["model"]["head.weight"] = files[1]["model"]["head.weight"] + 1
    words = "'head.weight' is tied to 'emb.weight' but differs"
    with pytest.raises(errors.ShardMismatchError, match=words):
        consolidate_checkpoint(save(files, tmp_path), tmp_path / "m.pth")

"""Per-rank torch files become the unsharded state_dict: in memory, and streamed in every format."""

import os
from pathlib import Path

import pytest
import torch
from consolidating import (
    SUFFIX,
    Entry,
    Harmful,
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
from on_ranks import raises
from safetensors.torch import load_file

from xla_fsdp.consolidate import (
    consolidate_checkpoint,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    errors,
    verify_checkpoint,
)
from xla_fsdp.consolidate.format import rank_file


def in_memory(files, rank=-1, **options):
    state_dicts = [file["model"] for file in files]
    return consolidate_sharded_state_dicts(state_dicts, files[rank]["shard_metadata"], **options)


def assert_unpadded(state_dict):
    for tensor in state_dict.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("multiple", [1, 128])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_files(tmp_path, world_size, multiple):
    model = small_model()
    files = rank_files(model, world_size, multiple)
    for rank in range(world_size):
        assert_same(in_memory(files, rank), expected_state_dict(model))
    prefix = save(files, tmp_path)
    full, path = consolidate_sharded_model_checkpoints(prefix, SUFFIX)
    assert path == prefix + "_consolidated.pth"
    content = torch.load(path, weights_only=True)
    assert content["consolidated"]["world_size"] == world_size
    for state_dict in (full, content["model"]):
        assert_same(state_dict, expected_state_dict(model))
        assert_unpadded(state_dict)
        assert state_dict["emb.weight"].data_ptr() == state_dict["head.weight"].data_ptr()


@pytest.mark.parametrize("first_is_alias", [False, True])
def test_listed_alias_keeps_its_place(first_is_alias):
    weight, bias = torch.randn(2, 3), torch.randn(3)
    tied = Entry("a.w", "flat", [(("a.w", "z.w"), weight)], alias_keys=("z.w",))
    files = rank_files([tied, Entry("b", "flat", [(("b",), bias)])], 2)
    order = ["z.w", "b", "a.w"] if first_is_alias else ["a.w", "b", "z.w"]
    for file in files:
        file["model"] = {key: file["model"][key] for key in order}
    full = in_memory(files)
    assert list(full) == order
    assert torch.equal(full["a.w"], weight)
    assert full["z.w"] is full["a.w"]


@pytest.mark.parametrize("first_is_alias", [False, True])
def test_flat_parameter_of_a_module_with_two_names(first_is_alias):
    """Its shard is listed under both modules; the second must not pass for a buffer."""
    weight, bias = torch.randn(2, 3), torch.randn(3)
    members = [(("a.w", "b.w"), weight), (("a.b", "b.b"), bias)]
    files = rank_files([Entry("a.flat_param_0", "flat", members)], 2)
    for file in files:
        model, again = file["model"], {"b.flat_param_0": file["model"]["a.flat_param_0"].clone()}
        file["model"] = again | model if first_is_alias else model | again
    assert_same(in_memory(files), {"a.w": weight, "b.w": weight, "a.b": bias, "b.b": bias})


def test_alias_with_other_values_is_refused():
    tied = Entry("a", "flat", [(("a", "z"), torch.tensor([1.0, float("nan")]))], alias_keys=("z",))
    files = rank_files([tied], 2)
    model = files[1]["model"]
    model["z"] = model["z"].clone()  # equal bits, NaN included
    in_memory(files)
    model["z"] += 1
    model["z"][0] = 5
    raises(errors.ShardMismatchError, r"state_dict_list\[1\]: 'z' is tied to 'a'", in_memory, files)


def test_result_does_not_share_memory_with_the_input():
    files = rank_files(small_model(), 1)
    stored = {t.data_ptr() for t in files[0]["model"].values() if t.numel()}
    assert not stored & {t.data_ptr() for t in in_memory(files).values() if t.numel()}


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.float8_e4m3fnuz])
def test_any_dtype(tmp_path, dtype):
    values = torch.randn(5, dtype=torch.complex128)
    values = values.to(dtype) if dtype.is_complex else values.real.float().to(dtype)
    kept = torch.arange(3).to(torch.complex128)
    model = [Entry("w", "flat", [(("w",), values)]), Entry("b", "buffer", [(("b",), kept)])]
    full, path = consolidate_sharded_model_checkpoints(save(rank_files(model, 2), tmp_path), SUFFIX)
    for found in (full, loaded(path)):
        assert list(found) == ["w", "b"] and found["w"].dtype is dtype
        assert torch.equal(found["w"].view(torch.uint8), values.view(torch.uint8))
        assert torch.equal(found["b"], kept)


@pytest.mark.parametrize("kind", ["parameters", "columns", "conjugate", "sparse buffer"])
def test_state_dicts_as_users_have_them(tmp_path, kind):
    values = torch.randn(6, 4, dtype=torch.complex64 if kind == "conjugate" else torch.float32)
    files = rank_files([Entry("w", "dim0", [(("w",), values)])], 2)
    for file in files:
        shard = file["model"]["w"]
        if kind == "parameters":
            file["model"]["w"] = torch.nn.Parameter(shard)
        elif kind == "columns":
            file["model"]["w"] = shard.t().contiguous().t()
        elif kind == "conjugate":
            file["model"]["w"] = shard.conj().resolve_conj().conj()
        else:
            file["model"]["eye"] = torch.eye(3).to_sparse()
    full = in_memory(files)
    again, path = consolidate_sharded_model_checkpoints(save(files, tmp_path), SUFFIX)
    streamed = tmp_path / "streamed.pth"
    consolidate_checkpoint(save(files, tmp_path), streamed, suffix=SUFFIX)
    saved = [loaded(each) for each in (path, streamed)]
    for found in (full, again, *saved):
        assert torch.equal(found["w"], values) and type(found["w"]) is torch.Tensor
        assert not found["w"].requires_grad
        assert kind != "sparse buffer" or torch.equal(found["eye"].to_dense(), torch.eye(3))
    if kind == "sparse buffer":
        with pytest.raises(errors.UnsupportedValueError, match="'eye'.* Only dense"):
            consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "x.safetensors", suffix=SUFFIX)


def test_tied_argument_adds_names():
    files = rank_files(small_model(), 2)
    full = in_memory(files, tied={"copy": "block.fc.bias"})
    assert full["copy"] is full["block.fc.bias"]
    raises(errors.TiedWeightError, "'no'.*no such parameter", in_memory, files, tied={"copy": "no"})
    with pytest.raises(errors.TiedWeightError, match="'scalar' is in the checkpoint already"):
        in_memory(files, tied={"scalar": "nothing"})


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


def test_the_prefix_is_the_whole_name_and_paths_are_bytes(tmp_path):
    save(rank_files(small_model(), 1), tmp_path)
    (path,) = tmp_path.iterdir()
    found = consolidate_checkpoint(os.fsencode(path), os.fsencode(tmp_path / "m.pth"), suffix="")
    assert found.path == f"{tmp_path}/m.pth"
    assert_same(loaded(found.path), expected_state_dict(small_model()))


def test_as_safetensors(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_file, "PIECE_BYTES", 8)  # two elements of most
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


def with_optimizer(files):
    """As torch's Adam numbers its state: parameters in the order of the state_dict."""
    for file in files:
        keys = list(file["shard_metadata"]["parameters"])
        own = {
            number: {
                "step": torch.tensor(5.0),
                "exp_avg": file["model"][key].float() * 2,
                "exp_avg_sq": file["model"][key].float() * 3,
            }
            for number, key in enumerate(keys)
        }
        group = {"lr": 0.1, "betas": (0.9, 0.99), "params": list(range(len(keys)))}
        file["optimizer"] = {"state": own, "param_groups": [group]}
    return files


def test_optimizer(tmp_path, monkeypatch):
    monkeypatch.setattr(rank_file, "PIECE_BYTES", 8)  # two elements of most
    files = with_optimizer(rank_files(small_model(), 3, 4))
    prefix = save(files, tmp_path)
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
    for file in files:
        del file["optimizer"]
    with pytest.raises(errors.OptionsError, match="has no optimizer"):
        consolidate_checkpoint(save(files, tmp_path), tmp_path / "none", optimizer=True)


def two_groups(found):
    (group,) = found["param_groups"]
    parts = group["params"][:2], group["params"][2:]
    found["param_groups"] = [{**group, "params": part} for part in parts]


OPTIMIZERS = {
    "several groups": two_groups,
    "fewer parameters": lambda found: found["param_groups"][0]["params"].pop(),
    "one twice": lambda found: found["param_groups"][0]["params"].__setitem__(1, 0),
    "other shape": lambda found: found["state"][0].update(exp_avg=torch.zeros(3, 7)),
    "other step": lambda found: found["state"][0]["step"].add_(1),
    "other keys": lambda found: found["state"][0].pop("exp_avg"),
    "surplus": lambda found: found["state"].update({99: {}}),
}


@pytest.mark.parametrize("what", [*OPTIMIZERS, "not one", "missing", "ignored"])
def test_optimizer_that_cannot_be_matched(tmp_path, capsys, what):
    files = with_optimizer(rank_files(small_model(), 2))
    if what in OPTIMIZERS:
        OPTIMIZERS[what](files[1]["optimizer"])
    elif what == "ignored":  # as many as are frozen: the number of parameters is right
        files[1]["shard_metadata"]["ignored"] = ["norm.half"]
    else:
        files[1]["optimizer"] = [1] if what == "not one" else None
    prefix = save(files, tmp_path)
    before = sorted(tmp_path.iterdir())
    options = ("--ckpt_prefix", prefix, "--optimizer", "--save_path", tmp_path / "out")
    code, out, err = run_cli(capsys, *options)
    assert (code, out) == (2, [])
    assert err[-1].startswith(f"UnmatchedOptimizerError: {path_of(tmp_path, 1, 2)}: ")
    assert sorted(tmp_path.iterdir()) == before
    consolidate_checkpoint(prefix, tmp_path / "m.pth")


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
    raises(errors.UnreadableFileError, "not a zip file", verify_checkpoint, tmp_path / "ckpt")


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

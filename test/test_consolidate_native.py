"""Checkpoints in this package's format become the unsharded state_dict again."""

import random

import pytest
import torch
from test_consolidate_support import (
    SUFFIX,
    Entry,
    assert_same,
    expected_state_dict,
    loaded,
    rank_files,
    save,
    small_model,
)

from xla_fsdp.consolidate import (
    ShardMismatchError,
    TiedWeightError,
    UnsupportedValueError,
    consolidate_checkpoint,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)


def in_memory(files, rank=-1, **options):
    """With the metadata of any rank."""
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
    with pytest.raises(ShardMismatchError, match=r"state_dict_list\[1\]: 'z' is tied to 'a'"):
        in_memory(files)


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
        with pytest.raises(UnsupportedValueError, match="'eye'.* Only dense"):
            consolidate_checkpoint(tmp_path / "ckpt", tmp_path / "x.safetensors", suffix=SUFFIX)


def test_extra_state_passes_through():
    files = rank_files(small_model(), 2)
    for rank, file in enumerate(files):
        file["model"]["q._extra_state"] = {"rank": rank}
    assert in_memory(files)["q._extra_state"] == {"rank": 0}


def test_tied_argument_adds_names():
    files = rank_files(small_model(), 2)
    full = in_memory(files, tied={"copy": "block.fc.bias"})
    assert full["copy"] is full["block.fc.bias"]
    with pytest.raises(TiedWeightError, match="'no'.*no such parameter"):
        in_memory(files, tied={"copy": "no"})
    with pytest.raises(TiedWeightError, match="'scalar' is in the checkpoint already"):
        in_memory(files, tied={"scalar": "nothing"})


def random_model(rng):
    """Random entries: both layouts, one to five members, tied names, buffers of several dtypes."""
    names = (f"{rng.choice('abc')}{i}.weight" for i in range(1000))
    dtypes = [torch.float32, torch.bfloat16, torch.float64]
    model = []
    for index in range(rng.randint(1, 8)):
        kind = rng.choice(["flat", "dim0", "buffer"])
        shape = [rng.randint(0, 6) for _ in range(rng.randint(1 if kind == "dim0" else 0, 4))]
        if kind == "buffer":
            name = next(names)
            tensor = torch.randint(-50, 50, shape).to(rng.choice([*dtypes, torch.int64]))
            stored = torch.bfloat16 if tensor.is_floating_point() and rng.random() < 0.5 else None
            model.append(Entry(name, "buffer", [((name,), tensor)], stored))
            continue
        dtype = rng.choice(dtypes)
        members = []
        for _ in range(rng.randint(1, 5) if kind == "flat" else 1):
            tied = tuple(next(names) for _ in range(rng.choice([1, 1, 1, 2, 3])))
            members.append((tied, torch.randn(shape).to(dtype)))
            shape = [rng.randint(0, 6) for _ in range(rng.randint(0, 4))]
        key = members[0][0][0] if len(members) == 1 else f"u{index}.flat_param_0"
        model.append(Entry(key, kind, members))
    return model


@pytest.mark.parametrize("seed", range(60))
def test_random_models(seed):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = random_model(rng)
    files = rank_files(model, rng.choice([1, 2, 3, 4, 5, 8]), rng.choice([1, 2, 7, 128]))
    full = in_memory(files)
    assert_same(full, expected_state_dict(model))
    assert_unpadded(full)

"""Checkpoints in this package's format become the unsharded state_dict again."""

import random

import pytest
import torch
from test_consolidate_support import (
    SUFFIX,
    Entry,
    assert_same,
    expected_state_dict,
    rank_files,
    save,
    small_model,
)

from xla_fsdp.consolidate import (
    ShardMismatchError,
    TiedWeightError,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)

pytestmark = pytest.mark.filterwarnings("error")
WORLD_SIZES = [1, 2, 3, 4, 8]


@pytest.mark.parametrize("multiple", [1, 128])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_files(tmp_path, world_size, multiple):
    model = small_model()
    prefix = save(rank_files(model, world_size, multiple), tmp_path)
    full, path = consolidate_sharded_model_checkpoints(prefix, SUFFIX)
    assert path == prefix + "_consolidated.pth"
    assert_same(full, expected_state_dict(model))
    written = torch.load(path, weights_only=True)
    assert_same(written["model"], expected_state_dict(model))
    assert written["consolidated"]["world_size"] == world_size


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_state_dicts_in_memory(world_size):
    model = small_model()
    files = rank_files(model, world_size)
    for any_rank in files:
        full = consolidate_sharded_state_dicts(
            [file["model"] for file in files], any_rank["shard_metadata"]
        )
        assert_same(full, expected_state_dict(model))


def test_save_model_false_writes_nothing(tmp_path):
    model = small_model()
    save(rank_files(model, 2), tmp_path, prefix="ckpt")
    before = sorted(tmp_path.iterdir())
    full, path = consolidate_sharded_model_checkpoints(
        ckpt_prefix=f"{tmp_path}/", ckpt_suffix="*rank*-of-*.pth", save_model=False
    )
    assert path is None
    assert_same(full, expected_state_dict(model))
    assert sorted(tmp_path.iterdir()) == before


def test_padding_is_not_saved(tmp_path):
    model = [
        Entry("w", "flat", [(("w",), torch.randn(3))]),
        Entry("e", "dim0", [(("e",), torch.randn(5, 2))]),
    ]
    prefix = save(rank_files(model, 4, multiple=4096), tmp_path)
    full, path = consolidate_sharded_model_checkpoints(prefix, SUFFIX)
    for tensor in full.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    for tensor in torch.load(path, weights_only=True)["model"].values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_tied_names_share_one_tensor_also_in_the_file(tmp_path):
    prefix = save(rank_files(small_model(), 2), tmp_path)
    full, path = consolidate_sharded_model_checkpoints(prefix, SUFFIX)
    for state_dict in (full, torch.load(path, weights_only=True)["model"]):
        assert state_dict["emb.weight"].data_ptr() == state_dict["head.weight"].data_ptr()


@pytest.mark.parametrize("first_is_alias", [False, True])
def test_listed_alias_keeps_its_place(first_is_alias):
    weight, bias = torch.randn(2, 3), torch.randn(3)
    tied = Entry("a.w", "flat", [(("a.w", "z.w"), weight)], alias_keys=("z.w",))
    files = rank_files([tied, Entry("b", "flat", [(("b",), bias)])], 2)
    order = ["z.w", "b", "a.w"] if first_is_alias else ["a.w", "b", "z.w"]
    state_dicts = [{key: file["model"][key] for key in order} for file in files]
    full = consolidate_sharded_state_dicts(state_dicts, files[0]["shard_metadata"])
    assert list(full) == order
    assert torch.equal(full["a.w"], weight)
    assert full["z.w"] is full["a.w"]


@pytest.mark.parametrize("first_is_alias", [False, True])
def test_flat_parameter_of_a_module_with_two_names(first_is_alias):
    """Its shard is listed under both modules; the second must not pass for a buffer."""
    weight, bias = torch.randn(2, 3), torch.randn(3)
    members = [(("a.w", "b.w"), weight), (("a.b", "b.b"), bias)]
    files = rank_files([Entry("a.flat_param_0", "flat", members)], 2)
    state_dicts = []
    for file in files:
        shard = file["model"]["a.flat_param_0"]
        again = {"b.flat_param_0": shard.clone()}
        state_dicts.append(again | file["model"] if first_is_alias else file["model"] | again)
    full = consolidate_sharded_state_dicts(state_dicts, files[0]["shard_metadata"])
    assert_same(full, {"a.w": weight, "b.w": weight, "a.b": bias, "b.b": bias})


def test_alias_with_other_values_is_refused():
    tied = Entry("a", "flat", [(("a", "z"), torch.tensor([1.0, float("nan")]))], alias_keys=("z",))
    files = rank_files([tied], 2)
    state_dicts = [file["model"] for file in files]
    state_dicts[1]["z"] = state_dicts[1]["z"].clone()  # equal bits, NaN included
    consolidate_sharded_state_dicts(state_dicts, files[0]["shard_metadata"])
    state_dicts[1]["z"] += 1
    state_dicts[1]["z"][0] = 5
    with pytest.raises(ShardMismatchError, match=r"state_dict_list\[1\]: 'z' is tied to 'a'"):
        consolidate_sharded_state_dicts(state_dicts, files[0]["shard_metadata"])


def test_result_does_not_share_memory_with_the_input():
    files = rank_files(small_model(), 1)
    stored = {t.data_ptr() for t in files[0]["model"].values() if t.numel()}
    full = consolidate_sharded_state_dicts([files[0]["model"]], files[0]["shard_metadata"])
    assert not stored & {t.data_ptr() for t in full.values() if t.numel()}


@pytest.mark.parametrize("dtype", [torch.complex128, torch.complex64, torch.float8_e4m3fnuz])
def test_any_dtype(tmp_path, dtype):
    values = torch.randn(5, dtype=torch.complex128)
    values = values.to(dtype) if dtype.is_complex else values.real.float().to(dtype)
    kept = torch.arange(3).to(torch.complex128)
    model = [Entry("w", "flat", [(("w",), values)]), Entry("b", "buffer", [(("b",), kept)])]
    full, path = consolidate_sharded_model_checkpoints(save(rank_files(model, 2), tmp_path), SUFFIX)
    written = torch.load(path, weights_only=True)["model"]
    for found in (full, written):
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
    state_dicts = [file["model"] for file in files]
    full = consolidate_sharded_state_dicts(state_dicts, files[0]["shard_metadata"])
    again, path = consolidate_sharded_model_checkpoints(save(files, tmp_path), SUFFIX)
    for found in (full, again, torch.load(path, weights_only=True)["model"]):
        assert torch.equal(found["w"], values) and type(found["w"]) is torch.Tensor
        assert not found["w"].requires_grad
        assert kind != "sparse buffer" or torch.equal(found["eye"].to_dense(), torch.eye(3))


def test_extra_state_passes_through():
    files = rank_files(small_model(), 2)
    for rank, file in enumerate(files):
        file["model"]["q._extra_state"] = {"rank": rank}
    full = consolidate_sharded_state_dicts(
        [file["model"] for file in files], files[0]["shard_metadata"]
    )
    assert full["q._extra_state"] == {"rank": 0}


def test_tied_argument_adds_names():
    model = small_model()
    files = rank_files(model, 2)
    state_dicts, metadata = [file["model"] for file in files], files[0]["shard_metadata"]
    full = consolidate_sharded_state_dicts(state_dicts, metadata, tied={"copy": "block.fc.bias"})
    assert full["copy"] is full["block.fc.bias"]
    with pytest.raises(TiedWeightError, match="'no'.*no such parameter"):
        consolidate_sharded_state_dicts(state_dicts, metadata, tied={"copy": "no"})
    with pytest.raises(TiedWeightError, match="'scalar' is in the checkpoint already"):
        consolidate_sharded_state_dicts(state_dicts, metadata, tied={"scalar": "nothing"})


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
    world_size = rng.choice([1, 2, 3, 4, 5, 8])
    files = rank_files(model, world_size, rng.choice([1, 2, 7, 128]))
    full = consolidate_sharded_state_dicts(
        [file["model"] for file in files], files[-1]["shard_metadata"]
    )
    assert_same(full, expected_state_dict(model))

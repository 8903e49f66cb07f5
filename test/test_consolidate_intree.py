"""Checkpoints written by torch_xla's own class become the plain model's state_dict.

All ranks are built one after the other, in a process without ranks: no collective runs.
"""

import pytest
import torch
from consolidating import assert_equal, assert_refused, loaded, run_cli
from torch import nn

from xla_fsdp.consolidate import (
    consolidate_checkpoint,
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
    errors,
)

DIM0 = {"shard_param_on_dim_0": True}
FLAT = {"flatten_parameters": True}
# name: (world size, constructor arguments, model, wrap children too, move to XLA before wrapping)
CASES = {
    **{
        f"{name}-{world_size}": (world_size, options, "vision", True, False)
        for world_size in (1, 2, 3, 4, 8)
        for name, options in (("plain", {}), ("flat", FLAT), ("dim0", DIM0))
    },
    "root-only": (2, {}, "vision", False, False),
    "flat-root-only": (3, FLAT, "vision", False, False),
    "bfloat16-buffers": (2, {"buffer_dtype": torch.bfloat16}, "vision", True, True),
    "bfloat16-buffers-flat": (2, {"buffer_dtype": torch.bfloat16, **FLAT}, "vision", True, True),
    "bfloat16-buffers-cpu": (2, {"buffer_dtype": torch.bfloat16}, "vision", True, False),
    "frozen-flat": (2, FLAT, "frozen", False, False),
    "tied": (2, {}, "tied", False, False),
    "tied-flat": (2, FLAT, "tied", False, False),
    "shared-module": (2, {}, "shared", True, False),
    "named-flat-param": (2, {}, "named", False, False),
}
TIED = {"head.weight": "emb.weight"}
LOSSY = {"tied", "tied-flat", "bfloat16-buffers-cpu"}


class Vision(nn.Module):
    """Nested modules, a scalar, an empty parameter, buffers of three dtypes."""

    def __init__(self, scalar):
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.empty = nn.Parameter(torch.zeros(0, 2))
        self.tail = nn.Linear(4, 5, bias=False)
        if scalar:
            self.scale = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("table", torch.arange(4) / 8)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x):
        return self.tail(self.block(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x):
        return self.head(self.emb(x))


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = nn.Linear(3, 3)
        self.again = self.block

    def forward(self, x):
        return self.again(self.block(x))


class Named(nn.Module):
    """Names that look like the wrapper's own but are the model's."""

    def __init__(self):
        super().__init__()
        self.flat_param_0 = nn.Parameter(torch.randn(3, 2))
        self.my_fpw_module = nn.Linear(2, 2)

    def forward(self, x):
        return self.my_fpw_module(x @ self.flat_param_0)


def build(kind, options):
    torch.manual_seed(0)
    if kind == "tied":
        return Tied()
    if kind == "shared":
        return Shared()
    if kind == "named":
        return Named()
    # Sharding by rows cannot hold a scalar.
    model = Vision(scalar=not options.get("shard_param_on_dim_0"))
    model.block[1].running_mean.copy_(torch.arange(4) / 2)
    if kind == "frozen":
        model.block[0].requires_grad_(False)
    return model


def write_case(directory, world_size, options, kind, nested, on_device):
    import torch_xla
    import torch_xla.core.xla_model as xm
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel

    directory.mkdir()
    torch.save(build(kind, options).state_dict(), directory / "plain.pt")
    for rank in range(world_size):
        arguments = {
            **options,
            "sharding_groups": [list(range(world_size))],
            "sharding_rank": rank,
            "sharding_world_size": world_size,
        }
        model = build(kind, options)
        if on_device:
            model = model.to(torch_xla.device())
        if nested:
            child = XlaFullyShardedDataParallel(model.block, **arguments)
            model.block = child
            if kind == "shared":
                model.again = child
        model = XlaFullyShardedDataParallel(model, **arguments)
        content = {"model": model.state_dict(), "shard_metadata": model.get_shard_metadata()}
        xm.save(content, str(directory / f"rank-{rank}-of-{world_size}.pth"), master_only=False)


def write_cases(directory):
    for name, case in CASES.items():
        write_case(directory / name, *case)


@pytest.fixture(scope="module")
def written(tmp_path_factory, elsewhere):
    """By case a folder with rank-R-of-N.pth and plain.pt."""
    directory = tmp_path_factory.mktemp("intree")
    elsewhere(write_cases, directory)
    return directory


def load(written, case, **options):
    full, _ = consolidate_sharded_model_checkpoints(
        f"{written / case}/", "rank-*-of-*.pth", save_model=False, **options
    )
    return full, torch.load(written / case / "plain.pt", weights_only=True)


def contents(written, case):
    paths = sorted((written / case).glob("rank-*.pth"))
    return [torch.load(path, weights_only=True) for path in paths]


@pytest.mark.parametrize("case", sorted(CASES.keys() - LOSSY))
def test_equals_the_plain_model(written, case, tmp_path):
    """From files, streamed into a file, and from state_dicts in memory."""
    full, plain = load(written, case)
    assert_equal(full, plain)
    for tensor in full.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    path = tmp_path / "m.pth"
    consolidate_checkpoint(f"{written / case}/", path, suffix="rank-*-of-*.pth")
    found = loaded(path)
    assert list(found) == list(full)
    assert_equal(found, plain)
    files = contents(written, case)
    state_dicts, metadata = [file["model"] for file in files], files[0]["shard_metadata"]
    assert_equal(consolidate_sharded_state_dicts(state_dicts, metadata), plain)


def test_cast_buffers_without_recorded_dtype_are_returned_as_stored(written):
    full, plain = load(written, "bfloat16-buffers-cpu")
    assert full.keys() == plain.keys()
    assert full["block.1.running_mean"].dtype == torch.bfloat16
    assert torch.equal(full["block.1.running_mean"].float(), plain["block.1.running_mean"])


@pytest.mark.parametrize("case", ["tied", "tied-flat"])
def test_tied_names_are_lost_unless_named(written, case):
    full, plain = load(written, case)
    assert full.keys() == {"emb.weight"}
    full, plain = load(written, case, tied=TIED)
    assert_equal(full, plain)
    assert full["head.weight"] is full["emb.weight"]


def test_tied_names_on_the_command_line(written, tmp_path, capsys):
    arguments = ["--ckpt_prefix", f"{written / 'tied'}/", "--ckpt_suffix", "rank-*"]
    arguments += ["--save_path", tmp_path / "full.pth"]
    code, out, _ = run_cli(capsys, *arguments, "--tied", "head.weight=emb.weight")
    assert code == 0
    assert loaded(tmp_path / "full.pth").keys() == {"emb.weight", "head.weight"}
    assert "1 parameters (15 elements)" in out[-1]


def first_shard(about):
    return next(iter(next(iter(about["shard_info"].values())).values()))


def first_flat(about, change):
    flat = about["flatten_info"]
    key = next(iter(flat))
    flat[key] = change(*flat[key])


DAMAGES = {
    **{
        f"no {field}": lambda about, field=field: about.pop(field)
        for field in ("world_size", "rank", "shard_info", "flatten_info")
    },
    "missing flat parameter": lambda about: about["flatten_info"].popitem(),
    "numels": lambda about: first_flat(about, lambda n, s, e: (n, s, [e[0] + 1, *e[1:]])),
    "columns": lambda about: first_flat(about, lambda n, s, e: (n, s[:-1], e)),
    "size": lambda about: first_shard(about).update(_orig_size=[1]),
    "name": lambda about: first_shard(about).update(_orig_name=3),
    "buffer": lambda about: about["buffer_info"].update(table={"_orig_dtype": "float32"}),
}


@pytest.mark.parametrize("what", [*DAMAGES, "undescribed shard"])
def test_contradictory_metadata(written, tmp_path, capsys, what):
    files = contents(written, "flat-2")
    error, words = errors.InvalidMetadataError, what.removeprefix("no ") if "no " in what else ""
    if what in DAMAGES:
        DAMAGES[what](files[1]["shard_metadata"])
    else:
        error, words = errors.ShardMismatchError, "block._fsdp_shard_other"
        files[1]["model"][words] = torch.zeros(3)
    for index, file in enumerate(files):
        torch.save(file, tmp_path / f"ckpt{index}.pth")
    mentioned = tmp_path / "ckpt1.pth", words
    assert_refused(capsys, tmp_path, f"{tmp_path}/", error, *mentioned, suffix="ckpt*.pth")

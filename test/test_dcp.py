"""Directories of torch.distributed.checkpoint, to and from plain torch."""

import copy
import itertools
import os
import pickle
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
import torch_xla.core.xla_model as xm
from consolidating import Harmful
from on_ranks import on_each_rank
from small_models import Computes
from test_full_state import adamw, asgd
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from wrappings import assert_equal, plain_zoo, stacked, step, zoo

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import from_dcp, full_optim_state_dict, full_state_dict, to_dcp

RANKS = 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated"),
]


def by_name(model, optimizer):
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    return {names[number]: values for number, values in state["state"].items()}


def written_by_torch(tmp_path):
    found = []
    for make in (adamw, asgd):
        model = plain_zoo()
        optimizer = make(model.parameters())
        for number in range(2):
            step(model, optimizer, number)
        state, optim = get_state_dict(model, optimizer)
        flat = get_state_dict(
            model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
        )
        ways = {
            "tutorial": {"model": state, "optim": optim},
            "app": {"app": {"model": state, "optim": optim}, "step": 3},
            "titan": {"model": flat[0], "optimizer": flat[1]},
            "numbers": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
            "bare": {**state, "optimizer": optim},
        }
        for way, content in ways.items():
            if make is adamw or way == "tutorial":
                path = tmp_path / f"{way}-{make.__name__}"
                dcp.save(content, checkpoint_id=path, no_dist=True)
                if way == "titan":
                    as_later_torch(path / ".metadata")
                found.append((str(path), make, model.state_dict(), by_name(model, optimizer)))
    return found


def as_later_torch(path):
    """As torch 2.15 writes it with Python 3.13: a sixth property of every tensor, and the class of
    its path somewhere else."""
    metadata, state = pickle.loads(path.read_bytes()), TensorProperties.__getstate__
    with mock.patch.object(TensorProperties, "__getstate__", lambda own: (*state(own), (1,))):
        data = pickle.dumps(metadata, protocol=2)
    assert b"cpathlib\n" in data
    path.write_bytes(data.replace(b"cpathlib\n", b"cpathlib._local\n"))


def read_here(rank, written):
    kinds = itertools.cycle(["nested", "dim0", "flat", "none", "root"])
    for (path, make, state, optim), kind in zip(written, kinds, strict=False):
        model = zoo(kind, 5)
        optimizer = make(model.parameters())
        assert from_dcp(path, model, optimizer, allow_pickle=True) == ([], [])
        assert_equal(full_state_dict(model, rank0_only=False), state)
        found = full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        if kind == "flat":  # has state for all of a vector
            found = {name: found[name] for name in optim}
        for name, values in optim.items():
            assert set(found[name]) == set(values)
            assert_equal({key: found[name][key] for key in values}, values)
        assert found.keys() == optim.keys()


def numbered():
    """Its parameters are named "0" and "1", as those of an optimizer."""
    torch.manual_seed(0)
    parameters = {"0": nn.Parameter(torch.randn(4, 6)), "1": nn.Parameter(torch.randn(6))}

    def compute(self, x):
        return (x @ getattr(self, "0") * getattr(self, "1")).square().mean()

    return Computes(compute, **parameters)


@on_each_rank(2)
def test_parameters_with_numbers_as_names(rank, folder):
    plain = numbered()
    one = adamw(plain.parameters())
    plain(torch.ones(2, 4)).backward()
    one.step()
    expected = by_name(plain, one)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    ways = {
        "names": get_state_dict(plain, one),
        "flat": get_state_dict(plain, one, options=flat),
        "numbers": (plain.state_dict(), one.state_dict()),
    }
    for way, (state, optim) in ways.items():
        path = f"{folder}/{way}"
        if rank == 0:
            dcp.save({"model": state, "optim": optim}, checkpoint_id=path, no_dist=True)
        xm.rendezvous(way)
        model = FSDP(numbered())
        optimizer = adamw(model.parameters())
        from_dcp(path, model, optimizer, allow_pickle=True)
        found = full_optim_state_dict(model, optimizer, rank0_only=False)["state"]
        assert found.keys() == expected.keys(), way
        for name, values in expected.items():
            assert_equal({key: found[name][key] for key in values}, values)


def write_here(rank, folder, kinds):
    expected = {}
    for kind in kinds:
        build = stacked if kind == "scan" else zoo
        model = build(kind)
        optimizer = adamw(model.parameters())
        if kind in ("nested", "scan"):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.grad = parameter.detach().clone()
            optimizer.step()
        to_dcp(f"{folder}/{kind}", model, optimizer)
        state = full_state_dict(model, rank0_only=False)
        optim = full_optim_state_dict(model, optimizer, rank0_only=False)
        expected[kind] = state, optim["state"]
        other = "nested" if kind == "scan" else "flat" if kind == "nested" else "root"
        again = build(other, 3 if build is stacked else 7)
        new = adamw(again.parameters())
        from_dcp(f"{folder}/{kind}", again, new, allow_pickle=True)
        assert_equal(full_state_dict(again, rank0_only=False), state)
        found = full_optim_state_dict(again, new, rank0_only=False)["state"]
        for name, values in optim["state"].items():
            assert_equal(found[name], values)
    return expected if rank == 0 else None


def read_by_torch(path, plain, expected):
    state, optim = expected
    optimizer = adamw(plain.parameters())
    template = get_state_dict(plain, optimizer)
    content = {"model": template[0], "optim": template[1]}
    for name in list(content["optim"]["state"]):
        if name not in optim:  # never had a gradient, here or there
            del content["optim"]["state"][name]
    dcp.load(content, checkpoint_id=path, no_dist=True)
    assert_equal(dict(content["model"]), {n: state[n] for n in content["model"]})
    assert_equal(content["optim"]["state"], {n: optim[n] for n in content["optim"]["state"]})
    assert len(content["optim"]["state"]) == len(optim)
    if len(optim) == len(list(plain.parameters())):
        set_state_dict(
            plain, optimizer, model_state_dict=content["model"], optim_state_dict=content["optim"]
        )


class Counting(torch.nn.Linear):
    """Has extra state, which torch takes apart."""

    def __init__(self):
        super().__init__(3, 5)
        self.seen = {"a": {"b": 1}, "list": [{"c": torch.ones(2)}, {"c": torch.zeros(2)}]}

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def extra_state(rank, folder):
    expected = Counting().seen
    for number in range(2):
        model = FSDP(torch.nn.Sequential(Counting()))
        model.module[0].seen = None
        from_dcp(f"{folder}/extra-{number}", model, allow_pickle=True)
        assert_equal(model.module[0].seen, expected)
        if rank == 0 and number == 0:  # of a writing that never ended
            os.mkdir(f"{folder}/extra-1")
            with open(f"{folder}/extra-1/__7_0.distcp", "w"):
                pass
        to_dcp(f"{folder}/extra-{number + 1}", model)
    if rank == 0:
        content = {"model": torch.nn.Sequential(Counting()).state_dict()}
        content["model"]["0._extra_state"]["a"]["b"] = 0
        dcp.load(content, checkpoint_id=f"{folder}/extra-2", no_dist=True)
        assert_equal(content["model"]["0._extra_state"], expected)
        assert "__7_0.distcp" not in os.listdir(f"{folder}/extra-1")


def refused(rank, folder, written):
    model = zoo("nested")
    optimizer = adamw(model.parameters())

    def refuses(kind, text, fn, *args, **kwargs):
        with pytest.raises(Exception, match=text) as caught:
            fn(*args, **kwargs)
        names = kind if isinstance(kind, tuple) else (kind,)
        assert caught.type.__name__ in names, caught.type

    trusted = {"allow_pickle": True}
    refuses("UnsafeFileError", "allow_pickle=True", from_dcp, written[0][0], model)
    refuses("UnsafeFileError", "allow_pickle=True", from_dcp, f"{folder}/canary", model)
    refuses("CheckpointNotFoundError", "no .metadata", from_dcp, folder, model, **trusted)
    refuses("UnreadableFileError", "its .metadata", from_dcp, f"{folder}/junk", model, **trusted)
    refuses("ForeignFileError", "is not torch", from_dcp, f"{folder}/foreign", model, **trusted)
    refuses("ModelMismatchError", "no tensor of", from_dcp, f"{folder}/other", model, **trusted)
    refuses("ModelMismatchError", "lacks 'norm.bias'", from_dcp, f"{folder}/less", model, **trusted)
    bare = f"{folder}/model"
    refuses("ModelMismatchError", "has no optimizer", from_dcp, bare, model, optimizer, **trusted)
    gap = ("CoverageError", "OtherRankError")
    assert_equal(full_state_dict(model, rank0_only=False), plain_zoo().state_dict())
    refuses(("UnreadableFileError", "OtherRankError"), "cannot read|could not", from_dcp,
            f"{folder}/short", model, **trusted)  # fmt: skip
    refuses(gap, "of the elements|could not", from_dcp, f"{folder}/gap", model, **trusted)
    refuses(("OutputError", "OtherRankError"), "is not empty", to_dcp, folder, model)
    refuses("ValueError", "local directory", to_dcp, "memory://x", model)


def spoil(tmp_path):
    state = plain_zoo().state_dict()
    dcp.save({"model": state}, checkpoint_id=tmp_path / "model", no_dist=True)
    dcp.save({"x": torch.ones(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    less = {name: value for name, value in state.items() if name != "norm.bias"}
    dcp.save({"model": less}, checkpoint_id=tmp_path / "less", no_dist=True)
    for name, data in {
        "junk": b"junk",
        "foreign": pickle.dumps(Metadata({})),
        "canary": pickle.dumps(Harmful(tmp_path / "executed")),
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").write_bytes(data)
    for name in ("short", "gap"):
        dcp.save({"model": state}, checkpoint_id=tmp_path / name, no_dist=True)
    for file in (tmp_path / "short").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:1000])
    metadata = pickle.loads((tmp_path / "gap" / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.norm.weight"].chunks.clear()
    (tmp_path / "gap" / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("nested",), ("scan", "dim0", "none")], ids=" ".join)
def test_to_and_from_torch(run_ranks, tmp_path, kinds):
    written = written_by_torch(tmp_path)
    spoil(tmp_path)
    extra = {"model": torch.nn.Sequential(Counting()).state_dict()}
    dcp.save(extra, checkpoint_id=tmp_path / "extra-0", no_dist=True)

    def run(rank):
        read_here(rank, written)
        extra_state(rank, str(tmp_path))
        refused(rank, str(tmp_path), written)
        return write_here(rank, str(tmp_path / "ours"), kinds)

    expected = run_ranks(run, RANKS)[0]
    assert not (tmp_path / "executed").exists()
    for kind, values in expected.items():
        plain = stacked("plain", 7) if kind == "scan" else plain_zoo(7)
        read_by_torch(tmp_path / "ours" / kind, copy.deepcopy(plain), values)


def layers() -> nn.Sequential:
    """Rows that neither 2 nor 3 ranks divide."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(13, 31), nn.GELU(), nn.Linear(31, 7), nn.LayerNorm(7))


def fsdp_of_torch(rank, folder):
    """Trains and saves; rank 0 saves the full state, too."""
    import torch.distributed as dist
    from torch.distributed.checkpoint import state_dict as states
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # wherever the machine's name leads
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    model = layers()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = adamw(model.parameters())

    x = torch.randn(4, 13, generator=torch.Generator().manual_seed(2))
    model(x).square().mean().backward()
    optimizer.step()
    state, optim = states.get_state_dict(model, optimizer)
    dcp.save({"model": state, "optim": optim}, checkpoint_id=f"{folder}/theirs")
    options = states.StateDictOptions(full_state_dict=True)
    state, optim = states.get_state_dict(model, optimizer, options=options)
    if rank == 0:
        torch.save((state, optim["state"]), f"{folder}/full")
    dist.destroy_process_group()


def read_theirs(rank, folder):
    model = FSDP(layers(), flatten_parameters=True)
    optimizer = adamw(model.parameters())
    from_dcp(folder, model, optimizer, allow_pickle=True)
    state = full_state_dict(model, rank0_only=False)
    return state, full_optim_state_dict(model, optimizer, rank0_only=False)["state"]


@pytest.mark.slow
def test_what_torchs_fsdp_wrote_is_read_by_another_number_of_ranks(run_ranks, tmp_path):
    torch.multiprocessing.spawn(fsdp_of_torch, (str(tmp_path),), nprocs=2)
    found, of_optimizer = run_ranks(read_theirs, 3, str(tmp_path / "theirs"))[0]
    state, optim = torch.load(tmp_path / "full")
    assert_equal(found, dict(state))
    assert of_optimizer.keys() == optim.keys()
    for name, values in optim.items():
        assert_equal({key: of_optimizer[name][key] for key in values}, values)

"""Checkpoints of the current format, written without ranks: the pieces cut at random."""

import random
import zlib

import torch

from xla_fsdp.consolidate.format import values
from xla_fsdp.consolidate.format.dtypes import dtype_name
from xla_fsdp.consolidate.format.local import LocalStore
from xla_fsdp.consolidate.format.manifest import (
    NAME,
    Group,
    Manifest,
    Optimizer,
    State,
    Tensor,
    buffer_key,
    dump_manifest,
    file_name,
    parameter_key,
    state_key,
)
from xla_fsdp.consolidate.format.rank_file import FileTensor, write_file
from xla_fsdp.consolidate.format.strict import write_json


def write_checkpoint(
    path, tensors, optimizer=None, world_size=2, step=1, buffers=None, cut=None, **more
):
    """Writes the folder ``path``; returns the manifest.

    tensors: {name, or tuple of tied names: tensor}. buffers: {name: (as stored, dtype to restore or
    None)}, zeros on later ranks. optimizer: {"groups": [{"params": [names], options}], "state":
    {name: {key: value}}}; of its values the tensors of the parameter's shape are cut like it. cut:
    see `random_cuts`. more: fields of the manifest.
    """
    path.mkdir(parents=True)
    save_id = more.pop("save_id", f"{zlib.crc32(str(path).encode()):016x}")
    manifest = describe(tensors, optimizer, world_size, step, buffers, save_id=save_id, **more)
    records = []
    for rank in range(world_size):
        own = {name: stored for name, (stored, _) in (buffers or {}).items()}
        if rank:
            own = {name: torch.zeros_like(stored) for name, stored in own.items()}
        items, begins = items_of(rank, manifest, tensors, optimizer, own, cut)
        metadata = {**manifest.identity(rank), "begins": write_json(begins).decode()}
        target = str(path / file_name(rank, world_size))
        records.append(write_file(LocalStore(), target, items, metadata))
    manifest = Manifest(**{**vars(manifest), "files": tuple(records)})
    (path / NAME).write_bytes(dump_manifest(manifest))
    return manifest


def describe(tensors, optimizer, world_size, step, buffers, **more):
    tied = {(k,) if isinstance(k, str) else k: v for k, v in tensors.items()}
    return Manifest(
        step=step,
        world_size=world_size,
        parameters={
            n[0]: Tensor(n, dtype_name(t.dtype, ""), tuple(t.shape)) for n, t in tied.items()
        },
        buffers={
            name: Tensor(
                (name,),
                dtype_name(stored.dtype, ""),
                tuple(stored.shape),
                restore and dtype_name(restore, ""),
            )
            for name, (stored, restore) in (buffers or {}).items()
        },
        files=(),
        optimizer=_optimizer(optimizer, _state(_by_name(tensors), optimizer)),
        **more,
    )


def items_of(rank, manifest, tensors, optimizer, buffers, cut=None):
    """What the file of ``rank`` has, and where its pieces begin."""
    items, begins = [], {}
    for name, tensor in _by_name(tensors).items():
        begin, end = (cut or random_cuts)(name, tensor.numel(), manifest.world_size)[rank]
        if begin == end:
            continue
        begins[name] = begin
        items.append(_item(parameter_key(name), tensor.reshape(-1)[begin:end]))
        state = manifest.optimizer.state if manifest.optimizer else {}
        for key in state[name].sharded if name in state else ():
            full = optimizer["state"][name][key]
            items.append(_item(state_key(key, name), full.reshape(-1)[begin:end]))
    items += [_item(buffer_key(name), stored) for name, stored in buffers.items()]
    items.append(_item("rank/random", torch.tensor([rank])))
    return items, begins


def _by_name(tensors):
    return {k if isinstance(k, str) else k[0]: v for k, v in tensors.items()}


def _item(key, tensor):
    flat = tensor.reshape(-1)
    return FileTensor(key, tensor.dtype, tuple(tensor.shape), lambda low, high: flat[low:high])


def random_cuts(name, count, world_size):
    """Who has which elements: (begin, end) by rank, in no order, some having nothing."""
    pick = random.Random(f"{name} {count} {world_size}")
    inner = sorted(pick.randint(0, count) for _ in range(world_size - 1))
    edges = [0, *inner, count]
    pieces = list(zip(edges, edges[1:], strict=False))
    pick.shuffle(pieces)
    return pieces


def even_cuts(name, count, world_size):
    part = -(-count // (world_size * 128)) * 128
    return [(min(r * part, count), min((r + 1) * part, count)) for r in range(world_size)]


def _state(by_name, optimizer):
    """Of every parameter, the dtypes of what is cut, and the rest encoded."""
    found = {}
    for name, state in (optimizer or {"state": {}})["state"].items():
        sharded, single = {}, {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == by_name[name].shape:
                sharded[key] = dtype_name(value.dtype, key)
            else:
                single[key] = {"value": values.encode(value, key)}
                if isinstance(value, torch.Tensor):
                    single[key]["on"] = "host"
        found[name] = sharded, single
    return found


def _optimizer(optimizer, state):
    if optimizer is None:
        return None
    groups = tuple(
        Group(
            tuple(group["params"]),
            {k: values.encode(v, k) for k, v in group.items() if k != "params"},
        )
        for group in optimizer["groups"]
    )
    return Optimizer(
        "torch.optim.adam.Adam", groups, {n: State(*each) for n, each in state.items()}
    )


def everything(checkpoint, ranks=(0,)):
    """All values of a checkpoint that is intact, by what they are. ranks: of these the buffers."""
    checkpoint.verify()
    manifest, found = checkpoint.manifest, {}
    state = manifest.optimizer.state if manifest.optimizer else {}
    for name, tensor in manifest.parameters.items():
        found[name] = checkpoint.read(name, 0, tensor.numel)
        for key in state[name].sharded if name in state else ():
            found[name, key] = checkpoint.read(name, 0, tensor.numel, key)
    for name, tensor in manifest.buffers.items():
        for rank in ranks:
            found["buffer", name, rank] = checkpoint.read_buffer(name, 0, tensor.numel, rank)
    return found


def small_checkpoint(path, world_size=3, step=7, seed=0, **more):
    """Writes every kind of tensor; returns (state_dict, optimizer state_dict) to expect."""
    make = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(shape, generator=make)

    tensors = {
        ("emb.weight", "head.weight"): rand(50, 30),
        "fc.weight": rand(30, 40).to(torch.bfloat16),
        "fc.bias": rand(3),
        "scale": rand(),
        "empty": rand(0, 7),
        "table": torch.arange(1000, dtype=torch.int64),
        "eight": rand(33).to(torch.float8_e4m3fn),
        "odd": torch.arange(5).to(torch.uint16),
    }
    buffers = {
        "norm.mean": (torch.arange(3.0).to(torch.bfloat16), torch.float32),
        "norm.steps": (torch.tensor(7), None),
        "norm.flags": (torch.tensor([True, False]), None),
    }
    state = {
        name: {"step": torch.tensor(5.0), "exp_avg": rand(*shape), "exp_avg_sq": rand(*shape) ** 2}
        for name, shape in (("emb.weight", (50, 30)), ("fc.weight", (30, 40)), ("fc.bias", (3,)))
    }
    state["fc.bias"]["note"] = {"kind": ("a", 1)}
    groups = [
        {"params": ["emb.weight", "fc.weight"], "lr": 0.1, "betas": (0.9, 0.95), "foreach": None},
        {"params": ["fc.bias"], "lr": 0.2, "betas": (0.9, 0.95), "foreach": None},
    ]
    optimizer = {"groups": groups, "state": state}
    write_checkpoint(path, tensors, optimizer, world_size, step, buffers, **more)
    model = {}
    for names, tensor in tensors.items():
        for name in (names,) if isinstance(names, str) else names:
            model[name] = tensor
    for name, (stored, restore) in buffers.items():
        model[name] = stored.to(restore or stored.dtype)
    return model, {"state": state, "param_groups": groups}

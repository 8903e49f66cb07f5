"""A model that nothing refers to is gone, with all it held on the device, without a collection."""

import contextlib
import copy
import gc
import threading
import weakref

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import finish_step, on_each_rank
from torch import nn

import xla_fsdp
from xla_fsdp import CPUOffload, checkpoint_module, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.checkpoint.protocol import PlaceholderTensor
from xla_fsdp.checkpoint.readable_tensor import ReadableTensor
from xla_fsdp.consolidate import consolidate_checkpoint
from xla_fsdp.consolidate.format.reader import RankFile, ShardedCheckpoint

WIDTH = 24


def blocks(number=3):
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number)]


def nested(**options):
    return FSDP(nn.Sequential(*[FSDP(block, **options) for block in blocks()]), **options)


def tied():
    first, second, third = blocks()
    third[0].weight = first[0].weight
    return FSDP(nn.Sequential(FSDP(first), second, FSDP(third)))


def scanned():
    return FSDP(nn.Sequential(scan_blocks(blocks()), nn.Linear(WIDTH, WIDTH)))


MODELS = {
    "nested": nested,
    "tied": tied,
    "checkpointed": lambda: FSDP(nn.Sequential(*map(FSDP, map(checkpoint_module, blocks())))),
    "scanned": scanned,
    "copied": lambda: copy.deepcopy(nested()),
    "offloaded": lambda: nested(cpu_offload=CPUOffload(True, True, True)),
    "flattened": lambda: nested(flatten_parameters=True),
    "in bfloat16": lambda: nested(compute_dtype=torch.bfloat16),
    "kept for the backward": lambda: nested(reshard_after_forward=False),
    "ends its steps": lambda: nested(sync_on_finalization=True),
}


def a_step(model, x):
    loss = model(x).square().sum()
    loss.backward()
    return loss


@on_each_rank(2)
def test_a_model_goes_without_the_garbage_collector(rank):
    def trained(make):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        a_step(model, x)
        finish_step(optimizer)
        a_step(model, x)  # left pending
        return [weakref.ref(one) for one in (model, *model.parameters())]

    x = torch.ones(2, WIDTH).to("xla")
    gc.collect()
    gc.disable()
    try:
        for name, make in MODELS.items():
            references = trained(make)
            # Autograd's thread lets go of the last node of a graph when it gets another.
            (x[0, 0].detach().requires_grad_() * 1).backward()
            alive = [type(one()).__name__ for one in references if one() is not None]
            assert not alive, f"{name}: {alive}"
            gc.collect()
            torch_xla.sync()
    finally:
        gc.enable()


@on_each_rank(2)
def test_what_a_load_or_save_used_goes_without_the_garbage_collector(rank, tmp_path):
    def load_full():
        xla_fsdp.load_full_state_dict(model, xla_fsdp.full_state_dict(model) or None)

    def save_beside():
        with xla_fsdp.AsyncCheckpointer(f"{tmp_path}/beside") as checkpointer:
            checkpointer.save(model, optimizer, step=1)

    def keep_in_memory():
        with xla_fsdp.TieredCheckpointer(
            f"{tmp_path}/tiers", fast=f"{tmp_path}/host{rank}", host=f"{rank}", address="127.0.0.1"
        ) as tiers:
            tiers.save(model, optimizer, step=1)
            tiers.load(model, optimizer)

    def load_dcp():
        xla_fsdp.from_dcp(f"{tmp_path}/dcp", model, optimizer, allow_pickle=True)

    def damaged():
        with contextlib.suppress(xla_fsdp.consolidate.CheckpointError):
            xla_fsdp.load_weights(model, f"{tmp_path}/model.pth", prefix="no.")

    model = nested()
    optimizer = torch.optim.AdamW(model.parameters())
    a_step(model, torch.ones(2, WIDTH).to("xla"))
    optimizer.step()
    torch_xla.sync()
    saved = xla_fsdp.save_checkpoint(f"{tmp_path}/run", model, optimizer, step=1)
    if rank == 0:
        for name in ("model.safetensors", "model.pth"):
            consolidate_checkpoint(saved, f"{tmp_path}/{name}")
    xla_fsdp.to_dcp(f"{tmp_path}/dcp", model, optimizer)
    uses = {
        "load_checkpoint": lambda: xla_fsdp.load_checkpoint(saved, model, optimizer),
        "load_full_state_dict": load_full,
        "safetensors": lambda: xla_fsdp.load_weights(model, f"{tmp_path}/model.safetensors"),
        "a torch file": lambda: xla_fsdp.load_weights(model, f"{tmp_path}/model.pth"),
        "an error": damaged,
        "from_dcp": load_dcp,
        "AsyncCheckpointer": save_beside,
        "TieredCheckpointer": keep_in_memory,
    }
    kinds = (PlaceholderTensor, ReadableTensor, ShardedCheckpoint, RankFile, threading.Thread)
    left = {}
    gc.disable()
    try:
        for name, use in uses.items():
            xm.rendezvous(f"before {name}")
            if rank == 0:
                gc.collect()
                before = {id(one) for one in gc.get_objects() if type(one) in kinds}
            xm.rendezvous(f"now {name}")
            use()
            xm.rendezvous(f"after {name}")
            if rank == 0:
                for one in threading.enumerate():
                    if type(one) is threading.Thread and id(one) not in before:
                        one.join(60.0)
                del one
                found = [one for one in gc.get_objects() if type(one) in kinds]
                new = [one for one in found if id(one) not in before]
                left[name] = sorted({type(one).__name__ for one in new})
                del found, new
    finally:
        gc.enable()
    assert rank or set(left) == set(uses)
    assert not any(left.values()), left


FAILING = """
import gc, weakref
import torch, xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP

found = []

def train(rank, last):
    model = FSDP(torch.nn.Linear(8, 8))
    found.append(weakref.ref(model))
    if rank == last:
        raise ValueError("bad data")
    model(torch.ones(2, 8).to("xla")).sum().item()

for last in (1, 9):
    gc.collect()
    gc.disable()
    try:
        xla_fsdp.launch(train, (last,), 2)
    except xla_fsdp.RankError as error:
        print(str(error.__cause__))
    print([one() is None for one in found])
    gc.enable()
"""


def test_models_of_a_failed_launch_go_with_its_error(run_script):
    done = run_script(FAILING)
    lines = ["bad data", "[True, True]", "[True, True, True, True]"]
    assert done.stdout.splitlines() == lines, done.stderr

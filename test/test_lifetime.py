"""A model that nothing refers to is gone, with all it held on the device, without a collection."""

import contextlib
import copy
import gc
import threading
import weakref

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from checkpoint_runs import saves_and_loads
from on_ranks import finish_step, on_each_rank
from torch import nn

import xla_fsdp
from xla_fsdp import CPUOffload, checkpoint_module, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.checkpoint.protocol import PlaceholderTensor
from xla_fsdp.checkpoint.readable_tensor import ReadableTensor
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
    def damaged():
        with contextlib.suppress(xla_fsdp.consolidate.CheckpointError):
            xla_fsdp.load_weights(model, f"{tmp_path}/weights.pth", prefix="no.")

    model = nested()
    optimizer = torch.optim.AdamW(model.parameters())
    a_step(model, torch.ones(2, WIDTH).to("xla"))
    optimizer.step()
    torch_xla.sync()
    saves, loads = saves_and_loads(model, optimizer, tmp_path)
    uses = {**saves, **loads, "an error": damaged}
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

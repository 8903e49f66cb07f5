"""A model that nothing refers to is gone, with all it held on the device, without a collection.

Otherwise the next one, in the next cell of a notebook, would find its memory taken; and what is
left pending of it would be part of the programs of some processes, and not of others.
"""

import gc
import weakref

import torch
from torch import nn

WIDTH = 24


def blocks(number=3):
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(number)]


def nested(**options):
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    return FSDP(nn.Sequential(*[FSDP(block, **options) for block in blocks()]), **options)


def tied():
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    first, second, third = blocks()
    third[0].weight = first[0].weight
    return FSDP(nn.Sequential(FSDP(first), second, FSDP(third)))


def checkpointed():
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import checkpoint_module

    return FSDP(nn.Sequential(*[FSDP(checkpoint_module(block)) for block in blocks()]))


def scanned():
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import scan_blocks

    return FSDP(nn.Sequential(scan_blocks(blocks()), nn.Linear(WIDTH, WIDTH)))


def copied():
    import copy

    return copy.deepcopy(nested())


def offloaded():
    from xla_fsdp import CPUOffload

    return nested(cpu_offload=CPUOffload(True, True, True))


MODELS = {
    "nested": nested,
    "tied": tied,
    "checkpointed": checkpointed,
    "scanned": scanned,
    "copied": copied,
    "offloaded": offloaded,
    "flattened": lambda: nested(flatten_parameters=True),
    "in bfloat16": lambda: nested(compute_dtype=torch.bfloat16),
    "kept for the backward": lambda: nested(reshard_after_forward=False),
    "ends its steps": lambda: nested(sync_on_finalization=True),
}


def a_step(model, x):
    loss = model(x).square().sum()
    loss.backward()
    return loss


def each_is_gone(rank):
    import torch_xla

    def trained(make):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters())
        a_step(model, x)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
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


def test_a_model_goes_without_the_garbage_collector(run_ranks):
    run_ranks(each_is_gone, 2)

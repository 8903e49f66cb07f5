"""A checkpoint by all ranks, loaded into shards of half of them."""

from __future__ import annotations

import torch
import torch_xla
import torch_xla.runtime as xr

from ..checkpoint.full_optimizer import full_optim_state_dict
from ..checkpoint.full_state import full_state_dict
from ..checkpoint.loading import load_checkpoint
from ..checkpoint.saving import save_checkpoint
from ..consolidate.errors import SharedStorageError
from ..wrapper import XlaFullyShardedDataParallel as FSDP
from .nets import SEED, Net, tokens
from .parity import SIZE, halves
from .records import Finding, Status

_STEP = 7


def save_and_load(folder: str) -> Finding:
    """Saves on N ranks, loads on N/2, and compares what is there; call on every rank."""
    ranks = xr.world_size()
    name = "checkpoints"
    if ranks < 2 or ranks % 2:
        return Finding(Status.SKIPPED, name, f"{ranks} ranks have no halves")
    torch.manual_seed(SEED)
    model = FSDP(Net(SIZE, FSDP))
    optimizer = _optimizer(model)
    mine = tokens(SIZE, ranks, 0).chunk(ranks)[xr.global_ordinal()].to(torch_xla.device())
    model(mine).backward()
    optimizer.step()
    torch_xla.sync()
    try:
        save_checkpoint(folder, model, optimizer, step=_STEP)
    except SharedStorageError as error:
        remedy = "name a folder that all hosts share: --ckpt_dir"
        return Finding(Status.SKIPPED, name, str(error), remedy=remedy)
    torch.manual_seed(SEED + 1)  # other values than those that are saved
    groups = halves()
    other = FSDP(Net(SIZE, lambda block: FSDP(block, **groups)), **groups)
    other_optimizer = _optimizer(other)
    loaded = load_checkpoint(folder, other, other_optimizer)
    before = full_state_dict(model), full_optim_state_dict(model, optimizer)
    after = full_state_dict(other), full_optim_state_dict(other, other_optimizer)
    found = f"saved by {ranks} ranks, loaded into shards of {ranks // 2}"
    promised = "the same weights and optimizer state, bit for bit"
    if loaded is None or loaded.step != _STEP:
        return Finding(Status.FAILED, name, f"{found}: loaded step {loaded}", promised)
    if xr.global_ordinal() == 0:
        differ = [key for key, value in before[0].items() if not _same(value, after[0][key])]
        for key, state in before[1]["state"].items():
            theirs = after[1]["state"].get(key, {})
            differ += [
                f"{each} of {key}"
                for each, value in state.items()
                if not _same(value, theirs[each])
            ]
        if differ:
            remedy = "save no checkpoint that you rely on here; report it with this file"
            return Finding(Status.FAILED, name, f"{found}: {differ[0]} differs", promised, remedy)
    return Finding(Status.OK, name, found, promised)


def _same(one: torch.Tensor | float, other: torch.Tensor | float) -> bool:
    return torch.equal(torch.as_tensor(one), torch.as_tensor(other))


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3)

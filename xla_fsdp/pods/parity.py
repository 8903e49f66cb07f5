"""Tests that must pass on every machine: sharded equals unsharded training, checkpoints load."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch_xla
import torch_xla.backends
import torch_xla.runtime as xr
from torch import nn

from ..checkpoint.full_state import full_optim_state_dict, full_state_dict
from ..checkpoint.loading import load_checkpoint
from ..checkpoint.rank_exchange import RankExchange
from ..checkpoint.saving import save_checkpoint
from ..consolidate.errors import SharedStorageError
from ..remat import checkpoint_module
from ..scan.blocks import scan_blocks
from ..wrapper import XlaFullyShardedDataParallel as FSDP
from .findings import Finding, failed, ok, skipped
from .steps import OURS, SEED, Lane, Net, Size, global_batch

SIZE = Size(blocks=2, width=64, vocabulary=67, sequence=16, batch=2)
STEPS, CLIP = 3, 0.5
_SAVED_STEP = 7


@dataclass(frozen=True)
class Case:
    """``tolerance`` is relative, for losses, norms and weights."""

    name: str
    tolerance: float = 1e-4
    options: dict[str, Any] = field(default_factory=dict)
    checkpoint: bool = False
    scanned: bool = False
    accumulated: bool = False
    groups: bool = False  # shards over each half of the ranks

    @property
    def dtype(self) -> torch.dtype | None:
        return self.options.get("compute_dtype")


CASES = (
    Case("nested"),
    Case("flat, recomputed", options={"flatten_parameters": True}, checkpoint=True),
    Case("scanned blocks", scanned=True),
    Case("no_sync", accumulated=True),
    Case("bfloat16", 3e-2, options={"compute_dtype": torch.bfloat16}),
    Case("two replicas", groups=True),
)


def compare(names: Sequence[str]) -> Iterator[Finding]:
    """Compares sharded with unsharded training in cases, ``()``: all; call on every rank.

    In full precision: by default a TPU rounds float32 operands to bfloat16, depending on shapes.
    """
    if torch_xla.backends.get_mat_mul_precision() != "highest":
        torch_xla.backends.set_mat_mul_precision("highest")
    references: dict[torch.dtype | None, dict[str, torch.Tensor]] = {}
    for case in [case for case in CASES if not names or case.name in names]:
        if case.groups and xr.world_size() % 2:
            yield skipped(f"parity: {case.name}", f"{xr.world_size()} ranks have no two halves")
            continue
        if case.dtype not in references:
            references[case.dtype] = _trained(case, sharded=False)
        yield _parity_finding(case, _trained(case, sharded=True), references[case.dtype])


def _parity_finding(
    case: Case, ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]
) -> Finding:
    name = f"parity: {case.name}"
    worst, where = 0.0, "nowhere"
    for key, value in reference.items():
        apart = _relative_difference(ours[key], value) if key in ours else float("inf")
        if not apart <= worst:  # also if it is NaN
            worst, where = apart, key
    found = f"largest relative difference {worst:.1e} ({where}) after {STEPS} steps"
    expected = f"equal to unsharded training, to {case.tolerance:.0e}"
    if worst <= case.tolerance:
        return ok(name, found, expected)
    remedy = "do not train on this machine; report it with this file"
    return failed(name, found, expected, remedy)


def _relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    ours, theirs = ours.double(), theirs.double()
    if not bool(torch.isfinite(ours).all()):
        return float("inf")
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp_min(1e-6))


def _trained(case: Case, sharded: bool) -> dict[str, torch.Tensor]:
    """Returns losses, norms and, on rank 0, the weights."""
    rank, ranks, device = xr.global_ordinal(), xr.world_size(), torch_xla.device()
    torch.manual_seed(SEED)
    model: Any = _wrap_case(case) if sharded else Net(SIZE).to(device)
    trained = [p for p in model.parameters() if p.requires_grad]
    # Not Adam, which makes large steps from rounding errors: the exact gradient of keys' bias is
    # zero.
    optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
    clip = model.clip_grad_norm_ if sharded else partial(nn.utils.clip_grad_norm_, trained)
    losses, norms = [], []
    for number in range(STEPS):
        parts = global_batch(SIZE, ranks, number).chunk(2 if case.accumulated and sharded else 1)
        step = []
        for part, whole in enumerate(parts):
            mine = (whole.chunk(ranks)[rank] if sharded else whole).to(device)
            hold = sharded and part < len(parts) - 1
            with model.no_sync() if hold else contextlib.nullcontext():
                loss = _loss(case, model, mine, sharded)
                (loss / len(parts)).backward()
            step.append(loss.detach())
        norm = clip(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(sum(loss.item() for loss in step) / len(step))
        norms.append(norm.item())
    if sharded:
        everybody = RankExchange().gather_values("average losses", losses)
        losses = [sum(each) / ranks for each in zip(*everybody, strict=True)]
        weights = full_state_dict(model)
    else:
        weights = {name: value.cpu() for name, value in model.state_dict().items()}
    own = {"losses": torch.tensor(losses), "norms": torch.tensor(norms)}
    return own | (weights if rank == 0 else {})


def _loss(case: Case, model: nn.Module, mine: torch.Tensor, sharded: bool) -> torch.Tensor:
    if sharded or case.dtype is None:
        return model(mine)
    cast = {name: p.to(case.dtype) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, cast, (mine,))


def _wrap_case(case: Case) -> nn.Module:
    options = {**case.options, **(_halves() if case.groups else {})}

    def wrap(block: nn.Module) -> nn.Module:
        if case.scanned:
            return block
        return FSDP(checkpoint_module(block) if case.checkpoint else block, **options)

    join: Callable = (
        partial(scan_blocks, **options) if case.scanned else lambda b: nn.Sequential(*b)
    )
    return FSDP(Net(SIZE, wrap, join), **options)


def _halves() -> dict[str, Any]:
    rank, half = xr.global_ordinal(), xr.world_size() // 2
    first = list(range(half))
    return {
        "sharding_groups": [first, [half + each for each in first]],
        "sharding_rank": rank % half,
        "sharding_world_size": half,
        "replication_groups": [[each, half + each] for each in first],
    }


def save_and_load(folder: str) -> Finding:
    """Loads into shards of half of the ranks, and compares; call on every rank."""
    ranks = xr.world_size()
    name = "checkpoints"
    if ranks < 2 or ranks % 2:
        return skipped(name, f"{ranks} ranks have no two halves")
    lane = Lane(OURS, SIZE)
    lane.trace()
    torch_xla.sync()
    try:
        save_checkpoint(folder, lane.model, lane.optimizer, step=_SAVED_STEP)
    except SharedStorageError as error:
        return skipped(name, str(error), remedy="give a folder that all hosts share: --ckpt_dir")
    torch.manual_seed(SEED + 1)
    groups = _halves()
    other = FSDP(Net(SIZE, lambda block: FSDP(block, **groups)), **groups)
    trained = [p for p in other.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loaded = load_checkpoint(folder, other, optimizer)
    before, after = _values(lane.model, lane.optimizer), _values(other, optimizer)
    found = f"saved by {ranks} ranks, loaded into shards of {ranks // 2}"
    expected = "the same weights and optimizer state, bit for bit"
    if loaded is None or loaded.step != _SAVED_STEP:
        return failed(name, f"{found}: loaded step {loaded}", expected)
    for key, value in before.items():
        if key not in after or not torch.equal(value, after[key]):
            remedy = "do not rely on checkpoints from this machine; report it with this file"
            return failed(name, f"{found}: {key} differs", expected, remedy)
    return ok(name, found, expected)


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights and optimizer state by name, on rank 0."""
    values = full_state_dict(model)
    for key, state in full_optim_state_dict(model, optimizer).get("state", {}).items():
        values |= {f"{each} of {key}": torch.as_tensor(state[each]) for each in state}
    return values

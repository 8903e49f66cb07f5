"""The lanes to compare: the same model and optimizer, sharded by our class or the in-tree one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch_xla
from torch import nn

from .model import VOCABULARY, LanguageModel

OURS, IN_TREE, UNWRAPPED = "ours", "in-tree", "unwrapped"
SEED = 7


@dataclass(frozen=True)
class Workload:
    """The workload of every lane; its fields are the flags of ``benchmarks.compare``."""

    ranks: int = 4
    blocks: int = 12
    width: int = 256
    heads: int = 4
    batch: int = 4
    sequence: int = 64
    checkpoint: bool = False
    compute_dtype: str | None = None

    @property
    def arguments(self) -> dict:
        """The arguments of ``Workload`` as plain values."""
        return asdict(self)

    @property
    def dtype(self) -> torch.dtype | None:
        return getattr(torch, self.compute_dtype) if self.compute_dtype else None


class Lane:
    """The model and optimizer of one rank, sharded by one of the classes."""

    def __init__(self, name: str, work: Workload, rank: int, simulated: bool = False):
        """``simulated``: simulate rank ``rank`` of ``work.ranks``; no other rank exists."""
        self.name = name
        groups = {}
        if simulated:
            groups["sharding_groups"] = [list(range(work.ranks))]
            groups["sharding_rank"], groups["sharding_world_size"] = rank, work.ranks
        torch.manual_seed(SEED)  # the same weights on every rank and in every lane
        model = LanguageModel(work.blocks, work.width, work.heads, work.sequence)
        wrap, checkpoint = _classes(name, work, groups)
        for number, block in enumerate(model.blocks):
            model.blocks[number] = wrap(checkpoint(block) if work.checkpoint else block)
        self.model = wrap(model).to(torch_xla.device())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        rng = torch.Generator().manual_seed(
            SEED + 1 + rank
        )  # each rank has another part of the batch
        shape = work.batch, work.sequence + 1
        tokens = torch.randint(VOCABULARY, shape, generator=rng)
        self.tokens = tokens.to(torch_xla.device())
        torch_xla.sync()

    def trace(self) -> torch.Tensor:
        """Trace forward, backward and optimizer; nothing runs before ``torch_xla.sync()``."""
        loss = self.model(self.tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _classes(name: str, work: Workload, groups: dict) -> tuple[Callable, Callable]:
    if name == OURS:
        import xla_fsdp

        def wrap(module: nn.Module) -> nn.Module:
            return xla_fsdp.XlaFullyShardedDataParallel(module, compute_dtype=work.dtype, **groups)

        return wrap, xla_fsdp.checkpoint_module
    from torch_xla.distributed import fsdp as in_tree

    if name == IN_TREE:

        def wrap(module: nn.Module) -> nn.Module:
            return in_tree.XlaFullyShardedDataParallel(
                module, compute_dtype=work.dtype, pin_layout_in_collective_ops=False, **groups
            )

        return wrap, in_tree.checkpoint_module
    return (lambda module: module), in_tree.checkpoint_module

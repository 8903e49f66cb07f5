"""Small models, inputs of every rank, and comparisons of a sharded model with a plain one."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn

from xla_fsdp import FSDPModule
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.consolidate import consolidate_sharded_state_dicts
from xla_fsdp.ranks.rank import current_rank
from xla_fsdp.sharding.sharded_parameter import local

WIDTH, WORDS = 6, 11


class Computes(nn.Module):
    """Has the ``children``; its forward is ``compute(module, *inputs)``."""

    def __init__(self, compute, **children):
        super().__init__()
        self.compute = compute
        for name, child in children.items():
            setattr(self, name, child)

    def forward(self, *inputs, **options):
        return self.compute(self, *inputs, **options)


class Block(nn.Module):
    """Parameters that do not divide, and one that has no dimension."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.gate = nn.Linear(width, 7), nn.Linear(width, 7)
        self.down = nn.Linear(7, width)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.gain * self.down(F.gelu(self.up(y)) * torch.tanh(self.gate(y)))


class Language(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks: nn.Module = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def mlp() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        nn.Linear(WIDTH, 3),
    )


def wrapped(model: nn.Module, *children: str, wrap: Any = FSDP, **options):
    for child in children:
        parent = model.get_submodule(child.rpartition(".")[0])
        setattr(parent, child.rpartition(".")[2], wrap(model.get_submodule(child), **options))
    return wrap(model, **options)


def hybrid(rank: int) -> dict[str, Any]:
    return {
        "sharding_groups": [[0, 1], [2, 3]],
        "sharding_rank": rank % 2,
        "sharding_world_size": 2,
        "replication_groups": [[0, 2], [1, 3]],
    }


@contextlib.contextmanager
def without_sync(model: nn.Module) -> Iterator[None]:
    """``no_sync`` of a wrapper, and what ``fully_shard`` has instead."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            yield


def trace_as_on_tpu(on_tpu: bool = True) -> None:
    """Until the launch is over, this rank traces what a TPU would get, if ``on_tpu``."""
    current_rank().as_on_tpu |= on_tpu


def inputs(rank: int, step: int = 0) -> torch.Tensor:
    """Two rows for each rank; every rank can make every other's."""
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def here(rank: int, step: int = 0) -> torch.Tensor:
    return inputs(rank, step).to("xla")


def inputs_of_all(step: int = 0) -> torch.Tensor:
    return torch.cat([inputs(rank, step) for rank in range(xr.world_size())])


def whole(model, tensors) -> dict[str, torch.Tensor]:
    """Full tensors by name, from this rank's shards: gathered through the ranks' rendezvous.

    Replicas must hold the same.
    """
    mine = {name: local(value).detach().cpu() for name, value in tensors.items()}
    ranks, metadata = xm.mesh_reduce("whole", mine, list), model.get_shard_metadata()
    size = metadata["world_size"]
    for replica in range(size, len(ranks)):
        torch.testing.assert_close(ranks[replica], ranks[replica % size], rtol=0, atol=0)
    return consolidate_sharded_state_dicts(ranks[:size], metadata)


def of_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name, of tied parameters by each; zeros for those that have none."""
    named = model.named_parameters(remove_duplicate=False)
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named}


def gradients(model) -> dict[str, torch.Tensor]:
    return whole(model, of_parameters(model))


def assert_same_gradients(model, plain: nn.Module, rtol=1e-4, atol=1e-6, **options) -> None:
    torch_xla.sync()
    ours = gradients(model)
    for name, expected in of_parameters(plain).items():
        torch.testing.assert_close(ours[name], expected, rtol=rtol, atol=atol, **options)


def mean_square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def assert_same_backward(model, plain, rank: int, loss_of=mean_square, step: int = 0) -> None:
    loss_of(model, here(rank, step)).backward()
    loss_of(plain, inputs_of_all(step)).backward()
    assert_same_gradients(model, plain)

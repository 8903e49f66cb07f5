"""Evaluates a model during its training, on all ranks."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


def vary_by_rank(seed: int) -> None:
    """Gives each rank another random state, for dropout. Call it after the weights are created."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    torch.manual_seed(seed + 1 + xr.global_ordinal())
    xm.set_rng_state(seed + 1 + xr.global_ordinal(), str(torch_xla.device()))


def average_batch_statistics(model: nn.Module) -> None:
    """Averages batch norm statistics over ranks, so that all evaluate and save the same model."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if statistics:
        xm.all_reduce(xm.REDUCE_SUM, statistics, scale=1 / xr.world_size())


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A context without gradients and dropout, which does not affect the training after it."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    device = str(torch_xla.device())
    state = xm.get_rng_state(device)
    model.eval()
    with torch.no_grad():
        yield
    model.train()
    xm.set_rng_state(state, device)


def over_all_ranks(count: torch.Tensor) -> int:
    """The sum of the counts of all ranks."""
    import torch_xla.core.xla_model as xm

    return xm.mesh_reduce("count", count.item(), sum)

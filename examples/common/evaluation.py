"""A model is evaluated in the middle of its training, by all ranks."""

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


def vary_by_rank(seed: int) -> None:
    """Dropout is to differ. To be called when every rank has made the same weights."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    torch.manual_seed(seed + 1 + xr.global_ordinal())
    xm.set_rng_state(seed + 1 + xr.global_ordinal(), str(torch_xla.device()))


def average_batch_statistics(model: nn.Module) -> None:
    """Makes every rank evaluate, and save, the same model: batch norm saw other images on each."""
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    statistics = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if statistics:
        xm.all_reduce(xm.REDUCE_SUM, statistics, scale=1 / xr.world_size())


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and dropout. Training goes on as if nothing had been evaluated."""
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
    """The sum of what every rank has counted."""
    import torch_xla.core.xla_model as xm

    return xm.mesh_reduce("count", count.item(), sum)

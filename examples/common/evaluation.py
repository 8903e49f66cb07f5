"""Evaluates a model during its training, on all ranks."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.utils.data import DataLoader

from .batches import on_device

IGNORED = -100  # a label that does not count


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


def count_correct(model: nn.Module, held_out: DataLoader, prefetch: int) -> int:
    """The number of held-out images that are classified correctly, over all ranks."""
    with evaluating(model), on_device(held_out, prefetch) as loader:
        hits = sum((model(images).argmax(dim=1) == labels).sum() for images, labels in loader)
        return over_all_ranks(hits)


def mean_loss(
    model: nn.Module, loss: Callable[..., torch.Tensor], held_out: Iterable, prefetch: int
) -> tuple[float, int]:
    """The mean loss of held-out tokens over all ranks, and the number of these tokens.

    ``held_out``: batches of tokens, labels and what else ``loss`` takes. ``loss``: computes the
    cross entropy with the weights of ``model``; it has an argument ``reduction``.
    """
    total, count = 0, 0
    with evaluating(model), on_device(held_out, prefetch) as loader:
        for tokens, labels, *others in loader:
            total = total + loss(tokens, labels, *others, reduction="sum")
            count = count + (labels != IGNORED).sum()
        count = over_all_ranks(count)
        return over_all_ranks(total) / count, count


def over_all_ranks(count: torch.Tensor) -> int:
    """The sum of the counts of all ranks."""
    import torch_xla.core.xla_model as xm

    return xm.mesh_reduce("count", count.item(), sum)

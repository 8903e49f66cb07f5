"""Which images a rank gets. Plain torch."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from .script import Stop


class InEpochs(Dataset):
    """``self[epoch, index]`` is an image as ``vary`` shows it in that epoch.

    What is drawn for it depends on the seed, the epoch and the image alone, not on what was drawn
    before or on the rank, process or thread that reads it: a run that is resumed sees what it would
    have seen.
    """

    def __init__(self, data: Dataset, seed: int, vary: Callable | None) -> None:
        self.data, self.seed, self.vary = data, seed, vary

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: tuple[int, int]) -> tuple:
        epoch, index = place
        image, label = self.data[index]
        if self.vary:
            image = self.vary(image, random.Random(f"{self.seed} {epoch} {index}"))
        return image, label


class InEpochsSampler(DistributedSampler):
    """A rank's share of ``dataset``, a sequence of indices, as ``(epoch, index)``.

    Worker processes live on from epoch to epoch, and hear of ``set_epoch`` in no other way.
    """

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for place in super().__iter__():
            yield self.epoch, self.dataset[place]


class EvenShare(Dataset):
    """One rank's share of a data set, filled up to as many whole batches as the others have.

    Every image counts once: what fills a share up has the label -1, which no prediction equals.
    """

    def __init__(self, data: Dataset, rank: int, world_size: int, batch_size: int) -> None:
        self.data, self.first, self.stride = data, rank, world_size
        self.length = -(-len(data) // (world_size * batch_size)) * batch_size

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple:
        place = self.first + self.stride * index
        image, label = self.data[place % len(self.data)]
        return image, label if place < len(self.data) else -1


def training_batches(
    data: Dataset,
    rank: int,
    world_size: int,
    batch_size: int,
    *,
    seed: int,
    drop_last: bool = True,
    max_steps: int | None = None,
    vary: Callable[[Any, random.Random], torch.Tensor] | None = None,
    **workers: object,
) -> DataLoader:
    """Shuffled batches of one rank; ``loader.sampler.set_epoch`` shuffles anew.

    Args:
        batch_size: of a rank.
        max_steps: most batches an epoch; the images for them are always the same ones.
        vary: makes of an image what is shown of it; draws from what it is given.
        workers: how a ``DataLoader`` reads.
    """
    chosen = range(len(data))
    if max_steps:
        # Not the first ones: in folders these are all of the first classes.
        mixed = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        chosen = mixed[: max_steps * batch_size * world_size].tolist()
    sampler = InEpochsSampler(chosen, world_size, rank, seed=seed, drop_last=drop_last)
    loader = DataLoader(
        InEpochs(data, seed, vary),
        batch_size,
        sampler=sampler,
        drop_last=drop_last,
        generator=_generator(),
        **workers,
    )
    if not len(loader):
        raise Stop(
            f"{len(chosen)} training images over {world_size} ranks do not fill one batch of "
            f"{batch_size} a rank; choose a smaller --batch_size",
            code=2,
        )
    return loader


def test_batches(
    data: Dataset, rank: int, world_size: int, batch_size: int, **workers: object
) -> DataLoader:
    """Batches of one rank's even share, at most ``batch_size`` images each."""
    # Shares are whole batches: a larger one than needed would be filled up with images, and read.
    batch_size = min(batch_size, -(-len(data) // world_size))
    share = EvenShare(data, rank, world_size, batch_size)
    return DataLoader(share, batch_size, generator=_generator(), **workers)


def _generator() -> torch.Generator:
    """For the seed that a loader draws for its workers: ranks' states, which are saved, stay."""
    return torch.Generator()

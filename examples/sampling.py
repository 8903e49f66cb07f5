"""Which images a rank gets, and in which order."""

import itertools
import random
from collections.abc import Callable, Iterator

import torch
from absl import flags
from common.script import Stop
from torch.utils.data import DataLoader, Dataset, DistributedSampler

flags.DEFINE_integer("max_steps", None, "most steps an epoch, for a quick look", lower_bound=1)


class InEpochs(Dataset):
    """``self[epoch, index]`` is an image as ``vary`` shows it in that epoch.

    What is drawn for it depends on the seed, the epoch and the image alone, not on who reads it or
    what was drawn before: a run that is resumed sees what it would have seen.
    """

    def __init__(self, data: Dataset, seed: int, vary: Callable | None) -> None:
        self.data, self.seed, self.vary = data, seed, vary

    def __getitem__(self, place: tuple[int, int]) -> tuple:
        epoch, index = place
        image, label = self.data[index]
        if self.vary:
            image = self.vary(image, random.Random(f"{self.seed} {epoch} {index}"))
        return image, label


class InEpochsSampler(DistributedSampler):
    """A rank's share of ``dataset``, a sequence of indices, as ``(epoch, index)``.

    Attributes:
        begun: an epoch, and how many images of it the rank has had before: they are left out.
    """

    begun = (0, 0)

    @property
    def had(self) -> int:
        """How many images of this epoch the rank has had before."""
        return self.begun[1] if self.begun[0] == self.epoch else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        # Worker processes live on from epoch to epoch, and hear of set_epoch in no other way.
        whole = ((self.epoch, self.dataset[place]) for place in super().__iter__())
        return itertools.islice(whole, self.had, None)


class FilledUp(Dataset):
    """``data``, again and again. It counts once: later the label is -1, which is never right."""

    def __init__(self, data: Dataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, place: int) -> tuple:
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
    vary: Callable | None = None,
    **workers: object,
) -> DataLoader:
    """Shuffled batches of one rank. ``vary(image, draw)`` makes of an image what is shown of it."""
    chosen = range(len(data))
    if max_steps:
        # Always the same. Not the first ones: in folders these are all of the first classes.
        mixed = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        chosen = mixed[: max_steps * batch_size * world_size].tolist()
    sampler = InEpochsSampler(chosen, world_size, rank, seed=seed, drop_last=drop_last)
    # A loader draws a seed for its workers: ranks' random states, which are saved, stay.
    workers |= {"drop_last": drop_last, "generator": torch.Generator()}
    loader = DataLoader(InEpochs(data, seed, vary), batch_size, sampler=sampler, **workers)
    if not len(loader):
        few = f"{len(chosen)} training images over {world_size} ranks do not fill one batch"
        raise Stop(f"{few} of {batch_size} a rank; choose a smaller --batch_size", code=2)
    return loader


def test_batches(
    data: Dataset, rank: int, world_size: int, batch_size: int, **workers: object
) -> DataLoader:
    """Batches of one rank, at most ``batch_size`` images each: all whole, on each rank as many."""
    # A larger batch than needed would be filled up with images, and read.
    batch_size = min(batch_size, -(-len(data) // world_size))
    steps = -(-len(data) // (world_size * batch_size))
    share = range(rank, world_size * batch_size * steps, world_size)
    workers |= {"generator": torch.Generator()}
    return DataLoader(FilledUp(data), batch_size, sampler=share, **workers)

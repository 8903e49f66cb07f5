"""Selects the images of each rank, and their order."""

import itertools
import random
from collections.abc import Callable, Iterator

import torch
from absl import flags
from common.script import Stop
from torch.utils.data import DataLoader, Dataset, DistributedSampler

flags.DEFINE_integer(
    "max_steps", None, "maximum number of steps in an epoch, for a short test", lower_bound=1
)


class EpochDataset(Dataset):
    """Images of ``data``, as ``self[epoch, index]``, with the random ``transform``.

    The random numbers depend only on the seed, the epoch and the image, so a resumed run gets the
    same images as one that was not interrupted.
    """

    def __init__(self, data: Dataset, seed: int, transform: Callable | None) -> None:
        self.data, self.seed, self.transform = data, seed, transform

    def __getitem__(self, place: tuple[int, int]) -> tuple:
        epoch, index = place
        image, label = self.data[index]
        if self.transform:
            image = self.transform(image, random.Random(f"{self.seed} {epoch} {index}"))
        return image, label


class EpochSampler(DistributedSampler):
    """Samples a rank's share of ``dataset``, a sequence of indices, as ``(epoch, index)``."""

    _begun_epoch = -1
    _begun_images = 0

    def skip(self, epoch: int, images: int) -> None:
        """Leaves out the first ``images`` of ``epoch``, which this rank finished earlier."""
        self._begun_epoch, self._begun_images = epoch, images

    @property
    def skipped(self) -> int:
        """The number of images that are left out of this epoch."""
        return self._begun_images if self.epoch == self._begun_epoch else 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        # Worker processes keep running, so they get the epoch only as part of the index.
        places = ((self.epoch, self.dataset[place]) for place in super().__iter__())
        return itertools.islice(places, self.skipped, None)


class PaddedDataset(Dataset):
    """``data``, repeated. Repeated images have the label -1, so they never count as correct."""

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
    transform: Callable | None = None,
    **workers: object,
) -> DataLoader:
    """Shuffled batches of one rank. ``transform(image, draw)``: a random transform of an image."""
    chosen = range(len(data))
    if max_steps:
        # A fixed random selection, because the first images all belong to the first classes.
        mixed = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        chosen = mixed[: max_steps * batch_size * world_size].tolist()
    sampler = EpochSampler(chosen, world_size, rank, seed=seed, drop_last=drop_last)
    # A loader samples a seed for its workers. A separate generator leaves the ranks' random states,
    # which are saved, unchanged.
    workers |= {"drop_last": drop_last, "generator": torch.Generator()}
    loader = DataLoader(EpochDataset(data, seed, transform), batch_size, sampler=sampler, **workers)
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
    """Test batches of one rank, of at most ``batch_size`` images.

    All batches have the same size, and all ranks have the same number of batches.
    """
    # A batch that is larger than necessary would be filled with repeated images.
    batch_size = min(batch_size, -(-len(data) // world_size))
    steps = -(-len(data) // (world_size * batch_size))
    share = range(rank, world_size * batch_size * steps, world_size)
    workers |= {"generator": torch.Generator()}
    return DataLoader(PaddedDataset(data), batch_size, sampler=share, **workers)

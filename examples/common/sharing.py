"""Which images a rank gets. Plain torch."""

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from .script import Stop


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
    **workers: object,
) -> DataLoader:
    """Shuffled batches of one rank; ``loader.sampler.set_epoch`` shuffles anew.

    Args:
        batch_size: of a rank.
        max_steps: most batches an epoch; the images for them are always the same ones.
        workers: how a ``DataLoader`` reads.
    """
    if max_steps:
        # Not the first ones: in folders these are all of the first classes.
        chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        data = Subset(data, chosen[: max_steps * batch_size * world_size].tolist())
    sampler = DistributedSampler(data, world_size, rank, seed=seed, drop_last=drop_last)
    loader = DataLoader(data, batch_size, sampler=sampler, drop_last=drop_last, **workers)
    if not len(loader):
        raise Stop(
            f"{len(data)} training images over {world_size} ranks do not fill one batch of "
            f"{batch_size} a rank; choose a smaller --batch_size",
            code=2,
        )
    return loader


def test_batches(
    data: Dataset, rank: int, world_size: int, batch_size: int, **workers: object
) -> DataLoader:
    """Batches of one rank's even share."""
    share = EvenShare(data, rank, world_size, batch_size)
    return DataLoader(share, batch_size, **workers)

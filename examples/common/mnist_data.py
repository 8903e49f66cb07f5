"""Handwritten digits, 28 by 28: scikit-learn's bundled set, MNIST, or random images.

Plain torch: also used where there is no torch_xla.
"""

import contextlib
import io
import os

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from .script import Stop

MEAN, STD = 0.1307, 0.3081
HELD_OUT_DIGITS = 297
FAKE_IMAGES = {True: 1500, False: 297}
MNIST_FILES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


class Images(Dataset):
    """Images as bytes, which become normalised floats a batch at a time."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images = images  # uint8, (N, 28, 28)
        self.labels = labels  # int64, (N,)

    def __len__(self) -> int:
        return len(self.images)

    def first(self, count: int) -> "Images":
        return Images(self.images[:count], self.labels[:count])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        images = self.images[indices].unsqueeze(1).float() / 255
        return (images - MEAN) / STD, self.labels[indices]


class EvenShare(Dataset):
    """One rank's share of a data set, filled up to as many whole batches as the others have.

    What fills it up has the label -1, which no prediction equals.
    """

    def __init__(self, data: Images, rank: int, world_size: int, batch_size: int) -> None:
        self.data, self.first, self.stride = data, rank, world_size
        self.batches = -(-len(data) // (world_size * batch_size))
        self.length = self.batches * batch_size

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        places = [self.first + self.stride * index for index in indices]
        real = torch.tensor([place < len(self.data) for place in places])
        images, labels = self.data.__getitems__([place % len(self.data) for place in places])
        return images, torch.where(real, labels, -1)


def prepare(datadir: str) -> None:
    """Downloads MNIST into ``datadir``, in torchvision's layout, unless it is there."""
    from torchvision.datasets import MNIST

    chatter = io.StringIO()
    try:
        with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
            MNIST(datadir, download=True)
    except Exception as error:
        # A download that failed says so in several lines.
        reason = " ".join(str(error).split())
        raise Stop(
            f"no MNIST in --datadir={datadir} and it cannot be downloaded; expected "
            f"{', '.join(MNIST_FILES)} in {os.path.join(datadir, 'MNIST', 'raw')} ({reason[:200]})",
            code=2,
        ) from error


def load(train: bool, datadir: str | None = None, fake: bool = False) -> Images:
    """The training images, or the held-out ones: the same in every process."""
    if fake:
        generator = torch.Generator().manual_seed(int(train))
        count = FAKE_IMAGES[train]
        images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)
        return Images(images, torch.randint(0, 10, (count,), generator=generator))
    if datadir:
        from torchvision.datasets import MNIST

        mnist = MNIST(datadir, train=train)
        return Images(mnist.data, mnist.targets)
    return _bundled_digits(train)


def _bundled_digits(train: bool) -> Images:
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    indices = range(len(digits.images))
    split = train_test_split(
        indices, test_size=HELD_OUT_DIGITS, stratify=digits.target, random_state=0
    )
    chosen = split[0] if train else split[1]
    images = torch.tensor(digits.images[chosen], dtype=torch.float32) / 16  # (N, 8, 8)
    images = F.interpolate(images.unsqueeze(1), size=(28, 28), mode="bilinear").squeeze(1)
    return Images((images * 255).round().to(torch.uint8), torch.tensor(digits.target[chosen]))


def train_loader(
    data: Images, rank: int, world_size: int, batch_size: int, drop_last: bool, seed: int
) -> DataLoader:
    """Shuffled batches of one rank; ``loader.sampler.set_epoch`` shuffles anew."""
    sampler = DistributedSampler(data, world_size, rank, seed=seed, drop_last=drop_last)
    return DataLoader(data, batch_size, sampler=sampler, drop_last=drop_last, collate_fn=_as_it_is)


def test_loader(data: Images, rank: int, world_size: int, batch_size: int) -> DataLoader:
    """Batches of one rank's even share."""
    share = EvenShare(data, rank, world_size, batch_size)
    return DataLoader(share, batch_size, collate_fn=_as_it_is)


def _as_it_is(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return batch

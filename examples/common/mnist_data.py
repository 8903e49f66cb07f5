"""Handwritten digits, 28 by 28: scikit-learn's bundled set, MNIST, or random images.

Plain torch: also used where there is no torch_xla.
"""

from __future__ import annotations

import contextlib
import io
import os
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset

from .script import Stop

if TYPE_CHECKING:
    from sklearn.utils import Bunch

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
    """Images as bytes, which become normalised floats one by one."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images = images  # uint8, (N, 28, 28)
        self.labels = labels  # int64, (N,)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index].unsqueeze(0).float() / 255
        return (image - MEAN) / STD, int(self.labels[index])


def prepare(datadir: str) -> None:
    """Downloads MNIST into ``datadir``, in torchvision's layout, unless it is there."""
    from torchvision.datasets import MNIST

    chatter = io.StringIO()
    try:
        with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
            MNIST(datadir, download=True)
    except Exception as error:
        place = os.path.join(datadir, "MNIST", "raw")
        raise Stop(
            f"no MNIST in --datadir={datadir} and it cannot be downloaded; expected "
            f"{', '.join(MNIST_FILES)} in {place} ({_reason(error)})",
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

        try:
            mnist = MNIST(datadir, train=train)
            _check(mnist.data, mnist.targets)
        except Exception as error:  # torchvision raises many kinds
            raise Stop(f"no MNIST in --datadir={datadir}: {_reason(error)}", code=2) from error
        return Images(mnist.data, mnist.targets)
    return _bundled_digits(train)


def _check(images: torch.Tensor, labels: torch.Tensor) -> None:
    if images.shape != (len(labels), 28, 28):
        shape = " x ".join(map(str, images.shape))
        raise ValueError(f"{shape} images and {len(labels)} labels; expected N x 28 x 28 and N")
    if not len(labels) or labels.max() > 9:
        raise ValueError("expected labels from 0 to 9")


def _reason(error: Exception) -> str:
    if isinstance(error, (AssertionError, KeyError)):  # they have no words of their own
        return "a file is not in the format of MNIST"
    # A download that failed says so in several lines.
    return " ".join(str(error).split())[:200]


def split_digits(digits: Bunch) -> tuple[list[int], list[int]]:
    """Which of scikit-learn's ``load_digits()`` are for training, and which are held out."""
    from sklearn.model_selection import train_test_split

    return train_test_split(
        range(len(digits.images)),
        test_size=HELD_OUT_DIGITS,
        stratify=digits.target,
        random_state=0,
    )


def _bundled_digits(train: bool) -> Images:
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = split_digits(digits)[0 if train else 1]
    images = torch.tensor(digits.images[chosen], dtype=torch.float32) / 16  # (N, 8, 8)
    images = F.interpolate(images.unsqueeze(1), size=(28, 28), mode="bilinear").squeeze(1)
    return Images((images * 255).round().to(torch.uint8), torch.tensor(digits.target[chosen]))

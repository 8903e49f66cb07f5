"""Handwritten digits in plain torch: scikit-learn's bundled set, and MNIST.

:func:`load` loads them as 28 by 28 pixels; :func:`write` writes scikit-learn's set as PNG files.
"""

import contextlib
import io
import os
import tempfile

import torch
import torch.nn.functional as F
from common.script import Stop, to_one_line
from images import unreadable
from torch.utils.data import Dataset

MEAN, STD = 0.1307, 0.3081
HELD_OUT = 297
FAKE_IMAGES = {True: 1500, False: HELD_OUT}
MNIST_FILES = [
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
]


class Images(Dataset):
    """A dataset of images, stored as bytes and returned as normalised floats."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images = images  # uint8, (N, 28, 28)
        self.labels = labels  # int64, (N,)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = self.images[index].unsqueeze(0).float() / 255
        return (image - MEAN) / STD, int(self.labels[index])


def prepare(datadir: str) -> None:
    """Downloads MNIST into ``datadir``, in torchvision's layout, if it is not there yet."""
    from torchvision.datasets import MNIST

    chatter = io.StringIO()
    try:
        with contextlib.redirect_stdout(chatter), contextlib.redirect_stderr(chatter):
            MNIST(datadir, download=True)
    except Exception as error:
        raise Stop(
            f"no MNIST in --datadir={datadir} and it cannot be downloaded; expected "
            f"{', '.join(MNIST_FILES)} in {os.path.join(datadir, 'MNIST', 'raw')} "
            f"({to_one_line(error, 200)})",
            code=2,
        ) from error


def load(train: bool, datadir: str | None = None, fake: bool = False) -> Images:
    """Returns the training images, or the held-out ones; they are equal in every process."""
    if fake:
        generator = torch.Generator().manual_seed(int(train))
        count = FAKE_IMAGES[train]
        images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)
        return Images(images, torch.randint(0, 10, (count,), generator=generator))
    if datadir:
        from torchvision.datasets import MNIST

        try:
            mnist = MNIST(datadir, train=train)
        except Exception as error:  # torchvision raises many kinds
            raise Stop(
                f"no MNIST in --datadir={datadir}, or a file is damaged: {type(error).__name__} "
                f"{to_one_line(error)}",
                code=2,
            ) from error
        count = len(mnist.targets)
        if not count or mnist.data.shape != (count, 28, 28) or mnist.targets.max() > 9:
            raise Stop(
                f"--datadir={datadir} must have a label from 0 to 9 for each 28 x 28 image", code=2
            )
        return Images(mnist.data, mnist.targets)
    _, images, labels = bundled_digits("train" if train else "val", 28)
    return Images((images.squeeze(1) * 255).round().to(torch.uint8), labels)


def bundled_digits(part: str, edge: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """scikit-learn's digits: indices, images (N, 1, edge, edge) from 0 to 1, and labels."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    found = load_digits()
    train, held_out = train_test_split(
        range(len(found.images)), test_size=HELD_OUT, stratify=found.target, random_state=0
    )
    chosen = train if part == "train" else held_out
    small = torch.tensor(found.images[chosen], dtype=torch.float32).unsqueeze(1) / 16  # 8 x 8
    shown = F.interpolate(small, size=(edge, edge), mode="bilinear")
    return chosen, shown, torch.tensor(found.target[chosen])


def write(folder: str) -> str:
    """Writes scikit-learn's digits into ``folder`` if it is empty; returns ``folder``.

    There are 1,500 training and 297 test images of 32 x 32 pixels.
    """
    from torchvision.utils import save_image

    if _is_filled(folder):
        return folder
    parent = os.path.dirname(os.path.abspath(folder))
    try:
        os.makedirs(parent, exist_ok=True)
        # Write into a temporary folder first, so that other processes only see a complete folder.
        with tempfile.TemporaryDirectory(dir=parent) as draft:
            for part in ("train", "val"):
                for index, image, label in zip(*bundled_digits(part, 32), strict=True):
                    place = os.path.join(draft, "digits", part, str(int(label)))
                    os.makedirs(place, exist_ok=True)
                    save_image(image, os.path.join(place, f"{index:04}.png"))
            try:
                os.rename(os.path.join(draft, "digits"), folder)
            except OSError:
                # Another process may have written it first.
                if not _is_filled(folder):
                    raise
    except OSError as error:
        raise Stop(f"the digits cannot be written to {folder}: {error.strerror}", 2) from error
    return folder


def _is_filled(folder: str) -> bool:
    try:
        return os.path.isdir(folder) and bool(os.listdir(folder))
    except OSError as error:
        raise unreadable(folder, error) from error

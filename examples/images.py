"""Reads images from folders named after their classes, as for ImageNet-1k, in plain torch.

``DIR/train/<class>/<image>`` for training, ``DIR/val/<class>/<image>`` for the test.
"""

import math
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from common.script import Stop, to_one_line
from PIL import Image
from torch.utils.data import Dataset
from torchvision import datasets, transforms
from torchvision.transforms import InterpolationMode, functional

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# The numbers of images of ImageNet-1k.
FAKE_IMAGES = {"train": 1_281_167, "val": 50_000}


class UnreadableImage(Stop):
    """An image cannot be read. From a loader's worker process, the message is a traceback."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message.rpartition("UnreadableImage: ")[2].strip(), code)

    def __str__(self) -> str:
        return self.message


class FakeImages(Dataset):
    """As many random images as ImageNet-1k has, at most ``count``; a few images are repeated."""

    def __init__(self, part: str, image_size: int, classes: int, count: int | None = None) -> None:
        self.count, self.classes = min(count or FAKE_IMAGES[part], FAKE_IMAGES[part]), classes
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(16, 3, image_size, image_size, generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % len(self.images)], index % len(self.images) % self.classes


@dataclass
class RandomCrop:
    """Crops a random part of an image, at least ``min_crop`` of its area, perhaps mirrored.

    It works like torchvision's RandomResizedCrop, but with a generator that the caller passes.
    """

    image_size: int
    min_crop: float = 0.08
    flip: bool = True
    interpolation: str = "bilinear"

    def __call__(self, image: Image.Image, draw: random.Random) -> torch.Tensor:
        place = self.choose(image.width, image.height, draw)
        size, mode = [self.image_size] * 2, InterpolationMode(self.interpolation)
        part = functional.resized_crop(image, *place, size, mode)
        return _to_tensor(functional.hflip(part) if self.flip and draw.random() < 0.5 else part)

    def choose(self, width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
        """Returns top, left, height and width of a random part of an image of this size."""
        for _ in range(10):
            area = width * height * draw.uniform(self.min_crop, 1)
            ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top, left = draw.random() * (height - h + 1), draw.random() * (width - w + 1)
                return int(top), int(left), h, w
        # The image is too narrow: use its middle.
        ratio = min(max(width / height, 3 / 4), 4 / 3)
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        return (height - h) // 2, (width - w) // 2, h, w


def training_images(folder: str) -> datasets.ImageFolder:
    """Training images without a transform, for a :class:`RandomCrop`."""
    return _open(folder, "train", None)


def test_images(
    datadir: str,
    classes: Sequence[str] | None = None,
    *,
    image_size: int,
    border: float = 256 / 224,
    interpolation: str = "bilinear",
) -> datasets.ImageFolder:
    """Test images: the middle, after scaling the shorter edge to ``border`` times the size.

    Raises Stop if the folder's classes differ from ``classes``, those of the training.
    """
    found = find_classes(datadir, ("val",))
    # Labels are indices of the sorted names: one more name would change all labels after it.
    if classes is not None:
        _require_same(
            list(classes),
            found,
            f"{datadir} does not have the {len(classes)} classes that the network was trained on",
        )
    resize = transforms.Resize(round(image_size * border), InterpolationMode(interpolation))
    shown = transforms.Compose([resize, transforms.CenterCrop(image_size), _to_tensor])
    return _open(datadir, "val", shown)


def find_classes(folder: str, parts: tuple[str, ...] = ("train", "val")) -> list[str]:
    """The names of the classes. It only reads the names of folders."""
    found = []
    for part in parts:
        path = os.path.join(folder, part)
        if not os.path.isdir(path):
            raise Stop(
                f"no folder {path}; images are expected in "
                + " and ".join(f"{folder}/{name}/<class>/" for name in parts),
                code=2,
            )
        try:
            found.append(sorted(entry.name for entry in os.scandir(path) if entry.is_dir()))
        except OSError as error:
            raise unreadable(path, error) from error
        if not found[-1]:
            raise Stop(f"{path} is empty; it must have a folder for each class", code=2)
    _require_same(found[0], found[-1], f"{folder}: train and val do not have the same classes")
    return found[0]


def _require_same(some: list[str], others: list[str], otherwise: str) -> None:
    different = sorted(set(some) ^ set(others))
    if different:
        raise Stop(
            f"{otherwise}: {len(different)} classes are in only one of them, such as "
            f"{different[0]!r}",
            code=2,
        )


def unreadable(folder: str, error: OSError) -> Stop:
    return Stop(f"{folder} cannot be read: {error.strerror}; make it readable", code=2)


def _to_tensor(image: Image.Image) -> torch.Tensor:
    return functional.normalize(functional.to_tensor(image), MEAN, STD)


def _open(folder: str, part: str, transform: Callable | None) -> datasets.ImageFolder:
    try:
        return datasets.ImageFolder(os.path.join(folder, part), transform, loader=_read)
    except (OSError, ValueError) as error:
        # The message about a class without images has several lines.
        raise Stop(f"{folder}: {to_one_line(error)}", code=2) from error


def _read(path: str) -> Image.Image:
    try:
        return datasets.folder.pil_loader(path)
    except Exception as error:  # PIL raises many kinds
        raise UnreadableImage(
            f"{path} is not a complete image: {to_one_line(error)}; replace or remove it"
        ) from error

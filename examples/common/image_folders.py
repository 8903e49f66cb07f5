"""Images in folders named after their classes, as ImageNet-1k is kept. Plain torch.

``DIR/train/<class>/<image>`` for training, ``DIR/val/<class>/<image>`` for the test. Without such a
folder, scikit-learn's 1,797 handwritten digits are written out in this form, as PNG files.
"""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import datasets, transforms
from torchvision.transforms import InterpolationMode, functional

from .script import Stop

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
# As many as in ImageNet-1k.
FAKE_IMAGES = {"train": 1_281_167, "val": 50_000}
DIGIT_EDGE = 32


class UnreadableImage(Stop):
    """An image can not be read. A loader's worker process hands on a traceback as the message."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message.rpartition("UnreadableImage: ")[2].strip(), code)

    def __str__(self) -> str:
        return self.message


class FakeImages(Dataset):
    """As many random images as ImageNet-1k has, ``count`` at most; a few that come again."""

    def __init__(self, part: str, image_size: int, classes: int, count: int | None = None) -> None:
        self.count, self.classes = min(count or FAKE_IMAGES[part], FAKE_IMAGES[part]), classes
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(16, 3, image_size, image_size, generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % len(self.images)], index % len(self.images) % self.classes


@dataclass
class RandomPart:
    """Shows a random part of an image, at least ``min_crop`` of its area, perhaps mirrored.

    torchvision's RandomResizedCrop and RandomHorizontalFlip, but for where the numbers come from:
    those draw from the one generator of the process.
    """

    image_size: int
    min_crop: float = 0.08
    flip: bool = True
    interpolation: str = "bilinear"

    def __call__(self, image: Image.Image, draw: random.Random) -> torch.Tensor:
        place = self.choose(image.width, image.height, draw)
        size, mode = [self.image_size] * 2, InterpolationMode(self.interpolation)
        part = functional.resized_crop(image, *place, size, mode)
        if self.flip and draw.random() < 0.5:
            part = functional.hflip(part)
        return _to_tensor(part)

    def choose(self, width: int, height: int, draw: random.Random) -> tuple[int, int, int, int]:
        """Top, left, height and width of a part of an image of this size."""
        for _ in range(10):
            area = width * height * draw.uniform(self.min_crop, 1)
            ratio = math.exp(draw.uniform(math.log(3 / 4), math.log(4 / 3)))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                top, left = draw.random() * (height - h + 1), draw.random() * (width - w + 1)
                return int(top), int(left), h, w
        # The image is a narrow one: its middle.
        ratio = min(max(width / height, 3 / 4), 4 / 3)
        w, h = min(width, round(height * ratio)), min(height, round(width / ratio))
        return (height - h) // 2, (width - w) // 2, h, w


def training_images(folder: str) -> datasets.ImageFolder:
    """Training images as they are, for a :class:`RandomPart`."""
    return _open(folder, "train", None)


def test_images(
    folder: str, image_size: int, *, border: float = 256 / 224, interpolation: str = "bilinear"
) -> datasets.ImageFolder:
    """Test images: the middle, after scaling the shorter edge to ``border`` times the size."""
    mode = InterpolationMode(interpolation)
    edge = round(image_size * border)
    return _open(
        folder,
        "val",
        transforms.Compose(
            [
                transforms.Resize(edge, interpolation=mode),
                transforms.CenterCrop(image_size),
                _to_tensor,
            ]
        ),
    )


def classes(folder: str, parts: tuple[str, ...] = ("train", "val")) -> list[str]:
    """Names of the classes. Reads names of folders only; an evaluation needs ``val`` only.

    Raises:
        Stop: with code 2: no such folder; one of ``parts`` is not in it, can not be read, or is
            without classes; or they do not have the same classes.
    """
    found = {}
    for part in parts:
        path = os.path.join(folder, part)
        if not os.path.isdir(path):
            expected = " and ".join(f"{folder}/{each}/<class>/" for each in parts)
            raise Stop(f"no folder {path}; images are expected in {expected}", code=2)
        try:
            found[part] = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
        except OSError as error:
            raise _unreadable(path, error) from error
        if not found[part]:
            raise Stop(f"{path} is empty: no folder of a class in it", code=2)
    different = sorted(set(found[parts[0]]) ^ set(found[parts[-1]]))
    if different:
        raise Stop(
            f"{folder}: train and val do not have the same classes: {different[0]!r} is in one "
            f"only ({len(different)} such)",
            code=2,
        )
    return found[parts[0]]


def digits(folder: str) -> str:
    """Writes scikit-learn's digits there unless something is there already; returns ``folder``.

    1,500 to train and 297 to test, 32 x 32 pixels.
    """
    from sklearn.datasets import load_digits
    from torchvision.utils import save_image

    from .mnist_data import split_digits

    if _is_filled(folder):
        return folder
    all_digits = load_digits()
    parts = dict(zip(("train", "val"), split_digits(all_digits), strict=True))
    parent = os.path.dirname(os.path.abspath(folder))
    try:
        os.makedirs(parent, exist_ok=True)
        # Whoever finds the folder finds it complete.
        with tempfile.TemporaryDirectory(dir=parent) as draft:
            for part, chosen in parts.items():
                for index in chosen:
                    place = os.path.join(draft, "digits", part, str(all_digits.target[index]))
                    os.makedirs(place, exist_ok=True)
                    image = torch.tensor(all_digits.images[index], dtype=torch.float32) / 16
                    image = torch.nn.functional.interpolate(
                        image[None, None], size=(DIGIT_EDGE, DIGIT_EDGE), mode="bilinear"
                    )
                    save_image(image[0], os.path.join(place, f"{index:04}.png"))
            try:
                os.rename(os.path.join(draft, "digits"), folder)
            except OSError:
                # Another start may have been there first.
                if not _is_filled(folder):
                    raise
    except OSError as error:
        raise Stop(f"the digits can not be written to {folder}: {error.strerror}", 2) from error
    return folder


def _is_filled(folder: str) -> bool:
    try:
        return os.path.isdir(folder) and bool(os.listdir(folder))
    except OSError as error:
        raise _unreadable(folder, error) from error


def _unreadable(folder: str, error: OSError) -> Stop:
    return Stop(f"{folder} can not be read: {error.strerror}; make it readable", code=2)


def _to_tensor(image: Image.Image) -> torch.Tensor:
    return functional.normalize(functional.to_tensor(image), MEAN, STD)


def _open(folder: str, part: str, transform: Callable | None) -> datasets.ImageFolder:
    try:
        return datasets.ImageFolder(os.path.join(folder, part), transform, loader=_read)
    except (OSError, ValueError) as error:
        # A class without images says so in several lines.
        raise Stop(f"{folder}: {' '.join(str(error).split())[:300]}", code=2) from error


def _read(path: str) -> Image.Image:
    try:
        return datasets.folder.pil_loader(path)
    except Exception as error:  # PIL raises many kinds
        reason = " ".join(str(error).split())[:300]
        raise UnreadableImage(
            f"{path} is not a whole image: {reason}; replace or remove it"
        ) from error

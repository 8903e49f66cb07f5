"""Images in folders named after their classes, as ImageNet-1k is kept. Plain torch.

``DIR/train/<class>/<image>`` for training, ``DIR/val/<class>/<image>`` for the test. Without such a
folder, scikit-learn's 1,797 handwritten digits are written out in this form, as PNG files.
"""

from __future__ import annotations

import os
import tempfile

import torch
from PIL import Image
from torch.utils.data import Dataset
from torchvision import datasets, transforms
from torchvision.transforms import InterpolationMode

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
    """As many random images as ImageNet-1k has, or ``count``; a few that come again and again."""

    def __init__(self, part: str, image_size: int, classes: int, count: int | None = None) -> None:
        self.count, self.classes = count or FAKE_IMAGES[part], classes
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(16, 3, image_size, image_size, generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.images[index % len(self.images)], index % len(self.images) % self.classes


def training_images(
    folder: str,
    image_size: int,
    *,
    min_crop: float = 0.08,
    flip: bool = True,
    interpolation: str = "bilinear",
) -> datasets.ImageFolder:
    """Training images, a random part of each (at least ``min_crop`` of its area) and mirrored."""
    mode = InterpolationMode(interpolation)
    steps = [transforms.RandomResizedCrop(image_size, scale=(min_crop, 1), interpolation=mode)]
    if flip:
        steps.append(transforms.RandomHorizontalFlip())
    return _open(folder, "train", steps)


def test_images(
    folder: str, image_size: int, *, border: float = 256 / 224, interpolation: str = "bilinear"
) -> datasets.ImageFolder:
    """Test images: the middle, after scaling the shorter edge to ``border`` times the size."""
    mode = InterpolationMode(interpolation)
    edge = round(image_size * border)
    return _open(
        folder,
        "val",
        [transforms.Resize(edge, interpolation=mode), transforms.CenterCrop(image_size)],
    )


def classes(folder: str, parts: tuple[str, ...] = ("train", "val")) -> list[str]:
    """Names of the classes. Reads names of folders only; an evaluation needs ``val`` only.

    Raises:
        Stop: with code 2: no such folder; one of ``parts`` is not in it, or without classes; or
            they do not have the same classes.
    """
    found = {}
    for part in parts:
        path = os.path.join(folder, part)
        if not os.path.isdir(path):
            expected = " and ".join(f"{folder}/{each}/<class>/" for each in parts)
            raise Stop(f"no folder {path}; images are expected in {expected}", code=2)
        found[part] = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
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
            if not _is_filled(folder):
                os.rename(os.path.join(draft, "digits"), folder)
    except OSError as error:
        raise Stop(f"the digits can not be written to {folder}: {error.strerror}", 2) from error
    return folder


def _is_filled(folder: str) -> bool:
    return os.path.isdir(folder) and bool(os.listdir(folder))


def _open(folder: str, part: str, steps: list) -> datasets.ImageFolder:
    steps = [*steps, transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    try:
        return datasets.ImageFolder(
            os.path.join(folder, part), transforms.Compose(steps), loader=_read
        )
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

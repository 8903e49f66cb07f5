"""Flags of the scripts that train on folders of images, and their batches."""

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import digits
import images
from absl import flags
from common import script
from sampling import test_batches, training_batches
from torch.utils.data import DataLoader

DIGITS = "runs/digits"

flags.DEFINE_string(
    "datadir",
    None,
    f"folder with train/<class>/ and val/<class>/; default: handwritten digits in {DIGITS}",
)
flags.DEFINE_alias("data_dir", "datadir")
flags.DEFINE_bool("fake_data", False, "train on random images, as many as ImageNet has")
flags.DEFINE_integer("num_classes", None, "default: that of the data", lower_bound=1)
flags.DEFINE_integer("image_size", None, "pixels along an edge", lower_bound=1)
script.DEFINE_number("min_crop", None, "smallest part of a training image to crop", "(0, 1]")
flags.DEFINE_integer(
    "num_workers",
    None,
    "processes of each rank that read training images, and the same number for test images; "
    "default: up to 4, depending on the cores; none for digits",
    lower_bound=0,
)
script.require("datadir", bool, "is empty; give a folder")


class Source(NamedTuple):
    """The source of the images. Without ``datadir`` they are random."""

    datadir: str | None
    classes: list[str] | None
    num_classes: int
    digits: bool

    @classmethod
    def find(
        cls, datadir: str | None, fake: bool, num_classes: int | None, plan: str | None
    ) -> "Source":
        """Returns the source that the flags select; call it before the ranks start."""
        if fake and datadir:
            raise script.Stop("--fake_data excludes --datadir", code=2)
        if fake or (plan and not datadir):  # a plan needs no images
            return cls(None, None, num_classes or 1000, digits=False)
        folder = datadir or digits.write(DIGITS)
        try:
            classes = images.find_classes(folder)
        except script.Stop as error:
            remedy = "" if datadir else f"; remove {DIGITS}, which is then created again"
            raise script.Stop(f"{error.message}{remedy}", code=2) from error
        if num_classes is not None and num_classes < len(classes):
            raise script.Stop(
                f"--num_classes={num_classes}, but {folder} has {len(classes)}", code=2
            )
        return cls(folder, classes, num_classes or len(classes), digits=not datadir)

    def describe(self, image_size: int, interpolation: str = "bilinear") -> dict[str, Any]:
        """The arguments with which ``images.test_images`` reads the images of this run."""
        return {
            "kind": "folders",
            "datadir": self.datadir and os.path.abspath(self.datadir),
            "classes": self.classes,
            "image_size": image_size,
            "interpolation": interpolation,
            "border": self.border,
        }

    @property
    def border(self) -> float:
        """The size of a test image before its middle is cropped / its size after that."""
        return 1.0 if self.digits else 256 / 224  # digits fill their images

    def batches(
        self,
        options: SimpleNamespace,
        batch_size: int,
        test_batch_size: int,
        interpolation: str = "bilinear",
    ) -> tuple[DataLoader, DataLoader]:
        """The training and test batches of this rank, which has ``batch_size`` images in a step."""
        import torch_xla.runtime as xr

        rank, world_size, image_size = xr.global_ordinal(), xr.world_size(), options.image_size
        if self.datadir is None:
            transform = None
            train_data = images.FakeImages("train", image_size, self.num_classes)
            most = options.max_steps and options.max_steps * test_batch_size * world_size
            test_data = images.FakeImages("val", image_size, self.num_classes, most)
        else:
            train_data = images.training_images(self.datadir)
            least = options.min_crop or (0.6 if self.digits else 0.08)
            # Do not mirror digits.
            transform = images.RandomCrop(image_size, least, not self.digits, interpolation)
            test_data = images.test_images(
                self.datadir,
                self.classes,
                image_size=image_size,
                border=self.border,
                interpolation=interpolation,
            )
        num_workers = options.num_workers
        if num_workers is None and (self.digits or self.datadir is None):
            num_workers = 0
        workers = reading(num_workers)
        train = training_batches(
            train_data,
            rank,
            world_size,
            batch_size,
            seed=options.seed,
            max_steps=options.max_steps,
            transform=transform,
            **workers,
        )
        return train, test_batches(test_data, rank, world_size, test_batch_size, **workers)


def reading(number: int | None) -> dict[str, Any]:
    """The arguments of a ``DataLoader`` for its worker processes."""
    import torch_xla.runtime as xr

    on_cpu = xr.device_type() == "CPU"
    if number is None:
        cores = len(os.sched_getaffinity(0))
        # CPU ranks share the cores of one machine, and each rank has two loaders.
        number = min(4, cores // (2 * xr.world_size()) if on_cpu else cores)
    if not number:
        return {}
    # CPU ranks are threads, and a process with threads must not fork.
    context = "forkserver" if on_cpu else None
    workers = {"num_workers": number, "persistent_workers": True}
    return {**workers, "multiprocessing_context": context}

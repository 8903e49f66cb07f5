"""Flags of the scripts that train on folders of images, and the batches that come of them."""

import os
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
flags.DEFINE_integer("num_classes", None, "default: as many as there are", lower_bound=1)
flags.DEFINE_integer("image_size", None, "pixels along an edge", lower_bound=1)
script.DEFINE_number("min_crop", None, "least part of a training image that is shown", "(0, 1]")
flags.DEFINE_integer(
    "num_workers",
    None,
    "processes a rank that read images to train on, and as many those of the test; default: 4 if "
    "there are cores for them, none for digits",
    lower_bound=0,
)
script.require("datadir", bool, "is empty; name a folder")


class Source(NamedTuple):
    """Where images come from. Without ``datadir`` they are fake."""

    datadir: str | None
    classes: list[str] | None
    num_classes: int
    digits: bool

    @classmethod
    def find(
        cls, datadir: str | None, fake: bool, num_classes: int | None, plan: str | None
    ) -> "Source":
        """Of what the flags say, before the ranks start."""
        if fake and datadir:
            raise script.Stop("--fake_data excludes --datadir", code=2)
        if fake or (plan and not datadir):  # a plan is of the full size, and needs no image
            return cls(None, None, num_classes or 1000, digits=False)
        folder = datadir or digits.write(DIGITS)
        try:
            classes = images.find_classes(folder)
        except script.Stop as error:
            again = "" if datadir else f"; remove {DIGITS}, which is made again"
            raise script.Stop(f"{error.message}{again}", code=2) from error
        if num_classes is not None and num_classes < len(classes):
            more = f"but {folder} has {len(classes)}"
            raise script.Stop(f"--num_classes={num_classes}, {more}", code=2)
        return cls(folder, classes, num_classes or len(classes), digits=not datadir)

    def describe(self, image_size: int, interpolation: str = "bilinear") -> dict[str, Any]:
        """How ``images.test_images`` reads those of this run."""
        return {
            "kind": "folders",
            "datadir": self.datadir and os.path.abspath(self.datadir),
            "classes": self.classes,
            "image_size": image_size,
            "interpolation": interpolation,
            # Digits fill their image.
            "border": 1.0 if self.digits else 256 / 224,
        }

    def batches(
        self,
        batch_size: int,
        test_batch_size: int,
        interpolation: str = "bilinear",
        *,
        image_size: int,
        min_crop: float | None,
        num_workers: int | None,
        max_steps: int | None,
        seed: int,
    ) -> tuple[DataLoader, DataLoader]:
        """This rank's training and test batches."""
        import torch_xla.runtime as xr

        share, vary = (xr.global_ordinal(), xr.world_size()), None
        if self.datadir is None:
            train_data = images.FakeImages("train", image_size, self.num_classes)
            most = max_steps and max_steps * test_batch_size * share[1]
            test_data = images.FakeImages("val", image_size, self.num_classes, most)
        else:
            train_data = images.training_images(self.datadir)
            least = min_crop or (0.6 if self.digits else 0.08)
            # Mirrored digits are none.
            vary = images.RandomPart(image_size, least, not self.digits, interpolation)
            read = self.describe(image_size, interpolation) | {"datadir": self.datadir}
            test_data = images.test_images(**{k: v for k, v in read.items() if k != "kind"})
        if num_workers is None and (self.digits or self.datadir is None):
            num_workers = 0
        workers = reading(num_workers)
        how = {"seed": seed, "max_steps": max_steps, "vary": vary}
        train = training_batches(train_data, *share, batch_size, **how, **workers)
        return train, test_batches(test_data, *share, test_batch_size, **workers)


def reading(number: int | None) -> dict[str, Any]:
    """How a ``DataLoader`` reads: in which processes."""
    import torch_xla.runtime as xr

    on_cpu = xr.device_type() == "CPU"
    if number is None:
        cores = len(os.sched_getaffinity(0))
        # CPU ranks share the cores of one machine, and each has two loaders.
        number = min(4, cores // (2 * xr.world_size()) if on_cpu else cores)
    if not number:
        return {}
    # CPU ranks are threads, and a process with threads must not fork.
    context = "forkserver" if on_cpu else None
    workers = {"num_workers": number, "persistent_workers": True}
    return {**workers, "multiprocessing_context": context}

"""Flags of the scripts that train on folders of images, and the batches that come of them."""

import os
from types import SimpleNamespace
from typing import Any

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


def prepare(options: SimpleNamespace) -> bool:
    """Settles where images come from, before the ranks start; true if it is the digits."""
    if options.fake_data and options.datadir:
        raise script.Stop("--fake_data excludes --datadir", code=2)
    if options.plan and not options.datadir:
        # A plan is of the full size, and needs no image.
        options.fake_data = True
    small = not (options.datadir or options.fake_data)
    if small:
        options.datadir = digits.write(DIGITS)
    options.classes = None
    if not options.fake_data:
        try:
            options.classes = images.find_classes(options.datadir)
        except script.Stop as error:
            again = f"; remove {DIGITS}, which is made again" if small else ""
            raise script.Stop(f"{error.message}{again}", code=2) from error
        found, wish = len(options.classes), options.num_classes
        if wish is not None and wish < found:
            raise script.Stop(f"--num_classes={wish}, but {options.datadir} has {found}", code=2)
    script.fill_in(options, num_classes=1000 if options.fake_data else len(options.classes))
    if small or options.fake_data:
        script.fill_in(options, num_workers=0)
    script.fill_in(options, min_crop=0.6 if small else 0.08)
    # Mirrored digits are none.
    options.flip = not small
    return small


def describe(options: SimpleNamespace, interpolation: str = "bilinear") -> dict[str, Any]:
    """How ``images.test_images`` reads those of this run; fake ones are in no folder."""
    return {
        "kind": "folders",
        "datadir": None if options.fake_data else os.path.abspath(options.datadir),
        "classes": options.classes,
        "image_size": options.image_size,
        "interpolation": interpolation,
        # Digits fill their image.
        "border": 256 / 224 if options.flip else 1.0,
    }


def batches(
    options: SimpleNamespace, batch_size: int, test_batch_size: int, interpolation: str = "bilinear"
) -> tuple[DataLoader, DataLoader]:
    """This rank's training and test batches."""
    import torch_xla.runtime as xr

    share, size, vary = (xr.global_ordinal(), xr.world_size()), options.image_size, None
    if options.fake_data:
        train_data = images.FakeImages("train", size, options.num_classes)
        most = options.max_steps and options.max_steps * test_batch_size * share[1]
        test_data = images.FakeImages("val", size, options.num_classes, most)
    else:
        train_data = images.training_images(options.datadir)
        vary = images.RandomPart(size, options.min_crop, options.flip, interpolation)
        read = describe(options, interpolation) | {"datadir": options.datadir}
        test_data = images.test_images(**{k: v for k, v in read.items() if k != "kind"})
    how = {"seed": options.seed, "max_steps": options.max_steps, "vary": vary}
    workers = reading(options)
    train = training_batches(train_data, *share, batch_size, **how, **workers)
    return train, test_batches(test_data, *share, test_batch_size, **workers)


def reading(options: SimpleNamespace) -> dict[str, Any]:
    """How a ``DataLoader`` reads: in which processes."""
    import torch_xla.runtime as xr

    on_cpu, number = xr.device_type() == "CPU", options.num_workers
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

"""Flags of the scripts that train on folders of images, and the batches that come of them."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from absl import flags
from torch.utils.data import DataLoader

from . import image_folders, script, sharing, test_images

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
flags.DEFINE_float("min_crop", None, "least part of a training image that is shown")
flags.DEFINE_integer(
    "num_workers",
    None,
    "processes a rank that read images to train on, and as many those of the test; default: 4 if "
    "there are cores for them, none for digits",
    lower_bound=0,
)
script.require("datadir", bool, "is empty; name a folder")
script.require("min_crop", lambda value: 0 < value <= 1, "must be greater than 0 and at most 1")


def prepare(options: SimpleNamespace) -> bool:
    """Settles where images come from, before the ranks start; true if it is the digits.

    Raises:
        Stop: with code 2, as ``image_folders.classes``; or flags that exclude each other.
    """
    if options.fake_data and options.datadir:
        raise script.Stop("--fake_data excludes --datadir", code=2)
    if options.plan and not options.datadir:
        # A plan is of the full size, and needs no image.
        options.fake_data = True
    digits = not (options.datadir or options.fake_data)
    if digits:
        options.datadir = image_folders.digits(DIGITS)
    if options.fake_data:
        script.fill_in(options, num_classes=1000)
    else:
        try:
            options.classes = image_folders.classes(options.datadir)
        except script.Stop as error:
            if not digits:
                raise
            remedy = f"remove {DIGITS}, which is made again"
            raise script.Stop(f"{error.message}; {remedy}", code=2) from error
        found = len(options.classes)
        script.fill_in(options, num_classes=found)
        if options.num_classes < found:
            raise script.Stop(
                f"--num_classes={options.num_classes}, but {options.datadir} has {found}", code=2
            )
    if digits or options.fake_data:
        script.fill_in(options, num_workers=0)
    script.fill_in(options, min_crop=0.6 if digits else 0.08)
    # Mirrored digits are none.
    options.flip = not digits
    return digits


def describe(options: SimpleNamespace, interpolation: str = "bilinear") -> dict[str, Any]:
    """How the test images are read, for ``test_images.of``; fake ones are in no folder."""
    fake = options.fake_data
    return {
        "kind": "folders",
        "datadir": None if fake else os.path.abspath(options.datadir),
        "classes": None if fake else options.classes,
        "image_size": options.image_size,
        "interpolation": interpolation,
        # Digits fill their image.
        "border": 256 / 224 if options.flip else 1.0,
    }


def batches(
    options: SimpleNamespace, batch_size: int, test_batch_size: int, interpolation: str = "bilinear"
) -> tuple[DataLoader, DataLoader, int]:
    """This rank's training and test batches, and how many test images all ranks have together."""
    import torch_xla.runtime as xr

    share = (xr.global_ordinal(), xr.world_size())
    size, vary = options.image_size, None
    if options.fake_data:
        train_data = image_folders.FakeImages("train", size, options.num_classes)
        most = options.max_steps and options.max_steps * test_batch_size * share[1]
        test_data = image_folders.FakeImages("val", size, options.num_classes, most)
    else:
        train_data = image_folders.training_images(options.datadir)
        vary = image_folders.RandomPart(size, options.min_crop, options.flip, interpolation)
        test_data = test_images.of(**describe(options, interpolation))
    workers = _workers(options)
    train = sharing.training_batches(
        train_data,
        *share,
        batch_size,
        seed=options.seed,
        max_steps=options.max_steps,
        vary=vary,
        **workers,
    )
    return (
        train,
        sharing.test_batches(test_data, *share, test_batch_size, **workers),
        len(test_data),
    )


def _workers(options: SimpleNamespace) -> dict[str, Any]:
    import torch_xla.runtime as xr

    on_cpu, number = xr.device_type() == "CPU", options.num_workers
    if number is None:
        cores = len(os.sched_getaffinity(0))
        # CPU ranks share the cores of one machine, and each has two loaders.
        number = min(4, cores // (2 * xr.world_size()) if on_cpu else cores)
    if not number:
        return {}
    return {
        "num_workers": number,
        "persistent_workers": True,
        # CPU ranks are threads, and a process with threads must not fork.
        "multiprocessing_context": "forkserver" if on_cpu else None,
    }

"""The held-out images of a run, as plain values describe them: for evaluation anywhere."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from . import image_folders, mnist_data
from .script import Stop


def are_known(description: dict[str, Any]) -> bool:
    """Whether :func:`of` needs no other folder: a run on fake images in folders had none."""
    return description["kind"] == "mnist" or description["datadir"] is not None


def of_network(images: Any, datadir: str | None) -> Dataset:
    """What a ``network.json`` says under ``images``, read from ``datadir`` if that is given.

    Raises:
        Stop: with code 2, as :func:`of`; or it says something else.
    """
    if not isinstance(images, dict):
        raise Stop(f"network.json does not say how images are read: it has {images!r:.60}", 2)
    if datadir is not None:
        images = images | {"datadir": datadir} | ({"fake": False} if "fake" in images else {})
    try:
        if not are_known(images):
            raise Stop("the network was trained on fake images: --datadir=DIR names real ones", 2)
        return of(**images)
    except (TypeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise Stop(f"network.json does not say how images are read: {reason}", code=2) from error


def of(
    kind: str, datadir: str | None, classes: Sequence[str] | None = None, **arguments: Any
) -> Dataset:
    """``kind`` is ``mnist`` (with ``fake``) or ``folders`` (``image_size``, ...).

    Args:
        classes: names of the folders that the network was trained on; ``None``: not known.

    Raises:
        Stop: with code 2: what is in ``datadir`` can not be read, or has other classes.
    """
    if kind == "mnist":
        return mnist_data.load(False, datadir, **arguments)
    if kind != "folders":
        raise Stop(f"unknown kind of images {kind!r}; mnist and folders are known", code=2)
    found = image_folders.classes(datadir, parts=("val",))
    # Labels are places in the sorted names: with one name more, all after it would be wrong.
    if classes is not None and found != list(classes):
        different = sorted(set(found) ^ set(classes))
        raise Stop(
            f"{datadir} does not have the {len(classes)} classes that the network was trained on: "
            f"{different[0]!r} is in one only ({len(different)} such)",
            code=2,
        )
    return image_folders.test_images(datadir, **arguments)

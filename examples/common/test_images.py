"""The held-out images of a run, as plain values describe them: for evaluation anywhere."""

from typing import Any

from torch.utils.data import Dataset

from . import image_folders, mnist_data


def of(kind: str, datadir: str | None, **arguments: Any) -> Dataset:
    """``kind`` is ``mnist`` (with ``fake``) or ``folders`` (``image_size``, ...)."""
    if kind == "mnist":
        return mnist_data.load(False, datadir, **arguments)
    image_folders.classes(datadir)
    return image_folders.test_images(datadir, **arguments)

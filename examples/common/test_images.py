"""The held-out images of a run, as plain values describe them: for evaluation anywhere."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from . import image_folders, mnist_data
from .script import Stop


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
    found = image_folders.classes(datadir)
    # Labels are places in the sorted names: with one name more, all after it would be wrong.
    if classes is not None and found != list(classes):
        different = sorted(set(found) ^ set(classes))
        raise Stop(
            f"{datadir} does not have the {len(classes)} classes that the network was trained on: "
            f"{different[0]!r} is in one only ({len(different)} such)",
            code=2,
        )
    return image_folders.test_images(datadir, **arguments)

"""Inputs of a forward that are on another device than its parameters."""

from __future__ import annotations

from typing import Any

import torch

from ..tree import tensors_in


class InputDeviceError(RuntimeError):
    """The forward of a wrapped module failed, and was given tensors that are on another device than
    its parameters. ``__cause__`` is the error that it failed with."""


def raise_if_elsewhere(module: str, inputs: Any, device: torch.device, error: RuntimeError) -> None:
    """Raises InputDeviceError from ``error`` if ``inputs`` were not all on ``device``.

    ``error`` is what the forward of a ``module`` (the name of its class) ended with. It may move
    its inputs itself and fail for another reason, so its message comes first.
    """
    elsewhere = [tensor for tensor in tensors_in(inputs) if tensor.device != device]
    # Subclasses, of this package or of torch such as torch.OutOfMemoryError, name another reason.
    if elsewhere and type(error) in (RuntimeError, NotImplementedError):
        raise InputDeviceError(
            f"{error}\nThe forward of {module} that failed with this was given a tensor of shape "
            f"{tuple(elsewhere[0].shape)} on {elsewhere[0].device}, while its parameters are on "
            f"{device}. If it does not move its inputs itself, move inputs there with "
            f".to({str(device)!r})"
        ) from error

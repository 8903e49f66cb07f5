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
    its inputs itself, so they are no error as long as it computes.
    """
    elsewhere = [tensor for tensor in tensors_in(inputs) if tensor.device != device]
    # Exceptions of other classes are ours, and say themselves what to do.
    if elsewhere and type(error) in (RuntimeError, NotImplementedError):
        raise InputDeviceError(
            f"the forward of {module} failed, and was given a tensor of shape "
            f"{tuple(elsewhere[0].shape)} on {elsewhere[0].device}, while its parameters are on "
            f"{device}: move inputs there with .to({str(device)!r}). If it moves them itself, the "
            f"reason is another: {error}"
        ) from error

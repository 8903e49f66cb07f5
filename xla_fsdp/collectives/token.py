"""torch_xla's token, through which each collective of a device waits for the one before."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch_xla


@contextlib.contextmanager
def set_aside(device: str) -> Iterator[None]:
    """Collectives traced within wait for none from before, and none afterwards for them."""
    token = torch_xla._XLAC._get_all_reduce_token(device)
    torch_xla._XLAC._set_all_reduce_token(device, None)
    try:
        yield
    finally:
        torch_xla._XLAC._set_all_reduce_token(device, token)

"""What collectives depend on besides their operands."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from .. import xlac
from ..ranks.rank import current_rank
from .host_data import as_data


@contextlib.contextmanager
def set_aside(device: torch.device) -> Iterator[None]:
    """Collectives traced within wait for none from before, and none afterwards for them."""
    rank = current_rank()
    order = None if rank is None else rank.order
    token = xlac.collective_token(str(device))
    xlac.set_collective_token(str(device), None)
    try:
        if order is None:
            yield
        else:
            with order.apart(lambda: as_data(torch.tensor(False), device)):
                yield
    finally:
        xlac.set_collective_token(str(device), token)

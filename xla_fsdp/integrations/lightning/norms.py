"""``lightning.pytorch.utilities.grad_norm`` of gradients that ranks have in shards."""

from __future__ import annotations

import torch
from torch import nn


def norms_of_whole(
    module: nn.Module, norm_type: float | str, group_separator: str = "/"
) -> dict[str, torch.Tensor]:
    """The norm of each whole gradient and of all together, by the names that Lightning has for
    them; every rank calls it.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    order = float(norm_type)
    # Clipping at infinity changes nothing, and knows how parameters are shared.
    norms = {
        f"grad_{order}_norm{group_separator}{name}": (
            torch.nn.utils.clip_grad_norm_([parameter], float("inf"), order)
        )
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if norms:
        norms[f"grad_{order}_norm_total"] = torch.stack(list(norms.values())).norm(order)
    return norms

"""``lightning.pytorch.utilities.grad_norm`` of gradients that ranks have in shards."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from ...sharding.around import is_sharded

_plain = FunctionType(
    grad_norm.__code__, grad_norm.__globals__, "grad_norm", grad_norm.__defaults__
)


def norms(module: nn.Module, norm_type: float | str, group_separator: str = "/") -> dict[str, Any]:
    """The norm of each whole gradient and of all together, by the names that Lightning has for
    them; of a sharded module every rank calls it.

    Raises:
        ValueError: ``norm_type`` is not positive.
    """
    if not is_sharded(module):
        return _plain(module, norm_type, group_separator)
    order = float(norm_type)
    # Clipping at infinity changes nothing, and knows how parameters are shared.
    found = {
        f"grad_{order}_norm{group_separator}{name}": (
            torch.nn.utils.clip_grad_norm_([parameter], float("inf"), order)
        )
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    if found:
        found[f"grad_{order}_norm_total"] = torch.stack(list(found.values())).norm(order)
    return found


def enter(module: Any, norm_type: Any, group_separator: str = "/") -> Any:
    """Its code becomes that of ``grad_norm``, which scripts have imported before they import us."""
    from xla_fsdp.integrations.lightning.norms import norms

    return norms(module, norm_type, group_separator)

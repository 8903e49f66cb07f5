"""What is wrong with the parameters of a module that is to be wrapped."""

from __future__ import annotations

import warnings

import torch_xla.runtime as xr
from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..names import dotted
from ..tree import has_own_operators
from .attributes import ModuleParameters
from .ignored import is_ignored, note_of
from .released import ReleasedParameter
from .sharded_tensor import home_of


def require_parameters_here(path: str, module: nn.Module) -> None:
    """Raises ValueError, TypeError or RuntimeError if parameters of ``module``, called ``path``,
    cannot be sharded, or would compute otherwise then."""
    name = path or type(module).__name__
    looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and not is_ignored(module)
    if looks_up and module.max_norm is not None:
        raise ValueError(
            f"{type(module).__name__} {name!r} has max_norm={module.max_norm}, with which a "
            "forward changes the rows that it looks up, on each rank others: set max_norm to None, "
            "and compute with shortened rows instead (e = embedding(i); e * (max_norm / "
            "e.norm(dim=-1, keepdim=True)).clamp(max=1))"
        )
    if looks_up and module.scale_grad_by_freq and xr.world_size() > 1:
        raise ValueError(
            f"{type(module).__name__} {name!r} has scale_grad_by_freq=True, with which a row's "
            "gradient is divided by how often it is looked up, here by this rank's part of the "
            "batch alone: set it to False, or keep the module whole with ignored_modules"
        )
    if isinstance(module._parameters, ModuleParameters) and module._parameters.flattened:
        raise RuntimeError(
            f"the parameters of module {name!r} are flattened into another wrapper's, which is not "
            "part of the module to wrap: put that wrapper in its place (wrapper, not "
            "wrapper.module), or wrap it without flatten_parameters"
        )
    for key, parameter in module._parameters.items():
        if isinstance(parameter, ReleasedParameter) and home_of(parameter) is None:
            raise RuntimeError(
                f"parameter {dotted(path, key)!r} of {type(module).__name__} is tied to one of "
                "scanned blocks, which share none: untie it, or wrap the blocks singly. "
                "Or it is tied to one that another wrapper has, and was moved since "
                "(model.to(device)): move the model before wrapping the first of its modules"
            )
        if parameter is not None and home_of(parameter) is None and note_of(parameter) is None:
            _require_plain(dotted(path, key), parameter)
        if isinstance(parameter, UninitializedParameter):
            raise RuntimeError(
                f"parameter {dotted(path, key)!r} of {type(module).__name__} is lazy and has no "
                "shape yet: run the module once on an input before wrapping it, or give it its "
                "sizes"
            )


def _require_plain(name: str, parameter: nn.Parameter) -> None:
    """Raises TypeError or RuntimeError if something hangs on ``parameter`` that a shard cannot
    have, and warns of a gradient."""
    kind = type(parameter)
    if has_own_operators(kind) or (
        kind.__torch_function__ is not nn.Parameter.__torch_function__
        and not isinstance(parameter, (ReleasedParameter, UninitializedParameter))
    ):
        raise TypeError(
            f"parameter {name!r} is a {kind.__name__}, which has operators of its own; gathered it "
            "would be a plain tensor without them. Use an nn.Parameter, or leave it whole with "
            "ignored_parameters"
        )
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        raise RuntimeError(
            f"parameter {name!r} has a hook from before the wrapping, which nobody would call: "
            f"register it after wrapping, on model.get_parameter({name!r}); there it is given "
            "this rank's shard of the mean gradient"
        )
    if parameter.grad is not None:
        warnings.warn(
            f"parameter {name!r} has a gradient from before the wrapping, which is dropped: wrap "
            "first, or call zero_grad() before wrapping",
            stacklevel=2,
        )

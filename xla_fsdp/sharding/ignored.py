"""Ignored modules and parameters, which are replicated on every rank.

As in torch FSDP1, they are not gathered, cast, initialized or reduced. Unlike there, they move to
the shards' device, and ``average_ignored_gradients`` averages their gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch_xla.runtime as xr
from torch import nn

from ..names import dotted, is_wrapper
from .shard_reductions import OF_REPLICATED, reduce_replicated
from .sharded_tensor import sharded_tensor_of

# On a module: its id, which differs for a copy. On a parameter: its IgnoredMark.
_MARK = "_xla_fsdp_ignored"


class IgnoredGradient(torch.Tensor):
    """The gradient of an ignored parameter, computed from this rank's batch.

    Its norm is that of the mean of all ranks' powers, and its maximum that of all ranks, so that
    all ranks clip alike.
    """

    answers_first = True  # see ranks/cpu/mode.py
    replicated = True

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind is not cls and kind is not IgnoredParameter for kind in types):
            return NotImplemented  # sharded tensors handle lists that contain both
        with torch._C.DisableTorchFunctionSubclass():
            if func in OF_REPLICATED and args and isinstance(args[0], cls):
                return reduce_replicated(func, args, kwargs or {})
            found = func(*args, **(kwargs or {}))
            if getattr(func, "__name__", "") in _SAME_ELEMENTS and type(found) is torch.Tensor:
                # torch_xla's clipping detaches gradients. A copy on the host is plain.
                found.__class__ = cls if found.device.type == "xla" else torch.Tensor
            return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self.as_subclass(torch.Tensor).detach().clone())


_SAME_ELEMENTS = frozenset("abs detach clone contiguous to float double half bfloat16 type".split())


class IgnoredParameter(nn.Parameter):
    """A parameter that is replicated on every rank."""

    @property
    def grad(self) -> torch.Tensor | None:
        found = _GRAD.__get__(self)
        if type(found) is torch.Tensor and xr.world_size() > 1:
            found.__class__ = IgnoredGradient
        return found

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__set__(self, None)


_GRAD: Any = torch.Tensor.grad


class IgnoredMark:
    """``averaged``: whether the gradient of the parameter was ever averaged."""

    def __init__(self) -> None:
        self.name = ""
        self.averaged = False


def mark_ignored(
    module: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_parameters: Iterable[nn.Parameter] | None,
) -> None:
    """Marks ``ignored_modules`` and ``ignored_parameters``.

    Raises:
        ValueError: one is not in ``module``, is ``module`` or a wrapper, is sharded already, or has
            no values.
    """
    modules, parameters = tuple(ignored_modules or ()), list(ignored_parameters or ())
    _require_inside(module, modules, parameters)
    inside = [found for root in modules for found in _outside_wrappers(root)]
    for path, one in inside:
        for name, tensor in own_tensors(one):
            where = f"{dotted(path, name)!r} of an ignored {type(one).__name__}"
            if sharded_tensor_of(tensor) is not None:
                raise ValueError(
                    f"{where} is already sharded by another wrapper. Pass ignored_modules or "
                    "ignored_parameters to that wrapper too"
                )
            if tensor.is_meta:
                raise ValueError(
                    f"{where} is on the meta device, but ignored modules are not initialized. Give "
                    "it values before wrapping (to_empty(device='cpu'), then reset_parameters() or "
                    "a load)"
                )
            if isinstance(tensor, nn.Parameter):
                parameters.append(tensor)
    for _, one in inside:
        one.__dict__[_MARK] = id(one)
    mark_parameters(parameters)


def own_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of ``module`` itself, not of its children."""
    named = [*module._parameters.items(), *module._buffers.items()]
    return [(name, tensor) for name, tensor in named if tensor is not None]


def is_ignored(module: nn.Module) -> bool:
    return vars(module).get(_MARK) == id(module)


def ignored_mark_of(parameter: object) -> IgnoredMark | None:
    return getattr(parameter, _MARK, None)


def mark_parameters(parameters: Iterable[nn.Parameter]) -> None:
    """Marks ``parameters``, which may be copies of ignored parameters."""
    for parameter in parameters:
        if ignored_mark_of(parameter) is None:
            setattr(parameter, _MARK, IgnoredMark())
            if type(parameter) is nn.Parameter:
                parameter.__class__ = IgnoredParameter


def move_ignored(path: str, module: nn.Module, device: torch.device) -> list[nn.Parameter]:
    """Moves the ignored parameters that ``module`` itself has to ``device``; the objects stay.

    Raises RuntimeError if something else refers to one.
    """
    found = []
    for name, parameter in module._parameters.items():
        note = ignored_mark_of(parameter)
        if parameter is None or note is None:
            continue
        note.name = note.name or dotted(path, name)
        found.append(parameter)
        if parameter.device == device:
            continue
        with torch.no_grad():
            moved = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
            moved.__dict__.update(vars(parameter))
            moved.__class__ = type(parameter)
        try:
            torch.utils.swap_tensors(parameter, moved)
        except RuntimeError as error:
            raise RuntimeError(
                f"the ignored parameter {note.name!r} cannot be moved to {device}. Move it there "
                f"with .to({str(device)!r}) before wrapping ({error})"
            ) from error
    return found


def as_list(name: str, given: Any, kinds: tuple[type, ...]) -> list[Any]:
    """The values of the option ``name``; raises TypeError unless all are of ``kinds``."""
    if given is None:
        return []
    wanted = " or ".join(f"torch.nn.{one.__name__}" for one in kinds)
    # A tensor is iterable, but not accepted as a list.
    if isinstance(given, (str, bytes, torch.Tensor)) or not isinstance(given, Iterable):
        raise TypeError(f"{name} must be an iterable of {wanted}, got {_shown(given)}. Pass a list")
    values = list(given)
    for value in values:
        if not isinstance(value, kinds):
            raise TypeError(f"{name} must contain {wanted}, got {_shown(value)}. Leave that out")
    return values


def _shown(value: Any) -> str:
    # Do not show values of a parameter (they may be on the device), nor long module reprs.
    long = isinstance(value, (torch.Tensor, nn.Module))
    return type(value).__name__ if long else repr(value)


def _require_inside(
    module: nn.Module, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter]
) -> None:
    inside = set(module.modules())
    for one in modules:
        if one is module:
            raise ValueError(
                "ignored_modules contains the module to wrap itself, so nothing would be sharded. "
                "Do not wrap it, or ignore modules inside it"
            )
        if is_wrapper(one):
            raise ValueError(
                f"ignored_modules contains a wrapped {type(one).__name__}, which is already "
                "sharded. Leave it out (inner wrappers are never changed), or do not wrap it"
            )
        if one not in inside:
            raise ValueError(
                f"ignored_modules contains a {type(one).__name__} that is not inside the module to "
                f"wrap ({type(module).__name__}). Only its submodules can be ignored"
            )
    held = {id(parameter) for parameter in module.parameters()}
    for number, parameter in enumerate(parameters):
        if sharded_tensor_of(parameter) is not None:
            raise ValueError(
                f"parameter {number} of ignored_parameters is already sharded by an inner wrapper. "
                "Pass ignored_parameters to that wrapper too"
            )
        if id(parameter) not in held:
            raise ValueError(
                f"parameter {number} of ignored_parameters, of shape {tuple(parameter.shape)}, is "
                f"not in the module to wrap ({type(module).__name__}). Only its parameters can be "
                "ignored"
            )


def _outside_wrappers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    if not is_wrapper(module):
        yield path, module
        for name, child in module.named_children():
            yield from _outside_wrappers(child, dotted(path, name))

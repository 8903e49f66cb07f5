"""Host tensors of a simulated rank: large ones are not written, so that they take up no memory.

A model that a step builds on the CPU has parameters whose pages nobody writes. They stay so while
they are initialized, converted, copied and moved to the XLA device.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ...collectives.host_data import LARGE, fake_cpu_tensor, share


class HostTensors:
    """Knows which memory of the host belongs to parameters, and which of it has no values."""

    def __init__(self) -> None:
        # A weak reference also prevents that another storage gets the same address.
        self._of_parameters: set[StorageWeakRef] = set()
        self._unwritten: set[StorageWeakRef] = set()

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """``func(*args, **kwargs)``, but large tensors are not written where no value is needed."""
        # Functions of nn.init pass it by this name.
        tensor: Any = args[0] if args else kwargs.get("tensor")
        made = None
        if func in _FILLS:
            if self._is_parameter(tensor):
                if _is_plain(tensor):
                    self._unwritten.add(_storage(tensor))
                return tensor
        elif func in _DRAWS:
            if kwargs.get("out") is None and _is_large_draw(args, kwargs):
                return torch.zeros(*args, **_without_generator(kwargs))
        elif func in _ALIASES:
            if _is_plain(tensor) and isinstance(tensor, nn.Parameter):
                self._of_parameters.add(_storage(tensor))
        elif func in _COPIES and _may_be_replaced(tensor):
            made = self._copied(tensor, *_COPIES[func])
        elif func is torch.Tensor.to and _may_be_replaced(tensor):
            made = self._moved(tensor, args[1:], kwargs)
        return func(*args, **kwargs) if made is None else made

    def _is_parameter(self, tensor: Any) -> bool:
        """Whether ``tensor`` is a large parameter on the host, or shares memory with one."""
        if isinstance(tensor, nn.Parameter):
            return tensor.device.type == "cpu" and tensor.numel() >= LARGE
        return _is_plain(tensor) and _storage(tensor) in self._of_parameters

    def _moved(self, tensor: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor | None:
        """``tensor.to(...)``; ``None`` if torch is to do it."""
        try:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        except (TypeError, RuntimeError):  # copy=True, or wrong arguments
            return None
        if device is None or device.type == "cpu":
            return self._copied(tensor, dtype) if dtype not in (None, tensor.dtype) else None
        if device.type != "xla":
            return None
        if dtype not in (None, tensor.dtype):
            converted = self._copied(tensor, dtype)
            tensor = tensor.to(dtype) if converted is None else converted
        return share(tensor, torch.device("xla", device.index or 0))

    def _copied(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """A copy of a tensor without values; ``None`` if ``tensor`` may have some."""
        if dtype is tensor.dtype or _storage(tensor) not in self._unwritten:
            return None
        made = fake_cpu_tensor(tensor.shape, dtype or tensor.dtype)
        self._of_parameters.add(_storage(made))
        self._unwritten.add(_storage(made))
        return made


def _is_plain(tensor: Any) -> bool:
    """Whether ``tensor`` is large, on the host, and of no subclass."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.numel() >= LARGE
    )


def _may_be_replaced(tensor: Any) -> bool:
    """Whether a large tensor on the host may be copied without autograd."""
    return _is_plain(tensor) and not (tensor.requires_grad and torch.is_grad_enabled())


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


def _without_generator(kwargs: dict) -> dict:
    return {key: value for key, value in kwargs.items() if key != "generator"}


def _is_large_draw(args: tuple, kwargs: dict) -> bool:
    kwargs = {**_without_generator(kwargs), "device": "meta"}
    return torch.empty(*args, **kwargs).numel() >= LARGE


_FILLS = frozenset(
    getattr(torch.Tensor, f"{name}_")
    for name in "uniform normal zero fill mul add sub div erfinv clamp copy".split()
) | frozenset(
    value
    for name, value in vars(nn.init).items()
    if name.endswith("_") and isinstance(value, types.FunctionType)
)
_DRAWS = frozenset({torch.randn, torch.rand})
_ALIASES = frozenset({torch.Tensor.data.__get__, torch.Tensor.detach})  # type: ignore[attr-defined]
# To the dtype of the result, where it has another.
_COPIES: dict[Any, tuple[torch.dtype, ...]] = {
    torch.Tensor.clone: (),
    torch.Tensor.half: (torch.float16,),
    torch.Tensor.bfloat16: (torch.bfloat16,),
    torch.Tensor.float: (torch.float32,),
    torch.Tensor.double: (torch.float64,),
}

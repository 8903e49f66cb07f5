"""``.grad`` of shards while ``no_sync`` stores their gradients without reducing them."""

from __future__ import annotations

from typing import Any

import torch

from ..tree import tensors_in
from .layout import ShardSpec
from .shard_reductions import TENSOR_METADATA


def unreduced_error(what: str, name: str) -> RuntimeError:
    return RuntimeError(
        f"{what} was called while gradients of {name!r} are stored by no_sync and not reduced yet, "
        "so they would be ignored. Run the last backward before it outside of no_sync(), or drop "
        "them with model.zero_grad()"
    )


class UnreducedGradient(torch.Tensor):
    """A gradient that is stored and not reduced: it has metadata, but no values.

    ``zero_`` drops the stored gradient, as an assignment to ``.grad`` does. On the meta device, so
    that code that bypasses its torch function raises.
    """

    answers_first = True  # see ranks/cpu/mode.py

    _parameter: torch.Tensor
    _spec: ShardSpec

    @classmethod
    def of(cls, parameter: torch.Tensor, spec: ShardSpec) -> UnreducedGradient:
        empty = torch.empty(spec.shape, dtype=parameter.dtype, device="meta")
        made = torch.Tensor._make_subclass(cls, empty)
        made._parameter, made._spec = parameter, spec
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, mine = getattr(func, "__name__", str(func)), tensors_in((args, kwargs), cls)
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("zero_", "_foreach_zero_"):
                for one in mine:
                    drop_unreduced(one._spec)
                others = [one for one in tensors_in(args) if not isinstance(one, cls)]
                if others:
                    torch._foreach_zero_(others)
                return args[0]
            if name in ("detach", "detach_", "requires_grad_"):
                return args[0]
            if func in _OF_THE_PARAMETER:
                return func(args[0]._parameter)
            if func in TENSOR_METADATA:
                return func(*args, **(kwargs or {}))
        if name in ("__get__", "__set__"):
            name = f".{func.__self__.__name__}"
        raise unreduced_error(name, mine[0]._spec.name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnreducedGradient({self._spec.name!r}, shape={tuple(self._spec.shape)})"


_OF_THE_PARAMETER = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("device", "is_xla", "is_cpu", "is_meta")
)


def has_unreduced(spec: ShardSpec) -> bool:
    tensor = spec.tensor
    return tensor is not None and bool(tensor.unreduced)


def drop_unreduced(spec: ShardSpec) -> None:
    tensor = spec.tensor
    if tensor is not None:
        tensor.drop_unreduced()

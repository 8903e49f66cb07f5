"""The full (unsharded) parameter that a module has in a forward and its backward.

It is computed from the shards, so for autograd it is not a leaf. To code that uses it, it behaves
like the ``nn.Parameter`` that the module was built with: same class, ``requires_grad``, attributes
and hooks. Requests that only the shard can answer, or that can be answered only later, raise.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .sharded_parameter import is_user_attribute
from .sharded_tensor import ShardedTensor


class Origin(NamedTuple):
    """The source of a full parameter: member ``member`` of ``tensor``.

    Attributes:
        name: returns its dotted name.
        alone: whether the tensor contains nothing else. A flat vector and a stack of scanned blocks
            contain several parameters.
        source: returns the pass that gathered it, as long as that exists; its number there is
            ``number``.
    """

    tensor: ShardedTensor
    member: int
    name: Callable[[], str]
    alone: bool
    source: Callable[[], Any] = lambda: None
    number: int = 0


class UnshardedParameter(torch.Tensor):
    """A full parameter, made by :func:`make_unsharded`."""

    _xla_fsdp_origin: Origin
    _is_param = True  # isinstance(it, nn.Parameter)
    # Results of operations are plain tensors, as for a Parameter.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # -- user attributes: stored where the sharded parameter stores them -------------------------

    def __getattr__(self, name: str) -> Any:
        if is_user_attribute(name):
            attributes = self._xla_fsdp_origin.tensor.attributes_of(self._xla_fsdp_origin.member)
            if name in attributes:
                return attributes[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(getattr(type(self), name, None), "__set__"):  # of every tensor
            super().__setattr__(name, value)
        else:
            origin = self._xla_fsdp_origin
            origin.tensor.attributes_of(origin.member)[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        origin = self._xla_fsdp_origin
        del origin.tensor.attributes_of(origin.member)[name]

    # -- autograd ---------------------------------------------------------------------------------

    @property
    def requires_grad(self) -> bool:
        """That of the sharded parameter, even if gradients are disabled."""
        return self._xla_fsdp_origin.tensor.shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> UnshardedParameter:
        """Accepts only the current value, which changes nothing.

        Raises:
            RuntimeError: the call would change ``requires_grad``.
        """
        if requires_grad is not self.requires_grad:
            raise RuntimeError(
                f"requires_grad={requires_grad} was set on parameter "
                f"{self._xla_fsdp_origin.name()!r} in a forward or backward, where it would be "
                "lost. Freeze or unfreeze parameters between steps, "
                "model.get_parameter(name).requires_grad_(...)"
            )
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True, as for a parameter."""
        return True

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        """None, as for a parameter, although the graph leads to the shard."""
        return None

    @property
    def grad(self) -> None:
        """None while there is no gradient.

        Raises:
            RuntimeError: the shard has a gradient, or a backward may be computing one.
        """
        tensor = self._xla_fsdp_origin.tensor
        computing = torch._C._current_graph_task_id() != -1 and self.requires_grad
        if computing or tensor.shard.grad is not None or tensor.unreduced:
            self._raise_for_gradient()
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None or self.grad is not None:
            self._raise_for_gradient()

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def _raise_for_gradient(self) -> NoReturn:
        raise RuntimeError(
            f"the gradient of parameter {self._xla_fsdp_origin.name()!r} is not available in a "
            "forward or backward: it is complete only when it is reduced over the ranks. "
            "Read or change .grad of model.parameters() after backward(), or register a hook "
            "outside of the forward, model.get_parameter(name).register_hook(...)"
        )

    def retain_grad(self) -> None:
        """Changes nothing, as for every leaf."""

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """On the sharded parameter: called with the reduced gradient, in every backward."""
        return self._hooked("register_hook").register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """On the sharded parameter: called once its gradient is reduced, in every backward."""
        name = "register_post_accumulate_grad_hook"
        return self._hooked(name).register_post_accumulate_grad_hook(hook)

    def _hooked(self, method: str) -> nn.Parameter:
        origin = self._xla_fsdp_origin
        if not origin.alone:
            raise RuntimeError(
                f"{method} of parameter {origin.name()!r} is not supported, because it is stored "
                "in one tensor with others (flatten_parameters, scan_blocks) and has no separate "
                "gradient. Register the hook on a parameter of model.named_parameters(), or wrap "
                "without flatten_parameters, each block separately"
            )
        return origin.tensor.shard

    # -- copies: plain parameters that are not sharded --------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copied = nn.Parameter(self.detach().clone(), self.requires_grad)
            origin = self._xla_fsdp_origin
            attributes = origin.tensor.attributes_of(origin.member)
            own = {name: value for name, value in attributes.items() if is_user_attribute(name)}
            copied.__dict__.update(copy.deepcopy(own, memo))
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)


def make_unsharded(full: torch.Tensor, origin: Origin) -> None:
    """Makes ``full``, the value of a parameter, behave like that parameter."""
    full.__class__ = UnshardedParameter
    full.__dict__["_xla_fsdp_origin"] = origin


def _raise_if_registered(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
    """Raises RuntimeError if a forward assigns a full parameter to another name or module."""
    if isinstance(parameter, UnshardedParameter) and parameter is not module._parameters.get(name):
        raise RuntimeError(
            f"a forward assigned its parameter {parameter._xla_fsdp_origin.name()!r} to the "
            f"attribute {name!r} of a {type(module).__name__}, where it would be empty after the "
            "forward. Use a local variable, or share the parameter before wrapping"
        )


register_module_parameter_registration_hook(_raise_if_registered)

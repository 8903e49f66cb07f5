"""What a module holds in a forward and its backward: a full (unsharded) parameter.

It is computed from the shards, so to autograd it is no leaf. To the code that computes with it, it
is the ``nn.Parameter`` that the module was built with: its class, ``requires_grad``, attributes and
hooks. What can only be known of the shard, or later, raises.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from .sharded_parameter import is_users
from .sharded_tensor import ShardedTensor


class Origin(NamedTuple):
    """What a full parameter is made of: member ``member`` of ``tensor``.

    Attributes:
        name: returns its dotted name.
        alone: whether the tensor stores nothing else. A flat vector and a stack of scanned blocks
            store several parameters.
        source: returns the pass that gathered it, until that is gone; its number there is
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
    # Results are plain tensors, as those of a Parameter.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    # -- attributes of the user: kept where the sharded parameter keeps them ---------------------

    def __getattr__(self, name: str) -> Any:
        if is_users(name):
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
        """That of the sharded parameter, also where gradients are off."""
        return self._xla_fsdp_origin.tensor.shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> UnshardedParameter:
        """Changes nothing.

        Raises:
            RuntimeError: it would.
        """
        if requires_grad is not self.requires_grad:
            raise RuntimeError(
                f"requires_grad={requires_grad} of parameter {self._xla_fsdp_origin.name()!r} in a "
                "forward or backward would be lost: freeze or unfreeze parameters between steps, "
                "model.get_parameter(name).requires_grad_(...)"
            )
        return self

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """True, as of the parameter."""
        return True

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        """None, as of the parameter. The graph goes on to the shard all the same."""
        return None

    @property
    def grad(self) -> None:
        """None while there is no gradient.

        Raises:
            RuntimeError: there is one of the shard, or a backward may be computing one.
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
            "forward or backward: it is complete when the backward has reduced it over the ranks. "
            "Read or change .grad of model.parameters() after backward(), or register a hook "
            "outside of the forward, model.get_parameter(name).register_hook(...)"
        )

    def retain_grad(self) -> None:
        """Changes nothing, as of every leaf."""

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
                f"{method} of parameter {origin.name()!r}, which is stored in one tensor with "
                "others (flatten_parameters, scan_blocks): its gradient alone does not exist. "
                "Register the hook on what model.named_parameters() returns, or wrap without "
                "flatten_parameters, the blocks one by one"
            )
        return origin.tensor.shard

    # -- copies: parameters that nothing shards ---------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copied = nn.Parameter(self.detach().clone(), self.requires_grad)
            origin = self._xla_fsdp_origin
            attributes = origin.tensor.attributes_of(origin.member)
            own = {name: value for name, value in attributes.items() if is_users(name)}
            copied.__dict__.update(copy.deepcopy(own, memo))
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)


def make_unsharded(full: torch.Tensor, origin: Origin) -> None:
    """Has ``full`` answer as the parameter that it is the value of."""
    full.__class__ = UnshardedParameter
    full.__dict__["_xla_fsdp_origin"] = origin


def _raise_if_registered(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
    """Raises RuntimeError if a forward makes a full parameter one of another name or module."""
    if isinstance(parameter, UnshardedParameter) and parameter is not module._parameters.get(name):
        raise RuntimeError(
            f"a forward assigned its parameter {parameter._xla_fsdp_origin.name()!r} to the "
            f"attribute {name!r} of a {type(module).__name__}, where it would be an empty tensor "
            "after the forward. Use a local variable, or share the parameter before wrapping"
        )


register_module_parameter_registration_hook(_raise_if_registered)

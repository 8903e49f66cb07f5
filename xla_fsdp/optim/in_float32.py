"""Any optimizer, in float32 on parameters in a narrower dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from ..sharding.freeing import Stamp, stamps
from ..sharding.layout import spec_of
from ..sharding.sharded_parameter import local, make_sharded, on_local_parts
from ..sharding.sharded_tensor import set_sharded_tensor, sharded_tensor_of
from .base import ShardAwareOptimizer
from .saved import LazyState, StateConverter, require_shape, state_converter_of

_NARROW = (torch.bfloat16, torch.float16)


class InFloat32(ShardAwareOptimizer):
    """Makes an optimizer of float32 tensors step for parameters in bfloat16 or float16.

    The inner optimizer's state is the state of this one; other parameters are passed to it
    directly. Groups have its ``options``, and ``own`` ones, which it does not know.

    Raises:
        TypeError: ``optimizer_class`` does not make an optimizer.
    """

    def __init__(
        self,
        params: ParamsT,
        optimizer_class: Callable[..., Optimizer],
        options: Mapping[str, Any],
        own: Mapping[str, Any],
    ):
        nested = isinstance(optimizer_class, type) and issubclass(optimizer_class, InFloat32)
        if nested or not callable(optimizer_class):
            raise TypeError(
                "optimizer_class must be the class of an optimizer, such as torch.optim.AdamW, got "
                f"{optimizer_class!r}"
            )
        self._inner: Any = None  # the Optimizer, once there are groups
        self._wide: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
        super().__init__(params, {})
        groups = [
            {**group, "params": [self._widened(p) for p in group["params"]]}
            for group in self.param_groups
        ]
        inner = optimizer_class(groups, **options)
        if not isinstance(inner, Optimizer):
            raise TypeError(
                f"optimizer_class must make a torch.optim.Optimizer, got {type(inner).__name__}"
            )
        self._inner = inner
        # Saved in checkpoints.
        self._own = {"optimizer": type(inner).__name__, **own}
        self.defaults = {**inner.defaults, **self._own}
        for group, theirs in zip(self.param_groups, inner.param_groups, strict=True):
            self._take_options(group, theirs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if self._inner is not None:
            group = self.param_groups[-1]
            wide = [self._widened(p) for p in group["params"]]
            self._inner.add_param_group({**group, "params": wide})
            self._take_options(group, self._inner.param_groups[-1])

    def _update(self) -> None:
        inner = self._inner
        pairs = list(self._pairs())
        for parameter, wide in pairs:
            own = self.state.get(parameter) or {}
            inner.state.pop(wide, None)
            kept = {key: value for key, value in own.items() if key != self._own_key}
            if kept:
                inner.state[wide] = kept
            grad = parameter.grad
            if wide is not parameter and grad is not None:
                with on_local_parts():
                    self._begin(parameter, wide, own.get(self._own_key))
                    wide.grad = grad.to(wide.dtype)
        # The global optimizer hooks are called for this optimizer.
        step: Any = type(inner).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(inner)
        for parameter, wide in pairs:
            if parameter.grad is None:
                continue
            state = self.state[parameter] = {**inner.state.get(wide, {})}
            if wide is not parameter:
                wide.grad = None
                with on_local_parts():
                    state[self._own_key] = self._finish(parameter, wide)

    # The key of state that the inner optimizer does not know.
    _own_key: str
    _copied: frozenset[str] = frozenset({"_inner", "_wide", "_own"})

    def _begin(
        self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter, own: torch.Tensor | None
    ) -> None:
        """Prepares ``wide``, the value to step from. ``own``: the additional state, if any."""
        raise NotImplementedError

    def _finish(self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter) -> torch.Tensor:
        """Gives ``parameter`` its new value; returns the additional state."""
        raise NotImplementedError

    def _saved_own(self, parameter: torch.nn.Parameter, own: Any) -> Any:
        """The additional state in a checkpoint."""
        return own

    @property
    def state_converter(self) -> StateConverter | None:
        return None if state_converter_of(self._inner) is None else self

    @property
    def member_state(self) -> frozenset[str]:
        return self._inner_converter.member_state

    def saved_state(
        self, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        rest = dict(state)
        own = rest.pop(self._own_key, None)
        more = {} if own is None else {self._own_key: self._saved_own(parameter, own)}
        return [{**each, **more} for each in self._inner_converter.saved_state(parameter, rest)]

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        rest = dict(saved)
        own = rest.pop(self._own_key, None)
        state = self._inner_converter.load_saved_state(parameter, rest, group)
        return state if own is None else {**state, self._own_key: own.to(parameter.device)}

    @property
    def _inner_converter(self) -> Any:
        return state_converter_of(self._inner)

    def __getstate__(self) -> dict[str, Any]:
        more = {key: value for key, value in vars(self).items() if key in self._copied}
        return {**super().__getstate__(), **more}

    def _widened(self, parameter: torch.nn.Parameter) -> torch.nn.Parameter:
        if parameter.dtype not in _NARROW:
            return parameter
        wide = torch.nn.Parameter(local(parameter).float(), parameter.requires_grad)
        _share_sharded_tensor(parameter, wide)
        self._wide[parameter] = wide
        return wide

    def _take_options(self, group: dict[str, Any], theirs: Mapping[str, Any]) -> None:
        group.update({key: value for key, value in theirs.items() if key != "params"})
        group.update(self._own)

    def _pairs(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        """Updates the inner optimizer's options first."""
        for group, theirs in zip(self.param_groups, self._inner.param_groups, strict=True):
            changed = [key for key, value in self._own.items() if group.get(key) != value]
            if changed:
                raise RuntimeError(
                    f"the loaded groups of this {type(self).__name__} have {changed[0]}="
                    f"{group.get(changed[0])!r}, but it was made with {self._own[changed[0]]!r}. "
                    "Make the optimizer with the class and options of the saved one"
                )
            options = {k: v for k, v in group.items() if k != "params" and k not in self._own}
            theirs.update(options)
            for parameter, wide in zip(group["params"], theirs["params"], strict=True):
                if wide is not parameter:
                    _share_sharded_tensor(parameter, wide)  # lost in a copy
                yield parameter, wide


class MasterWeights(InFloat32):
    """Stores a float32 copy of parameters in bfloat16 or float16, and updates the copy.

    Micikevicius et al., 2017 (arXiv 1710.03740). The copy is the state ``master``: sharded, saved
    and loaded like moments. If other code changes elements of a parameter, they are copied to it.
    ::

        model = FSDP(model.bfloat16())
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=3e-4)

    Args:
        optimizer_class: any optimizer of torch or of :mod:`xla_fsdp.optim`; its state is float32.
        options: its options.

    Raises:
        TypeError: ``optimizer_class`` does not make an optimizer.
    """

    _own_key = "master"

    def __init__(self, params: ParamsT, optimizer_class: Callable[..., Optimizer], **options: Any):
        self._left: dict[torch.nn.Parameter, Stamp] = {}
        super().__init__(params, optimizer_class, options, {})
        for parameter in self._wide:
            self._left[parameter] = _stamp(parameter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._left = {}  # stamps belong to the copied tensors

    def _begin(
        self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter, own: torch.Tensor | None
    ) -> None:
        if own is not None and own is not wide:  # state was loaded
            wide.copy_(own)
        if _stamp(parameter) != self._left.get(parameter):
            same = wide.to(parameter.dtype) == parameter
            wide.copy_(torch.where(same, wide, parameter.float()))

    def _finish(self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter) -> torch.Tensor:
        parameter.copy_(wide)
        self._left[parameter] = _stamp(parameter)
        return wide

    def _saved_own(self, parameter: torch.nn.Parameter, own: Any) -> LazyState:
        value = local(own)
        require_shape(self._own_key, value, local(parameter).shape)
        return LazyState(value.dtype, value.detach().cpu)


def _share_sharded_tensor(parameter: torch.nn.Parameter, wide: torch.nn.Parameter) -> None:
    """For optimizers that use collectives."""
    sharded = sharded_tensor_of(parameter)
    if sharded is not None and sharded_tensor_of(wide) is None:
        set_sharded_tensor(wide, replace(sharded, shard=wide))
    spec = spec_of(parameter)
    if spec is not None:
        make_sharded(wide, spec)


def _stamp(tensor: torch.Tensor) -> Stamp:
    """A value that changes whenever the tensor's value does."""
    if tensor.device.type == "xla":
        return stamps([tensor])[0]
    return tensor.data_ptr(), tensor._version

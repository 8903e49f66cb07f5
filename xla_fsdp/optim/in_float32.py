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
        self._inner: Optimizer | None = None
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
        assert inner is not None
        pairs = list(self._pairs())
        for parameter, wide in pairs:
            own = self.state.get(parameter) or {}
            further = (*self._element_keys, *self._single_keys)
            kept = {key: value for key, value in own.items() if key not in further}
            if kept:
                inner.state[wide] = kept
            else:
                inner.state.pop(wide, None)
            if wide is not parameter:
                grad = parameter.grad
                if grad is not None:
                    with on_local_parts():
                        self._begin(parameter, wide, own)
                        wide.grad = grad.to(wide.dtype)
        # The global optimizer hooks are called for this optimizer.
        step: Any = type(inner).step
        (step.__wrapped__ if getattr(step, "hooked", False) else step)(inner)
        for parameter, wide in pairs:
            if parameter.grad is None:
                continue
            extra = {}
            if wide is not parameter:
                wide.grad = None
                with on_local_parts():
                    extra = self._finish(parameter, wide)
            self.state[parameter] = {**inner.state.get(wide, {}), **extra}

    # State that the inner optimizer does not know: elementwise, and single values.
    _element_keys: tuple[str, ...] = ()
    _single_keys: tuple[str, ...] = ()
    _copied: frozenset[str] = frozenset({"_inner", "_wide", "_own"})

    def _begin(
        self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> None:
        """Prepares ``wide``, the value to step from."""
        raise NotImplementedError

    def _finish(
        self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter
    ) -> dict[str, torch.Tensor]:
        """Gives ``parameter`` its new value; returns additional state."""
        raise NotImplementedError

    @property
    def state_converter(self) -> StateConverter | None:
        return None if state_converter_of(self._inner) is None else self

    @property
    def member_state(self) -> frozenset[str]:
        return self._inner_converter.member_state

    def saved_state(
        self, parameter: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        rest, more = dict(state), {}
        for key in self._element_keys:
            if key in rest:
                value = local(rest.pop(key))
                require_shape(key, value, local(parameter).shape)
                more[key] = LazyState(value.dtype, value.detach().cpu)
        for key in self._single_keys:
            if key in rest:
                more[key] = rest.pop(key)
        return [{**own, **more} for own in self._inner_converter.saved_state(parameter, rest)]

    def load_saved_state(
        self, parameter: torch.nn.Parameter, saved: Mapping[str, Any], group: Mapping[str, Any]
    ) -> dict[str, Any]:
        further = {*self._element_keys, *self._single_keys}
        rest = {key: value for key, value in saved.items() if key not in further}
        state = self._inner_converter.load_saved_state(parameter, rest, group)
        more = {key: value for key, value in saved.items() if key in further}
        return state | {key: value.to(parameter.device) for key, value in more.items()}

    @property
    def _inner_converter(self) -> StateConverter:
        found = state_converter_of(self._inner)
        assert found is not None
        return found

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
        assert self._inner is not None
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

    _element_keys = ("master",)

    def __init__(self, params: ParamsT, optimizer_class: Callable[..., Optimizer], **options: Any):
        self._left: dict[torch.nn.Parameter, Stamp] = {}
        super().__init__(params, optimizer_class, options, {})
        for parameter in self._wide:
            self._left[parameter] = _stamp(parameter)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._left = {}  # stamps belong to the copied tensors

    def _begin(
        self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter, state: Mapping[str, Any]
    ) -> None:
        master = state.get("master")
        if master is not None and master is not wide:  # state was loaded
            wide.copy_(master)
        if _stamp(parameter) != self._left.get(parameter):
            same = wide.to(parameter.dtype) == parameter
            wide.copy_(torch.where(same, wide, parameter.float()))

    def _finish(
        self, parameter: torch.nn.Parameter, wide: torch.nn.Parameter
    ) -> dict[str, torch.Tensor]:
        parameter.copy_(wide)
        self._left[parameter] = _stamp(parameter)
        return {"master": wide}


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

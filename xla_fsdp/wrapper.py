"""The wrapper of a module."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .names import WRAPPED, is_wrapper
from .sharded_module import ShardedModule, make_unit
from .sharding import metadata
from .sharding.comm_hook import Hook, register
from .sharding.comm_plan import Divisors, checked_factor
from .sharding.options import WRAPPER, FSDPOptions, constructor
from .sharding.sharded_tensor import raise_replaced
from .sharding.state import unique_units, unit_of
from .sharding.summon import full_params_of, summon_full_params

_OWN = frozenset(vars(nn.Module())) | {WRAPPED, "_unit"}


class XlaFullyShardedDataParallel(ShardedModule):
    """Shards a module's parameters, gradients and optimizer state over the ranks.

    Each rank has one shard of each parameter. A forward gathers the full parameters and frees them;
    the backward gathers them again and reduce-scatters the gradients, so that ``parameter.grad`` is
    the mean gradient of this rank's shard. Create the optimizer after wrapping and call
    ``optimizer.step()`` directly.

    Wrap the layers of a large model separately (manually, from the inside out, or with
    ``auto_wrap_policy``), then the model, so that only one layer's parameters are full at a time.
    Parameters keep their dotted names. ``load_state_dict`` accepts the ``state_dict`` of the same
    rank and number of ranks, also of torch_xla's class.

    Args:
        module: on CPU, on the XLA device or on the meta device. Its values must be the same on
            every rank, unless ``sync_module_states``.
        args, options: those of :class:`~xla_fsdp.FSDPOptions`, in the order of torch_xla's class.

    Raises:
        RuntimeError: the module is already wrapped, or has no ``forward``.
        ValueError, TypeError: an option or its value is not allowed, was removed, or does not
            exist.
    """

    _fsdp_wrapped_module: Any

    @constructor(FSDPOptions)
    def __init__(self, module: nn.Module, *args: Any, **options: Any) -> None:
        super().__init__()
        self._unit = make_unit(module, self, FSDPOptions.of(WRAPPER, *args, **options))
        self._fsdp_wrapped_module = module
        self._register_state_dict_hook(metadata.clean_state_dict_keys)
        self.register_load_state_dict_pre_hook(metadata.restore_state_dict_keys)
        self.register_load_state_dict_post_hook(metadata.clean_reported_keys)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._unit.run(self._unit.module, args, kwargs)

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def training(self) -> bool:
        """That of the wrapped module, whose forward reads it."""
        return self._fsdp_wrapped_module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if WRAPPED in self.__dict__.get("_modules", {}):  # else nn.Module.__init__ sets it
            self._fsdp_wrapped_module.training = mode

    @property
    def fsdp_options(self) -> FSDPOptions:
        """The options that inner wrappers inherit. Each is an attribute too."""
        return self._unit.options

    @property
    def rank(self) -> int:
        """This rank's index among the ranks that share the parameters."""
        return self._unit.world.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that share the parameters."""
        return self._unit.world.size

    def __getattr__(self, name: str) -> Any:
        """Options by name; otherwise the attribute of the wrapped module."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("_fsdp_wrapped_module", "fsdp_options"):
                raise
        if FSDPOptions.inherits(name):
            return getattr(self.fsdp_options, name)
        value = getattr(self._fsdp_wrapped_module, name)
        if name in self._unit.forward_methods:
            return self._with_parameters(value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_inside(name):
            for slot in self._unit.slots:
                if slot.module is self._fsdp_wrapped_module and slot.name == name:
                    raise_replaced(self._unit.name_of(slot.index))
            setattr(self._fsdp_wrapped_module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_inside(name) and name not in self.__dict__:
            delattr(self._fsdp_wrapped_module, name)
        else:
            super().__delattr__(name)

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> None:
        """Registers it on the wrapped module."""
        self._owner_of_new(name).register_buffer(name, *args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers it on the wrapped module; it is not sharded."""
        self._owner_of_new(name).register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds it to the wrapped module; it is not sharded."""
        self._owner_of_new(name).add_module(name, module)

    def _owner_of_new(self, name: str) -> Any:
        return self._fsdp_wrapped_module if self._is_inside(name) else super()

    def _is_inside(self, name: str) -> bool:
        if WRAPPED not in self.__dict__.get("_modules", {}):
            return False
        if name in _OWN or hasattr(type(self), name):
            return False
        # Private attributes that other code sets on a module stay where it sets them.
        return not name.startswith("_") or name in vars(self._fsdp_wrapped_module)

    def _with_parameters(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._unit.run(method, args, kwargs)

        return call

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]

    def __len__(self) -> int:
        return len(self._fsdp_wrapped_module)

    def __bool__(self) -> bool:
        return True

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Raises RuntimeError: shards already have values, which would be lost."""
        raise RuntimeError(
            f"to_empty(device={device!r}) of a wrapped module would drop the values of its shards, "
            "and modules on the meta device got theirs when they were wrapped "
            "(reset_parameters(), param_init_fn). Leave the call out"
        )

    def extra_repr(self) -> str:
        shown = ["reshard_after_forward", "flatten_parameters", "compute_dtype"]
        values = ", ".join(f"{name}={getattr(self.fsdp_options, name)}" for name in shown)
        return f"rank={self.rank}, world_size={self.world_size}, {values}"

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """All modules, under the names that they have without wrappers.

        A wrapper has the name of its module, and comes before it.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self._fsdp_wrapped_module.named_modules(memo, prefix, remove_duplicate)

    @property
    def sharded_params(self) -> list[nn.Parameter]:
        """The shards that this wrapper (not those inside it) gathers."""
        return self._unit.shards

    @property
    def full_params(self) -> list[torch.Tensor]:
        """The full parameters that this wrapper gathers, in the order of ``sharded_params``.

        Those of a flattened vector are separate. Changing the list has no effect.

        Raises:
            RuntimeError: outside of a forward, backward and ``summon_full_params`` (``torch_xla``'s
                class has tensors of one element there).
        """
        return full_params_of(self._unit)

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """``list(named_parameters())``."""
        return list(self.named_parameters())

    summon_full_params = staticmethod(summon_full_params)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """The wrappers in ``module``, itself and modules sharded in place included."""
        found: list[Any] = [m for m in module.modules() if is_wrapper(m)]
        if not root_only:
            return found
        inner = {id(m) for one in found for m in one.modules() if m is not one}
        return [m for m in found if id(m) not in inner and m._unit.is_root is not False]

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """All shards that have a gradient, including those of inner wrappers."""
        return [parameter for parameter in self.parameters() if parameter.grad is not None]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backwards store full gradients; the first backward after it reduces the sum."""
        units = unique_units(self)
        before = [unit.require_sync for unit in units]
        for unit in units:
            unit.require_sync = False
        try:
            yield
        finally:
            for unit, value in zip(units, before, strict=True):
                unit.require_sync = value

    def set_gradient_divide_factors(self, pre: float, post: float, recursive: bool) -> None:
        """Divides gradients by ``pre`` before and by ``post`` after the reduction.

        The default is the mean over all ranks. ``recursive``: also in all wrappers inside.
        """
        divisors = Divisors(checked_factor("pre", pre), checked_factor("post", post))
        for unit in unique_units(self) if recursive else [self._unit]:
            unit.comms.divisors = divisors

    @property
    def gradient_predivide_factor(self) -> float:
        return self._unit.comms.divisors.before

    @property
    def gradient_postdivide_factor(self) -> float:
        return self._unit.comms.divisors.after

    def register_comm_hook(self, state: object, hook: Hook, over: str = "all") -> None:
        """Makes ``hook(state, bucket)`` reduce the gradients of this wrapper and of those inside
        it.

        Args:
            state: passed to ``hook`` unchanged. Not saved with the model.
            hook: takes ``state`` and a :class:`~xla_fsdp.comm_hooks.GradBucket`, returns the mean
                gradient of this rank's shards: docs/how-to/communication-hooks.md. Must do the same
                on all ranks.
            over: ``"all"``: the hook gets each rank's local full gradients. ``"replicas"`` (hybrid
                sharding): it averages gradients that are reduced within the sharding group.

        Raises:
            TypeError: ``hook`` is no such function, or is one of torch.distributed.
            ValueError: ``over`` has another value, or there are no replicas.
            RuntimeError: a hook is registered already. In the backward: a hook of scanned blocks
                stored a tensor that exists only inside their loop.
        """
        register(unique_units(self), state, hook, over)

    # The wrapper's own hooks run around those of the module. A hook that the module alone would
    # call on the other side of one of these goes to the module.

    def register_forward_pre_hook(
        self, hook: Any, *, prepend: bool = False, **options: Any
    ) -> RemovableHandle:
        """As on the wrapped module."""
        owner = self._owner_of_hook("_forward_pre_hooks", not prepend)
        return owner.register_forward_pre_hook(hook, prepend=prepend, **options)

    def register_forward_hook(
        self, hook: Any, *, prepend: bool = False, **options: Any
    ) -> RemovableHandle:
        """As on the wrapped module."""
        owner = self._owner_of_hook("_forward_hooks", prepend)
        return owner.register_forward_hook(hook, prepend=prepend, **options)

    def register_full_backward_pre_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As on the wrapped module."""
        owner = self._owner_of_hook("_backward_pre_hooks", not prepend)
        return owner.register_full_backward_pre_hook(hook, prepend)

    def register_full_backward_hook(self, hook: Any, prepend: bool = False) -> RemovableHandle:
        """As on the wrapped module."""
        owner = self._owner_of_hook("_backward_hooks", prepend)
        return owner.register_full_backward_hook(hook, prepend)

    def _owner_of_hook(self, kind: str, inside: bool) -> Any:
        """The wrapped module if the hook must run ``inside`` of its hooks, else the wrapper."""
        module = self._fsdp_wrapped_module
        return module if inside and not self._unit.depth and getattr(module, kind) else super()


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes ``module.method_name(...)`` compute with gathered parameters, such as ``generate``.

    Gradients flow through it; hooks of the module do not run. No effect if ``module`` is not
    wrapped.

    Args:
        module: a wrapper of this package, or any module.
        method_name: a method of the wrapped module, or of a module to which it forwards attributes
            (as a ``PeftModel`` does).

    Raises:
        AttributeError: there is no such method; with ``fully_shard``, on the class.
        TypeError: ``module`` is not a module, or has scanned blocks, which only have a forward.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
    unit = unit_of(module)
    if unit is None:
        return
    if unit.depth:
        raise TypeError(
            f"{type(module).__name__} supports no other method than its forward. Call the forward"
        )
    inner, called = unit.module, type(unit.module).__name__
    if not callable(getattr(inner, method_name, None)):
        raise AttributeError(f"{called} has no method {method_name!r} to register")
    if unit.in_place and not hasattr(type(inner), method_name):
        raise AttributeError(
            f"{method_name!r} is a method of a module inside {called}, but fully_shard changes "
            "only the class of the module itself. Wrap with XlaFullyShardedDataParallel, or add a "
            "method to the class that calls it"
        )
    unit.forward_methods |= {method_name}

"""What users ask of a wrapper besides computing: names, attributes, state dicts."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from .names import WRAPPED, is_wrapper
from .sharding import metadata
from .sharding.attributes import ModuleParameters, refuse_replacement
from .sharding.awaited import still_awaited
from .sharding.gathering import in_method
from .sharding.host_shard import staying
from .sharding.options import FSDPOptions
from .sharding.summon import full_params_of, require_no_scanned, summon_full_params
from .sharding.unit import Unit, units_in
from .wrapper_gradients import GradientMethods
from .wrapper_hooks import HookMethods

# What instances of nn.Module have, and wrappers besides.
_OWN = frozenset(vars(nn.Module())) | {WRAPPED, "_unit", "_forward_methods"}


class WrapperMethods(GradientMethods, HookMethods):
    """A module around ``_fsdp_wrapped_module`` whose parameters ``_unit`` shards."""

    _is_fsdp_wrapper = True  # see names.is_wrapper
    # Methods of the wrapped module that compute like its forward.
    _forward_methods: frozenset[str] = frozenset()
    fsdp_options: FSDPOptions

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    @property
    def rank(self) -> int:
        """This rank's place among the ranks that share the parameters."""
        return self._unit.world.rank

    @property
    def world_size(self) -> int:
        """How many ranks share the parameters."""
        return self._unit.world.size

    def __getattr__(self, name: str) -> Any:
        """Options by name; attributes that the wrapper does not have are the wrapped module's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("_fsdp_wrapped_module", "fsdp_options"):  # not built yet
                raise
        if FSDPOptions.inherits(name):
            return getattr(self.fsdp_options, name)
        value = getattr(self._fsdp_wrapped_module, name)
        own = isinstance(value, types.MethodType) and value.__self__ is self._fsdp_wrapped_module
        # A registered one may be of a module inside, as those of a PeftModel are.
        if own or name in self._forward_methods:
            return self._with_parameters(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        """What a user sets is the wrapped module's, as if there were no wrapper."""
        if self._is_inside(name):
            held = self._fsdp_wrapped_module._parameters
            if isinstance(held, ModuleParameters) and name in held.wholes:
                refuse_replacement(held.wholes[name].name)
            setattr(self._fsdp_wrapped_module, name, value)
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._is_inside(name) and name not in self.__dict__:
            delattr(self._fsdp_wrapped_module, name)
        else:
            super().__delattr__(name)

    def register_buffer(self, name: str, *args: Any, **kwargs: Any) -> None:
        """On the wrapped module, whose forward is to see it."""
        self._home_of_new(name).register_buffer(name, *args, **kwargs)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """On the wrapped module, whose forward is to see it; it is not sharded."""
        self._home_of_new(name).register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """To the wrapped module, whose forward is to see it; it is not sharded."""
        self._home_of_new(name).add_module(name, module)

    def _home_of_new(self, name: str) -> Any:
        return self._fsdp_wrapped_module if self._is_inside(name) else super()

    def _is_inside(self, name: str) -> bool:
        """Whether an attribute called ``name`` is the wrapped module's to have."""
        if WRAPPED not in self.__dict__.get("_modules", {}):  # not built yet
            return False
        if name in _OWN or hasattr(type(self), name):
            return False
        # What others note on a module for themselves stays where they put it.
        return not name.startswith("_") or name in vars(self._fsdp_wrapped_module)

    def _with_parameters(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """A method that the wrapped module answers with, to be called from outside."""

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if name in self._forward_methods:
                return self._run(method, args, kwargs)
            with in_method():
                return method(*args, **kwargs)

        return call

    def _run(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """``forward(*args, **kwargs)`` with this wrapper's parameters gathered."""
        raise TypeError(
            f"{type(self).__name__} computes in its forward only; call that, or register a method "
            "of the module around it"
        )

    def to_empty(self, *, device: Any, recurse: bool = True) -> NoReturn:
        """Raises RuntimeError: shards have values since the wrapping, and keep them."""
        raise RuntimeError(
            f"to_empty(device={device!r}) of a wrapped module would take the values of its shards "
            "away, which modules on the meta device were given when they were wrapped "
            "(reset_parameters(), param_init_fn). Leave the call out"
        )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``to``, ``half``, ``cpu`` and the like: dtypes may change, the device may not."""
        if is_wrapper(self):
            require_device_stays(self._unit, fn)
            fn = staying(fn, self._unit.shards)
        waiting = still_awaited(vars(self)["_unit"].awaited) if is_wrapper(self) else []
        super()._apply(fn, recurse)
        for one in waiting:
            one.wait_on()
        return self

    def __getitem__(self, key: Any) -> Any:
        """Items of the wrapped module, should it be an ``nn.Sequential``."""
        return self._fsdp_wrapped_module[key]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a wrapped model cannot be pickled, it belongs to this rank's device; save "
            "state_dict() and get_shard_metadata()"
        )

    def __deepcopy__(self, memo: dict) -> WrapperMethods:
        self._settle()
        still_awaited(self._unit.awaited)
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        clone._unit.note_homes()  # what is noted on parameters is not copied with them
        clone._unit.gradients.forget()  # copies of parameters have no gradients
        return clone

    def __len__(self) -> int:
        return len(self._fsdp_wrapped_module)

    def __bool__(self) -> bool:
        return True

    def extra_repr(self) -> str:
        shown = ["reshard_after_forward", "flatten_parameters", "compute_dtype"]
        values = ", ".join(f"{name}={getattr(self.fsdp_options, name)}" for name in shown)
        return f"rank={self.rank}, world_size={self.world_size}, {values}"

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, under the names that the parameters have in the unwrapped module."""
        self._settle()
        yield from super().named_parameters(*args, **kwargs)

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Module]]:
        """All modules, under the names that they have without wrappers.

        A wrapper has the name of the module that it wraps, and comes before it. Parents that are
        not wrapped ask for names here too, so theirs are the same.
        """
        memo = set() if memo is None else memo
        if self in memo:
            return
        if remove_duplicate:
            memo.add(self)
        yield prefix, self
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def state_dict(  # type: ignore[override]  # of a destination's own type nothing is said
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """This rank's shards and all buffers; see :meth:`get_shard_metadata`.

        Raises:
            RuntimeError: some have no values yet (``param_init_fn=loaded_later``).
        """
        self._settle()
        self._require_values("state_dict() came")
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Loads what :meth:`state_dict` of the same rank of as many ranks returned.

        Takes the shards of ``torch_xla.distributed.fsdp`` as well, if wrapped alike.
        """
        self._settle()
        return super().load_state_dict(state_dict, *args, **kwargs)

    def get_shard_metadata(self) -> dict[str, Any]:
        """How to put the ``state_dict()`` of all ranks together.

        Save it beside the state dict, under ``"shard_metadata"``, for
        ``python -m xla_fsdp.consolidate``. Plain dicts, lists, numbers and strings.
        """
        return metadata.shard_metadata(list(units_in(self)))

    @property
    def sharded_params(self) -> list[nn.Parameter]:
        """The shards that this wrapper (not those inside it) gathers."""
        return self._unit.shards

    @property
    def full_params(self) -> list[torch.Tensor]:
        """The full parameters that this wrapper (not those inside it) gathers, in the order of
        ``sharded_params``; those of a flattened vector one by one. A list of its own: putting
        others in it changes nothing.

        Raises:
            RuntimeError: outside of a forward, backward and ``summon_full_params``, where there are
                none (``torch_xla``'s class has tensors of one element there).
        """
        return full_params_of(self._unit)

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """``list(named_parameters())``: names here are the original ones."""
        return list(self.named_parameters())

    summon_full_params = staticmethod(summon_full_params)

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Calls ``fn`` on every module inside, then on this one, while they hold full parameters.

        For initialisation; must be called, and do the same, on every rank. The wrappers on the way
        to a module are full with it, no others. See :func:`summon_full_params`.
        """
        require_no_scanned(self._wrapped_units())
        with summon_full_params(self, recurse=False):
            return super().apply(fn)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[Any]:
        """The wrappers in ``module``, itself included, or those of them that none is around.

        What is sharded in place counts as well.
        """
        found: list[Any] = [m for m in module.modules() if is_wrapper(m)]
        if not root_only:
            return found
        inner = {id(m) for one in found for m in one.modules() if m is not one}
        return [m for m in found if id(m) not in inner and m._unit.is_root is not False]

    def _settle(self, recursive: bool = True) -> None:
        if is_wrapper(self):
            for unit in self._wrapped_units() if recursive else [self._unit]:
                unit.settle()


def require_device_stays(unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Raises RuntimeError if ``fn``, which is to be applied to shards, moves them elsewhere."""
    device, found = unit.world.device, fn(unit.placeholder).device
    if found != device:
        raise RuntimeError(
            f"the shards of a wrapped module stay on {device}, where its collectives are; "
            f"they can not move to {found}. For the values on the host call "
            "xla_fsdp.full_state_dict(model), for a model there consolidate a checkpoint"
        )

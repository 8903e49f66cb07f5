"""``FSDPModule``: what a module becomes that is sharded in place."""

from __future__ import annotations

import copy
import functools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ..names import SHELL, dotted, is_wrapper, shell_of
from ..sharding.awaited import Awaited, still_awaited
from ..sharding.gathering import in_method
from ..sharding.host_shard import staying
from ..sharding.metadata import require_copying
from ..sharding.summon import require_no_scanned, summon_full_params
from ..sharding.unit import Unit
from ..wrapper_methods import require_device_stays
from .settings import FSDPSettings
from .shell import Shell

# Between a function of torch's and what it asks a module for: methods of parents that call it.
_FRAMES = 6


class FSDPModule(FSDPSettings):
    """A module after ``fully_shard``: of its own class still, and of this one.

    Called, it gathers its parameters, computes and frees them; hooks of the module run within.
    Names of modules, parameters and the state dict are what they were. Methods other than forward
    raise an error if they compute with parameters, see ``register_fsdp_forward_method``.
    """

    _is_fsdp_wrapper = True  # see names.is_wrapper
    _unit: Unit
    _fsdp_original: type[nn.Module]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A module of the original class: a slice of a Sequential makes one of its own class."""
        original = getattr(cls, "_fsdp_original", None)
        if original is None:
            raise TypeError("FSDPModule is what xla_fsdp.fully_shard(module) makes of a module")
        return original(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        shell = self._shell
        if shell._unit.computing:  # the shell calls, or the module itself
            return super().__call__(*args, **kwargs)
        return shell(*args, **kwargs)

    @property
    def _shell(self) -> Shell:
        return self.__dict__[SHELL]

    def _fsdp_at_rest(self) -> None:
        """Puts all shards where they belong."""
        for module in self.modules():
            shell = shell_of(module)
            if isinstance(shell, Shell):
                shell.release()
        self._fsdp_settle()

    def _fsdp_settle(self) -> None:
        """Forgets what exceptions left behind, but not what ``unshard`` did."""
        for module in self.modules():
            shell = shell_of(module)
            if is_wrapper(module) and not (isinstance(shell, Shell) and shell.in_place.held):
                module.__dict__["_unit"].settle()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards; between ``unshard()`` and ``reshard()`` full tensors, for looking at."""
        _require_not_for_torchs(sys._getframe(1))
        self._fsdp_settle()
        yield from super().named_parameters(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's shards and all buffers; see :meth:`get_shard_metadata`."""
        _require_not_for_torchs(sys._getframe(1))
        self._fsdp_at_rest()
        self._shell._require_values("state_dict() came")
        return super().state_dict(*args, **kwargs)

    def get_shard_metadata(self) -> dict[str, Any]:
        """How to put the ``state_dict()`` of all ranks together, as
        :meth:`XlaFullyShardedDataParallel.get_shard_metadata`."""
        return self._shell.get_shard_metadata()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """As :meth:`XlaFullyShardedDataParallel.clip_grad_norm_`; must be called on every rank."""
        return self._shell.clip_grad_norm_(max_norm, norm_type, groups)

    def average_ignored_gradients(self) -> None:
        """As :meth:`XlaFullyShardedDataParallel.average_ignored_gradients`; call it on every
        rank."""
        self._shell.average_ignored_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, also those that were left unreduced."""
        super().zero_grad(set_to_none)
        for unit in self._shell._wrapped_units():
            unit.gradients.forget()
            for shard in unit.shards:  # which are no parameters of a module after unshard()
                if shard.grad is not None:
                    shard.grad = None if set_to_none else torch.zeros_like(shard.grad)

    def apply(self, fn: Callable[[nn.Module], None]) -> Any:
        """Calls ``fn`` on every module inside, then on this one, while they hold full parameters.

        For initialisation; must be called, and do the same, on every rank.
        """
        require_no_scanned(self._shell._wrapped_units())
        self._fsdp_at_rest()
        with summon_full_params(self, recurse=False):
            return super().apply(fn)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """As in torch: parameters and buffers have no values until they are given some.

        They are given some by a load, within ``summon_full_params``, or by the next methods of the
        model that are called, such as ``init_weights()``: these compute with full parameters, and
        must do the same on every rank, as :meth:`apply`. A forward before all have values raises
        RuntimeError and names those that have none.

        Raises:
            ValueError: another device than that of the shards; ``recurse=False``; scanned blocks.
        """
        there = {shard.device.type for shard in self._unit.shards} or {"xla"}
        if torch.device(device).type not in there:
            raise ValueError(
                f"to_empty(device={device!r}) of a sharded module, whose shards stay on "
                f"{'/'.join(there)}: pass device={min(there)!r}"
            )
        if not recurse:
            raise ValueError(
                "to_empty(recurse=False) of a sharded module is not possible: its unit has the "
                "parameters of its submodules, too. Leave recurse out"
            )
        units = self._shell._wrapped_units()
        require_no_scanned(units)
        self._fsdp_at_rest()
        for unit in units:
            unit.wait_for_values()
        for name, module in self.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    own = Awaited(buffer, {(0, 0): dotted(name, key)}, (module, key))
                    self._unit.awaited.append(own)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """``to``, ``half``, ``cpu`` and the like: dtypes may change, the device may not."""
        self._shell.release()
        require_device_stays(self._unit, fn)
        return super()._apply(staying(fn, self._unit.shards), recurse)

    def __deepcopy__(self, memo: dict) -> Any:
        self._fsdp_at_rest()
        self._shell.in_place.keeping.drop()
        clone: Any = object.__new__(type(self))
        memo[id(self)] = clone
        copy.deepcopy(self._shell, memo)  # first: modules inside refer to it, if it is there
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        clone._unit.note_homes()  # what is noted on parameters is not copied with them
        clone._unit.gradients.forget()  # copies of parameters have no gradients
        return clone

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "a sharded model cannot be pickled, it belongs to this rank's device; save "
            "state_dict() and get_shard_metadata(), or xla_fsdp.full_state_dict(model)"
        )


def become_sharded(module: nn.Module, shell: Shell) -> None:
    """Has ``module`` compute through ``shell``, as a module of a class of both kinds."""
    module.__dict__["_unit"] = shell._unit
    module.__dict__[SHELL] = shell
    module.__class__ = _sharded_class(type(module))  # type: ignore[arg-type]  # Module is hashable
    module.register_load_state_dict_pre_hook(_before_load)


def _require_not_for_torchs(frame: types.FrameType | None) -> None:
    """Raises RuntimeError if ``frame`` is torch's, which takes every tensor for a whole one."""
    for _ in range(_FRAMES):
        if frame is None:
            return
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            raise RuntimeError(
                "torch.distributed.checkpoint.state_dict would take this rank's shards for whole "
                "parameters: use xla_fsdp.full_state_dict, full_optim_state_dict and their load_ "
                "counterparts, or save_checkpoint; to_dcp writes torch's format"
            )
        frame = frame.f_back


def _before_load(
    module: FSDPModule, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
) -> None:
    if not is_wrapper(module):
        return  # it is the unwrapped module for a while, see checkpoint/protocol.py
    require_copying(local_metadata, "the shards that the module gathers")
    module._shell.release()
    module._unit.settle()


def _waits_for_values(shell: Shell) -> bool:
    return any(still_awaited(unit.awaited) for unit in shell._wrapped_units())


@functools.cache
def _sharded_class(original: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of ``original`` that are sharded. One for all, as they had one before;
    should two ranks ask at once, one each, which makes no difference."""
    own: dict[str, Any] = {"_fsdp_original": original, "__module__": original.__module__}
    seen = {"__init__"}
    for base in original.__mro__:
        for name, value in vars(base).items() if base not in (nn.Module, object) else ():
            special = name.startswith("__") or hasattr(nn.Module, name) and name != "forward"
            if name not in seen and isinstance(value, types.FunctionType) and not special:
                own[name] = _watched(name, value)
            seen.add(name)
    return type(f"FSDP{original.__name__}", (FSDPModule, original), own)


def _watched(name: str, function: types.FunctionType) -> Callable[..., Any]:
    """A method of the original class, which may be called from outside of a forward."""

    @functools.wraps(function)
    def call(self: FSDPModule, *args: Any, **kwargs: Any) -> Any:
        # Not `function`: the original class may have been given another one since.
        method = getattr(super(FSDPModule, self), name)
        shell = self._shell
        if shell.holds_full():
            return method(*args, **kwargs)
        if name == "forward" or name in shell._forward_methods:
            return shell._run(method, args, kwargs)
        if not self._unit.summoned and _waits_for_values(shell):
            # There is nothing to compute with yet, so it is to give values.
            with summon_full_params(self):
                return method(*args, **kwargs)
        with in_method():
            return method(*args, **kwargs)

    return call

"""What users ask of a wrapper besides computing: names, state dicts, gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from . import metadata
from .clip import clip_grad_norm_
from .options import FSDPOptions
from .unit import Unit

_PREFIX = "_fsdp_wrapped_module."


class WrapperSurface(nn.Module):
    """A module around ``_fsdp_wrapped_module`` whose parameters ``_unit`` shards."""

    _unit: Unit
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
        if name in FSDPOptions.__dataclass_fields__:
            return getattr(self.fsdp_options, name)
        return getattr(self._fsdp_wrapped_module, name)

    def __getitem__(self, key: Any) -> Any:
        """Items of the wrapped module, should it be an ``nn.Sequential``."""
        return self.module[key]

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a wrapped model cannot be pickled, it belongs to this rank's device; save "
            "state_dict() and get_shard_metadata()"
        )

    def __deepcopy__(self, memo: dict) -> WrapperSurface:
        self._settle()
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({k: copy.deepcopy(v, memo) for k, v in self.__dict__.items()})
        return clone

    def __len__(self) -> int:
        return len(self.module)

    def __bool__(self) -> bool:
        return True

    def extra_repr(self) -> str:
        shown = ["reshard_after_forward", "flatten_parameters", "compute_dtype"]
        values = ", ".join(f"{name}={getattr(self.fsdp_options, name)}" for name in shown)
        return f"rank={self.rank}, world_size={self.world_size}, {values}"

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The shards, under the names that the parameters have in the unwrapped module."""
        self._settle()
        for name, parameter in super().named_parameters(*args, **kwargs):
            yield name.replace(_PREFIX, ""), parameter

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers, under the names that they have in the unwrapped module."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            yield name.replace(_PREFIX, ""), buffer

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """This rank's shards and all buffers; see :meth:`get_shard_metadata`."""
        self._settle()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict, *args: Any, **kwargs: Any) -> Any:
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
        return metadata.shard_metadata(self)

    @property
    def sharded_params(self) -> list[nn.Parameter]:
        """The shards that this wrapper (not those inside it) gathers."""
        return self._unit.shards

    @property
    def params_with_grad(self) -> list[nn.Parameter]:
        """All shards, inner wrappers included, that have a gradient."""
        return [parameter for parameter in self.parameters() if parameter.grad is not None]

    def get_original_names_and_sharded_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """``list(named_parameters())``: names here are the original ones."""
        return list(self.named_parameters())

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        groups: Sequence[Sequence[int]] | None = None,
    ) -> torch.Tensor:
        """Scales all gradients so that their total norm is at most ``max_norm``; see
        :func:`xla_fsdp.clip.clip_grad_norm_`. Must be called on every rank."""
        return clip_grad_norm_(
            self._wrapped_units(), self.parameters(), max_norm, norm_type, groups
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets all gradients, also those that ``no_sync`` has left unreduced.

        An optimizer's ``zero_grad`` does not know of the latter.
        """
        super().zero_grad(set_to_none)
        for unit in self._wrapped_units():
            unit.forget_unsynced()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, backwards leave gradients unreduced; the first backward after it reduces the sum.

        Saves the reductions of all but the last micro-batch, at the price of the full gradients in
        memory.
        """
        units = self._wrapped_units()
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

        The defaults average over all ranks. ``recursive``: in all wrappers inside as well.
        """
        for name, value in (("pre", pre), ("post", post)):
            if not value > 0:
                raise ValueError(f"{name} must be a positive number, got {value!r}")
        for unit in self._wrapped_units() if recursive else [self._unit]:
            unit.wire.predivide, unit.wire.postdivide = float(pre), float(post)

    @property
    def gradient_predivide_factor(self) -> float:
        return self._unit.wire.predivide

    @property
    def gradient_postdivide_factor(self) -> float:
        return self._unit.wire.postdivide

    def _settle(self, recursive: bool = True) -> None:
        if "_unit" in self.__dict__:
            for unit in self._wrapped_units() if recursive else [self._unit]:
                unit.settle()

    def _wrapped_units(self) -> list:
        wrappers = (m for m in self.modules() if isinstance(m, WrapperSurface))
        return [wrapper._unit for wrapper in wrappers]

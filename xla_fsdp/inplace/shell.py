"""The wrapper behind a module that is sharded in place, which nobody sees.

It is no child of the module, so that names and ``modules()`` stay as they are; it runs the module's
forward as any wrapper does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..sharding.attributes import refuse_replacement
from ..sharding.gathering import Pass
from ..sharding.keeping import Keeping
from ..sharding.options import FSDPOptions
from ..sharding.unit import units_in
from ..tree import cast_floats
from ..wrapper import XlaFullyShardedDataParallel
from ..wrapper_methods import WrapperMethods
from .policies import MixedPrecisionPolicy


@dataclass
class InPlace:
    """What a shell knows besides what a wrapper does.

    Attributes:
        policy: whose ``output_dtype`` is left to do.
        held: what ``unshard()`` has put into the modules.
        syncs, all_reduces: whether backwards reduce, and over replicas.
    """

    policy: MixedPrecisionPolicy
    keeping: Keeping
    held: Pass | None = None
    syncs: bool = True
    all_reduces: bool = True


class Shell(XlaFullyShardedDataParallel):
    """A wrapper around ``module``, whose ``options`` are those of any wrapper."""

    in_place: InPlace
    # On the meta device: a module without reset_parameters is no error, as in torch.
    waits_for_values = True

    def __init__(
        self, module: nn.Module, policy: MixedPrecisionPolicy, options: FSDPOptions
    ) -> None:
        WrapperMethods.__init__(self)
        self._wrap(module, options)
        keeping = Keeping(self._unit.options, self._unit.world)
        keeping.divisors = self._unit.comms.divisors
        self._unit.comms = self._unit.gradients.comms = keeping
        # Not set as an attribute, which would be the module's.
        self.__dict__["in_place"] = InPlace(policy, keeping)

    def _run(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._unit.computing:
            return super()._run(forward, args, kwargs)
        self.release()
        try:
            outputs = super()._run(forward, args, kwargs)
        finally:
            if self._frees_after_forward:
                self.in_place.keeping.drop()
        dtype = self.in_place.policy.output_dtype
        return outputs if dtype is None else cast_floats(outputs, dtype)

    @property
    def _frees_after_forward(self) -> bool:
        options = self.fsdp_options
        if self._unit.is_root and options.disable_reshard_on_root:
            return False
        return bool(options.reshard_after_forward)

    def _become_root(self) -> None:
        _require_inner_first(self)
        super()._become_root()

    # -- by hand --------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Puts full parameters into the modules, and keeps them for the next forward."""
        unit = self._unit
        if unit.computing or torch._C._current_graph_task_id() != -1:
            return  # gathered there anyway, when its turn comes
        unit.require_not_summoned()
        self.release()
        self.in_place.keeping.by_hand = True
        if unit.tensors:
            one = Pass(unit)
            with torch.enable_grad():
                one.gather((), anchored=False)
            unit.install(one)
            self.in_place.held = one

    def holds_full(self) -> bool:
        """Whether modules hold full parameters: in a forward or backward, and after ``unshard``.

        Raises:
            RuntimeError: after ``unshard``, and these are not the values any more.
        """
        unit, held = self._unit, self.in_place.held
        if unit.computing:
            return True
        if held is None:
            unit.settle()  # what an exception left behind
        elif unit.held is not None and self.in_place.keeping.is_stale(unit.tensors):
            raise RuntimeError(
                f"parameters of {unit.title!r} were changed, by an optimizer step or a load, since "
                "unshard() gathered them: call it again"
            )
        return unit.held is not None

    def reshard(self) -> None:
        """Undoes :meth:`unshard`."""
        self.in_place.keeping.drop()
        self.release()

    def release(self) -> None:
        """Puts the shards where ``unshard`` put full parameters; what computed with these keeps
        them.

        Raises:
            RuntimeError: they were changed or replaced, which would be lost.
        """
        held, self.in_place.held = self.in_place.held, None
        if held is None:
            return
        unit = self._unit
        there = [place.module._parameters.get(place.name) for place in unit.places]
        try:
            held.require_full_unchanged()
        except RuntimeError as error:
            raise RuntimeError(
                f"a parameter of {unit.title!r} was changed between unshard() and reshard(): what "
                "is full there is this rank's copy, which is lost. Change parameters within "
                "xla_fsdp.XlaFullyShardedDataParallel.summon_full_params(model)"
            ) from error
        finally:
            self._settle(recursive=False)
        for place, found in zip(unit.places, there, strict=True):
            if found is not held.full[place.index] and found is not place.resting:
                refuse_replacement(unit.name_of(place.index))

    # -- settings -------------------------------------------------------------------------------

    def set_sync(self, syncs: bool | None = None, all_reduces: bool | None = None) -> None:
        """Whether backwards reduce, and over replicas; ``None``: as before.

        Without the latter nothing is reduced either, where there are replicas: the gradient is the
        same in the end, and nowhere half-reduced in between.
        """
        own = self.in_place
        own.syncs = own.syncs if syncs is None else syncs
        own.all_reduces = own.all_reduces if all_reduces is None else all_reduces
        replicated = self._unit.world.replicas > 1
        self._unit.gradients.require_sync = own.syncs and (own.all_reduces or not replicated)

    def set_reshard_after_forward(self, reshards: bool) -> None:
        """Whether full parameters are freed after the forward, also if this is the root."""
        options = replace(
            self.fsdp_options, reshard_after_forward=reshards, disable_reshard_on_root=False
        )
        self.__dict__["fsdp_options"] = self._unit.options = options
        self._unit.secondaries = None  # those of reshard_after_forward=<int>


def _require_inner_first(root: nn.Module) -> None:
    """Raises RuntimeError if a module was sharded after one around it, whose parameters are in both
    units."""
    owners: dict[tuple[nn.Module, str], str] = {}
    for path, unit in units_in(root):
        for place in unit.places:
            outer = owners.setdefault((place.module, place.name), path)
            if outer != path and path.startswith(f"{outer}." if outer else ""):
                raise RuntimeError(
                    f"parameter {unit.name_of(place.index)!r} belongs to two units, that of "
                    f"{path!r} and that of {outer or 'the model'!r} around it. Call fully_shard "
                    "from the inside out, for layers first and for the whole model last; a module "
                    "that is used inside and outside of a layer is to be sharded by itself, first"
                )

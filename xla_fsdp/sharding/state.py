"""When the parameters of a unit are full: in its forwards and backwards, and when asked by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from .. import xlac
from ..collectives.order import Order, waits_of_backward, waits_of_forward
from ..collectives.world import World
from ..layers import linear
from ..names import is_wrapper
from ..tree import cast_floats, map_tensors, tensors_in
from .attributes import refuse_replacement
from .freeing import Stamp, stamps
from .gathering import Pass, computing, computing_passes, parameters_saved_as_recipes
from .options import FSDPOptions
from .secondary import Secondary
from .unit import NamedUnits, Unit
from .user_checks import (
    compare_initial_weights,
    raise_if_elsewhere,
    require_all_sharded,
    require_plain_call,
    require_uncompiled,
    require_values,
    tell_of_slices,
)


class FSDPState(Unit):
    """A unit, and which of its parameters are full at the moment.

    Between uses the module holds shards. :meth:`run` gathers, computes and frees; the first
    gradient that reaches the outputs has the backward gather again, and its end frees.

    Attributes:
        is_root: whether no other unit is around this one; unknown until the first forward.
        order: what was gathered and reduced last, shared by the units of a model.
        computing: forwards of the unit that are under way (a module may call itself).
        active: the pass with whose full parameters the modules compute now.
        summoned: whether modules hold full parameters outside of a forward, see summon.py.
        forward_methods: methods of the module that compute like its forward.

    Those that only ``fully_shard`` sets:

    Attributes:
        output_dtype: what floating-point outputs are cast to.
        unsharded: the pass whose full parameters :meth:`unshard` has put into the modules.
        caches_after_backward: keep what was gathered for a backward until the next forward.
    """

    def __init__(self, options: FSDPOptions, world: World, module: nn.Module) -> None:
        super().__init__(options, world, module)
        self.is_root: bool | None = None
        self.order = Order()
        self.computing = 0
        self.active: Pass | None = None
        self.summoned = False
        self.forward_methods: frozenset[str] = frozenset()
        self.output_dtype: torch.dtype | None = None
        self.unsharded: Pass | None = None
        self.caches_after_backward = False
        self._caches_by_hand = False
        # What was gathered last, and of which values of the shards.
        self._cached: list[torch.Tensor] | None = None
        self._cached_of: list[Stamp] = []
        self._syncs = self._all_reduces = True
        # Passes whose backward is under way, by autograd graph task (checkpointed layers run a
        # backward of their own inside the outer one).
        self._backward: dict[int, list[Pass]] = {}

    # -- forward --------------------------------------------------------------------------------

    def cast_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The inputs of a forward in the dtype in which it computes."""
        dtype = self.options.dtype_of_inputs(root=self.is_root is not False)
        return (args, kwargs) if dtype is None else cast_floats((args, kwargs), dtype)

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """``forward(*args, **kwargs)``, of the module or a method of it, with full parameters."""
        called = type(self.module).__name__
        require_plain_call(called)
        args, kwargs = self.cast_inputs(args, kwargs)
        if self.computing:  # a module that calls itself: its parameters are there
            return forward(*args, **kwargs)
        self.release()
        if self.is_root is None:
            self._become_root()
        self.settle()
        if self.stream is not None:
            args, kwargs = self.stream.entering((args, kwargs))
        # In a recomputation: their own backward follows immediately.
        stays = torch.is_grad_enabled() and (_in_backward() or not self._frees_after_forward)
        one = self._begin((args, kwargs), stays)
        keep = False
        try:
            with parameters_saved_as_recipes(), computing((one,)):
                outputs = one.copied_out(forward(*args, **kwargs))
            self._require_unchanged(one)
            keep = stays
        except RuntimeError as error:
            raise_if_elsewhere(called, (args, kwargs), self.world.device, error)
            raise
        finally:
            self._end(one, keep)
        if self.stream is not None:
            del args, kwargs  # what is held when a program starts is a result of it
            self.stream.forward_over()
        if torch.is_grad_enabled():
            outputs = self._watch(one, outputs)
        return outputs if self.output_dtype is None else cast_floats(outputs, self.output_dtype)

    def _become_root(self) -> None:
        """The outermost unit that computes first is the root of those inside."""
        named = [("", self), *units_in(self.module)]
        for _, unit in named:
            unit.require_not_summoned()
        if self.in_place:
            _require_inner_first(named)
        require_values(named, "the first forward came")
        streams = [unit.stream for _, unit in named if unit.stream is not None]
        for path, unit in reversed(named):  # of two names the first stays
            unit.is_root = unit is self
            unit.comms.label = f"{path}." if path else ""
            unit.order = self.order
        for stream in streams:  # those of one model wait for each other
            stream.traffic = streams[0].traffic
        require_uncompiled(self.module)
        require_all_sharded(self.module, named)
        compare_initial_weights(self.world, named)
        tell_of_slices(self.world)

    @property
    def _frees_after_forward(self) -> bool:
        if self.is_root and self.options.disable_reshard_on_root:
            return False
        return bool(self.options.reshard_after_forward)

    def _begin(self, inputs: Any, keep: bool) -> Pass:
        """Gathers for a forward on ``inputs`` and gives the modules their full parameters.

        ``keep``: these will stay until the backward.
        """
        if self.active is None:
            self.require_resting()
        recomputes = _in_backward()
        secondary: Secondary | None = None
        if self.secondaries is not None and torch.is_grad_enabled():
            if recomputes:
                secondary = self.secondaries.of(self.shards)
            elif not keep:
                secondary = self.secondaries.fresh(self.shards)
        one = Pass(self, secondary)
        if self.is_root:
            one.on_backward_end = self._end_backward_of_model
        if self.tensors:
            arguments = tensors_in(inputs)
            events: Sequence[torch.Tensor] = ()
            if self.world.as_on_tpu and self.options.optimization_barrier_in_forward:
                events = [tensor for tensor in arguments if tensor.device == self.world.device]
                if not recomputes:
                    waits = waits_of_forward(self.options.forward_prefetch)
                    events = self.order.start_forward(events, waits)
            one.gather(events)
        self.computing += 1
        self._install(one)
        return one

    def require_resting(self) -> None:
        """Raises RuntimeError if a module holds something else than what was put there."""
        self.require_not_summoned()
        for place in self.places:
            if place.module._parameters.get(place.name) is not place.resting:
                refuse_replacement(self.name_of(place.index))

    def require_not_summoned(self) -> None:
        """Raises RuntimeError if modules hold full parameters that no forward has gathered."""
        if self.summoned:
            raise RuntimeError(
                f"the forward of {self.title!r} was called within summon_full_params or apply: "
                "leave that first, a forward gathers for itself"
            )

    def _require_unchanged(self, one: Pass) -> None:
        """After the forward: raises RuntimeError if it changed its parameters, or replaced them."""
        one.require_full_unchanged()
        for place in self.places:
            if place.module._parameters.get(place.name) is not one.full[place.index]:
                raise RuntimeError(
                    f"the forward replaced its parameter {self.name_of(place.index)!r} by another; "
                    "a sharded parameter can only be replaced before wrapping"
                )

    def _end(self, one: Pass, keep: bool) -> None:
        """After the forward, or after an exception in it."""
        self.computing -= 1
        self._restore()
        if not keep:
            one.reshard()
        if self._frees_after_forward:
            self._drop_cache()
        if not computing_passes() and not _in_backward():
            self.order.end_forward()

    def _watch(self, one: Pass, outputs: Any) -> Any:
        """Has the first gradient that reaches ``outputs`` start the backward of pass ``one``."""

        def hook(tensor: torch.Tensor) -> torch.Tensor:
            # A leaf is not this unit's result, and would collect a hook at every step.
            if tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: self.enter_backward(one, grad))
            return tensor

        return map_tensors(hook, outputs)

    def _install(self, one: Pass) -> None:
        """Puts the pass's full parameters where the modules look for them."""
        self.active = one
        for place in self.places:
            # No Parameter, which would be a leaf of the graph, but answers as one.
            place.put(one.full[place.index])
        linear.replace_forwards(self.linears, self.world)
        self.refresh_rnns()

    def _restore(self) -> None:
        """Undoes the last install: back to an enclosing backward's parameters, or to the shards."""
        enclosing = [one for passes in self._backward.values() for one in passes]
        if enclosing:
            self._install(enclosing[-1])
        elif self.active is not None:
            self.active = None
            for place in self.places:
                place.rest()
            linear.restore_forwards(self.linears)
            self.refresh_rnns()

    def settle(self) -> None:
        """Forgets what an exception in an earlier forward or backward left behind."""
        if not self.computing and not _in_backward():
            for task in list(self._backward):
                self._leave_backward(task)
            if self.stream is not None:
                self.stream.forget()
            if self.gradients.host is not None:
                self.gradients.host.forget()
            self._restore()

    # -- backward -------------------------------------------------------------------------------

    def enter_backward(self, one: Pass, grad: torch.Tensor | None) -> None:
        """Regathers pass ``one`` for the backward that ``grad`` is the first sign of."""
        task = torch._C._current_graph_task_id()
        passes = self._backward.get(task)
        if passes is None:
            passes = self._backward[task] = []

            def end() -> None:
                self._leave_backward(task)
                if one.on_backward_end is not None:
                    one.on_backward_end()

            # Autograd's thread lets go of the callback some time after the backward.
            held = [end]
            torch.autograd.Variable._execution_engine.queue_callback(lambda: held.pop()())
        if one in passes:
            return
        passes.append(one)
        options = self.options
        events: Sequence[torch.Tensor] = ()
        if grad is not None and self.world.as_on_tpu and options.optimization_barrier_in_backward:
            waits = waits_of_backward(options.backward_prefetch, options.limit_all_gathers)
            events = self.order.start_backward([grad], waits)
        one.unshard(events)
        # Recomputation of checkpointed layers inside the unit looks for parameters in the modules.
        self._install(one)

    def leave_backward(self) -> None:
        """Frees what the backward under way has gathered."""
        self._leave_backward(torch._C._current_graph_task_id())

    def _leave_backward(self, task: int) -> None:
        for one in self._backward.pop(task, ()):
            one.finish()
        self.order.end_backward()
        if not self.caches_after_backward:
            self._drop_cache()
        self._restore()

    def _end_backward_of_model(self) -> None:
        """As the root: reduces what is left, and brings to the host what belongs there."""
        units = list(dict.fromkeys([self, *unique_units(self.module)]))
        with torch.no_grad():
            for unit in units:
                unit.gradients.flush()
                unit._narrow_gradients()
        hosts = [unit.gradients.host for unit in units if unit.gradients.host is not None]
        starts = self.options.sync_on_finalization
        if starts or hosts:
            for unit in units:  # what is full would be an output of the program
                unit.leave_backward()
        for host in hosts:
            host.arrive()
        for unit in units:
            if unit.stream is not None:
                unit.stream.arrive()
        if starts:
            xlac.start_program(self.world.device)

    def _narrow_gradients(self) -> None:
        """Gives gradients the dtype that the unit computes in, if
        ``MixedPrecision(keep_low_precision_grads=True)`` asks for that.

        torch accumulates the next backward's into them as they are.
        """
        policy = self.options.mixed_precision
        if policy is None or not policy.keep_low_precision_grads or policy.param_dtype is None:
            return
        for tensor, holder, _ in self.holders():
            if holder.grad is not None and holder.is_floating_point() and not tensor.wide:
                if holder.grad.dtype is not policy.param_dtype:
                    # Only the data of a gradient may have another dtype than its parameter.
                    holder.grad.data = holder.grad.to(policy.param_dtype)

    # -- bytes ----------------------------------------------------------------------------------

    def gather(
        self, events: Sequence[torch.Tensor], backward: bool, secondary: Secondary | None
    ) -> list[torch.Tensor]:
        """Every full parameter in compute dtype, traced to run after ``events``.

        Each pass frees its tensors. So where they are cached it gets copies, which the compiler
        removes. A cache is not used once a shard has another value: a forgotten ``reshard()`` costs
        memory and is never wrong.
        """
        given = self.tensors, self.order, events, backward, secondary
        if not (self._caches_by_hand or self.caches_after_backward):
            return self.comms.gather(*given)
        if self._cached is None or self._cache_is_stale():
            self._cached = self.comms.gather(*given)
            self._cached_of = stamps(self.shards)
        return [torch.view_copy(full, full.shape) for full in self._cached]

    def reduce(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], leaves: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        """As :meth:`UnitGradients.reduce`."""
        shards, arrived = self.gradients.reduce(grads, needed, leaves)
        # At the end of the backward the order forgets.
        if self.world.as_on_tpu and torch._C._current_graph_task_id() in self._backward:
            self.order.add_reductions(arrived)
        return shards

    def _cache_is_stale(self) -> bool:
        return self._cached_of != stamps(self.shards)

    def _drop_cache(self) -> None:
        self._caches_by_hand, self._cached = False, None

    # -- by hand: fully_shard only --------------------------------------------------------------

    def unshard(self) -> None:
        """Puts full parameters into the modules, and keeps them for the next forward."""
        if self.computing or _in_backward():
            return  # gathered there anyway, when its turn comes
        self.require_not_summoned()
        self.release()
        self._caches_by_hand = True
        if self.tensors:
            one = Pass(self)
            with torch.enable_grad():
                one.gather(())
            self._install(one)
            self.unsharded = one

    def holds_full(self) -> bool:
        """Whether modules hold full parameters: in a forward or backward, and after ``unshard``.

        Raises:
            RuntimeError: after ``unshard``, and these are not the values any more.
        """
        if self.computing:
            return True
        if self.unsharded is None:
            self.settle()  # what an exception left behind
        elif self.active is not None and self._cache_is_stale():
            raise RuntimeError(
                f"parameters of {self.title!r} were changed, by an optimizer step or a load, since "
                "unshard() gathered them: call it again"
            )
        return self.active is not None

    def reshard(self) -> None:
        """Undoes :meth:`unshard`, and frees what is cached."""
        self._drop_cache()
        self.release()

    def release(self) -> None:
        """Puts the shards where ``unshard`` put full parameters; what computed with these keeps
        them.

        Raises:
            RuntimeError: they were changed or replaced, which would be lost.
        """
        held, self.unsharded = self.unsharded, None
        if held is None:
            return
        there = [place.module._parameters.get(place.name) for place in self.places]
        try:
            held.require_full_unchanged()
        except RuntimeError as error:
            raise RuntimeError(
                f"a parameter of {self.title!r} was changed between unshard() and reshard(): what "
                "is full there is this rank's copy, which is lost. Change parameters within "
                "xla_fsdp.XlaFullyShardedDataParallel.summon_full_params(model)"
            ) from error
        finally:
            self.settle()
        for place, found in zip(self.places, there, strict=True):
            if found is not held.full[place.index] and found is not place.resting:
                refuse_replacement(self.name_of(place.index))

    def rest(self) -> None:
        """Puts the shards where they belong."""
        self.release()
        self.settle()

    def set_sync(self, syncs: bool | None = None, all_reduces: bool | None = None) -> None:
        """Whether backwards reduce, and over replicas; ``None``: as before.

        Without the latter nothing is reduced either, where there are replicas: the gradient is the
        same in the end, and nowhere half-reduced in between.
        """
        self._syncs = self._syncs if syncs is None else syncs
        self._all_reduces = self._all_reduces if all_reduces is None else all_reduces
        replicated = self.world.replicas > 1
        self.gradients.require_sync = self._syncs and (self._all_reduces or not replicated)

    def set_reshard_after_forward(self, reshards: bool) -> None:
        """Whether full parameters are freed after the forward, also if this is the root."""
        self.options = replace(
            self.options, reshard_after_forward=reshards, disable_reshard_on_root=False
        )
        self.secondaries = None  # those of reshard_after_forward=<int>


def unit_of(module: nn.Module) -> FSDPState | None:
    """The unit of a wrapper, or of a module that is sharded in place; ``None`` of others."""
    return vars(module)["_unit"] if is_wrapper(module) else None


def units_in(root: nn.Module) -> list[tuple[str, FSDPState]]:
    """The units in ``root``, its own included, with the names of their modules as seen from there;
    a module that has two names comes twice."""
    modules = root.named_modules(remove_duplicate=False)
    return [(name, unit) for name, module in modules if (unit := unit_of(module)) is not None]


def unique_units(root: nn.Module) -> list[FSDPState]:
    """The units in ``root``, its own included, each once."""
    return list(dict.fromkeys(unit for _, unit in units_in(root)))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _require_inner_first(named: NamedUnits) -> None:
    """Raises RuntimeError if a module was sharded after one around it, whose parameters are in both
    units."""
    owners: dict[tuple[nn.Module, str], str] = {}
    for path, unit in named:
        for place in unit.places:
            outer = owners.setdefault((place.module, place.name), path)
            if outer != path and path.startswith(f"{outer}." if outer else ""):
                raise RuntimeError(
                    f"parameter {unit.name_of(place.index)!r} belongs to two units, that of "
                    f"{path!r} and that of {outer or 'the model'!r} around it. Call fully_shard "
                    "from the inside out, for layers first and for the whole model last; a module "
                    "that is used inside and outside of a layer is to be sharded by itself, first"
                )

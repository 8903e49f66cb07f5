"""When the parameters of an FSDP unit are full: in a forward or backward, or after ``unshard``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from .. import xlac
from ..collectives.order import Event, Order
from ..collectives.world import World
from ..layers import linear
from ..names import is_wrapper
from ..ranks.autograd_thread import in_backward
from ..tree import cast_floats, map_tensors, tensors_in
from .comm_plan import gather_waits
from .comms import SecondaryShards
from .cpu_offload import state_of
from .freeing import stamps
from .gathering import Pass, computing, computing_passes, parameters_saved_as_recipes
from .gradients import accumulate_sums
from .options import FSDPOptions
from .sharded_tensor import raise_replaced
from .unit import NamedUnits, Unit
from .user_checks import (
    compare_initial_weights,
    log_slices,
    raise_if_on_other_device,
    require_all_sharded,
    require_plain_call,
    require_uncompiled,
    require_values,
    warn_if_elsewhere,
)


class FSDPState(Unit):
    """An FSDP unit, and which of its parameters are full at the moment.

    Attributes:
        is_root: whether no other unit is around this one; unknown until the first forward.
        order: what was gathered and reduced last, shared by the units of a model.
        computing: current forwards of the unit (a module may call itself).
        active: the pass whose full parameters the modules use now.
        summoned: whether modules have full parameters outside of a forward, see summon.py.
        forward_methods: methods of the module that compute like its forward.

    Only ``fully_shard`` sets:

    Attributes:
        output_dtype: the dtype that floating-point outputs are cast to.
        unsharded: the pass whose full parameters :meth:`unshard` put into the modules.
        caches_after_backward: keep the parameters gathered for a backward until the next forward.
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
        self._secondaries: list[weakref.ref[SecondaryShards]] = []
        # Gathered last, with the states of their shards.
        self._cached: list[torch.Tensor] | None = None
        self._cached_of: list[object] = []
        self._syncs = self._all_reduces = True
        # By autograd graph task: checkpointed layers run a backward inside the outer one.
        self._backward: dict[int, list[Pass]] = {}

    def cast_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        dtype, policy = self.options.compute_dtype, self.options.mixed_precision
        if policy is not None and not policy.cast_forward_inputs:
            if self.is_root is False or not policy.cast_root_forward_inputs:
                dtype = None
        return (args, kwargs) if dtype is None else cast_floats((args, kwargs), dtype)

    def run(self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Calls ``forward``, of the module or a method, with full parameters."""
        called = type(self.module).__name__
        require_plain_call(called, args, kwargs)
        args, kwargs = self.cast_inputs(args, kwargs)
        if self.computing:  # a module that calls itself
            return forward(*args, **kwargs)
        self.release()
        if self.is_root is None:
            self._become_root()
        self.reset_after_failure()
        if self.stream is not None:
            args, kwargs = self.stream.mark_backward_end((args, kwargs))
        # In a recomputation, keep them: its backward follows immediately.
        stays = torch.is_grad_enabled() and (in_backward() or not self._frees_after_forward)
        one = self._begin((args, kwargs), stays)
        keep = False
        try:
            with parameters_saved_as_recipes(), computing((one,)):
                outputs, elsewhere = self._finish(one, forward(*args, **kwargs))
            one.require_full_unchanged()
            for slot in self.slots:
                if slot.module._parameters.get(slot.name) is not one.full[slot.index]:
                    raise RuntimeError(
                        f"the forward replaced its parameter {self.name_of(slot.index)!r} by "
                        "another tensor, but a sharded parameter cannot be replaced. Replace it "
                        "before wrapping"
                    )
            if elsewhere:
                warn_if_elsewhere(called, (args, kwargs), elsewhere, self.world.device)
            keep = stays
        except RuntimeError as error:
            raise_if_on_other_device(called, (args, kwargs), self.world.device, error)
            raise
        finally:
            self._end(one, keep)
        if self.stream is not None:
            del args, kwargs  # tensors referenced at program start become results of the program
            self.stream.end_forward()
        return outputs if self.output_dtype is None else cast_floats(outputs, self.output_dtype)

    def _become_root(self) -> None:
        """Makes the outermost unit that computes first the root of the units inside it."""
        named = [("", self), *units_in(self.module)]
        for _, unit in named:
            unit.require_not_summoned()
        if self.in_place:
            _require_inner_first(named)
        require_values(named, "the first forward was called")
        traffic = None
        for path, unit in reversed(named):  # if a unit has two names, the first one wins
            unit.is_root = unit is self
            unit.comms.label = f"{path}." if path else ""
            unit.order = self.order
            if unit.stream is not None:  # the streams of one model wait for each other
                traffic = unit.stream.traffic = traffic or unit.stream.traffic
        require_uncompiled(self.module)
        require_all_sharded(self.module, named)
        compare_initial_weights(self.world, named)
        log_slices(self.world)

    @property
    def _frees_after_forward(self) -> bool:
        if self.is_root and self.options.disable_reshard_on_root:
            return False
        return bool(self.options.reshard_after_forward)

    def _begin(self, inputs: Any, keep: bool) -> Pass:
        """Gathers for a forward on ``inputs``; ``keep``: until the backward."""
        if self.active is None:
            self.require_shards_installed()
        recomputes = in_backward()
        one = Pass(self, self._second_shards(recomputes, keep))
        if self.is_root or not (computing_passes() or recomputes):
            one.on_backward_end = self._end_backward_of_model
        if self.tensors:
            events: Sequence[torch.Tensor] = ()
            if waits := gather_waits(self.options, self.world, False):
                events = [one for one in tensors_in(inputs) if one.device == self.world.device]
                if not recomputes:
                    events = self.order.start(Event.INPUTS, events, waits)
            one.gather(events)
        self.computing += 1
        self._install(one)
        return one

    def _second_shards(self, recomputes: bool, keep: bool) -> SecondaryShards | None:
        """What a forward fills; in a recomputation, what the forward filled, if still valid."""
        world = self.secondary_world
        if world is None or not torch.is_grad_enabled() or (keep and not recomputes):
            return None
        now, known = stamps(self.shards), [one for ref in self._secondaries if (one := ref())]
        if recomputes:
            alike = (one for one in reversed(known) if one.pieces and one.shard_stamps == now)
            return next(alike, None)
        known.append(SecondaryShards(world, now))
        self._secondaries = [weakref.ref(one) for one in known]
        return known[-1]

    def require_shards_installed(self) -> None:
        self.require_not_summoned()
        for slot in self.slots:
            if slot.module._parameters.get(slot.name) is not slot.sharded_value:
                users = [reference.wrapper for reference in vars(slot.module).get(_WRAPPERS, ())]
                if len(users) - users.count(None) > 1:
                    raise RuntimeError(
                        f"the forward of {self.title} was called while another wrapper has "
                        f"gathered {self.name_of(slot.index)!r}, whose "
                        f"{type(slot.module).__name__} is part of both. Wrap that module before "
                        "them, so that both call its wrapper. If it has no forward, let one "
                        "wrapper shard both: exclude the inner layers from auto_wrap_policy"
                    )
                raise_replaced(self.name_of(slot.index))

    def require_not_summoned(self) -> None:
        if self.summoned:
            raise RuntimeError(
                f"the forward of {self.title} was called within summon_full_params or apply. "
                "Leave that context first: a forward gathers its parameters itself"
            )

    def _end(self, one: Pass, keep: bool) -> None:
        self.computing -= 1
        self._restore()
        _forget_cached_parametrizations(self.module)
        if not keep:
            one.reshard()
        if self._frees_after_forward:
            self._drop_cache()
        if not computing_passes() and not in_backward():
            self.order.end_forward()

    def _finish(self, one: Pass, outputs: Any) -> tuple[Any, set[torch.device]]:
        """``outputs``, with copies of freed parameters, and hooks that start the backward.

        Also returns other devices of outputs that require a gradient.
        """
        own = set(map(id, one.full))
        elsewhere: set[torch.device] = set()

        def finish(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in own:
                tensor = torch.view_copy(tensor, tensor.shape)
            # A leaf is no result of this unit, and would get one more hook at every step.
            if torch.is_grad_enabled() and tensor.grad_fn is not None:
                tensor.register_hook(lambda grad: self.enter_backward(one, grad))
            if tensor.requires_grad and tensor.device != self.world.device:
                elsewhere.add(tensor.device)
            return tensor

        return map_tensors(finish, outputs), elsewhere

    def _install(self, one: Pass) -> None:
        self.active = one
        for slot in self.slots:
            slot.put(one.full[slot.index])
        if self.linears:
            linear.replace_forwards(self.linears, self.world)
        self.refresh_rnns()

    def _restore(self) -> None:
        """Restores an enclosing backward's parameters, or the shards."""
        enclosing = [*chain.from_iterable(self._backward.values())]
        if enclosing:
            self._install(enclosing[-1])
        elif self.active is not None:
            self.active = None
            for slot in self.slots:
                slot.restore_sharded()
            if self.linears:
                linear.restore_forwards(self.linears)
            self.refresh_rnns()

    def reset_after_failure(self) -> None:
        """Clears state that an exception in an earlier forward or backward left behind."""
        if not self.computing and not in_backward():
            for task in list(self._backward):
                self._leave_backward(task)
            if self.stream is not None:
                self.stream.forget()
            if self.host_gradients is not None:
                self.host_gradients.forget()
            self._restore()

    def enter_backward(self, one: Pass, grad: torch.Tensor | None) -> None:
        """Gathers pass ``one`` for its backward when its first gradient arrives."""
        task = torch._C._current_graph_task_id()
        passes = self._backward.get(task)
        if passes is None:
            passes = self._backward[task] = []

            def end() -> None:
                self._leave_backward(task)
                if one.on_backward_end is not None:
                    one.on_backward_end()

            # Autograd's thread frees the callback some time after the backward.
            held = [end]
            torch.autograd.Variable._execution_engine.queue_callback(lambda: held.pop()())
        if one in passes:
            return
        passes.append(one)
        events: Sequence[torch.Tensor] = ()
        waits = gather_waits(self.options, self.world, True)
        if grad is not None and waits:
            events = self.order.start(Event.GRADIENT, [grad], waits)
        one.unshard(events)
        # Checkpointed layers inside the unit recompute, and read parameters from the modules.
        self._install(one)

    def leave_backward(self) -> None:
        self._leave_backward(torch._C._current_graph_task_id())

    def _leave_backward(self, task: int) -> None:
        for one in self._backward.pop(task, ()):
            one.finish()
        self.order.end_backward()
        if not self.caches_after_backward:
            self._drop_cache()
        self._restore()

    def _end_backward_of_model(self) -> None:
        """For the outermost unit: reduces what remains, and waits for gradients on the host."""
        units = list(dict.fromkeys([self, *unique_units(self.module)]))
        with torch.no_grad():
            accumulate_sums([pending for unit in units for pending in unit.flush_gradients()])
            for unit in units:
                unit._narrow_gradients()
        hosts = [unit.host_gradients for unit in units if unit.host_gradients is not None]
        starts = self.options.sync_on_finalization
        if starts or hosts:
            for unit in units:  # full parameters would be outputs of the program
                unit.leave_backward()
        for host in hosts:
            host.fetch()
        for unit in units:
            if unit.stream is not None:
                unit.stream.traffic.wait()
        accumulate_sums(pending for host in hosts for pending in host.take_hooked())
        if starts:
            xlac.start_program(self.world.device)

    def _narrow_gradients(self) -> None:
        """Applies ``keep_low_precision_grads``."""
        policy = self.options.mixed_precision
        if policy is None or not policy.keep_low_precision_grads or policy.param_dtype is None:
            return
        for tensor, holder, _ in self.holders():
            if tensor.unreduced:
                continue
            if holder.grad is not None and holder.is_floating_point() and not tensor.wide:
                if holder.grad.dtype is not policy.param_dtype:
                    # torch allows another dtype than the parameter's only through ``grad.data``.
                    holder.grad.data = holder.grad.to(policy.param_dtype)

    def gather(
        self, events: Sequence[torch.Tensor], backward: bool, secondary: SecondaryShards | None
    ) -> list[torch.Tensor]:
        """Every full parameter in compute dtype, traced to run after ``events``.

        Each pass frees its tensors, so it gets copies of cached ones; the compiler removes these.
        """
        given = self.tensors, self.order, events, backward, secondary
        if not (self._caches_by_hand or self.caches_after_backward):
            return self.comms.gather(*given)
        if self._cached is None or self._cache_is_stale():
            self._cached = self.comms.gather(*given)
            self._cached_of = [state_of(shard) for shard in self.shards]
        return [torch.view_copy(full, full.shape) for full in self._cached]

    def reduce(
        self, grads: Sequence[torch.Tensor | None], needed: Sequence[bool], leaves: Sequence[Any]
    ) -> list[torch.Tensor | None]:
        shards, arrived = self.reduce_gradients(grads, needed, leaves)
        # ``order`` is cleared at the end of the backward.
        if self.world.as_on_tpu and torch._C._current_graph_task_id() in self._backward:
            self.order.add_reductions(arrived)
        return shards

    def _cache_is_stale(self) -> bool:
        return self._cached_of != [state_of(shard) for shard in self.shards]

    def _drop_cache(self) -> None:
        self._caches_by_hand, self._cached = False, None

    def unshard(self) -> None:
        """Puts full parameters into the modules, where they stay for the next forward."""
        if self.computing or in_backward():
            return
        self.require_not_summoned()
        self.release()
        self._caches_by_hand = True
        if self.tensors:
            one = Pass(self)
            with torch.enable_grad():
                one.gather(())
            self._install(one)
            self.unsharded = one

    def has_full_parameters(self) -> bool:
        """Whether modules have full parameters: in a forward or backward, or after ``unshard``.

        Raises RuntimeError if the parameters have changed since ``unshard``.
        """
        if self.computing:
            return True
        if self.unsharded is None:
            self.reset_after_failure()
        elif self.active is not None and self._cache_is_stale():
            raise RuntimeError(
                f"parameters of {self.title} were changed by an optimizer step or a load after "
                "unshard() gathered them, so the gathered values are old. Call unshard() again"
            )
        return self.active is not None

    def reshard(self) -> None:
        """Undoes :meth:`unshard`, and frees cached full parameters."""
        self._drop_cache()
        self.release()

    def release(self) -> None:
        """Replaces the full parameters of ``unshard`` by the shards.

        Raises RuntimeError if full parameters were changed or replaced, which would be lost.
        """
        held, self.unsharded = self.unsharded, None
        if held is None:
            return
        there = [slot.module._parameters.get(slot.name) for slot in self.slots]
        try:
            held.require_full_unchanged()
        except RuntimeError as error:
            raise RuntimeError(
                f"a parameter of {self.title} was changed between unshard() and reshard(), but "
                "the full parameter is a temporary copy, so the change would be lost. Change "
                "parameters within "
                "xla_fsdp.XlaFullyShardedDataParallel.summon_full_params(model)"
            ) from error
        finally:
            self.reset_after_failure()
        for slot, found in zip(self.slots, there, strict=True):
            if found is not held.full[slot.index] and found is not slot.sharded_value:
                raise_replaced(self.name_of(slot.index))

    def install_shards(self) -> None:
        self.release()
        self.reset_after_failure()

    def set_sync(self, syncs: bool | None = None, all_reduces: bool | None = None) -> None:
        """Sets whether backwards reduce, and over replicas; ``None``: unchanged.

        If ``all_reduces=False`` with replicas, nothing is reduced: the sum is the same.
        """
        self._syncs = self._syncs if syncs is None else syncs
        self._all_reduces = self._all_reduces if all_reduces is None else all_reduces
        replicated = self.world.replicas > 1
        self.require_sync = self._syncs and (self._all_reduces or not replicated)

    def set_reshard_after_forward(self, reshards: bool) -> None:
        """Applies to the root too."""
        self.options = replace(
            self.options, reshard_after_forward=reshards, disable_reshard_on_root=False
        )
        self.secondary_world = None


def _forget_cached_parametrizations(root: nn.Module) -> None:
    """In torch's ``parametrize.cached()``: what it stores may be a parameter that is freed."""
    if parametrize._cache:
        inside = set(map(id, root.modules()))
        for key in list(parametrize._cache):
            if key[0] in inside:
                del parametrize._cache[key]


def unit_of(module: nn.Module) -> FSDPState | None:
    """The unit of a wrapper or of a module that is sharded in place, else ``None``."""
    return vars(module)["_unit"] if is_wrapper(module) else None


def units_in(root: nn.Module) -> list[tuple[str, FSDPState]]:
    """The units in ``root`` by module name; one with two names occurs twice."""
    modules = root.named_modules(remove_duplicate=False)
    return [(name, unit) for name, module in modules if (unit := unit_of(module)) is not None]


def unique_units(root: nn.Module) -> list[FSDPState]:
    found = map(unit_of, root.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))


def _require_inner_first(named: NamedUnits) -> None:
    """Raises RuntimeError if a module was sharded after one around it."""
    owners: dict[tuple[nn.Module, str], str] = {}
    for path, unit in named:
        for slot in unit.slots:
            outer = owners.setdefault((slot.module, slot.name), path)
            if outer != path and path.startswith(f"{outer}." if outer else ""):
                raise RuntimeError(
                    f"parameter {unit.name_of(slot.index)!r} belongs to two FSDP units, that of "
                    f"{path!r} and that of {outer or 'the model'!r} around it. Call fully_shard "
                    "from the inside out: for layers first and for the entire model last; for a "
                    "module that is used inside and outside of a layer, before both"
                )


# On a module: references to the wrappers that shard its parameters, not those of its children.
_WRAPPERS = "_xla_fsdp_wrappers"


class WrapperReference:
    """A weak reference to a wrapper."""

    def __init__(self, wrapper: nn.Module | None) -> None:
        self._known = None if wrapper is None else weakref.ref(wrapper)

    @property
    def wrapper(self) -> nn.Module | None:
        """``None`` if the wrapper is gone, or if the module was copied without it."""
        return None if self._known is None else self._known()

    def __deepcopy__(self, memo: dict) -> WrapperReference:
        return WrapperReference(memo.get(id(self.wrapper)))


def mark_sharded(module: nn.Module, *wrappers: WrapperReference) -> None:
    vars(module).setdefault(_WRAPPERS, []).extend(wrappers)


def find_outer_wrappers(module: nn.Module) -> list[nn.Module]:
    """The wrappers that shard parameters in ``module``, the outermost first, including itself."""
    inside = set(module.modules()) - {module}
    found: dict[nn.Module, None] = {}
    for inner in module.modules():
        for reference in vars(inner).get(_WRAPPERS, ()):
            wrapper = reference.wrapper
            if wrapper is not None and wrapper not in inside:
                found[wrapper] = None
    # Each contains the next, so the outermost has most modules.
    return sorted(found, key=lambda wrapper: -sum(1 for _ in wrapper.modules()))


def find_sharded_outside(module: nn.Module, units: Iterable[Unit]) -> str | None:
    """The name of a submodule that none of ``units``, those inside, shards; or ``None``."""
    held = {slot.module for unit in units for slot in unit.slots}
    for name, inner in module.named_modules():
        if _WRAPPERS in vars(inner) and inner not in held:
            return name or type(inner).__name__
    return None


def is_sharded(module: nn.Module) -> bool:
    """Whether ``module`` contains wrappers, or a wrapper around it shards its parameters."""
    return any(is_wrapper(inner) or _WRAPPERS in vars(inner) for inner in module.modules())

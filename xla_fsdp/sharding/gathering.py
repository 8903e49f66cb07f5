"""Gathers shards into full parameters in the forward, reduces full gradients in the backward.

One autograd node gathers all parameters of a unit. Its backward runs after all their gradients have
been delivered, ``None`` for an unused parameter.
"""

from __future__ import annotations

import contextlib
import copy
import enum
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from ..ranks.autograd_thread import in_backward
from ..tree import map_tensors
from ..wording import join_some
from .comms import SecondaryShards
from .freeing import Stamp, fill_, free_, stamps
from .sharded_parameter import is_user_attribute
from .sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    from .state import FSDPState


class Origin(NamedTuple):
    """The source of a full parameter: member ``member`` of ``tensor``.

    Attributes:
        alone: whether the tensor contains nothing else (it may be a flat vector or a stack).
        source: returns the pass that gathered it, as long as that exists; ``number``: there.
    """

    tensor: ShardedTensor
    member: int
    name: Callable[[], str]
    alone: bool
    source: Callable[[], Any] = lambda: None
    number: int = 0


class UnshardedParameter(torch.Tensor):
    """A full parameter in a forward and its backward: to users, the ``nn.Parameter`` of the module.

    It is no leaf, because it is computed from shards; what only the shard can answer raises.
    """

    _xla_fsdp_origin: Origin
    _is_param = True  # isinstance(it, nn.Parameter)
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if is_user_attribute(name):
            attributes = self._xla_fsdp_origin.tensor.attributes_of(self._xla_fsdp_origin.member)
            if name in attributes:
                return attributes[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if hasattr(getattr(type(self), name, None), "__set__"):
            super().__setattr__(name, value)
        else:
            origin = self._xla_fsdp_origin
            origin.tensor.attributes_of(origin.member)[name] = value

    def __delattr__(self, name: str) -> None:
        self.__getattr__(name)
        origin = self._xla_fsdp_origin
        del origin.tensor.attributes_of(origin.member)[name]

    @property
    def requires_grad(self) -> bool:
        return self._xla_fsdp_origin.tensor.shard.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.requires_grad_(value)

    def requires_grad_(self, requires_grad: bool = True) -> UnshardedParameter:
        """Raises RuntimeError if the call would change ``requires_grad``."""
        if requires_grad is not self.requires_grad:
            raise RuntimeError(
                f"requires_grad={requires_grad} was set on parameter "
                f"{self._xla_fsdp_origin.name()!r} in a forward or backward, where it would be "
                "lost. Freeze or unfreeze parameters between steps, "
                "model.get_parameter(name).requires_grad_(...)"
            )
        return self

    @property
    def data(self) -> torch.Tensor:
        """The values without a graph, which stay when the parameter is freed."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]  # a descriptor in C

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        return True

    @property
    def grad_fn(self) -> None:  # type: ignore[override]
        return None

    @property
    def grad(self) -> None:
        """None; raises RuntimeError if the shard has, or a backward may compute, a gradient."""
        tensor = self._xla_fsdp_origin.tensor
        computing = in_backward() and self.requires_grad
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
            "forward or backward: it is complete only when it is reduced over the ranks. "
            "Read or change .grad of model.parameters() after backward(), or register a hook "
            "outside of the forward, model.get_parameter(name).register_hook(...)"
        )

    def retain_grad(self) -> None:
        """Changes nothing."""

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """On the sharded parameter: called with the reduced gradient."""
        return self._hooked("register_hook").register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """On the sharded parameter: called once its gradient is reduced."""
        name = "register_post_accumulate_grad_hook"
        return self._hooked(name).register_post_accumulate_grad_hook(hook)

    def _hooked(self, method: str) -> nn.Parameter:
        origin = self._xla_fsdp_origin
        if not origin.alone:
            raise RuntimeError(
                f"{method} of parameter {origin.name()!r} is not supported, because it is stored "
                "in one tensor with others (flatten_parameters, scan_blocks) and has no separate "
                "gradient. Register the hook on a parameter of model.named_parameters(), or wrap "
                "without flatten_parameters, each block separately"
            )
        return origin.tensor.shard

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            copied = nn.Parameter(self.detach().clone(), self.requires_grad)
            origin = self._xla_fsdp_origin
            attributes = origin.tensor.attributes_of(origin.member)
            own = {name: value for name, value in attributes.items() if is_user_attribute(name)}
            copied.__dict__.update(copy.deepcopy(own, memo))
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self).__reduce_ex__(protocol)


def make_unsharded(full: torch.Tensor, origin: Origin) -> None:
    full.__class__ = UnshardedParameter
    full.__dict__["_xla_fsdp_origin"] = origin


def _raise_if_registered(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
    """Raises RuntimeError if a forward assigns a full parameter elsewhere."""
    if isinstance(parameter, UnshardedParameter) and parameter is not module._parameters.get(name):
        raise RuntimeError(
            f"a forward assigned its parameter {parameter._xla_fsdp_origin.name()!r} to the "
            f"attribute {name!r} of a {type(module).__name__}, where it would be empty after the "
            "forward. Use a local variable, or share the parameter before wrapping"
        )


register_module_parameter_registration_hook(_raise_if_registered)


class ParameterState(enum.Enum):
    """Which parameters of a unit a pass stores in device memory."""

    # The full tensors have one element each; a `SecondaryShards` may store pieces.
    SHARDED = enum.auto()
    UNSHARDED = enum.auto()  # the full parameters, in compute dtype


def raise_changed_in_forward(name: str) -> NoReturn:
    raise RuntimeError(
        f"the forward changed its parameter {name!r} (in place, through .data, or by an option "
        "such as Embedding's max_norm), but the full parameter is a temporary copy, so the change "
        "would be lost. Compute with a changed copy (w = self.weight.clamp(-1, 1), or "
        "torch.nn.utils.parametrize), or change the shards between steps, under torch.no_grad() "
        "and outside of the forward"
    )


def raise_changed_before_backward(name: str) -> NoReturn:
    raise RuntimeError(
        f"parameter {name!r} was changed between a forward and its backward (by an optimizer step, "
        "a load or in place), but the backward needs the values that the forward used. Call "
        "backward first, or run the forward again"
    )


class Pass:
    """One forward of a unit, until its backward is over.

    References go from the graph to the pass, the full tensors, the gathering node, which has only
    a weak one to the pass: all is freed with the graph, without the garbage collector.
    """

    def __init__(self, unit: FSDPState, secondary: SecondaryShards | None = None):
        self.unit = unit
        self.secondary = secondary
        self.full: list[torch.Tensor] = []
        self.state = ParameterState.SHARDED
        self.on_backward_end: Callable[[], None] | None = None
        # Taken at the gather.
        self._shard_stamps: dict[ShardedTensor, Stamp] = {}
        self._full_stamps: list[Stamp] = []

    def gather(self, events: Sequence[torch.Tensor]) -> None:
        shards = self.unit.shards
        self.full = list(Gather.apply(self, events, *shards))
        source = weakref.ref(self)
        for index, full in enumerate(self.full):
            tensor, member = self.unit.members[index]
            name = partial(self.unit.name_of, index)
            alone = not tensor.flattened
            make_unsharded(full, Origin(tensor, member, name, alone, source, index))
        self.state = ParameterState.UNSHARDED
        self._shard_stamps = dict(zip(self.unit.tensors, stamps(shards), strict=True))
        self._full_stamps = stamps(self.full)

    def require_full_unchanged(self) -> None:
        """Raises RuntimeError if the forward changed a full parameter."""
        for index, (now, before) in enumerate(
            zip(stamps(self.full), self._full_stamps, strict=True)
        ):
            if now != before:
                raise_changed_in_forward(self.unit.name_of(index))

    def require_shards_unchanged(self, index: int | None = None) -> None:
        """Raises RuntimeError if shard ``index`` (``None``: any) changed since the gather."""
        for number in range(len(self.full)) if index is None else [index]:
            tensor, _ = self.unit.members[number]
            if stamps([tensor.shard]) != [self._shard_stamps[tensor]]:
                raise_changed_before_backward(self.unit.name_of(number))

    def unshard(self, events: Sequence[torch.Tensor]) -> None:
        """Gathers after ``events`` exist; does nothing if it is gathered."""
        if self.state is ParameterState.SHARDED:
            with torch.no_grad():
                fill_(self.full, self.unit.gather(events, True, self.secondary))
            self.state = ParameterState.UNSHARDED

    def reshard(self) -> None:
        if self.state is ParameterState.UNSHARDED:
            free_(self.full, self.unit.placeholder)
            self.state = ParameterState.SHARDED

    def finish(self) -> None:
        self.reshard()
        if self.secondary is not None:
            self.secondary.pieces.clear()

    def value(self, index: int) -> torch.Tensor:
        """Full parameter ``index``, detached; gathered here if its backward has not started."""
        self.require_shards_unchanged(index)
        self.unshard(())
        return self.full[index].detach()


_passes: ContextVar[tuple[Pass, ...]] = ContextVar("xla_fsdp_passes", default=())


def computing_passes() -> tuple[Pass, ...]:
    """The passes whose forward this thread executes, outermost first."""
    return _passes.get()


@contextlib.contextmanager
def computing(passes: tuple[Pass, ...]) -> Iterator[None]:
    token = _passes.set(_passes.get() + passes)
    try:
        yield
    finally:
        _passes.reset(token)


class Gather(torch.autograd.Function):
    """``apply(source, events, *shards)`` returns every full parameter of a unit."""

    @staticmethod
    def forward(
        ctx: Any, source: Pass, events: Sequence[torch.Tensor], *shards: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.source = weakref.ref(source)
        ctx.unit = unit = source.unit
        # A view or a parameter would not be the base of its views: see Recipe.
        full = [
            one.detach() if one._base is not None or isinstance(one, nn.Parameter) else one
            for one in unit.gather(events, False, source.secondary)
        ]
        members = zip(full, unit.members, strict=True)
        frozen = [one for one, (tensor, _) in members if not tensor.shard.requires_grad]
        ctx.mark_non_differentiable(*frozen)
        return tuple(full)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        leaves = [leaf for leaf, _ in ctx.next_functions]  # one for each input that is a tensor
        unit = ctx.unit
        with torch.no_grad():
            reduced = unit.reduce(grads, needed, leaves)
        message = partial(_about_second_derivatives, unit)
        return None, None, *without_second_derivative(reduced, unit.shards, message)


def _about_second_derivatives(unit: FSDPState) -> str:
    trained = [n for n, (tensor, _) in enumerate(unit.members) if tensor.shard.requires_grad]
    names = join_some([repr(unit.name_of(number)) for number in trained], 3)
    return (
        f"the gradients of {names}, computed with create_graph=True, were differentiated again. "
        "Gradients of sharded parameters have no second derivative. Gradients of inputs have one: "
        "torch.autograd.grad(loss, inputs, create_graph=True). For a product of the Hessian and a "
        "vector, take the difference of the gradients before and after a small step of the "
        "parameters, in torch.no_grad(), along the vector; or do not wrap this module"
    )


class _NoSecondDerivative(torch.autograd.Function):
    """Identity of the first ``count`` of ``tensors``, whose backward raises."""

    @staticmethod
    def forward(
        ctx: Any, message: Callable[[], str], count: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.message = message
        return tuple(gradient.detach() for gradient in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> NoReturn:
        raise RuntimeError(ctx.message())


def without_second_derivative(
    gradients: Sequence[torch.Tensor | None],
    sources: Sequence[torch.Tensor],
    message: Callable[[], str],
) -> list[torch.Tensor | None]:
    """``gradients``, whose backward (with ``create_graph=True``) raises RuntimeError."""
    given = [gradient for gradient in gradients if gradient is not None]
    if not (torch.is_grad_enabled() and given):
        return list(gradients)
    marked = iter(_NoSecondDerivative.apply(message, len(given), *given, *sources))
    return [None if gradient is None else next(marked) for gradient in gradients]


GatherNode = Gather._backward_cls


# Saved for the backward, full parameters, their views and casts would stay in memory: recipes are
# saved instead. A view refers to its base and can be replayed; a cast's input is recorded.

# A dtype to cast to, or a view of a meta tensor: a view on XLA keeps its base alive.
Step = torch.dtype | torch.Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """``steps`` applied to full parameter ``index`` of a unit's pass."""

    source: Pass
    index: int
    steps: tuple[Step, ...]

    def rebuild(self) -> torch.Tensor:
        value = self.source.value(self.index)
        with torch.no_grad():
            for step in self.steps:
                if isinstance(step, torch.Tensor):
                    value = step._view_func_unsafe(value)
                else:
                    value = value.to(step)
        return value


_CAST = "_xla_fsdp_cast"


@dataclass(frozen=True, slots=True)
class _Cast:
    """The recipe of the result of a cast, without a strong reference to the pass."""

    source: Callable[[], Pass | None]
    index: int
    steps: tuple[Step, ...]

    def __reduce__(self) -> tuple:
        """A copy, or a pickled and loaded cast, has no recipe."""
        return type(None), ()


@contextlib.contextmanager
def parameters_saved_as_recipes() -> Iterator[None]:
    """Within, autograd saves gathered parameters, their views and casts as recipes.

    Other tensors go to the saved-tensor hooks that were active before, if any.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if outer is not None and outer[0] is _pack:
        yield
        return
    pack, unpack = (_pack, _unpack) if outer is None else _delegating(*outer)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


@dataclass(frozen=True, slots=True)
class _Saved:
    """Any other saved tensor. With hooks, autograd itself does not check for in-place changes."""

    tensor: torch.Tensor
    version: int

    def unchanged(self) -> torch.Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} that the backward needs was changed "
                f"in place after the forward used it: it is at version {self.tensor._version}, but "
                f"version {self.version} was saved. Replace the in-place operation"
            )
        return self.tensor


def _pack(tensor: torch.Tensor) -> Any:
    return recipe_of(tensor) or _Saved(tensor, tensor._version)


def _unpack(packed: Any) -> torch.Tensor:
    return packed.rebuild() if type(packed) is Recipe else packed.unchanged()


def _delegating(outer_pack: Callable, outer_unpack: Callable) -> tuple[Callable, Callable]:
    def pack(tensor: torch.Tensor) -> Any:
        return recipe_of(tensor) or (outer_pack(tensor),)

    def unpack(packed: Any) -> torch.Tensor:
        return packed.rebuild() if type(packed) is Recipe else outer_unpack(packed[0])

    return pack, unpack


def recipe_of(tensor: torch.Tensor) -> Recipe | None:
    """How to rebuild ``tensor`` from a full parameter; ``None`` if it does not come from one."""
    viewed = tensor._base
    base = tensor if viewed is None else viewed
    steps: tuple[Step, ...]
    if isinstance(base, UnshardedParameter):
        origin = base._xla_fsdp_origin
        source, index, steps = origin.source(), origin.number, ()
    else:
        cast: _Cast | None = base.__dict__.get(_CAST)
        if cast is None:
            return None
        source, index, steps = cast.source(), cast.index, cast.steps
    # Without its pass, and after a change in place, a tensor cannot be rebuilt.
    if source is None or tensor._version:
        return None
    return Recipe(source, index, steps if viewed is None else (*steps, _on_meta(tensor, viewed)))


def _on_meta(view: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(base.shape, dtype=base.dtype, device="meta")
    with torch.no_grad(), _force_original_view_tracking(True):
        try:
            return view._view_func_unsafe(empty)
        except RuntimeError:  # Tensor.view of a tensor not contiguous there; on XLA all are
            # torch caches data of operators in such a mode, and that cache is not thread-safe.
            with _ONE_AT_A_TIME, _Contiguous():
                return view._view_func_unsafe(empty)


_ONE_AT_A_TIME = threading.Lock()


class _Contiguous(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return map_tensors(
            lambda one: torch.empty(one.shape, dtype=one.dtype, device="meta"),
            func(*args, **(kwargs or {})),
        )


# Behind every cast on XLA devices. Called with its dispatch keys.
_cast = torch.library.get_kernel("aten::_to_copy", "AutogradXLA")


def _noted_cast(keys: Any, tensor: torch.Tensor, **options: Any) -> torch.Tensor:
    """Casts, and records on the result the full parameter that it casts."""
    result = _cast.call_boxed(keys, tensor, **options)
    made = recipe_of(tensor)
    if made is not None and result.device == tensor.device:
        source, steps = weakref.ref(made.source), (*made.steps, result.dtype)
        setattr(result, _CAST, _Cast(source, made.index, steps))
    return result


_OPERATORS = torch.library.Library("aten", "IMPL")
_OPERATORS.impl("_to_copy", _noted_cast, "AutogradXLA", with_keyset=True)

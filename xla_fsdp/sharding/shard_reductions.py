"""Reductions over all elements of sharded tensors, and tensors whose values are not reduced yet.

A reduction is a local one, then one collective: all ranks that share the tensor (not its replicas)
must call it. Sums are accumulated at least in float32; padding does not count. Gradients to the
shards are means over the ranks.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ..collectives.host_data import as_data, fake_cpu_tensor
from ..collectives.world import World
from ..ranks.autograd_thread import in_backward
from ..ranks.rank import is_simulated_rank
from ..tree import map_tensors, tensors_in
from .layout import ShardedParameterError, ShardSpec, spec_of, unsupported

_LABEL = "reduction over shards"


class SumOverRanks(torch.autograd.Function):
    """The sum over the ranks that share a tensor; with ``mean`` the mean, replicas included.

    Each is the backward of the other.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, world: World, mean: bool) -> torch.Tensor:
        ctx.world, ctx.mean = world, mean
        total = reduce_on_device(world.all_reduce_sum, value, world)
        if not mean:
            return total
        if world.replicas > 1:
            total = reduce_on_device(world.sum_over_replicas, total, world)
        return total / (world.size * world.replicas)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return SumOverRanks.apply(grad, ctx.world, not ctx.mean), None, None


class Shared(torch.autograd.Function):
    """A plain number with a graph that computes with local parts: its gradient is the sum of the
    ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, world: World) -> torch.Tensor:
        ctx.world = world
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_on_device(ctx.world.all_reduce_sum, grad, ctx.world), None


class _ToDevice(torch.autograd.Function):
    """The device copy of a part on the host: its backward is on autograd's thread of the device.

    Autograd has one thread for each kind of device. If both traced collectives, ranks would have
    different orders.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        ctx.spec, ctx.tensor, tensor = spec, None, spec.tensor
        if tensor is not None and tensor.shard is value:
            ctx.tensor = weakref.ref(tensor)
        return as_data(value.detach(), spec.world.device)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        tensor = None if ctx.tensor is None else ctx.tensor()
        if tensor is not None and adds_to_grad(ctx.next_functions[0][0]):
            tensor.copy.gradients.take(tensor.shard, grad.detach())
            return None, None
        if is_simulated_rank():
            return fake_cpu_tensor(grad.shape, grad.dtype), None
        world = ctx.spec.world
        if torch.is_grad_enabled() and world.size * world.replicas > 1:
            # The next backward would go through both threads, and ranks would have other orders.
            raise RuntimeError(
                f"the gradient of parameter {ctx.spec.name!r}, whose shard is on the host "
                "(cpu_offload), was computed with create_graph=True, but it has no second "
                "derivative there. Leave create_graph out, or wrap without cpu_offload"
            )
        return grad.to("cpu"), None


def to_device(value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """The copy on the device of ``value``, the local part of ``spec`` on the host."""
    if value.requires_grad:
        tensor = spec.tensor
        if tensor is not None and tensor.copy is not None and not in_backward():
            tensor.copy.gradients.forget()  # of a backward that raised
        found: torch.Tensor = _ToDevice.apply(value, spec)
        return found
    return as_data(value.detach(), spec.world.device)


def adds_to_grad(leaf: Any) -> bool | None:
    """Whether the current backward adds to ``.grad``; ``None`` in ``torch.autograd.grad``."""
    try:
        return torch._C._will_engine_execute_node(leaf)
    except RuntimeError:  # torch raises this if the leaf is not needed
        return None


class _Largest(torch.autograd.Function):
    """The maximum over the ranks, NaN if any is NaN.

    ``count``: how many of this rank's elements equal its largest one. All largest elements share
    the gradient equally.
    """

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, count: torch.Tensor | None, world: World
    ) -> torch.Tensor:
        marked = torch.stack([value, value.isnan().to(value.dtype)])
        largest, nan = reduce_on_device(world.all_reduce_max, marked, world).unbind()
        total = torch.where(nan > 0, torch.full_like(largest, math.nan), largest)
        ctx.world = world
        mine = (value == total).to(value.dtype)
        ctx.save_for_backward(mine if count is None else mine * count)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (mine,) = ctx.saved_tensors
        grad = SumOverRanks.apply(grad, ctx.world, True)
        share = mine / reduce_on_device(ctx.world.all_reduce_sum, mine, ctx.world)
        return grad * share, None, None


def reduce_on_device(
    reduce: Callable[[torch.Tensor, str], torch.Tensor], value: torch.Tensor, world: World
) -> torch.Tensor:
    """Applies ``reduce`` to ``value``, which may be on the host (``cpu_offload``)."""
    alone = world.size == world.replicas == 1
    if alone or (is_simulated_rank() and value.device != world.device):
        return value.clone()
    if value.device == world.device:
        return reduce(value, _LABEL)
    return reduce(as_data(value, world.device), _LABEL).to(value.device)


def sums(world: World, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The sums of the numbers ``parts`` over the ranks; one collective for all of a dtype."""
    totals: list[torch.Tensor] = list(parts)
    by_kind: dict[object, list[int]] = {}
    for n, part in enumerate(parts):
        by_kind.setdefault((part.dtype, part.device), []).append(n)
    for own in by_kind.values():
        together = SumOverRanks.apply(torch.stack([parts[n] for n in own]), world, False)
        for n, total in zip(own, together.unbind(), strict=True):
            totals[n] = total
    return totals


def _wide(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex() or value.dtype is torch.float64:
        return value
    return value.float() if value.is_floating_point() else value.long()


def without_padding(
    value: torch.Tensor, spec: ShardSpec, fill: Any = 0, masks: dict[Any, Any] | None = None
) -> torch.Tensor:
    """``value``, the local part of ``spec``, with ``fill`` in the padding.

    ``masks``: a cache for tensors of the same shapes, which saves tracing time.
    """
    if not spec.padded:
        return value
    masks = {} if masks is None else masks
    key = spec.layout.numel, spec.layout.shard_shape, spec.depth, spec.world, value.device
    if key not in masks:
        masks[key] = ~spec.inside(value)
    return value.masked_fill(masks[key], fill)


def _total(value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    return sums(spec.world, [without_padding(value, spec, 0).sum()])[0]


def _require_one(spec: ShardSpec, name: str) -> None:
    if spec.several:
        raise unsupported(
            name, spec, "the tensor contains several parameters, and each has a separate value"
        )


class PendingNorm(torch.Tensor):
    """The norm of a sharded tensor before its collective: a sum of powers, or a maximum.

    A list of norms is stacked before use, so one collective is enough for it. Norms of tensors that
    contain several parameters stay pending in the stack: only the norm of the stack, of the same
    order, is that of all parameters, and everything else raises ShardedParameterError. On the meta
    device, so that code that bypasses its torch function raises.
    """

    answers_first = True  # see ranks/cpu/mode.py

    _power: torch.Tensor
    _world: World
    _spec: ShardSpec | None
    _order: float
    _dtype: torch.dtype
    _norm: torch.Tensor | None
    _count: torch.Tensor | None
    _stacked: bool

    @classmethod
    def of(
        cls,
        power: torch.Tensor,
        world: World,
        spec: ShardSpec | None,
        order: float,
        dtype: torch.dtype,
        norm: torch.Tensor | None = None,
        count: torch.Tensor | None = None,
    ) -> PendingNorm:
        """``power``: this rank's sum of ``|x| ** order``; ``spec``: ``None`` if replicated."""
        made = torch.Tensor._make_subclass(cls, torch.empty((), dtype=dtype, device="meta"))
        made._power, made._world, made._spec = power, world, spec
        made._order, made._dtype, made._norm, made._count = order, dtype, norm, count
        made._stacked = norm is not None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        own = args[0] if args and isinstance(args[0], cls) else None
        with torch._C.DisableTorchFunctionSubclass():
            if own is not None:
                if func == torch.Tensor.dtype.__get__:  # type: ignore[attr-defined]
                    return own._dtype
                if func in TENSOR_METADATA:
                    return func(own._power, *args[1:], **kwargs)
                if func is torch.Tensor.to and not kwargs and args[1:] == (own._power.device,):
                    return own
                if own._stacked and func in (*_NORMS, torch.linalg.norm):
                    given = [*args[1:], kwargs.get("ord"), kwargs.get("p"), 2.0]
                    order = next(one for one in given if one is not None and one != "fro")
                    if order == own._order:
                        return func(own._norm, *args[1:], **kwargs)
            if (func is torch.stack or func is torch.cat) and set(types) == {cls}:
                return cls._stack(func, args, kwargs)
            args, kwargs = cls.added_up((args, kwargs))
        return func(*args, **kwargs)  # other arguments may be sharded tensors

    @classmethod
    def _stack(cls, func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        pending = tensors_in((args, kwargs), cls)
        args, kwargs = cls.added_up((args, kwargs), stacked=True)
        if len({one.device for one in tensors_in((args, kwargs))}) > 1:
            named = next((one._spec.name for one in pending if one._spec is not None), "")
            raise ShardedParameterError(
                "a list of norms has some of gradients on the host (cpu_offload) and some of "
                f"gradients on the device, such as that of {named!r}. Call model.clip_grad_norm_, "
                "which clips both, or torch.nn.utils.get_total_norm"
            )
        found: torch.Tensor = func(*args, **kwargs)
        for one in pending:
            if one._spec is not None and one._spec.several:
                alike = len({each._order for each in pending}) == 1
                order = one._order if alike else math.nan
                return cls.of(found, one._world, one._spec, order, found.dtype, found)
        return found

    @classmethod
    def added_up(cls, arguments: Any, stacked: bool = False) -> Any:
        """``arguments`` with norms for pending ones, in one collective; ``stacked``: to stack."""
        by_world: dict[World, list[PendingNorm]] = {}
        for one in tensors_in(arguments, cls):
            if one._spec is not None and not stacked:
                _require_one(
                    one._spec, "a list of norms, except for its norm," if one._stacked else "norm"
                )
            if one._norm is None:
                by_world.setdefault(one._world, []).append(one)
        for world, own in by_world.items():
            summed = [one for one in own if one._order != math.inf]
            parts = [one._power if one._spec else one._power / world.size for one in summed]
            for one, total in zip(summed, sums(world, parts), strict=True):
                one._norm = _root(total, one._order).to(one._dtype)
            if others := [one for one in own if one._order == math.inf]:
                powers = torch.stack([one._power for one in others])
                alone = torch.ones_like(powers[0])
                counts = [alone if one._count is None else one._count for one in others]
                norms = largest_of_ranks(powers, world, torch.stack(counts))
                for one, norm in zip(others, norms, strict=True):
                    one._norm = norm.to(one._dtype)
        return map_tensors(lambda one: one._norm, arguments, cls)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (+self).cpu().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(+self)


def _root(total: torch.Tensor, order: float) -> torch.Tensor:
    if order == 0:
        return total
    if not total.requires_grad:
        return total.sqrt() if order == 2 else total ** (1 / order)
    # The gradient of a root at 0 is infinite; that of a norm must be 0.
    zero = total == 0
    safe = torch.where(zero, torch.ones_like(total), total)
    root = safe.sqrt() if order == 2 else safe ** (1 / order)
    return torch.where(zero, torch.zeros_like(root), root)


# Functions that read no values.
TENSOR_METADATA = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "is_xla", "shape", "ndim", "requires_grad", "grad_fn", "layout",
                 "is_leaf", "is_sparse", "is_cuda", "is_cpu", "is_meta")
) | {torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.is_floating_point,
     torch.Tensor.is_complex}  # fmt: skip


def unreduced_error(what: str, name: str) -> RuntimeError:
    return RuntimeError(
        f"{what} was called while gradients of {name!r} are stored by no_sync and not reduced yet, "
        "so they would be ignored. Run the last backward before it outside of no_sync(), or drop "
        "them with model.zero_grad()"
    )


def operation_name(func: Any) -> str:
    """The name of a torch function for messages; ``.grad`` for a use of an attribute."""
    name = getattr(func, "__name__", str(func))
    if name in ("__get__", "__set__", "__delete__"):
        return f".{getattr(func.__self__, '__name__', 'attribute')}"
    return name


class UnreducedGradient(torch.Tensor):
    """A gradient that is stored and not reduced: it has metadata, but no values.

    ``zero_`` drops the stored gradient, as an assignment to ``.grad`` does. On the meta device, as
    ``PendingNorm``.
    """

    answers_first = True  # see ranks/cpu/mode.py

    _parameter: torch.Tensor
    _spec: ShardSpec

    @classmethod
    def of(cls, parameter: torch.Tensor, spec: ShardSpec) -> UnreducedGradient:
        empty = torch.empty(spec.shape, dtype=parameter.dtype, device="meta")
        made = torch.Tensor._make_subclass(cls, empty)
        made._parameter, made._spec = parameter, spec
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, mine = operation_name(func), tensors_in((args, kwargs), cls)
        with torch._C.DisableTorchFunctionSubclass():
            if name in ("zero_", "_foreach_zero_"):
                for one in mine:
                    if one._spec.tensor is not None:
                        one._spec.tensor.drop_unreduced()
                others = [one for one in tensors_in(args) if not isinstance(one, cls)]
                if others:
                    torch._foreach_zero_(others)
                return args[0]
            if name in ("detach", "detach_", "requires_grad_"):
                return args[0]
            if func in _OF_THE_PARAMETER:
                return func(args[0]._parameter)
            if func in TENSOR_METADATA:
                return func(*args, **(kwargs or {}))
        raise unreduced_error(name, mine[0]._spec.name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UnreducedGradient({self._spec.name!r}, shape={tuple(self._spec.shape)})"


_OF_THE_PARAMETER = frozenset(
    getattr(torch.Tensor, name).__get__ for name in ("device", "is_xla", "is_cpu", "is_meta")
)


def own_power(
    value: torch.Tensor, spec: ShardSpec | None, order: float, masks: dict[Any, Any] | None = None
) -> torch.Tensor:
    """This rank's sum of ``|x| ** order``; for ``inf`` the largest ``|x|``, NaN if one is NaN."""
    if value.is_complex():
        value = value.abs().to(value.dtype.to_real())  # torch_xla says that it is complex
    size = _wide(value)
    if spec is not None:
        size = without_padding(size, spec, 0 if order >= 0 else math.inf, masks)
    if order == math.inf:
        return largest(size.abs())
    if order == 0:
        return (size != 0).to(size.dtype).sum()
    return (size * size if order == 2 else size.abs() ** order).sum()


def largest(value: torch.Tensor) -> torch.Tensor:
    # XLA's maximum does not always return NaN if an element is NaN.
    return torch.where(value.isnan().any(), value.new_full((), math.nan), value.max())


def largest_of_ranks(
    value: torch.Tensor, world: World, count: torch.Tensor | None = None
) -> torch.Tensor:
    """The maximum over the ranks, NaN if any is NaN."""
    found: torch.Tensor = _Largest.apply(value, count, world)
    return found


def _count_of(largest: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    """The number of elements of ``value`` that equal ``largest``; None if that has no graph."""
    has_graph = largest.requires_grad
    return (value.detach() == largest.detach()).sum().to(value.dtype) if has_graph else None


_NORMS = (torch.linalg.vector_norm, torch.norm, torch.Tensor.norm)
_MAXIMA = (torch.max, torch.Tensor.max)
OF_REPLICATED = frozenset([*_NORMS, *_MAXIMA])


def reduce_replicated(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The norm, or the largest element on any rank, of a replicated tensor. With other arguments,
    this rank's result."""
    value, *rest = args
    given = {n: one for n, one in kwargs.items() if one is not None and one is not False}
    if func in _MAXIMA and not (rest or given):
        world = World.to_reduce_over(None, value.device)
        return largest_of_ranks(largest(_wide(value)), world).to(value.dtype)
    order = rest.pop(0) if rest else given.pop("p", given.pop("ord", None))
    order = 2.0 if order is None or order == "fro" else order
    dtype = given.pop("dtype", None)
    numeric = isinstance(order, (int, float)) and order > 0
    if func not in _NORMS or rest or given or not numeric:
        return func(*args, **kwargs)
    value = value if dtype is None else value.to(dtype)
    kept = value.dtype.to_real() if value.is_complex() else value.dtype
    power, world = own_power(value, None, order), World.to_reduce_over(None, value.device)
    return PendingNorm.of(power, world, None, float(order), kept)


def _max(value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    _require_elements(spec, "max")
    if value.is_complex():
        raise unsupported("the largest of complex numbers", spec)
    if value.dtype is torch.bool:
        return _any(value, spec)
    kept = value.dtype
    if not value.is_floating_point():  # exact beyond 2**24
        low = torch.iinfo(kept).min
        own = without_padding(value, spec, low).max()
        return reduce_on_device(spec.world.all_reduce_max, own, spec.world)
    wide = without_padding(_wide(value), spec, -math.inf)
    own = largest(wide)
    return largest_of_ranks(own, spec.world, _count_of(own, wide)).to(kept)


def _min(value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    if value.dtype is torch.bool:
        return _all(value, spec)
    if not value.is_floating_point():
        return ~_max(~value, spec)  # in order also for unsigned ones and the least of all
    return -_max(-value, spec)


def _require_elements(spec: ShardSpec, name: str) -> None:
    if not spec.numel:
        raise unsupported(name, spec, "it has no elements")


def _require_one_of_fractions(value: torch.Tensor, spec: ShardSpec, name: str) -> None:
    _require_one(spec, name)
    if not (value.is_floating_point() or value.is_complex()):
        raise unsupported(f"{name} of {value.dtype}", spec)


def _any(value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    own = without_padding(value != 0, spec, False).any().float()
    return sums(spec.world, [own])[0] > 0


def _all(value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    return ~_any(value == 0, spec)


def _sum_of(
    value: torch.Tensor, spec: ShardSpec, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if dtype is None and not (value.is_floating_point() or value.is_complex()):
        dtype = torch.int64
    kept = value.dtype if dtype is None else dtype
    wide = _wide(value if dtype is None else value.to(dtype))
    return _total(wide, spec).to(kept)


def _mean(
    value: torch.Tensor, spec: ShardSpec, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    value = value if dtype is None else value.to(dtype)
    _require_one_of_fractions(value, spec, "mean")
    return (_total(_wide(value), spec) / spec.numel).to(value.dtype)


def _var(
    value: torch.Tensor, spec: ShardSpec, *, unbiased: bool = True, correction: int | None = None
) -> torch.Tensor:
    _require_one_of_fractions(value, spec, "var")
    correction = int(unbiased) if correction is None else correction
    if value.is_complex():
        raise unsupported("the variance of complex numbers", spec)
    wide = _wide(value)
    away = wide - _mean(wide.detach(), spec)  # gradients through the mean would add up to zero
    return (_total(away * away, spec) / max(spec.numel - correction, 0)).to(value.dtype)


def _std(
    value: torch.Tensor, spec: ShardSpec, *, unbiased: bool = True, correction: int | None = None
) -> torch.Tensor:
    _require_one_of_fractions(value, spec, "std")
    variance = _var(_wide(value), spec, unbiased=unbiased, correction=correction)
    return variance.sqrt().to(value.dtype)


def norm(
    value: torch.Tensor, spec: ShardSpec, p: Any = "fro", dim: None = None,
    keepdim: bool = False, out: None = None, dtype: Any = None, **kwargs: Any,
) -> torch.Tensor:  # fmt: skip
    order = kwargs.pop("ord", p)
    if dim is not None or keepdim or out is not None or kwargs:
        raise unsupported("norm over some dimensions", spec)
    order = 2.0 if order is None or order == "fro" else order
    if not isinstance(order, (int, float)):
        raise unsupported(f"norm of order {order!r}", spec)
    value = value if dtype is None else value.to(dtype)
    kept = value.dtype.to_real() if value.is_complex() else value.dtype
    if order == -math.inf:
        _require_one(spec, "norm")
        return _min(_wide(value.abs().to(kept)), spec).to(kept)
    if order == math.inf:
        _require_elements(spec, "norm")
    power, count = own_power(value, spec, order), None
    if order == math.inf and power.requires_grad:
        count = _count_of(power, without_padding(_wide(value.detach().abs()), spec))
    return PendingNorm.of(power, spec.world, spec, float(order), kept, count=count)


def _linalg_norm(
    value: torch.Tensor, spec: ShardSpec, ord: Any = None, dim: None = None, *rest: Any, **kw: Any
) -> torch.Tensor:
    if ord is not None and len(spec.shape) > 1:
        raise unsupported("a matrix norm", spec)
    return norm(value, spec, ord, dim, *rest, **kw)


# Called with the local part, the spec and torch's further arguments, except dimensions.
REDUCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "sum": _sum_of, "mean": _mean, "max": _max, "min": _min, "amax": _max, "amin": _min,
    "any": _any, "all": _all, "var": _var, "std": _std, "norm": norm,
    "linalg_vector_norm": norm, "linalg_norm": _linalg_norm,
    "count_nonzero": lambda value, spec: _total(value != 0, spec),
}  # fmt: skip


def reduce(name: str, value: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Applies the reduction ``name`` of REDUCTIONS to all elements of the sharded ``value``."""
    spec = spec_of(value)
    assert spec is not None
    if kwargs.get("dim", ()) is None:
        del kwargs["dim"]
    if name in ("var", "std") and args and isinstance(args[0], bool):
        args, kwargs = args[1:], {**kwargs, "unbiased": args[0]}
    elif args and args[0] is None:
        args = args[1:]
    local = value.as_subclass(torch.Tensor)
    try:
        inspect.signature(REDUCTIONS[name]).bind(local, spec, *args, **kwargs)
    except TypeError:
        raise unsupported(f"{name} over some dimensions, or with these arguments,", spec) from None
    found = REDUCTIONS[name](local, spec, *args, **kwargs)
    return found.byte() if name in ("any", "all") and local.dtype is torch.uint8 else found


def all_true(value: torch.Tensor, spec: ShardSpec) -> bool:
    """Whether all elements of ``value``, on all ranks, are true. Waits for the device."""
    return bool(_all(value, spec))

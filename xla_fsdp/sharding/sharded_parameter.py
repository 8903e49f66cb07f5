"""The types of sharded parameters and of values computed from them: what each torch operation does.

The table is in ``docs/reference/sharded-parameters.md``.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat, starmap
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from ..collectives.order import with_own_buffer
from ..tree import map_tensors, tensors_in
from . import shard_reductions as reductions
from .layout import SPEC, ShardedParameterError, ShardSpec, spec_of, unsupported
from .shard_reductions import UnreducedGradient, operation_name


class _Sharded:
    answers_first = True  # see ranks/cpu/mode.py

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for kind in (UnreducedGradient, reductions.PendingNorm):
            if kind in types:  # it replaces its own tensors, and calls `func` again
                return kind.__torch_function__(func, types, args, kwargs)
        with on_local_parts():
            answer, kwargs = _answer_of(func), kwargs or {}
            # `torch.where` has a condition before its input, `torch.result_type` a scalar.
            if not args and not {"condition", "scalar"} & kwargs.keys():
                name = next((one for one in _FIRST if one in kwargs), None)
                args = () if name is None else (kwargs.pop(name),)
            try:
                if answer in _COMPUTING:
                    args, kwargs = _on_device(func, args, kwargs)
                return answer(func, args, dict(kwargs))
            except ShardedParameterError:
                divided = any(spec.world.size > 1 for spec in _specs((args, kwargs)))
                if divided or getattr(func, "__name__", "") == "__set__":
                    raise
                # On one rank the local parts are the full tensors; a full view shares memory.
                mine = map_tensors(_full, args)
                found = func(*mine, **map_tensors(_full, kwargs))
                return args[0] if args and found is mine[0] else found

    def to_local(self) -> torch.Tensor:
        """This rank's part, a plain tensor without a graph that shares memory."""
        return local(self)  # type: ignore[arg-type]

    def full_tensor(self) -> torch.Tensor:
        """The full tensor on the device. All ranks must call it.

        Its gradient goes to the shards, as the mean over all ranks.
        """
        spec = self.__dict__[SPEC]
        with on_local_parts():
            on_device = self.device == spec.world.device  # type: ignore[attr-defined]
            own = self if on_device else reductions.to_device(self, spec)  # type: ignore[arg-type]
            full: torch.Tensor = _FullTensor.apply(own, spec)
        return full

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """As for any tensor; not called in a backward that gives the tensor no gradient."""
        spec = self.__dict__[SPEC]

        def call(grad: torch.Tensor | None) -> Any:
            return None if grad is None else _result_of_hook(hook(as_sharded(grad, spec)), spec)

        return torch.Tensor.register_hook(self, call)  # type: ignore[arg-type]

    def require_plain(self, operation: str) -> None:
        """Raises ShardedParameterError if other ranks have other parts, see ranks/cpu."""
        spec = self.__dict__[SPEC]
        if spec.world.size > 1:
            raise unsupported(operation, spec, "it would combine the shards of different elements")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with on_local_parts():
                if self.grad_fn is not None:  # type: ignore[attr-defined]
                    raise RuntimeError(
                        "a tensor that is the result of an operation with a graph cannot be "
                        "deep-copied. Call detach() on it first"
                    )
                twin = local(self).clone().requires_grad_(self.requires_grad)  # type: ignore[attr-defined,arg-type]
            memo[id(self)] = twin
            twin.__class__ = type(self)  # type: ignore[assignment]
            own = {name: value for name, value in vars(self).items() if is_user_attribute(name)}
            twin.__dict__.update(copy.deepcopy(own, memo))
            twin.__dict__[SPEC] = self.__dict__[SPEC]
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A plain CPU tensor, so that files need neither this package nor torch_xla.

        ``xm.save`` copies each value by ``copy.copy``, which gives it too.
        """
        return local(self).cpu().__reduce_ex__(protocol)  # type: ignore[arg-type]

    def __repr__(self, *, tensor_contents: Any = None) -> Any:
        spec: ShardSpec = self.__dict__[SPEC]
        kind, shape = type(self).__name__, tuple(spec.shape)
        own = local(self)  # type: ignore[arg-type]
        return f"{kind}({spec.name!r}, shape={shape}, local={own!r})"

    def __format__(self, spec: str) -> str:
        return repr(self)


class _FullTensor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
        ctx.spec = spec
        full: torch.Tensor = spec.gather(own.detach())
        return full

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        mean = reductions.SumOverRanks.apply(grad, ctx.spec.world, True)
        return ctx.spec.cut(mean), None


class ShardedValue(_Sharded, torch.Tensor):  # type: ignore[misc]  # __repr__ is typed
    """This rank's part of a value computed from a sharded parameter."""


class ShardedParameter(_Sharded, nn.Parameter):  # type: ignore[misc]  # __repr__ is typed
    """This rank's shard of a parameter."""

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> Any:
        # Autograd also calls hooks of parameters that get no gradient from their unit's node.
        came = [False]

        def note(grad: torch.Tensor | None) -> None:
            came[0] = grad is not None

        def after(parameter: torch.Tensor) -> None:
            return hook(parameter) if came[0] else None

        torch.Tensor.register_hook(self, note)
        return torch.Tensor.register_post_accumulate_grad_hook(self, after)

    def _use_count(self) -> NoReturn:
        """Called by ``torch.utils.swap_tensors``."""
        raise ShardedParameterError(
            f"torch.utils.swap_tensors would replace parameter {self.__dict__[SPEC].name!r} by "
            "another tensor, but the wrapper gathers this one. Copy values into it, under "
            "torch.no_grad(): parameter.copy_(full)"
        )


# All other attributes are the user's.
_OURS = "_xla_fsdp_"


def is_user_attribute(attribute: str) -> bool:
    return not attribute.startswith(_OURS)


def make_sharded(parameter: nn.Parameter, spec: ShardSpec) -> None:
    if type(parameter) is nn.Parameter:
        parameter.__class__ = ShardedParameter
    parameter.__dict__[SPEC] = spec


def as_sharded(value: torch.Tensor, spec: ShardSpec) -> Any:
    """Makes ``value``, this rank's part of ``spec``, a ``ShardedValue``."""
    if type(value) is torch.Tensor:
        value.__class__ = ShardedValue
        value.__dict__[SPEC] = spec
    return value


# Within, operations treat sharded tensors as the plain local tensors.
on_local_parts = torch._C.DisableTorchFunctionSubclass


def local(value: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``value`` without a graph, or ``value`` if it is not sharded."""
    if not isinstance(value, _Sharded):
        return value
    with on_local_parts():
        return value.detach()


Answer = Callable[[Any, tuple, dict[str, Any]], Any]

# These read no values, or return only this tensor.
_PLAIN = frozenset(
    """element_size is_floating_point is_complex
    is_signed is_contiguous is_inference is_pinned is_shared get_device data_ptr
    storage_offset untyped_storage retain_grad register_hook
    register_post_accumulate_grad_hook requires_grad_ __hash__ __dir__ is_tensor
    is_conj is_neg is_distributed is_coalesced _has_compatible_shallow_copy_type _is_view
    is_set_to can_cast new_empty new_zeros new_ones new_full new_tensor
    has_names _is_zerotensor _is_functional_tensor _nested_tensor_size""".split()
)
# Names of the first argument.
_FIRST = ("input", "self", "tensor", "x", "A")
# The same elements, moved, cast or with new values.
_SAME_ELEMENTS = frozenset(
    """detach detach_ clone contiguous to cpu xla cuda type float double half bfloat16 int long
    short char byte bool chalf cfloat cdouble pin_memory zeros_like ones_like empty_like full_like
    zero_ fill_ constant_ alias type_as conj resolve_conj resolve_neg real imag positive
    __pos__""".split()
)
# Elementwise, but not tagged as pointwise.
_POINTWISE = frozenset(
    """isfinite isinf isnan isreal isclose isposinf isneginf signbit fix masked_fill where
    float_power square clip rsub nan_to_num floor_divide""".split()
)
_ALIASES = {
    "multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub", "absolute": "abs",
    "negative": "neg", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le",
    "not_equal": "ne", "arccos": "acos", "arcsin": "asin", "arctan": "atan", "arctan2": "atan2",
    "arccosh": "acosh", "arcsinh": "asinh", "arctanh": "atanh",
    "special_expit": "sigmoid",
}  # fmt: skip
_OPERATORS = {
    "truediv": "div", "rdiv": "div", "rtruediv": "div", "floordiv": "floor_divide",
    "rfloordiv": "floor_divide", "mod": "remainder",
    "rmod": "remainder", "rpow": "pow", "radd": "add", "rmul": "mul", "invert": "bitwise_not",
    "and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "rand": "bitwise_and",
    "ror": "bitwise_or", "rxor": "bitwise_xor", "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
}  # fmt: skip
_OPERATORS_IN_PLACE = ("iadd", "isub", "imul", "idiv", "itruediv", "ifloordiv", "imod", "ipow",
                       "iand", "ior", "ixor", "ilshift", "irshift")  # fmt: skip
_METADATA: dict[str, Callable[..., Any]] = {
    "shape": lambda shape: shape,
    "size": lambda shape, dim=None: shape if dim is None else shape[dim],
    "dim": len, "ndim": len, "ndimension": len,
    "numel": torch.Size.numel, "nelement": torch.Size.numel,
    "__len__": lambda shape: len(torch.empty(shape, device="meta")),
    "dim_order": lambda shape, **_: tuple(range(len(shape))),
    "stride": lambda shape, dim=None: _strides(shape) if dim is None else _strides(shape)[dim],
}  # fmt: skip


def is_pointwise(name: str) -> bool:
    """Whether torch's function ``name`` is elementwise and draws no random numbers."""
    base = name.rstrip("_")
    if name.startswith("__") and name.endswith("__"):
        base = name.strip("_")
        base = base[1:] if base in _OPERATORS_IN_PLACE else base
        base = _OPERATORS.get(base, base)
    if name in _POINTWISE or base in _POINTWISE:
        return True
    packet = getattr(torch.ops.aten, _ALIASES.get(base, base), None)
    if packet is None:
        return False
    tags = {tag for one in packet.overloads() for tag in getattr(packet, one).tags}
    return torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags


@functools.cache
def _answer_of(func: Any) -> Answer:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        descriptor = func.__self__
        attribute = getattr(getattr(descriptor, "fget", None) or descriptor, "__name__", "")
        read, written = _ATTRIBUTES.get(attribute, (_plain, _plain))
        return read if name == "__get__" else written
    if name in _ANSWERS:
        return _ANSWERS[name]
    if name.startswith(("_foreach_", "_fused_")):
        return _foreach
    return _pointwise if is_pointwise(name) else _unsupported


def _specs(value: Any) -> Iterator[ShardSpec]:
    return (spec for spec in map(spec_of, tensors_in(value)) if spec is not None)


def _unsupported(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    spec = next(_specs((args, kwargs)), None)
    if spec is None:  # a shard under construction
        return func(*args, **kwargs)
    why = ""
    if getattr(func, "__name__", "").rstrip("_") in _RANDOM:
        why = "ranks would draw equal values for different elements, or replicas different values"
    raise unsupported(operation_name(func), spec, why)


_RANDOM = frozenset(
    """normal uniform bernoulli exponential random geometric cauchy log_normal rand_like randn_like
    randint_like dropout rrelu alpha_dropout feature_dropout""".split()
)


def _plain(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _metadata(answer: Callable[..., Any], func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    spec = spec_of(args[0])
    if spec is None:  # another argument is sharded
        return func(*args, **kwargs)
    if answer is len and spec.several and isinstance(args[0], nn.Parameter):
        raise unsupported(
            "the number of dimensions", spec, "the tensor contains several parameters, and theirs "
            "may differ. Choose parameter groups by name, model.named_parameters(); leave "
            "memory_format out of model.to(), because XLA chooses how tensors are stored"
        )  # fmt: skip
    return answer(spec.shape, *[one for one in args[1:] if not isinstance(one, type)], **kwargs)


def _bytes(func: Any, args: tuple, kwargs: dict[str, Any]) -> int:
    own: torch.Tensor = args[0]
    return torch.Size(own.__dict__[SPEC].shape).numel() * own.element_size()


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return tuple(shape[dim + 1 :].numel() for dim in range(len(shape)))


def _full(value: torch.Tensor) -> torch.Tensor:
    spec = spec_of(value)
    return value if spec is None else spec.gather(value)


def _same_elements(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    spec = spec_of(args[0])
    if spec is not None:
        kwargs.pop("memory_format", None)  # one of the full tensor's dimensions
    found = func(*args, **kwargs)
    return found if spec is None else as_sharded(found, spec)


def _get_grad(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    spec = spec_of(args[0])
    if spec is not None and spec.tensor is not None and spec.tensor.unreduced:
        return UnreducedGradient.of(args[0], spec)
    return _same_elements(func, args, kwargs)


def _set_grad(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    spec = spec_of(args[0])
    if len(args) > 1:  # else the attribute is deleted
        _copy(func, args, kwargs)
    else:
        func(*args)
    if spec is not None and spec.tensor is not None:
        spec.tensor.drop_unreduced()


def _part(name: str, spec: ShardSpec | None, value: Any) -> Any:
    theirs = spec_of(value)
    if spec is None:
        assert theirs is not None
        raise unsupported(f"{name} into a tensor that is not sharded", theirs)
    if not isinstance(value, torch.Tensor):
        return value
    if theirs is not None:
        if spec is not theirs and spec != theirs:
            raise unsupported(name, spec, f"the other one is sharded differently: {theirs.name!r}")
        return value
    if value.shape != spec.shape:
        if value.numel() == 1 and name == "copy_":
            return value.reshape(())
        raise unsupported(
            name, spec, f"a plain tensor must have the full shape, got {list(value.shape)}. "
            "To write only this rank's shard, call parameter.to_local().copy_(part)"
        )  # fmt: skip
    with torch.no_grad():
        return as_sharded(spec.cut(value), spec)


def _result_of_hook(found: Any, spec: ShardSpec) -> Any:
    """The gradient that a hook returned: sharded, full, or this rank's part."""
    if type(found) is torch.Tensor and found.shape == spec.local_shape != spec.shape:
        return as_sharded(found, spec)
    return _part("the result of a hook", spec, found)


def _copy(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Handles ``copy_``, ``parameter.data = value`` and ``parameter.grad = value``."""
    if func.__name__ == "__delete__" or len(args) + ("other" in kwargs) < 2:
        return func(*args, **kwargs)  # raises, as for any tensor
    own, value, *rest = args if len(args) > 1 else (*args, kwargs.pop("other"))
    if func.__name__ == "copy_" and isinstance(value, (int, float, complex)):
        value = torch.tensor(value, device="cpu")
    part = _part(operation_name(func), spec_of(own), value)
    if isinstance(part, torch.Tensor):
        # torch does not move attributes; torch_xla gives the target the shape of a CPU number.
        if func.__name__ == "__set__" or not part.dim():
            part = part.to(own.device)
        if func.__name__ == "copy_" and part.dtype == own.dtype:
            part = with_own_buffer(part)
    return func(own, part, *rest, **kwargs)


def _common_spec(name: str, tensors: Iterable[torch.Tensor]) -> ShardSpec | None:
    """The spec that all ``tensors`` except numbers share, if any."""
    spec, plain = None, None
    for one in tensors:
        theirs = one.__dict__.get(SPEC)
        if theirs is None:
            plain = one if plain is None and one.numel() != 1 else plain
        elif spec is None:
            spec = theirs
        elif spec is not theirs and spec != theirs:
            raise unsupported(
                name, spec, f"{theirs.name!r} of shape {list(theirs.shape)} is sharded differently"
            )
    if spec is not None and plain is not None:
        raise unsupported(
            name, spec, f"the other tensor, of shape {list(plain.shape)}, is not sharded"
        )
    return spec


def _written(name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the function changes in place, or ``None``."""
    in_place = name.endswith("_") and not name.endswith("__")
    in_place |= name.strip("_") in _OPERATORS_IN_PLACE
    return args[0] if in_place else kwargs.get("out")


def _spec_of_all(func: Any, arguments: Any) -> ShardSpec:
    spec = _common_spec(operation_name(func), tensors_in(arguments))
    assert spec is not None, "one of the arguments is sharded"
    return spec


def _pointwise(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    name = operation_name(func)
    tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
    spec = _common_spec(name, tensors)
    written = _written(name, args, kwargs)
    if written is not None and spec_of(written) is None:
        return _unsupported(func, args, kwargs)
    if name == "where" and len(args) + len(kwargs) == 1:  # returns positions of elements
        return _unsupported(func, args, kwargs)
    if spec is not None and None in map(spec_of, tensors):

        def number(value: torch.Tensor) -> torch.Tensor:
            """A plain number in a shape that fits; all ranks contribute to its gradient."""
            if spec_of(value) is not None:
                return value
            if value.dim() > len(spec.shape):
                raise unsupported(name, spec, f"the other tensor has shape {list(value.shape)}")
            # A parameter without dimensions has a shard with one, and counts in type promotion.
            value = value.reshape(1) if value.dim() > 1 or not spec.shape else value
            return _shared(value, spec)

        args, kwargs = map_tensors(number, (args, kwargs))
    found = func(*args, **kwargs)
    if isinstance(found, tuple) and spec is not None:  # frexp
        return type(found)(as_sharded(one, spec) for one in found)
    return found if spec is None else as_sharded(found, spec)


def _shared(value: Any, spec: ShardSpec | None) -> Any:
    """``value``; all ranks contribute to its gradient if it is plain and has one."""
    plain = spec is not None and isinstance(value, torch.Tensor) and spec_of(value) is None
    if not plain or not (value.requires_grad and torch.is_grad_enabled()):
        return value
    return reductions.Shared.apply(value, spec.world)  # type: ignore[union-attr]


def _viewed_as(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Never a copy: torch finds the leaf of a graph by ``view_as``."""
    return _pointwise(func, args, kwargs)


def _of_metadata(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Answers from shapes and dtypes of full tensors."""

    def empty(value: torch.Tensor) -> torch.Tensor:
        shape = getattr(spec_of(value), "shape", value.shape)
        return torch.empty(shape, dtype=value.dtype, device="meta")

    return func(*map_tensors(empty, args), **map_tensors(empty, kwargs))


def _foreach(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    name = operation_name(func)
    if name in ("_foreach_norm", "_foreach_max"):
        of = torch.norm if name == "_foreach_norm" else torch.max
        order = args[1:] or ([kwargs["ord"]] if "ord" in kwargs else [])
        dtype = {"dtype": kwargs["dtype"]} if "dtype" in kwargs else {}
        reduce = {False: _reduction, True: reductions.reduce_replicated}
        return [
            reduce[getattr(type(each), "replicated", False)](of, (each, *order), dtype)
            for each in args[0]
        ]
    given = (*args, *kwargs.values())
    lists = [one for one in given if isinstance(one, (list, tuple)) and one]
    lists = [one for one in lists if isinstance(one[0], torch.Tensor)]
    rest = [one for one in given if isinstance(one, torch.Tensor)]
    specs = [_common_spec(name, [*together, *rest]) for together in zip(*lists, strict=False)]
    if torch.is_grad_enabled():

        def shared(given: Any) -> Any:
            """``given``, to whose plain tensors all ranks contribute gradients."""
            if isinstance(given, (list, tuple)):  # of another length, torch raises
                return [*starmap(_shared, zip(given, chain(specs, repeat(None)), strict=False))]
            return _shared(given, next(filter(None, specs), None))

        args = tuple(map(shared, args))
        kwargs = {name: shared(value) for name, value in kwargs.items()}
    if name == "_foreach_copy_":
        own, values, *others = args if len(args) > 1 else (*args, kwargs.pop("src"))
        args = (own, list(map(with_own_buffer, values)), *others)
    found = func(*args, **kwargs)
    if isinstance(found, (list, tuple)):
        for value, spec in zip(found, specs, strict=True):
            if spec is not None:
                as_sharded(value, spec)
    return found


def _reduction(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    name = operation_name(func)
    value = args[0]
    other = args[1] if len(args) > 1 else kwargs.get("other")
    if spec_of(value) is None or isinstance(other, torch.Tensor):
        if name in ("max", "min"):
            return _pointwise(func, args, kwargs)
        return _unsupported(func, args, kwargs)
    found = reductions.reduce(name, value, *args[1:], **kwargs)
    # The method computes a single norm; code that computes norms of a list uses functions.
    return reductions.PendingNorm.added_up(found) if func is torch.Tensor.norm else found


def _any_on_host(values: Iterable[Any]) -> bool:
    """Whether a sharded tensor is on the host. Runs at every operation, so it makes no lists."""
    for one in values:
        if isinstance(one, torch.Tensor):
            if one.is_cpu and SPEC in one.__dict__:
                return True
        elif isinstance(one, (list, tuple)) and _any_on_host(one):
            return True
    return False


def _on_device(func: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments on one device (``cpu_offload``).

    On that of what is changed in place; on the XLA device if the result has a graph, or if some
    sharded arguments are there.
    """
    if not (_any_on_host(args) or _any_on_host(kwargs.values())):
        return args, kwargs
    tensors = tensors_in((args, kwargs))
    sharded = [one for one in tensors if SPEC in one.__dict__]
    on_host = [one for one in sharded if one.is_cpu]
    of_host: ShardSpec = on_host[0].__dict__[SPEC]
    device = of_host.world.device
    if written := tensors_in(_written(operation_name(func), args, kwargs)):
        device = written[0].device
    elif len(on_host) == len(sharded):
        has_graph = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        device = device if has_graph else on_host[0].device

    def moved(value: torch.Tensor) -> torch.Tensor:
        spec = spec_of(value)
        if value.device == device or (spec is None and device.type == "cpu"):
            return value
        if device.type == "cpu":
            found = value.to(device)
        else:
            found = reductions.to_device(value, spec or of_host)
        return found if spec is None else as_sharded(found, spec)

    found: tuple[tuple, dict[str, Any]] = map_tensors(moved, (args, kwargs))
    return found


def _with_second(args: tuple, kwargs: dict[str, Any]) -> tuple:
    """``args`` with the second tensor, which may be in ``kwargs``."""
    name = "other" if "other" in kwargs else "tensor"
    return args if len(args) > 1 else (*args, kwargs.pop(name))


def _equal(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    first, second, *_ = _with_second(args, kwargs)
    if (spec_of(first) or first).shape != (spec_of(second) or second).shape:
        return False
    return reductions.all_true(torch.eq(first, second), _spec_of_all(func, (first, second)))


def _all_close(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    spec = _spec_of_all(func, (args, kwargs))
    return reductions.all_true(torch.isclose(*args, **kwargs), spec)


def _dot(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    spec = _spec_of_all(func, (args, kwargs))
    first, second, *rest = _with_second(args, kwargs)
    if rest or kwargs or len(spec.shape) != 1 or first.is_complex():
        return _unsupported(func, args, kwargs)
    return reductions.REDUCTIONS["sum"](first * second, spec)


def _dist(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    spec = _spec_of_all(func, (args, kwargs))
    first, second, *order = _with_second(args, kwargs)
    return reductions.norm(first - second, spec, *(order or [kwargs.get("p", 2.0)]))


def _set_items(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Handles ``value[mask] = number`` and ``value[...] = other``."""
    own, key, value = args
    if key is Ellipsis or (isinstance(key, slice) and key == slice(None)):
        if isinstance(value, torch.Tensor):
            _copy(torch.Tensor.copy_, (own, value), {})
        else:
            own.fill_(value)
        return None
    number = not isinstance(value, torch.Tensor) or (value.numel() == 1 and spec_of(value) is None)
    if not (isinstance(key, torch.Tensor) and key.dtype is torch.bool and number):
        return _unsupported(func, args, kwargs)
    spec = _common_spec("an assignment", [own, key])
    if spec is None or spec_of(key) is None or spec_of(own) is None:
        return _unsupported(func, args, kwargs)
    key = as_sharded(key.to(own.device), spec)
    own.masked_fill_(key, value.reshape(()) if isinstance(value, torch.Tensor) else value)
    return None


def _non_finite_check(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Handles a gradient scaler's check of gradients: one collective for each world."""
    grads, found, inverse = args
    for grad in grads:
        spec = spec_of(grad)
        if spec is not None and spec.padded:
            grad.copy_(reductions.without_padding(grad, spec))
    func(grads, found, inverse)
    for world in dict.fromkeys(spec.world for spec in map(spec_of, grads) if spec is not None):
        found.copy_(reductions.reduce_on_device(world.all_reduce_max, found, world))
    return None


def _gradient_of(output: Any, given: Any) -> Any:
    """This rank's part of ``given``, the gradient that the user passes to a backward of
    ``output``."""
    spec = spec_of(output)
    if spec is None or given is None:
        return given
    if type(given) is torch.Tensor and given.shape != spec.shape:
        raise unsupported(
            "the gradient given to a backward", spec, "it must have the full shape, got "
            f"{list(given.shape)}. Pass the full gradient, or torch.ones_like(value)"
        )  # fmt: skip
    return _part("a backward", spec, given).to(output.device)


def _backward(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    own, *rest = args
    gradient = rest.pop(0) if rest else kwargs.pop("gradient", None)
    func(own, _gradient_of(own, gradient), *rest, **kwargs)


def _autograd_grad(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    outputs, inputs = args  # tuples: torch completes its arguments
    given = kwargs["grad_outputs"]
    if given is not None:
        given = [given] if isinstance(given, torch.Tensor) else given
        kwargs["grad_outputs"] = list(map(_gradient_of, outputs, given))
    found = func(*args, **kwargs)
    for one, grad in zip(inputs, found, strict=True):
        spec = spec_of(one)
        if spec is not None and grad is not None:
            as_sharded(grad, spec)
    return found


_ANSWERS: dict[str, Answer] = {
    **dict.fromkeys(_PLAIN, _plain),
    **dict.fromkeys(_SAME_ELEMENTS, _same_elements),
    **dict.fromkeys(reductions.REDUCTIONS, _reduction),
    **{name: functools.partial(_metadata, answer) for name, answer in _METADATA.items()},
    "copy_": _copy,
    "equal": _equal,
    "allclose": _all_close,
    "dot": _dot,
    "vdot": _dot,
    "inner": _dot,
    "dist": _dist,
    "result_type": _of_metadata,
    "is_same_size": _of_metadata,
    "view_as": _viewed_as,
    "expand_as": _viewed_as,
    "reshape_as": _viewed_as,
    "backward": _backward,
    "grad": _autograd_grad,  # torch.autograd.grad
    "__setitem__": _set_items,
    "_amp_foreach_non_finite_check_and_unscale_": _non_finite_check,
}
# Attributes that are read, and set or deleted, in another way than those of a plain tensor.
_ATTRIBUTES: dict[str, tuple[Answer, Answer]] = {
    **dict.fromkeys(["T", "mT", "H", "mH", "__cuda_array_interface__"], (_unsupported,) * 2),
    **dict.fromkeys(["real", "imag"], (_same_elements, _unsupported)),
    **dict.fromkeys(["grad", "_grad"], (_get_grad, _set_grad)),
    **{name: (_ANSWERS[name], _plain) for name in ("shape", "ndim")},
    "data": (_same_elements, _copy),
    "nbytes": (_bytes, _plain),
}


# Those whose results have a graph if the arguments have one.
_COMPUTING = frozenset([_pointwise, _reduction, _dot, _dist, _foreach, _equal, _all_close])

"""What scanned blocks must not be or do, because a loop would give wrong results."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .. import xlac
from ..checkpoint.readable_tensor import same_bits
from ..consolidate.format.dtypes import is_dense
from ..names import dotted
from ..ranks.cpu.mode import DRAWS, HOST_DRAWS, READS, reads_to_host, xla_tensors
from ..sharding.freeing import fill_, stamps
from ..sharding.gathering import GatherNode, raise_changed_in_forward
from ..sharding.mixed_precision import is_float32_hook
from ..sharding.sharded_tensor import raise_replaced, sharded_tensor_of
from ..tree import tensors_in

if TYPE_CHECKING:
    from .unit import ScanUnit

Described = dict[str, Any]

_MACHINERY = frozenset(vars(nn.Module())) - {"training"}
_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
)
# Attributes of this package are not compared.
_OURS = "_xla_fsdp"
_MUST_BE_EQUAL = "blocks must be equal in all but the values of parameters and buffers"
_MAKE_EQUAL = "Make them equal, or wrap each block separately"
_BY_VALUE = (bool, int, str, bytes, range, torch.dtype, torch.device, types.CodeType)


def describe(block: nn.Module) -> Described:
    """What must be equal in all blocks, by dotted name in the block."""
    found: Described = {}
    first: dict[int, str] = {}
    for path, module in block.named_modules(remove_duplicate=False):
        # parametrize gives each module a new class.
        found[path or "the block"] = parametrize.type_before_parametrizations(module)
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                own = dotted(path, name)
                found[own] = None if tensor is None else _tensor(kind, tensor, first, own)
        for name, _ in module._buffers.items():  # those of torch.jit are no dict
            if name in module._non_persistent_buffers_set:
                found[f"persistence of {dotted(path, name)}"] = False
        require_no_hooks(path, module)
        if isinstance(module, nn.RNNBase):
            raise ValueError(
                f"module {path!r} of a block is a recurrent {type(module).__name__}, which "
                "scan_blocks does not support. Wrap each block separately"
            )
    return found


def require_no_hooks(path: str, module: nn.Module) -> None:
    for hooks in _HOOKS:
        registered = getattr(module, hooks, None) or {}
        if not all(map(is_float32_hook, registered.values())):
            raise ValueError(
                f"module {path or type(module).__name__!r} of a block has hooks "
                f"({hooks.strip('_')}). Scanned blocks are traced once for all, so a hook would be "
                "called for one block only: remove it, or wrap each block separately"
            )


def require_same(first: Described, other: Described, number: int) -> None:
    for name in [*first, *(name for name in other if name not in first)]:
        a, b = first.get(name, _ABSENT), other.get(name, _ABSENT)
        if a != b:
            raise ValueError(f"{_difference(name, a, b, number)}. {_MAKE_EQUAL}")
    if [*first] != [*other]:
        raise ValueError(
            f"{_MUST_BE_EQUAL}; block {number} has its modules or parameters in another order than "
            f"block 0. {_MAKE_EQUAL}"
        )


def require_same_attributes(
    first: nn.Module, other: nn.Module, number: int, ignore: Collection[str]
) -> None:
    """Raises ValueError unless attributes of ``first`` and ``other``, block ``number``, are equal.

    Objects of unknown classes are compared by what pickle would store.
    """
    comparison = _Comparison(number)
    modules = [list(block.named_modules(remove_duplicate=False)) for block in (first, other)]
    attributes: list[tuple[str, dict, dict]] = []
    for (path, a), (_, b) in zip(*modules, strict=True):
        comparison.note_partners(a, b)
        attributes.append((path, vars(a), vars(b)))
        for mine, its in ((a._parameters, b._parameters), (a._buffers, b._buffers)):
            for name, tensor in mine.items():
                if tensor is not None:
                    comparison.note_partners(tensor, its[name])
                    attributes.append((dotted(path, name), vars(tensor), vars(its[name])))
    for path, mine, its in attributes:
        for name in [*mine, *(name for name in its if name not in mine)]:
            if name not in ignore and name not in _MACHINERY and not name.startswith(_OURS):
                comparison.attribute = name
                comparison.require_equal(
                    dotted(path, name), mine.get(name, _ABSENT), its.get(name, _ABSENT)
                )


class _Comparison:
    def __init__(self, number: int) -> None:
        self.number = number
        self.attribute = ""
        # From modules, parameters and buffers of either block to their counterparts.
        self._partners: dict[int, Any] = {}
        # Objects may contain themselves.
        self._begun: dict[tuple[int, int], tuple[Any, Any]] = {}

    def note_partners(self, a: Any, b: Any) -> None:
        self._partners[id(a)], self._partners[id(b)] = b, a

    def require_equal(self, name: str, a: Any, b: Any) -> None:
        if a is b or (id(a), id(b)) in self._begun:
            return
        mine: list[tuple[str, Any]] = []
        its: list[tuple[str, Any]] = []
        if id(a) in self._partners or id(b) in self._partners:
            equal = self._partners.get(id(a)) is b
        elif type(a) is not type(b) or isinstance(a, type):
            equal = False
        elif type(a) in (float, complex):
            equal = repr(a) == repr(b)  # the sign of zero counts, NaN is equal to itself
        elif type(a) in _BY_VALUE:
            equal = a == b
        elif isinstance(a, torch.Tensor):
            if not (is_dense(a) and is_dense(b) and a.device.type == b.device.type == "cpu"):
                self._cannot_compare(name, a)
            equal = a.requires_grad is b.requires_grad and same_bits(a, b)
            mine, its = [(name, vars(a))], [(name, vars(b))]
        else:
            self._begun[id(a), id(b)] = a, b
            mine, its = (self._contents(name, value) for value in (a, b))
            equal = [part for part, _ in mine] == [part for part, _ in its]
        if not equal:
            raise ValueError(f"{_difference(name, a, b, self.number)}. {self._remedy}")
        for (part, one), (_, other) in zip(mine, its, strict=True):
            self.require_equal(part, one, other)

    def _contents(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """The named parts that define ``value``."""
        if type(value) is dict:
            keys = list(value)
            if all(type(key) is str for key in keys):
                return [(dotted(name, key), value[key]) for key in keys]
            return [(name, part) for item in value.items() for part in item]
        if type(value) in (list, tuple):
            return [(f"{name}[{number}]", item) for number, item in enumerate(value)]
        if type(value) in (set, frozenset):
            try:
                return [(name, item) for item in sorted(value)]
            except TypeError:
                self._cannot_compare(name, value)
        if isinstance(value, types.FunctionType):
            return list(_contents_of_function(name, value))
        if isinstance(value, types.MethodType):
            return [(name, value.__func__), (name, value.__self__)]
        try:
            stored = None if type(value) is object else value.__reduce_ex__(4)
        except Exception:
            stored = None
        if not isinstance(stored, tuple):
            self._cannot_compare(name, value)
        # Iterators are of the items, for subclasses of list or dict.
        return [(name, list(one) if isinstance(one, Iterator) else one) for one in stored]

    def _cannot_compare(self, name: str, value: Any) -> NoReturn:
        raise ValueError(
            f"{_MUST_BE_EQUAL}, and {name} of blocks 0 and {self.number} cannot be compared: "
            f"{_shown(value)}. {self._remedy}"
        )

    @property
    def _remedy(self) -> str:
        return (
            "Give all blocks the same object, or wrap each block separately; if the forward does "
            f"not depend on it, name it in ignore=[{self.attribute!r}]"
        )


def _difference(name: str, a: Any, b: Any, number: int) -> str:
    return f"{_MUST_BE_EQUAL}; {name}: {_shown(a)} in block 0, {_shown(b)} in block {number}"


def _contents_of_function(name: str, value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    yield f"the code of {name}", value.__code__
    yield f"the globals of {name}", id(value.__globals__)
    yield f"the defaults of {name}", (value.__defaults__, value.__kwdefaults__)
    yield name, value.__dict__
    for variable, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        try:
            yield f"{variable} in {name}", cell.cell_contents
        except ValueError:  # not set yet
            yield f"{variable} in {name}", _ABSENT


class _Absent:
    def __repr__(self) -> str:
        return "missing"


_ABSENT = _Absent()


def _tensor(kind: str, tensor: torch.Tensor, first: dict[int, str], own: str) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{kind} of shape {tuple(tensor.shape)}, {dtype}"
    if kind == "parameter":
        text += ", trainable" if tensor.requires_grad else ", frozen"
    shared = first.setdefault(id(tensor), own)
    return text if shared == own else f"{text}, the same as {shared}"


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} on {value.device}"
    if isinstance(value, str) and value.startswith(("parameter of", "buffer of")):
        return value
    return repr(value)


def _forward_error(block: nn.Module, does: str, remedy: str, what: str = "forward") -> ValueError:
    return ValueError(
        f"the {what} of {type(block).__name__} {does}, but scanned blocks are traced once for "
        f"all: {remedy}, or wrap each block separately"
    )


def require_like(y: Any, x: torch.Tensor, block: nn.Module) -> None:
    is_tensor = isinstance(y, torch.Tensor)
    if not is_tensor or y.shape != x.shape or y.dtype != x.dtype:
        found = f"{tuple(y.shape)}, {y.dtype}" if is_tensor else f"a {type(y).__name__}"
        raise ValueError(
            f"scanned blocks must return one tensor like their input, but {type(block).__name__} "
            f"returned {found} for an input of {tuple(x.shape)}, {x.dtype}. Make its forward "
            "return the tensor that the next block takes"
        )


def require_unchanged_structure(unit: ScanUnit) -> None:
    """Raises RuntimeError or ValueError if a parameter or a hook was added or removed."""
    unit.require_shards_installed()
    known = {use for stack in unit.parameters for use in stack.uses}
    for path, module in unit.module.named_modules():
        require_no_hooks(path, module)
        for name, parameter in module._parameters.items():
            if parameter is not None and (module, name) not in known:
                raise_replaced(unit.comms.label + dotted(path, name))


@contextlib.contextmanager
def forbid_lost_changes(
    unit: ScanUnit, full: Sequence[torch.Tensor], given: Collection[int], arguments: Any
) -> Iterator:
    """Around the call of the template: raises if a change in it would be lost.

    Raises RuntimeError for a parameter in ``full``, ValueError for an attribute or ``arguments``.
    ``given``: the ids that :func:`inputs_of` returns for its inputs.
    """
    before, attributes = stamps(full), _attributes(unit)
    items = _items(arguments)
    passed = [item for item in items if isinstance(item, torch.Tensor)]
    values = stamps(passed)
    yield
    found = _items(arguments)
    same = len(found) == len(items) and all(map(operator.is_, found, items))
    if not same or stamps(passed) != values:
        traced = [tensor for tensor in tensors_in(found) if inputs_of([tensor]) & set(given)]
        _free(traced, unit)
        what = "changes one of its arguments, a tensor or a container, for the next block"
        remedy = "change a copy, add the change to the tensor that the block returns"
        raise _forward_error(unit.module, what, remedy)
    for stack, value, was, now in zip(unit.parameters, full, before, stamps(full), strict=True):
        if stack.value is not value or now != was:
            raise_changed_in_forward(unit.comms.label + stack.name)
    for key, tensors in _attributes(unit).items():
        known = {id(tensor) for tensor in attributes.get(key, ())}
        new = [tensor for tensor in tensors if id(tensor) not in known]
        if inputs_of(new) & set(given):
            path, name = key
            _free(new, unit)
            what = f"stores a computed tensor in {dotted(path, name)!r}, where it has no value"
            remedy = "add it to the returned tensor, register a buffer if it needs no gradient"
            raise _forward_error(unit.module, what, remedy)


def _free(tensors: Sequence[torch.Tensor], unit: ScanUnit) -> None:
    """Drops the values of traced tensors: otherwise torch_xla would try to compute them."""
    for tensor in tensors:
        tensor.data = unit.placeholder.clone()


def _items(value: Any) -> list[Any]:
    """``value`` and, if it is a container, all that it contains."""
    inside: list[Any] = []
    if isinstance(value, Mapping):
        inside = [*value, *value.values()]
    elif isinstance(value, (list, tuple, set, frozenset)):
        inside = list(value)
    return [value, *(item for one in inside for item in _items(one))]


def inputs_of(tensors: Sequence[torch.Tensor]) -> set[int]:
    """Ids of the device values from which ``tensors`` are computed, except single numbers."""
    on_device = [tensor for tensor in tensors if tensor.device.type == "xla"]
    if not on_device:
        return set()
    numbers, values = xlac.device_data_of(on_device)
    return {number for number, value in zip(numbers, values, strict=True) if value.dim()}


def _attributes(unit: ScanUnit) -> dict[tuple[str, str], list[torch.Tensor]]:
    """Tensors in attributes of modules and parameters, by path and name."""
    holders = [(path, vars(module)) for path, module in unit.module.named_modules()]
    holders += [(tensor.key, tensor.attributes_of(0)) for tensor in unit.stored]
    return {
        (path, name): found
        for path, attributes in holders
        for name, value in attributes.items()
        if name not in ("_parameters", "_buffers", "_modules") and (found := tensors_in(value))
    }


def require_known_graph(block: nn.Module, y: torch.Tensor, leaves: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if ``y`` needs the gradient of a tensor that is not in ``leaves``."""
    known = {id(leaf) for leaf in leaves}
    edges, seen = [(y.grad_fn, 0)], set()
    while edges:
        node, output = edges.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        source = node.source() if isinstance(node, GatherNode) else None
        what = ""
        if source is not None:
            what = f"computed from {source.unit.name_of(output)!r}"
        elif leaf is not None and id(leaf) not in known:
            sharded = sharded_tensor_of(leaf)
            what = (
                f"a tensor of shape {tuple(leaf.shape)}" if sharded is None else repr(sharded.key)
            )
        if what:
            what = f"uses a tensor from outside of the block that needs a gradient, {what}"
            remedy = "pass it as an argument (blocks(x, it)), detach it"
            raise _forward_error(block, what, remedy)
        edges += node.next_functions


def require_no_graph(block: nn.Module, name: str, buffer: torch.Tensor) -> None:
    if buffer.requires_grad:
        what = f"gives its buffer {name!r} a value that needs a gradient"
        raise _forward_error(block, what, "call detach() on it, add its effect to the result")


@contextlib.contextmanager
def forbid_host_values(block: nn.Module, given: set[int], what: str = "forward") -> Iterator[None]:
    """Around the ``what`` of ``block``: raises ValueError if the host draws random numbers, or
    computes with a value computed from ``given``.

    ``given``: ids of device values that exist only in the loop. torch_xla would end the process.
    """
    error = functools.partial(_forward_error, block, what=what)
    with _ForbidReads(given, error), _ForbidFallbacks(given, error):
        yield


class _ForbidReads(TorchFunctionMode):
    def __init__(self, given: set[int], error: Callable[[str, str], ValueError]) -> None:
        super().__init__()
        self._given, self._error = given, error

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        draws = func in HOST_DRAWS
        if draws or func in READS and reads_to_host(func, args, kwargs):
            if inputs_of(xla_tensors((args, kwargs))) & self._given:
                if draws:  # CPU ranks would first compute the arguments
                    with torch._C.DisableTorchFunction():
                        return func(*args, **kwargs)
                remedy = "compute on the device (torch.where instead of if)"
                raise self._error(f"reads values on the host ({name})", remedy)
        found = func(*args, **kwargs)
        if func in DRAWS and isinstance(found, torch.Tensor) and found.device.type == "cpu":
            what = f"draws random numbers on the host ({name.rstrip('_')})"
            remedy = (
                "draw on the device (torch.rand((), device=x.device)) and choose by torch.where"
            )
            raise self._error(what, remedy)
        return found


class _ForbidFallbacks(TorchDispatchMode):
    """For operators that torch_xla computes on the host."""

    def __init__(self, given: set[int], error: Callable[[str, str], ValueError]) -> None:
        super().__init__()
        self._given, self._error = given, error

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace in ("aten", "prims"):  # others may have effects, such as collectives
            arguments = args, tuple(kwargs.items())
            described = _describe_argument(arguments)
            # Random operators count draws, so that every trace must try them.
            draws = torch.Tag.nondeterministic_seeded in func.tags
            reads = (_reads.__wrapped__ if draws else _reads)(func, described)
            # It may read only arguments that have values.
            tensors = xla_tensors((args, kwargs)) if reads else ()
            given = {id(one) for one in tensors if inputs_of([one]) & self._given}
            if given and _reads.__wrapped__(func, _describe_argument(arguments, given)):
                does = f"calls {func}, which torch_xla computes on the host"
                raise self._error(does, "compute with other operators")
        return func(*args, **kwargs)


class _Described(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    known: bool = False  # has a value outside of the loop

    def tensor(self, has_value: bool) -> torch.Tensor:
        """Such a tensor: zeros, or one for which XLA raises when it computes it."""
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        if has_value or self.known or self.device.type != "xla":
            return zeros
        # No version of calls is 0.
        (number,) = xlac.custom_call([zeros], "no_value", [[]], [torch.bool], False, "", 0, {})
        # Some operators end the process for the result of a call itself.
        return torch.where(number, zeros, torch.ones_like(zeros))


def _describe_argument(value: Any, given: set[int] | None = None) -> Any:
    """``value`` without the values of tensors, hashable. 1, 1.0 and True differ.

    ``given``: ids of the tensors without a value; default: all.
    """
    if isinstance(value, torch.Tensor):
        known = given is not None and id(value) not in given
        return _Described(value.shape, value.dtype, value.device, known)
    if isinstance(value, (list, tuple)):
        return tuple(_describe_argument(one, given) for one in value)
    return type(value), value


def _argument(described: Any, has_values: bool) -> Any:
    if isinstance(described, _Described):
        return described.tensor(has_values)
    if described and isinstance(described[0], type):
        return described[1]
    return tuple(_argument(one, has_values) for one in described)


@functools.cache
def _reads(func: Any, described: Any) -> bool:
    """Whether ``func`` computes values of such arguments, and does not only trace."""
    error = _raised(func, described, has_values=False)
    return error is not None and error is not _raised(func, described, has_values=True)


def _raised(func: Any, described: Any, has_values: bool) -> type | None:
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        args, kwargs = _argument(described, has_values)
        try:
            func(*args, **dict(kwargs))
        except Exception as error:
            return type(error)
    return None


class HookTensors(TorchFunctionMode):
    """Records the tensors that a communication hook makes and uses."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs, made)):
            self._tensors[id(tensor)] = weakref.ref(tensor)
        return made

    def require_none_left(self, arguments: Sequence[torch.Tensor]) -> None:
        """Raises RuntimeError if the hook stored a tensor made from ``arguments``."""
        if self._computed_from(arguments):
            gc.collect()  # perhaps only reference cycles keep them alive
        left = self._computed_from(arguments)
        if not left:
            return
        shapes = [tuple(tensor.shape) for tensor in left]
        for tensor in left:
            # torch_xla would end the process when it reads them. A view keeps its base alive.
            for one in (tensor, tensor._base):
                if one is not None:
                    fill_([one], [torch.zeros_like(one)])
        raise RuntimeError(
            f"a communication hook stored, or changed in place, tensors of shapes {shapes} that "
            "contain gradients of scanned blocks. The blocks are traced once, in a loop, and these "
            "tensors have no value outside of it. Wrap each block separately, or use a hook that "
            "stores no gradients"
        )

    def _computed_from(self, arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given, own = inputs_of(arguments), set(map(id, arguments))
        alive = (ref() for number, ref in self._tensors.items() if number not in own)
        return [one for one in alive if one is not None and inputs_of([one]) & given]

"""Calls torch's own ``state_dict`` and ``load_state_dict`` of the unwrapped module, with its hooks.

If the module computes with values, it is called again, with full values instead of placeholders.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..consolidate.format.dtypes import is_dense
from ..names import WRAPPED, dotted, is_names_hook, is_wrapper
from ..sharding.sharded_tensor import flattened_in
from ..sharding.state import unit_of, units_in
from ..sharding.user_checks import require_values
from ..tree import tensors_in
from .inventory import CPU, Entry, Inventory, ParameterShard, gather_members
from .matching import LoadedKeys
from .rank_exchange import RankExchange
from .readable_tensor import ReadableTensor

_ATEN = torch.ops.aten
# Operations on values that do not call torch's dispatcher.
_AROUND_THE_DISPATCHER = {
    torch.Tensor.data.__set__,  # type: ignore[attr-defined]
    torch.Tensor.numpy,
    torch.Tensor.tolist,
    torch.Tensor.__array__,
    torch.Tensor.__reduce_ex__,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.set_,
}


class ValuesNeededError(RuntimeError):
    """Something computes with values that are not in memory."""


@dataclass
class Uses:
    """How the placeholder tensors of one call were used.

    If ``values_needed``, its results are invalid. ``copied``: placeholders and what was copied to
    them.
    """

    values_needed: bool = False
    copied: list[tuple[PlaceholderTensor, torch.Tensor]] = field(default_factory=list)


class PlaceholderTensor(torch.Tensor):
    """Has the shape and dtype of ``source``, but no values.

    ``detach()`` and other views of the full tensor have the same source. ``copy_`` is recorded.
    Other operations raise :class:`ValuesNeededError`, and are recorded in case the caller catches
    it.
    """

    source: Any
    uses: Uses

    @staticmethod
    def __new__(
        cls, source: Any, uses: Uses, shape: Iterable[int], dtype: torch.dtype
    ) -> PlaceholderTensor:
        own: PlaceholderTensor = torch.Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype)
        own.source, own.uses = source, uses
        return own

    def __init__(self, *args: Any) -> None:
        pass

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _AROUND_THE_DISPATCHER:
            _need_values(args, func)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch has no classmethod in its stubs
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        first = args[0]
        if func in (_ATEN.detach.default, _ATEN.alias.default):
            return cls(first.source, first.uses, first.shape, first.dtype)
        if func is _ATEN.copy_.default and isinstance(first, cls) and first.shape == args[1].shape:
            first.uses.copied.append((first, args[1]))
            return first
        return _need_values((args, kwargs), func)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"PlaceholderTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


def _need_values(given: Any, func: Any) -> Any:
    for each in tensors_in(given):
        if isinstance(each, PlaceholderTensor):
            each.uses.values_needed = True
    raise ValuesNeededError(
        f"{func} needs the values of a placeholder tensor, which has none. The placeholder was "
        "kept after the state_dict() or load_state_dict() in which it was used: keep no tensors "
        "of a state dict in hooks."
    )


_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


@dataclass(frozen=True)
class CapturedLoad:
    """What ``load_state_dict`` took. ``keys``: what it reported."""

    values: dict[str, Any]
    keys: LoadedKeys


def state_dict_of(
    model: nn.Module, values: Mapping[Entry, torch.Tensor], path: str = ""
) -> Mapping[str, Any]:
    """``state_dict()`` of the unwrapped module, or of its submodule at ``path``."""
    with _unwrapped(model, values) as root:
        return root.get_submodule(path).state_dict()


def placeholder_state_dict(
    model: nn.Module, inventory: Inventory, path: str = ""
) -> Mapping[str, Any] | None:
    """:func:`state_dict_of` with placeholders; ``None`` if the module computes with values."""
    uses = Uses()
    try:
        state = state_dict_of(model, _make_placeholders(inventory, uses), path)
    except Exception:
        if not uses.values_needed:
            raise
    return None if uses.values_needed else state


def capture_loaded_values(
    exchange: RankExchange,
    model: nn.Module,
    inventory: Inventory,
    label: str,
    doing: str,
    given: Callable[[], Mapping[str, Any] | None],
) -> CapturedLoad | None:
    """The values that ``load_state_dict`` of the unwrapped module takes from ``given()``.

    Call it on every rank, with the same ``doing`` (for messages). Parameters and persistent buffers
    keep their values. Load hooks run, twice if one of them needs values, and may change other
    things. Raises their exceptions, and ModelMismatchError for those of ``load_state_dict``.
    """

    def try_with_placeholders() -> tuple[Any, bool]:
        state, uses = given(), Uses()
        captured: CapturedLoad | None = None
        if state is None:
            return (None, None), False
        inputs = _inputs(
            _require_dict(state, label),
            lambda one: PlaceholderTensor(one, uses, one.shape, one.dtype),
        )
        try:
            values = _make_placeholders(inventory, uses)
            captured = _load_placeholders(model, inventory, values, inputs, uses, label)
        except Exception:
            if not uses.values_needed:
                raise
        finally:
            # These form a cycle, which would keep all values in memory.
            uses.copied.clear()
        return (state, captured), uses.values_needed

    (state, captured), needing = exchange.run(doing, try_with_placeholders)
    if not any(needing):
        return captured
    require_values(
        units_in(model), f"a hook that computes with parameters, while loading {label}, was called"
    )
    needed = needing[exchange.rank]
    values = full_values(inventory, CPU if needed else None)

    def load_full() -> CapturedLoad | None:
        if state is None or not needed:
            return captured
        inputs = _inputs(state, ReadableTensor.read_full)
        return _load_placeholders(model, inventory, values, inputs, Uses(), label)

    return exchange.run_on_each_rank(doing, load_full)


def full_values(inventory: Inventory, to: torch.device | None) -> dict[Entry, torch.Tensor]:
    """Copies of all full values. Call it on every rank. Ranks that pass ``None`` get none."""
    values: dict[Entry, torch.Tensor] = {}
    for members in inventory.parts():
        values |= gather_members(members, members[0].holder, to)
    if to is not None:
        values.update((buffer, buffer.copy_to(to)) for buffer in inventory.buffers)
    return values


def _make_placeholders(inventory: Inventory, uses: Uses) -> dict[Entry, torch.Tensor]:
    return {
        entry: PlaceholderTensor(entry, uses, entry.shape, entry.dtype)
        for entry in inventory.entries()
    }


def _require_dict(given: Any, label: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{label} must be a dict, got {type(given).__name__}")
    for name in given:
        if not isinstance(name, str):
            raise ModelMismatchError(f"{label}: has the key {name!r:.80}, expected only strings")
    return given


def _inputs(
    given: Mapping[str, Any], convert: Callable[[ReadableTensor], torch.Tensor]
) -> Mapping[str, Any]:
    """``given`` with converted tensors, and with torch's ``_metadata`` (the module versions)."""
    inputs: Any = OrderedDict(
        (name, convert(value) if isinstance(value, ReadableTensor) else value)
        for name, value in given.items()
    )
    if hasattr(given, "_metadata"):
        inputs._metadata = given._metadata
    return inputs


def _load_placeholders(
    model: nn.Module,
    inventory: Inventory,
    values: Mapping[Entry, torch.Tensor],
    given: Mapping[str, Any],
    uses: Uses,
    label: str,
) -> CapturedLoad:
    extra: dict[str, Any] = {}
    with _unwrapped(model, values) as root, _set_extra_state_into(extra, root):
        before = _identities(root)
        try:
            reported = root.load_state_dict(given, strict=False)
        except RuntimeError as error:
            if uses.values_needed:
                raise
            lines = (line.strip() for line in str(error).splitlines())
            raise ModelMismatchError(f"{label}: {' '.join(lines)}") from error
        tensors, after = _tensors_of(root), _identities(root)
    copies: dict[Any, list[torch.Tensor]] = {}
    for target, value in uses.copied:
        copies.setdefault(target.source, []).append(value)
    found: dict[str, Any] = {}
    untouched: set[str] = set()
    seen: dict[int, ReadableTensor] = {}
    for entry in inventory.entries():
        offered = {name: tensors[name] for name in entry.names if name in tensors}
        if all(isinstance(value, PlaceholderTensor) for value in offered.values()):
            # It was overwritten once for each of its names.
            offered = dict(zip(entry.names, copies.get(entry, ()), strict=False))
            if not offered:
                untouched.update(entry.names)
        elif all(before.get(name) == after[name] for name in offered):
            untouched.update(entry.names)
        for name, value in offered.items():
            if isinstance(value, PlaceholderTensor) and value.source is entry:
                continue
            found[name] = seen.setdefault(id(value), _source_of(name, value, label))
    for name, state in extra.items():
        found[name] = state.source if isinstance(state, PlaceholderTensor) else state
    return CapturedLoad(found, _reported(reported, inventory, untouched))


def _source_of(name: str, value: torch.Tensor, label: str) -> ReadableTensor:
    if isinstance(value, PlaceholderTensor):
        if isinstance(value.source, ReadableTensor):
            return value.source
        value.uses.values_needed = True
        raise ValuesNeededError(f"{label}: {name!r} gets the values of another parameter")
    if not is_dense(value):
        raise ModelMismatchError(
            f"{label}: {name!r:.120} is not a dense tensor with values (it is sparse, quantized, "
            "or on the meta device)"
        )
    return ReadableTensor.from_tensor(value)


def _reported(reported: Any, inventory: Inventory, untouched: set[str]) -> LoadedKeys:
    """Missing and unexpected keys. For a tied parameter, one name is enough.

    If an overridden ``load_state_dict`` returned nothing, the ``untouched`` names are missing.
    """
    absent = set(getattr(reported, "missing_keys", untouched))
    missing = []
    for entry in inventory.entries():
        if absent.issuperset(entry.names):
            missing.append(entry.name)
        absent.difference_update(entry.names)
    return LoadedKeys(missing + sorted(absent), list(getattr(reported, "unexpected_keys", ())))


@contextlib.contextmanager
def _unwrapped(model: nn.Module, values: Mapping[Entry, torch.Tensor]) -> Iterator[nn.Module]:
    """A context in which ``model`` has no wrappers, and its modules have ``values``."""
    by_name: dict[str, torch.Tensor] = {}
    for entry, value in values.items():
        if isinstance(entry, ParameterShard):
            value = nn.Parameter(value, requires_grad=entry.holder.requires_grad)
        by_name.update(dict.fromkeys(entry.names, value))
    with contextlib.ExitStack() as undo:
        root = _without_wrappers(model, undo, set())
        for path, module in root.named_modules(remove_duplicate=False):
            for name, shown in flattened_in(module).items():
                undo.callback(vars(module).__setitem__, name, shown)
                del vars(module)[name]
            _replace_tensors(module._parameters, path, by_name, undo)
            _replace_tensors(module._buffers, path, by_name, undo)
        yield root


def _replace_tensors(
    kind: dict[str, Any], path: str, by_name: Mapping[str, torch.Tensor], undo: ExitStack
) -> None:
    for name, before in list(kind.items()):
        value = by_name.get(dotted(path, name))
        if value is not None:
            undo.callback(kind.__setitem__, name, before)
            kind[name] = value


def _without_wrappers(module: nn.Module, undo: ExitStack, seen: set[nn.Module]) -> nn.Module:
    """Removes wrappers around ``module`` and inside it until ``undo``. Returns the inner module."""
    inner = module._modules[WRAPPED] if WRAPPED in module._modules else None
    if inner is not None:
        unit = unit_of(module)
        if unit is not None and unit.depth:  # scanned blocks share one
            inner = nn.Module()
            for number in range(unit.depth):
                inner.add_module(str(number), _copied_tree(unit.module, {}))
        _take_hooks(inner, module, undo)
        return _without_wrappers(inner, undo, seen)
    if module in seen:
        return module
    seen.add(module)
    if is_wrapper(module):  # the methods of the original class may be overridden
        sharded: Any = type(module)
        undo.callback(setattr, module, "__class__", sharded)
        module.__class__ = sharded._fsdp_original
    for name, child in list(module._modules.items()):
        own = None if child is None else _without_wrappers(child, undo, seen)
        if own is not child:
            undo.callback(module._modules.__setitem__, name, child)
            module._modules[name] = own
    return module


def _take_hooks(inner: nn.Module, wrapper: nn.Module, undo: ExitStack) -> None:
    for kind in _HOOKS:
        own = vars(inner)[kind]
        for number, hook in vars(wrapper)[kind].items():
            if not is_names_hook(hook):
                own[number] = hook
                undo.callback(own.pop, number)


def _copied_tree(module: nn.Module, memo: dict[nn.Module, nn.Module]) -> nn.Module:
    """A copy of the modules, with separate dicts of parameters, buffers and submodules."""
    if module not in memo:
        copy = memo[module] = module.__class__.__new__(module.__class__)
        copy.__dict__.update(module.__dict__)
        copy.__dict__["_parameters"] = dict(module._parameters)
        copy.__dict__["_buffers"] = dict(module._buffers)
        copy.__dict__["_modules"] = {
            name: None if child is None else _copied_tree(child, memo)
            for name, child in module._modules.items()
        }
    return memo[module]


def _tensors_of(root: nn.Module) -> dict[str, torch.Tensor]:
    return {
        dotted(path, name): value
        for path, module in root.named_modules(remove_duplicate=False)
        for name, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None
    }


def _identities(root: nn.Module) -> dict[str, tuple[int, int]]:
    """Values that change when a tensor is replaced or changed, by name."""
    return {name: (id(value), value._version) for name, value in _tensors_of(root).items()}


@contextlib.contextmanager
def _set_extra_state_into(found: dict[str, Any], root: nn.Module) -> Iterator[None]:
    """A context in which ``set_extra_state`` of all modules stores the state into ``found``."""
    names: dict[nn.Module, list[str]] = {}
    for path, module in root.named_modules(remove_duplicate=False):
        if type(module).set_extra_state is not nn.Module.set_extra_state:
            names.setdefault(module, []).append(dotted(path, "_extra_state"))

    def note(own: list[str], state: Any) -> None:
        found.update(dict.fromkeys(own, state))

    for module, own in names.items():
        module.__dict__["set_extra_state"] = functools.partial(note, own)
    try:
        yield
    finally:
        for module in names:
            del module.__dict__["set_extra_state"]

"""torch's own ``state_dict`` and ``load_state_dict`` of the unwrapped module.

Whatever the module does in them runs: methods that it overrides, hooks, renamed and left out keys.
It runs on a tree of modules without wrappers, which hold an :class:`~.unread.UnreadTensor` for each
parameter and persistent buffer, so that nothing is gathered or read for it. Should something
compute with values, it runs once more, on full ones.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..consolidate.errors import ModelMismatchError
from ..names import WRAPPED, dotted, is_names_hook, is_wrapper
from ..sharding.attributes import flattened_in
from ..sharding.state import unit_of, units_in
from ..sharding.user_checks import require_values
from .inventory import Held, HeldBuffer, Inventory
from .meeting import Meeting
from .parts import CPU, gather_members, parts_of
from .stored import Stored, is_dense
from .unread import UnreadTensor, Uses, ValuesNeededError

_HOOKS = (
    "_state_dict_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)

# What has a place in a state dict.
Entry = Held | HeldBuffer


@dataclass(frozen=True)
class Offered:
    """What ``load_state_dict`` of the unwrapped module made of a state dict.

    Attributes:
        values: by the model's own names, tensors as :class:`Stored`; and states of modules.
        missing, unexpected: the names that it reported.
    """

    values: dict[str, Any]
    missing: list[str]
    unexpected: list[str]


def state_dict_of(
    model: nn.Module, values: Mapping[Entry, torch.Tensor], path: str = ""
) -> Mapping[str, Any]:
    """``state_dict()`` of the unwrapped module, or of the one at ``path`` in it, with ``values`` of
    all parameters and persistent buffers."""
    with _unwrapped(model, values) as root:
        return root.get_submodule(path).state_dict()


def unread_state_dict(
    model: nn.Module, inventory: Inventory, path: str = ""
) -> Mapping[str, Any] | None:
    """The same, with an :class:`UnreadTensor` for each value, whose source is a :class:`Held` or
    :class:`HeldBuffer`; ``None`` if something computes with values."""
    uses = Uses()
    try:
        state = state_dict_of(model, _unread(inventory, uses), path)
    except Exception:
        if not uses.values_needed:
            raise
    return None if uses.values_needed else state


def offered_by_load(
    meeting: Meeting,
    model: nn.Module,
    inventory: Inventory,
    label: str,
    doing: str,
    given: Callable[[], Mapping[str, Any] | None],
) -> Offered | None:
    """What ``load_state_dict`` of the unwrapped module takes from what is ``given`` on this rank;
    every rank must call this.

    Parameters and persistent buffers keep their values. The module's own code runs: load hooks and
    overrides of ``_load_from_state_dict`` may change other things, and run twice if one of them
    needs values.

    Values are tensors or :class:`Stored`. ``label`` is what they are, and ``doing``, the same on
    every rank, what is done, for messages. Ranks on which nothing (``None``) is given get ``None``.

    Raises:
        ModelMismatchError: torch's own reasons, such as a size mismatch.
        Exception: what hooks and the module's own methods raise; :class:`OtherRankError` on the
            other ranks.
    """
    found: list[Mapping[str, Any] | None] = []
    offered: list[Offered] = []

    def try_unread() -> bool:
        found.append(given())
        if found[0] is None:
            return False
        uses = Uses()
        inputs = _inputs(
            _checked(found[0], label), lambda one: UnreadTensor(one, uses, one.shape, one.dtype)
        )
        try:
            offered.append(_load(model, inventory, _unread(inventory, uses), inputs, uses, label))
        except Exception:
            if not uses.values_needed:
                raise
        return uses.values_needed

    needing = meeting.together(doing, try_unread)
    if not any(needing):
        return offered[0] if offered else None
    require_values(
        units_in(model), f"a hook that computes with parameters, while loading {label}, came"
    )
    values = full_values(inventory, CPU if needing[meeting.rank] else None)

    def load_full() -> Offered | None:
        if not needing[meeting.rank]:
            return offered[0] if offered else None
        assert found[0] is not None
        inputs = _inputs(found[0], Stored.whole)
        return _load(model, inventory, values, inputs, Uses(), label)

    return meeting.each(doing, load_full)


def full_values(inventory: Inventory, to: torch.device | None) -> dict[Entry, torch.Tensor]:
    """Copies of all parameters and persistent buffers; every rank must call this, those without
    ``to`` get none."""
    values: dict[Entry, torch.Tensor] = {}
    for part in parts_of(inventory):
        whole = gather_members(part, part.holder, to)
        values.update(zip(part.members, whole or (), strict=whole is not None))
    if to is not None:
        values.update((buffer, copied_buffer(buffer, to)) for buffer in inventory.buffers)
    return values


def copied_buffer(buffer: HeldBuffer, to: torch.device) -> torch.Tensor:
    """Its value on the device ``to``."""
    value = buffer.value()
    return value.clone() if to == CPU else value.to(to)


def _unread(inventory: Inventory, uses: Uses) -> dict[Entry, torch.Tensor]:
    """What stands for the values of all parameters and persistent buffers."""
    return {
        entry: UnreadTensor(entry, uses, entry.shape, entry.dtype)
        for entry in entries_of(inventory)
    }


def entries_of(inventory: Inventory) -> tuple[Entry, ...]:
    """All that has a place in a state dict, but for extra state of modules."""
    return (*inventory.parameters, *inventory.buffers)


def _checked(given: Any, label: str) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{label} must be a dict, got {type(given).__name__}")
    for name in given:
        if not isinstance(name, str):
            raise ModelMismatchError(f"{label}: has the key {name!r:.80}, expected names")
    return given


def _inputs(
    given: Mapping[str, Any], convert: Callable[[Stored], torch.Tensor]
) -> Mapping[str, Any]:
    """``given`` with tensors, and with the versions of modules that torch keeps beside them."""
    inputs: Any = OrderedDict(
        (name, convert(value) if isinstance(value, Stored) else value)
        for name, value in given.items()
    )
    if hasattr(given, "_metadata"):
        inputs._metadata = given._metadata
    return inputs


def _load(
    model: nn.Module,
    inventory: Inventory,
    values: Mapping[Entry, torch.Tensor],
    given: Mapping[str, Any],
    uses: Uses,
    label: str,
) -> Offered:
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
        held, after = _held_by(root), _identities(root)
    copies: dict[Any, list[torch.Tensor]] = {}
    for target, value in uses.copied:
        copies.setdefault(target.source, []).append(value)
    found: dict[str, Any] = {}
    untouched: set[str] = set()
    seen: dict[int, Stored] = {}
    for entry in entries_of(inventory):
        offered = {name: held[name] for name in entry.names if name in held}
        if all(isinstance(value, UnreadTensor) for value in offered.values()):
            # A tied one was overwritten under each of its names that was given.
            offered = dict(zip(entry.names, copies.get(entry, ()), strict=False))
            if not offered:
                untouched.update(entry.names)
        elif all(before.get(name) == after[name] for name in offered):
            untouched.update(entry.names)
        for name, value in offered.items():
            if isinstance(value, UnreadTensor) and value.source is entry:
                continue  # it stays as it is
            # Values that are one object need no comparison.
            found[name] = seen.setdefault(id(value), _stored(name, value, label))
    for name, state in extra.items():
        found[name] = state.source if isinstance(state, UnreadTensor) else state
    return Offered(found, *_reported(reported, inventory, untouched))


def _stored(name: str, value: torch.Tensor, label: str) -> Stored:
    if isinstance(value, UnreadTensor):
        if isinstance(value.source, Stored):
            return value.source
        value.uses.values_needed = True  # another parameter's
        raise ValuesNeededError(f"{label}: {name!r} gets the values of another parameter")
    if not is_dense(value):
        raise ModelMismatchError(f"{label}: {name!r:.120} is no dense tensor with values")
    return Stored.of(value)


def _reported(
    reported: Any, inventory: Inventory, untouched: set[str]
) -> tuple[list[str], list[str]]:
    """Missing and unexpected keys, as ``load_state_dict`` returned them; of a tied parameter one
    name is enough. A method that overrides it may return nothing."""
    absent = set(getattr(reported, "missing_keys", untouched))
    missing = []
    for entry in entries_of(inventory):
        if absent.issuperset(entry.names):
            missing.append(entry.name)
        absent.difference_update(entry.names)
    return missing + sorted(absent), list(getattr(reported, "unexpected_keys", ()))


@contextlib.contextmanager
def _unwrapped(model: nn.Module, values: Mapping[Entry, torch.Tensor]) -> Iterator[nn.Module]:
    """Within, ``model`` without its wrappers, whose modules hold ``values``."""
    by_name: dict[str, torch.Tensor] = {}
    for entry, value in values.items():
        if isinstance(entry, Held):
            value = nn.Parameter(value, requires_grad=entry.holder.requires_grad)
        by_name.update(dict.fromkeys(entry.names, value))
    with contextlib.ExitStack() as undo:
        root = _without_wrappers(model, undo, set())
        for path, module in root.named_modules(remove_duplicate=False):
            for name, shown in flattened_in(module).items():
                undo.callback(vars(module).__setitem__, name, shown)
                del vars(module)[name]
            _replace(module._parameters, path, by_name, undo)
            _replace(module._buffers, path, by_name, undo)
        yield root


def _replace(
    kind: dict[str, Any], path: str, by_name: Mapping[str, torch.Tensor], undo: ExitStack
) -> None:
    for name in list(kind):
        value = by_name.get(dotted(path, name))
        if value is not None:
            undo.callback(kind.__setitem__, name, kind[name])
            kind[name] = value


def _without_wrappers(module: nn.Module, undo: ExitStack, seen: set[nn.Module]) -> nn.Module:
    """The module in ``module`` that is no wrapper, and in it none either, until ``undo``."""
    inner = module._modules.get(WRAPPED)
    if inner is not None:
        unit = unit_of(module)
        if unit is not None and unit.depth:  # scanned blocks: no modules of their own
            inner = nn.Module()
            for number in range(unit.depth):
                inner.add_module(str(number), _copied_tree(unit.module, {}))
        _take_hooks(inner, module, undo)
        return _without_wrappers(inner, undo, seen)
    if module in seen:
        return module
    seen.add(module)
    if is_wrapper(module):  # in place: its class does not say what the module's own does
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
    """``inner`` has the hooks that a user has registered on ``wrapper``, until ``undo``."""
    for kind in _HOOKS:
        own = vars(inner)[kind]
        for number, hook in vars(wrapper)[kind].items():
            if not is_names_hook(hook):
                own[number] = hook
                undo.callback(own.pop, number)


def _copied_tree(module: nn.Module, memo: dict[nn.Module, nn.Module]) -> nn.Module:
    """Modules of the same classes and attributes that hold parameters and buffers of their own."""
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


def _held_by(root: nn.Module) -> dict[str, torch.Tensor]:
    return {
        dotted(path, name): value
        for path, module in root.named_modules(remove_duplicate=False)
        for name, value in (*module._parameters.items(), *module._buffers.items())
        if value is not None
    }


def _identities(root: nn.Module) -> dict[str, tuple[int, int]]:
    """Of each tensor in ``root`` something that changes when its value does."""
    return {name: (id(value), value._version) for name, value in _held_by(root).items()}


@contextlib.contextmanager
def _set_extra_state_into(found: dict[str, Any], root: nn.Module) -> Iterator[None]:
    """Within, states that modules are to set are noted by name instead."""
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

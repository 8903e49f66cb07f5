"""Initializes meta modules one at a time, and tracks which tensors have no values until a load."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..collectives.host_data import LARGE
from ..names import dotted, is_wrapper
from ..ranks.rank import is_simulated_rank
from ..wording import join_some
from .freeing import Stamp, stamps
from .ignored import is_ignored, own_tensors

# True on a tensor that defer_init made; an UninitializedTensor on a shard or buffer.
_MARK = "_xla_fsdp_awaited"
SHOWN = 20
# The offset in a holder where a layout begins, and the parameter's number in that layout.
Key = tuple[int, int]


def defer_init(module: nn.Module) -> None:
    """For ``param_init_fn``: the parameters of ``module`` on the meta device get values by a load.

    No full parameter is ever allocated: ``model = FSDP(meta_model, param_init_fn=defer_init)``,
    then ``load_weights``, ``load_checkpoint``, ``load_full_state_dict`` or ``load_state_dict``.
    Until all have values, shards are NaN, and a forward or a save raises RuntimeError. Initialize
    what a checkpoint does not contain within ``with FSDP.summon_full_params(model):``, or in a
    ``param_init_fn`` that calls this function.
    """
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            empty = nn.Parameter(_nothing(parameter), parameter.requires_grad)
            setattr(empty, _MARK, True)
            module._parameters[key] = empty
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _nothing(buffer)
            setattr(module._buffers[key], _MARK, True)


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """A CPU tensor like ``like``, all NaN (or 0), that uses almost no memory."""
    nan = like.is_floating_point() or like.is_complex()
    return torch.full((), float("nan") if nan else 0, dtype=like.dtype, device="cpu").expand(
        like.shape
    )


def is_deferred(tensor: torch.Tensor) -> bool:
    return getattr(tensor, _MARK, None) is True


class UninitializedTensor:
    """A shard or buffer without values.

    Attributes:
        names: the dotted names, in the wrapped module, of the members that have no values.
        use: for a buffer: its module and its name there.
    """

    def __init__(
        self, holder: torch.Tensor, names: dict[Key, str], use: tuple[nn.Module, str] | None = None
    ) -> None:
        self.names = names
        self.use = use
        self.partly = False  # the next assignment gives values to some of `names` only
        self.watch_changes(holder)

    def watch_changes(self, holder: torch.Tensor) -> None:
        """From now on, any change of the holder means that it has values."""
        self.holder = holder
        self.stamp: Stamp = stamps([holder])[0]
        setattr(holder, _MARK, self)

    @property
    def _current(self) -> torch.Tensor | None:
        return self.holder if self.use is None else self.use[0]._buffers.get(self.use[1])

    def restart_watch(self) -> None:
        """Does :meth:`watch_changes` again: changes so far gave it no values."""
        current = self._current
        self.watch_changes(self.holder if current is None else current)

    @property
    def is_initialized(self) -> bool:
        return self._current is not self.holder or stamps([self.holder])[0] != self.stamp


def begin_load(holder: torch.Tensor, keys: Iterable[Key]) -> None:
    """The next assignment to ``holder`` gives values only to ``keys``."""
    uninitialized = getattr(holder, _MARK, None)
    if isinstance(uninitialized, UninitializedTensor):
        for key in keys:
            uninitialized.names.pop(key, None)
        uninitialized.partly = bool(uninitialized.names)


def end_load(holder: torch.Tensor) -> None:
    uninitialized = getattr(holder, _MARK, None)
    if isinstance(uninitialized, UninitializedTensor) and uninitialized.partly:
        uninitialized.partly = False
        uninitialized.watch_changes(holder)


def remaining_uninitialized(uninitialized: list[UninitializedTensor]) -> list[UninitializedTensor]:
    """Removes those that have values by now, and returns the rest."""
    if uninitialized:
        for one in uninitialized:
            if one.is_initialized and getattr(one.holder, _MARK, None) is one:
                delattr(one.holder, _MARK)
        uninitialized[:] = [one for one in uninitialized if not one.is_initialized]
    return uninitialized


def require_initialized(holders: Iterable[torch.Tensor], doing: str) -> None:
    marks = [getattr(holder, _MARK, None) for holder in holders]
    if found := [one for one in marks if isinstance(one, UninitializedTensor)]:
        require_all_initialized([("", found)], doing)


def require_all_initialized(
    labelled: Sequence[tuple[str, list[UninitializedTensor]]], doing: str
) -> None:
    """Raises RuntimeError if a parameter or buffer has no values yet.

    ``labelled``: for every unit the name of its module, and its tensors without values.
    """
    if is_simulated_rank():
        return
    names = [
        dotted(path, name)
        for path, uninitialized in labelled
        for one in remaining_uninitialized(uninitialized)
        for name in one.names.values()
    ]
    names = list(dict.fromkeys(names))
    if names:
        some = join_some([repr(name) for name in names], SHOWN)
        raise RuntimeError(
            f"{doing} before {some} had values: param_init_fn=defer_init and to_empty() do not "
            "initialize them. Load them (load_weights, load_checkpoint, load_full_state_dict, "
            "load_state_dict), or assign them within `with FSDP.summon_full_params(model):`, as "
            "for buffers that are not persistent, which no checkpoint contains"
        )


# Set on a parameter that was on the meta device: the parameter that replaced it.
_REAL = "_xla_fsdp_real"


def is_on_meta(module: nn.Module) -> bool:
    """Whether ``module`` itself (not its children) has tensors on the meta device."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_meta:
            return True
    return False


def materialize(
    module: nn.Module, init_fn: Callable[[nn.Module], None] | None, waits: bool = False
) -> Iterator[nn.Module]:
    """Initializes the submodules on the meta device, and yields every submodule, children first.

    The caller may shard a submodule before it takes the next, so the full model never exists.
    Wrappers, ignored modules and what is inside them are not changed. ``waits``: a submodule
    without ``reset_parameters()`` gets values later, and does not raise.

    Raises RuntimeError if ``reset_parameters()`` or ``init_fn`` leaves a tensor without values.
    """
    for name, group in _groups(module, "", set()):
        allocated: list[_Allocated] = []
        for submodule in group:
            if is_on_meta(submodule):
                allocated += _initialize(submodule, name, init_fn, waits)
        for one in allocated:
            one.require_values()
        yield from group


def _groups(
    module: nn.Module, name: str, seen: set[nn.Module]
) -> Iterator[tuple[str, list[nn.Module]]]:
    """Submodules that get values together: modules may initialize their children's parameters."""
    if module in seen or is_wrapper(module) or is_ignored(module):
        return
    seen.add(module)
    together = []
    for key, child in list(module._modules.items()):
        if child is None:
            continue
        excluded = child in seen or is_wrapper(child) or is_ignored(child)
        if is_on_meta(module) and not child._modules and not excluded:
            seen.add(child)
            together.append(child)
        else:
            yield from _groups(child, dotted(name, key), seen)
    yield name, [*together, module]


def _initialize(
    module: nn.Module, name: str, init_fn: Callable[[nn.Module], None] | None, waits: bool
) -> list[_Allocated]:
    """Gives ``module`` values. Returns tensors to check after its group."""
    before = {key: p for key, p in module._parameters.items() if p is not None and p.is_meta}
    reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    described = f"module {name!r} ({type(module).__name__})" if name else type(module).__name__
    allocated: list[_Allocated] = []
    if init_fn is not None:
        init_fn(module)
    elif reset is not None:
        module.to_empty(device="cpu", recurse=False)
        most = LARGE if is_simulated_rank() else math.inf  # large tensors of a plan get no values
        for key, tensor in own_tensors(module):
            if 0 < tensor.numel() < most:
                allocated.append(_Allocated(module, described, key, tensor))
        with torch.no_grad():
            reset()
    elif waits:
        defer_init(module)
    else:
        raise RuntimeError(
            f"{described} is on the meta device and has no reset_parameters(). Add that method; or "
            "pass param_init_fn, a function that initializes the module it is called with; or pass "
            "param_init_fn=xla_fsdp.defer_init and give values afterwards, by a load or within "
            "`with FSDP.summon_full_params(model):`"
        )
    for key, meta in before.items():
        # A shared parameter occurs again.
        real = getattr(meta, _REAL, None)
        if real is None:
            real = module.get_parameter(key)
            real.requires_grad_(meta.requires_grad)
            real.__dict__.update(meta.__dict__)
            setattr(meta, _REAL, real)
        module._parameters[key] = real
    if left := [repr(key) for key, tensor in own_tensors(module) if tensor.is_meta]:
        raise RuntimeError(
            f"param_init_fn left {', '.join(left)} of {described} on the meta device. It must give "
            "values to the parameters and buffers of its argument"
        )
    return allocated


@dataclass
class _Allocated:
    """A tensor of ``module``, filled with a pattern that shows whether it gets initialized."""

    module: nn.Module
    described: str
    key: str
    tensor: torch.Tensor

    def __post_init__(self) -> None:
        values = self.tensor.detach()
        self.has_nan = values.is_floating_point() or values.is_complex()
        if self.has_nan:
            values.fill_(float("nan"))
        else:
            _bytes_of(values).fill_(0xFF)
        self.version = self.tensor._version

    def require_values(self) -> None:
        if getattr(self.module, self.key) is not self.tensor:
            return
        values = self.tensor.detach()
        if self.has_nan:
            unset = bool(values.isnan().all())
        else:  # an assignment may have written exactly the bytes of the pattern
            unset = values._version == self.version and bool((_bytes_of(values) == 0xFF).all())
        if unset:
            kind = "parameter" if isinstance(self.tensor, nn.Parameter) else "buffer"
            raise RuntimeError(
                f"reset_parameters() of {self.described} does not initialize its {kind} "
                f"{self.key!r}. Initialize it there, or pass param_init_fn"
            )


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())

"""One process that traces as any rank of a slice that is not there.

Inside :class:`Pretence` torch_xla believes what it is told: ``xr.world_size()``,
``xr.global_ordinal()`` and with them ``World`` (collectives/world.py) are those of the pretended
slice, for this project's wrapper, the in-tree class and any other code alike. Nothing runs:
collectives would have nobody to meet. Where a step would be cut and run, what was traced is
handed to ``on_cut``, and the tensors it would have computed become placeholders.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ... import xlac
from ...collectives.host_data import as_data
from ...collectives.routes import attributes_of
from ...ranks.autograd_thread import run_there
from ...ranks.cpu import call_site
from ...ranks.cpu.mode import READS, reads_to_host, xla_tensors
from ...ranks.cpu.patches import Patches
from ...ranks.rank import pretend, pretending
from ...sharding.freeing import fill_
from ...sharding.sharded_parameter import local
from ...tpu.libtpu_flags import ARGUMENTS
from ...tpu.topology import Slice
from .live import assign, is_pending

# More than any step reads, and soon reached by a loop that waits for a value.
_MANY_READS = 2000
# Values of tensors this large are not drawn: nothing will ever look at them.
_LARGE = 1 << 16


class StepTraced(BaseException):
    """Ends the caller's step where it is fully traced. Not an Exception: nobody should catch it."""


class Pretence:
    """A context manager in which this process is rank ``rank`` of ``size``.

    Args:
        slice: the slice that the runtime is to describe, or ``None``.
        on_cut: called where the program traced so far would be compiled and run. May raise
            :class:`StepTraced`.
        on_read: called before a pending value is read, which runs what it depends on and leaves
            everything else pending.
        arguments: what ``LIBTPU_INIT_ARGS`` is to be, or ``None``.

    Attributes:
        reads: places (``file:line in function``) where pending values were asked for. They get
            zeros, true if finiteness was asked, and masks that select everything.
        sized_by_data: places where values decided how many elements a tensor has. There are as many
            as there can be.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        on_cut: Callable[[], None],
        on_read: Callable[[], None],
        slice: Slice | None = None,
        arguments: str | None = None,
    ) -> None:
        self.arguments = arguments
        self.rank, self.size, self.slice = rank, size, slice
        self.on_cut, self.on_read = on_cut, on_read
        self.reads: list[str] = []
        self.sized_by_data: list[str] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Pretence:
        self._stack.enter_context(pretending())
        run_there(torch_xla.device(), functools.partial(pretend, True))
        self._stack.callback(run_there, torch_xla.device(), functools.partial(pretend, False))
        patches = Patches()
        self._stack.callback(patches.undo)
        if self.arguments is not None:
            self._stack.callback(_set_back, os.environ.get(ARGUMENTS))
            os.environ[ARGUMENTS] = self.arguments
        # torch_xla keeps both for the process once it knows them.
        patches.replace(xlac.WORLD_SIZE, self.size)
        patches.replace(xlac.ORDINAL, self.rank)
        if self.slice is not None:
            devices, kind = attributes_of(self.slice), self.slice.chip.device_kind
            patches.set(xr, "global_runtime_device_attributes", lambda: devices)
            patches.set(xm, "xla_device_kind", lambda device=None: kind)
        patches.replace(xlac.sync_device, lambda *args, **kwargs: self.on_cut())
        patches.replace(xlac.sync_tensors, lambda *args, **kwargs: self.on_cut())
        # Autocast asks what it runs on.
        patches.set(xm, "xla_device_hw", lambda device: "TPU" if "xla" in str(device) else "CPU")
        # What the process traced before is none of this step's, and the other way round.
        device = str(torch_xla.device())
        xlac.set_collective_token(device, None)
        self._stack.callback(xlac.set_collective_token, device, None)
        self._stack.enter_context(_NothingIsRead(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def read(self, tensors: list[torch.Tensor]) -> None:
        """Pending ``tensors`` are about to be read: they get values, zeros as a rule."""
        self.reads.append(call_site.here())
        if len(self.reads) >= _MANY_READS:
            place, times = Counter(self.reads).most_common(1)[0]
            raise RuntimeError(
                f"the step has read {len(self.reads)} values, {times} of them at {place}, and has "
                "not come to an end: nothing runs in a plan, so what is read is zero, and a loop "
                "that waits for another value never ends. Leave such a loop out of what is planned"
            )
        self.on_read()
        for tensor in tensors:
            settle([tensor], float(getattr(tensor, _TRUTH, 0)))

    def select(self, masks: list[torch.Tensor]) -> None:
        """Pending ``masks`` are about to decide on a shape: they select everything."""
        self.sized_by_data.append(call_site.here())
        self.on_read()
        settle(masks, 1.0)
        for mask in masks:
            setattr(mask, _KNOWN, torch.ones(mask.shape, dtype=mask.dtype))


def _set_back(arguments: str | None) -> None:
    os.environ.pop(ARGUMENTS, None)
    if arguments is not None:
        os.environ[ARGUMENTS] = arguments


def settle(tensors: Iterable[torch.Tensor], value: float = 0.0) -> None:
    """Gives pending tensors buffers, full of ``value``, without running what was traced."""
    for tensor in tensors:
        if is_pending(tensor):
            filled = torch.full(local(tensor).shape, value, dtype=tensor.dtype)
            placeholder = as_data(filled, tensor.device)
            assign(tensor, placeholder)
            if is_pending(tensor):  # a view stays a computation on what it is a view of
                fill_([tensor], [placeholder])


def forget_pending() -> None:
    """Forgets how to compute what is still pending: values that only autograd holds, on their way
    from one node to the next, which no :func:`settle` finds. They get no values, not even zeros.
    """
    xlac.forget_pending(str(torch_xla.device()))


class _NothingIsRead(TorchFunctionMode):
    """Stands in for what only running could give, and leaves out what only running would need."""

    def __init__(self, pretence: Pretence) -> None:
        super().__init__()
        self.pretence = pretence

    def __torch_function__(
        self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TELLS or func in _CARRIES or func in _TURNS:
            return _with_truth(func, args, kwargs)
        if masks := [t for t in _masks(func, args, kwargs) if is_pending(t)]:
            self.pretence.select(masks)
        if func in _FOLLOWED and _is_known(args, kwargs):
            return _computed(func, args, kwargs)
        if masks:
            return func(*args, **kwargs)
        if func in READS and reads_to_host(func, args, kwargs):
            pending = [t for t in xla_tensors((args, kwargs)) if is_pending(t)]
            if pending:
                self.pretence.read(pending)
        elif func in _FILLS and _is_large_parameter(filled := _first(args, kwargs)):
            return filled
        elif func in _DRAWS and kwargs.get("out") is None:
            plain = {k: v for k, v in kwargs.items() if k != "generator"}
            if torch.empty(*args, **{**plain, "device": "meta"}).numel() >= _LARGE:
                return torch.zeros(*args, **plain)
        return func(*args, **kwargs)


def _masks(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """What decides on the shape of the result."""
    if func in (torch.Tensor.__getitem__, torch.Tensor.masked_select, torch.masked_select):
        return [t for t in xla_tensors((args[1:], kwargs)) if t.dtype is torch.bool]
    if func in _PLACES or (func in _CHOICES and len(args) + len(kwargs) == 1):
        return xla_tensors((args, kwargs))
    return []


def _on_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        sent = as_data(value, device)
        setattr(sent, _KNOWN, value)
        return sent
    if isinstance(value, (list, tuple)):
        return type(value)(_on_device(one, device) for one in value)
    return value


def _is_known(args: tuple, kwargs: dict) -> bool:
    """Whether masks that select everything decide on all of it, and nothing has changed it."""
    tensors = xla_tensors((args, kwargs))
    return bool(tensors) and all(hasattr(t, _KNOWN) and not is_pending(t) for t in tensors)


def _computed(func: Any, args: tuple, kwargs: dict) -> Any:
    """On the host, as nothing runs on the device."""
    if func is torch.Tensor.__iter__:
        func = torch.Tensor.unbind
        return iter(_computed(func, args, kwargs))
    device = xla_tensors((args, kwargs))[0].device
    args, kwargs = tree_map_only(torch.Tensor, lambda t: getattr(t, _KNOWN, t), (args, kwargs))
    value = func(*args, **kwargs)
    return value if func in _VALUES else _on_device(value, device)


def _first(args: tuple, kwargs: dict) -> object:
    return args[0] if args else kwargs.get("tensor")  # as functions of nn.init hand it over


def _is_large_parameter(tensor: object) -> bool:
    # Pages that nobody writes take up no memory, so even a model that is built whole on the host
    # costs next to nothing.
    return (
        isinstance(tensor, torch.nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.numel() >= _LARGE
    )


_FILLS = frozenset(
    getattr(torch.Tensor, f"{name}_")
    for name in "uniform normal zero fill mul add sub div erfinv clamp copy".split()
) | frozenset(
    value
    for name, value in vars(torch.nn.init).items()
    if name.endswith("_") and isinstance(value, types.FunctionType)
)
_DRAWS = frozenset({torch.randn, torch.rand})
_PLACES = frozenset({torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere})
_CHOICES = frozenset({torch.where})  # without values to choose from: nonzero(as_tuple=True)

_VIEWS = frozenset(
    getattr(torch.Tensor, name)
    for name in "__getitem__ __iter__ unbind select squeeze unsqueeze flatten reshape view".split()
)
_VALUES = frozenset(
    getattr(torch.Tensor, name)
    for name in "item tolist cpu numpy __bool__ __float__ __int__ __index__".split()
)
_FOLLOWED = _VIEWS | _VALUES | _PLACES | _CHOICES
# On a tensor: the values it would have, were everything selected.
_KNOWN = "_xla_fsdp_known"
# On a tensor: whether it is true, had the step run. Losses are finite.
_TRUTH = "_xla_fsdp_assumed_truth"
_TELLS = {
    torch.isfinite: True, torch.Tensor.isfinite: True,
    torch.isnan: False, torch.Tensor.isnan: False,
    torch.isinf: False, torch.Tensor.isinf: False,
}  # fmt: skip
_CARRIES = frozenset(
    getattr(owner, name)
    for owner in (torch, torch.Tensor)
    for name in ("all", "any", "logical_and", "logical_or", "__and__", "__or__")
    if hasattr(owner, name)
)
_TURNS = frozenset({
    torch.logical_not, torch.Tensor.logical_not, torch.bitwise_not, torch.Tensor.bitwise_not,
    torch.Tensor.__invert__,
})  # fmt: skip


def _with_truth(func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
    result = func(*args, **kwargs)
    told = _TELLS.get(func)
    if told is None and args and hasattr(args[0], _TRUTH):
        told = getattr(args[0], _TRUTH) != (func in _TURNS)
    if told is not None and isinstance(result, torch.Tensor):
        setattr(result, _TRUTH, told)
    return result

"""Traces as one rank of a slice, in a process without that slice.

Nothing runs, because there are no other ranks for collectives: tensors that a program would compute
become placeholders.
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
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from ... import xlac
from ...collectives.host_data import LARGE, as_data, fake_cpu_tensor, share
from ...collectives.routes import attributes_of
from ...ranks.autograd_thread import run_there
from ...ranks.cpu import call_site
from ...ranks.cpu.mode import READS, reads_to_host, xla_tensors
from ...ranks.cpu.patches import Patches
from ...ranks.rank import set_simulated_rank
from ...sharding.freeing import fill_
from ...sharding.sharded_parameter import local
from ...tpu.libtpu_flags import ARGUMENTS
from ...tpu.topology import Slice
from .live import assign, is_pending, is_view

# More reads than in any step: a loop that waits for a value.
_MANY_READS = 2000


class StepTraced(BaseException):
    """Ends the step when it is fully traced; a BaseException, so that no code catches it."""


class SimulatedRank(TorchFunctionMode):
    """A context manager that makes this process rank ``rank`` of ``size``.

    Args:
        on_cut: called where the traced program would be run. May raise :class:`StepTraced`.
        on_read: called before a pending value is read, which runs only what the value depends on.
        arguments: the value of ``LIBTPU_INIT_ARGS``, or ``None`` to leave it.

    Attributes:
        reads: places (``file:line in function``) that read pending values. They read zero; a check
            for finite values is true; a mask selects everything.
        sized_by_data: places where values decide the size of a tensor; the largest is assumed.
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
        super().__init__()
        self.arguments = arguments
        self.rank, self.size, self.slice = rank, size, slice
        self.on_cut, self.on_read = on_cut, on_read
        self.reads: list[str] = []
        self.sized_by_data: list[str] = []
        self._stack, self._host_tensors = contextlib.ExitStack(), HostTensors()

    def __enter__(self) -> SimulatedRank:
        set_simulated_rank(True)
        self._stack.callback(set_simulated_rank, False)
        run_there(torch_xla.device(), functools.partial(set_simulated_rank, True))
        self._stack.callback(
            run_there, torch_xla.device(), functools.partial(set_simulated_rank, False)
        )
        patches = Patches()
        self._stack.callback(patches.undo)
        if self.arguments is not None:
            if ARGUMENTS in os.environ:
                self._stack.callback(os.environ.update, {ARGUMENTS: os.environ[ARGUMENTS]})
            self._stack.callback(os.environ.pop, ARGUMENTS, None)
            os.environ[ARGUMENTS] = self.arguments
        # torch_xla caches both for the process.
        patches.replace(xlac.WORLD_SIZE, self.size)
        patches.replace(xlac.ORDINAL, self.rank)
        if self.slice is not None:
            devices, kind = attributes_of(self.slice), self.slice.chip.device_kind
            patches.set(xr, "global_runtime_device_attributes", lambda: devices)
            patches.set(xm, "xla_device_kind", lambda device=None: kind)
        patches.replace(xlac.sync_device, lambda *args, **kwargs: self.on_cut())
        patches.replace(xlac.sync_tensors, lambda *args, **kwargs: self.on_cut())
        # Autocast reads the kind of device.
        patches.set(xm, "xla_device_hw", lambda device: "TPU" if "xla" in str(device) else "CPU")
        # The step must not depend on collectives that this process traced before, nor the reverse.
        device = str(torch_xla.device())
        xlac.set_collective_token(device, None)
        self._stack.callback(xlac.set_collective_token, device, None)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._stack.close()

    def __torch_function__(
        self, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _TELLS or func in _CARRIES or func in _TURNS:
            return _with_truth(func, args, kwargs)
        if masks := [t for t in _masks(func, args, kwargs) if is_pending(t)]:
            self.select(masks)
        if func in _FOLLOWED:
            tensors = xla_tensors((args, kwargs))
            # Whether all values follow from masks that select everything.
            if tensors and all(hasattr(t, _KNOWN) and not is_pending(t) for t in tensors):
                return _compute_on_host(func, args, kwargs)
        if masks:
            return func(*args, **kwargs)
        if func in READS and reads_to_host(func, args, kwargs):
            pending = [t for t in xla_tensors((args, kwargs)) if is_pending(t)]
            if pending:
                self.read(pending)
        return self._host_tensors.call(func, args, kwargs)

    def read(self, tensors: list[torch.Tensor]) -> None:
        """Fills pending ``tensors`` before they are read: with zeros, except for checks."""
        self.reads.append(call_site.here())
        if len(self.reads) >= _MANY_READS:
            place, times = Counter(self.reads).most_common(1)[0]
            raise RuntimeError(
                f"the step has read {len(self.reads)} values, {times} of them at {place}, and has "
                "not ended: nothing runs in a plan, so values are zero, and a loop that waits for "
                "another value never ends. Remove such a loop from the step that is planned"
            )
        self.on_read()
        for tensor in tensors:
            fill_pending([tensor], float(getattr(tensor, _TRUTH, 0)))

    def select(self, masks: list[torch.Tensor]) -> None:
        self.sized_by_data.append(call_site.here())
        self.on_read()
        fill_pending(masks, 1.0)
        for mask in masks:
            setattr(mask, _KNOWN, torch.ones(mask.shape, dtype=mask.dtype, device="cpu"))


def fill_pending(tensors: Iterable[torch.Tensor], value: float = 0.0) -> None:
    """Gives pending tensors buffers without running a program."""
    for tensor in tensors:
        if is_pending(tensor):
            shape = local(tensor).shape
            if value:
                filled = torch.full(shape, value, dtype=tensor.dtype, device="cpu")
            else:
                filled = fake_cpu_tensor(shape, tensor.dtype)
            placeholder = as_data(filled, tensor.device)
            if not is_view(tensor):  # an assignment would also change the base of a view
                assign(tensor, placeholder)
            if is_pending(tensor):
                fill_([tensor], [placeholder])


def drop_pending_of_autograd() -> None:
    """Drops pending values that only autograd references, which ``fill_pending`` cannot find."""
    xlac.forget_pending(str(torch_xla.device()))


def _masks(func: Any, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Tensors whose values decide the shape of the result."""
    if func in (torch.Tensor.__getitem__, torch.Tensor.masked_select, torch.masked_select):
        return [t for t in xla_tensors((args[1:], kwargs)) if t.dtype is torch.bool]
    if func in _PLACES or (func in _CHOICES and len(args) + len(kwargs) == 1):
        return xla_tensors((args, kwargs))
    return []


def _compute_on_host(func: Any, args: tuple, kwargs: dict) -> Any:
    if func is torch.Tensor.__iter__:
        func = torch.Tensor.unbind
        return iter(_compute_on_host(func, args, kwargs))
    device = xla_tensors((args, kwargs))[0].device
    args, kwargs = tree_map_only(torch.Tensor, lambda t: getattr(t, _KNOWN, t), (args, kwargs))
    value = func(*args, **kwargs)

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        sent = as_data(tensor, device)
        setattr(sent, _KNOWN, tensor)
        return sent

    return value if func in _VALUES else tree_map_only(torch.Tensor, on_device, value)


_PLACES = frozenset({torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere})
_CHOICES = frozenset({torch.where})  # with one argument: nonzero(as_tuple=True)

_VIEWS = frozenset(
    getattr(torch.Tensor, name)
    for name in "__getitem__ __iter__ unbind select squeeze unsqueeze flatten reshape view".split()
)
_VALUES = frozenset(
    getattr(torch.Tensor, name)
    for name in "item tolist cpu numpy __bool__ __float__ __int__ __index__".split()
)
_FOLLOWED = _VIEWS | _VALUES | _PLACES | _CHOICES
# Attribute of a tensor: its values if masks select everything.
_KNOWN = "_xla_fsdp_known"
# Attribute of a tensor: its truth value if all losses are finite.
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


class HostTensors:
    """Avoids writing large host tensors that need no values, so that they take up no memory."""

    def __init__(self) -> None:
        # Weak references also keep another storage from getting the same address.
        self._of_parameters: set[StorageWeakRef] = set()
        self._unwritten: set[StorageWeakRef] = set()

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        # Functions of nn.init pass it by this name.
        tensor: Any = args[0] if args else kwargs.get("tensor")
        made = None
        if func in _FILLS:
            if self._is_parameter(tensor):
                if _is_plain(tensor):
                    self._unwritten.add(_storage(tensor))
                return tensor
        elif func in _DRAWS:
            sizes = {key: value for key, value in kwargs.items() if key != "generator"}
            if kwargs.get("out") is None:
                like = torch.empty(*args, **{**sizes, "device": "meta"})
                if like.numel() >= LARGE:
                    return torch.zeros(*args, **sizes)
        elif func in _ALIASES:
            if _is_plain(tensor) and isinstance(tensor, nn.Parameter):
                self._of_parameters.add(_storage(tensor))
        elif func in _COPIES and _may_be_replaced(tensor):
            made = self._copied(tensor, *_COPIES[func])
        elif func is torch.Tensor.to and _may_be_replaced(tensor):
            made = self._moved(tensor, args[1:], kwargs)
        return func(*args, **kwargs) if made is None else made

    def _is_parameter(self, tensor: Any) -> bool:
        if isinstance(tensor, nn.Parameter):
            return tensor.device.type == "cpu" and tensor.numel() >= LARGE
        return _is_plain(tensor) and _storage(tensor) in self._of_parameters

    def _moved(self, tensor: torch.Tensor, args: tuple, kwargs: dict) -> torch.Tensor | None:
        try:
            device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        except (TypeError, RuntimeError):  # copy=True, or wrong arguments
            return None
        if device is None or device.type == "cpu":
            return self._copied(tensor, dtype) if dtype not in (None, tensor.dtype) else None
        if device.type != "xla":
            return None
        if dtype not in (None, tensor.dtype):
            converted = self._copied(tensor, dtype)
            tensor = tensor.to(dtype) if converted is None else converted
        return share(tensor, torch.device("xla", device.index or 0))

    def _copied(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None
    ) -> torch.Tensor | None:
        """A copy without values, or ``None`` if ``tensor`` may have some."""
        if dtype is tensor.dtype or _storage(tensor) not in self._unwritten:
            return None
        made = fake_cpu_tensor(tensor.shape, dtype or tensor.dtype)
        self._of_parameters.add(_storage(made))
        self._unwritten.add(_storage(made))
        return made


def _is_plain(tensor: Any) -> bool:
    """Whether ``tensor`` is large, on the host, and of no subclass."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.numel() >= LARGE
    )


def _may_be_replaced(tensor: Any) -> bool:
    return _is_plain(tensor) and not (tensor.requires_grad and torch.is_grad_enabled())


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())


_FILLS = frozenset(
    getattr(torch.Tensor, f"{name}_")
    for name in "uniform normal zero fill mul add sub div erfinv clamp copy".split()
) | frozenset(
    value
    for name, value in vars(nn.init).items()
    if name.endswith("_") and isinstance(value, types.FunctionType)
)
_DRAWS = frozenset({torch.randn, torch.rand})
_ALIASES = frozenset({torch.Tensor.data.__get__, torch.Tensor.detach})  # type: ignore[attr-defined]
# By function, the dtype of the result if fixed.
_COPIES: dict[Any, tuple[torch.dtype, ...]] = {
    torch.Tensor.clone: (),
    torch.Tensor.half: (torch.float16,),
    torch.Tensor.bfloat16: (torch.bfloat16,),
    torch.Tensor.float: (torch.float32,),
    torch.Tensor.double: (torch.float64,),
}

"""Tensors on the XLA device that are still referenced: those that a sync would compute."""

from __future__ import annotations

import gc
import re
import sys
import time
from dataclasses import dataclass
from itertools import compress

import torch

from ... import xlac
from ...collectives.host_data import LARGE
from ...sharding.freeing import fill_
from ...sharding.gathering import UnshardedParameter
from ...sharding.gradients import reduced_grad
from ...sharding.sharded_parameter import local, on_local_parts
from ...tree import overrides_dispatch

_FIELDS = re.compile(r"^(TensorID|AliasID|IR): ?(.*)$", re.M)


@dataclass(frozen=True)
class LiveTensor:
    """``alias_id`` stays the same while a tensor is updated in place."""

    tensor: torch.Tensor
    tensor_id: int
    alias_id: int
    pending: bool  # traced, not computed


class LiveTensors:
    """Finds every XLA tensor that Python references, with gradients.

    A search through all objects is slow, so those that exist at the start are frozen
    (``gc.freeze``) until :meth:`close`, or for good if the caller froze some. :meth:`all` includes
    ``before``, the tensors of the start, not ``saved``. :meth:`restore` restores their values,
    those of small tensors on the host, and all gradients.
    """

    def __init__(self) -> None:
        self._keeps_frozen = gc.get_freeze_count() > 0
        if self._keeps_frozen:
            gc.collect()  # else garbage would be frozen too
            gc.unfreeze()  # Python does not list frozen objects
        found = self._found("xla", "cpu")
        self.before = _with_gradients([tensor for tensor in found if is_xla(tensor)])
        self.saved = [SavedValue(tensor) for tensor in self.before]
        self._on_host = [(t, t.detach().clone()) for t in found if _is_small_on_host(t)]
        self._grads = [(tensor, reduced_grad(tensor)) for tensor in found if may_have_grad(tensor)]
        self._hidden = {id(one.data) for one in self.saved}
        gc.freeze()

    def all(self) -> list[torch.Tensor]:
        new = [tensor for tensor in self._found("xla") if id(tensor) not in self._hidden]
        return _with_gradients([*self.before, *new])

    def restore(self) -> None:
        for one in self.saved:
            one.restore()
        for tensor, value in self._on_host:
            if not torch.equal(_bytes(tensor), _bytes(value)):  # else it may be read-only
                assign(tensor, value)
        with on_local_parts():  # what `no_sync` stores stays
            for tensor, grad in self._grads:
                tensor.grad = grad

    def close(self) -> None:
        self.before, self.saved, self._on_host, self._grads = [], [], [], []
        gc.collect()
        if not self._keeps_frozen:
            gc.unfreeze()

    @staticmethod
    def _found(*devices: str) -> list[torch.Tensor]:
        # A list of all objects references tuples under construction. A thread that resizes one gets
        # a SystemError, so no other thread may run Python meanwhile, for up to 2 s.
        before = sys.getswitchinterval()
        sys.setswitchinterval(2.0)
        try:
            time.sleep(0)  # a thread that waits already runs first
            objects = gc.get_objects()
            # type(), because isinstance() reads __class__, which is slow and runs code of objects.
            kinds = {kind for kind in set(map(type, objects)) if torch.Tensor in kind.__mro__}
            tensors = list(compress(objects, map(kinds.__contains__, map(type, objects))))
            del objects
        finally:
            sys.setswitchinterval(before)
            time.sleep(0)  # else a thread that waits since then waits for 2 s
        found = [tensor for tensor in tensors if _is_on(tensor, *devices)]
        for tensor in found:  # some are referenced only by autograd
            tensor._fix_weakref()
        return found


def _is_small_on_host(tensor: torch.Tensor) -> bool:
    """Such as counters of schedules and averages; copies of large ones may exceed the memory."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    strided = plain and tensor.layout is torch.strided and not tensor.is_quantized
    return strided and tensor.numel() < LARGE


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def _with_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    grads = [reduced_grad(tensor) for tensor in tensors if may_have_grad(tensor)]
    there = [grad for grad in grads if grad is not None and is_xla(grad)]
    return list({id(t): t for t in [*tensors, *there]}.values())


def may_have_grad(tensor: torch.Tensor) -> bool:
    return tensor.is_leaf and not isinstance(tensor, UnshardedParameter)


def inspect_tensor(tensor: torch.Tensor) -> LiveTensor:
    """Does not read the value of ``tensor``."""
    fields = dict(_FIELDS.findall(xlac.debug_info(tensor)))
    # A computation that only returns a device buffer needs no execution.
    pending = fields["IR"] != "None" and "xla::device_data" not in fields["IR"]
    return LiveTensor(tensor, int(fields["TensorID"]), int(fields["AliasID"]), pending)


def is_pending(tensor: torch.Tensor) -> bool:
    return inspect_tensor(tensor).pending


class SavedValue:
    """The value of an XLA tensor, to restore it after in-place updates."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.data = torch.empty(local(tensor).shape, device=tensor.device, dtype=tensor.dtype)
        assign(self.data, tensor)

    def restore(self) -> None:
        assign(self.tensor, self.data)


def assign(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Gives ``tensor`` the value of ``data``, of the same shape and dtype, without tracing.

    Where torch allows no copy in place (expanded, inference mode), views keep their value.
    """
    with torch.no_grad(), on_local_parts(), torch.autograd._unsafe_preserve_version_counter(tensor):
        try:
            tensor.copy_(data)
        except RuntimeError:
            fill_([tensor], [data])


def is_xla(tensor: torch.Tensor) -> bool:
    """False for a class that only reports the XLA device."""
    return _is_on(tensor, "xla")


def _is_on(tensor: torch.Tensor, *devices: str) -> bool:
    try:
        return not overrides_dispatch(type(tensor)) and tensor.device.type in devices
    except Exception:  # a subclass in the middle of its construction
        return False

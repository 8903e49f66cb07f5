"""Tensors on the XLA device that somebody still holds: what a sync would compute and keep."""

from __future__ import annotations

import contextlib
import gc
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import compress

import torch

from ... import xlac
from ...sharding.freeing import fill_
from ...sharding.sharded_parameter import local, on_local_parts
from ...sharding.unsharded import UnshardedParameter
from ...tree import has_own_operators

_FIELDS = re.compile(r"^(TensorID|AliasID|IR): ?(.*)$", re.M)


@dataclass(frozen=True)
class Held:
    """What torch_xla knows of one live tensor.

    ``alias_id`` stays the same while a tensor is updated in place: by it the runtime finds the
    buffer that the new value may take over.
    """

    tensor: torch.Tensor
    tensor_id: int
    alias_id: int
    pending: bool  # its value has been traced, not computed


class LiveTensors:
    """Finds every XLA tensor that Python holds, gradients included, again and again.

    Looking through all objects of a process takes a while, so those that were there at the start
    are looked through once and then set aside (``gc.freeze``) until :meth:`close`, which also
    collects what has become garbage since.

    Attributes:
        before: the tensors that were there at the start.
        kept: their values. Not among the tensors that are found: nobody else knows of them.
    """

    def __init__(self) -> None:
        self.before = _with_gradients(self._found())
        self.kept = [Kept(tensor) for tensor in self.before]
        self._hidden = {id(one.data) for one in self.kept}
        # Somebody else's frozen objects could not be told from these.
        self._freezes = gc.get_freeze_count() == 0
        if self._freezes:
            gc.freeze()

    def all(self) -> list[torch.Tensor]:
        """The tensors that are there now."""
        new = [tensor for tensor in self._found() if id(tensor) not in self._hidden]
        return _with_gradients([*self.before, *new])

    def close(self) -> None:
        self.before, self.kept = [], []
        gc.collect()
        if self._freezes:
            gc.unfreeze()

    @staticmethod
    def _found() -> list[torch.Tensor]:
        # type() instead of isinstance(), which asks objects for their __class__: slow, and some
        # objects do things when asked.
        kinds = _tensor_types()
        with _alone():
            objects = gc.get_objects()
            tensors = list(compress(objects, map(kinds.__contains__, map(type, objects))))
            del objects
        found = [tensor for tensor in tensors if is_xla(tensor)]
        for tensor in found:  # those that only autograd held; now Python does, which it must know
            tensor._fix_weakref()
        return found


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Within, for up to 2 s, no other thread runs Python: a busy machine may stop this one for some
    tenths of a second.

    Who holds every object of the process also holds tuples that another thread is about to make,
    and Python refuses to resize a tuple that somebody else has (a SystemError in that thread).
    """
    before = sys.getswitchinterval()
    sys.setswitchinterval(2.0)
    try:
        time.sleep(0)  # who has waited for less than that may go first
        yield
    finally:
        sys.setswitchinterval(before)
        time.sleep(0)  # who has begun to wait meanwhile would go on for those 2 s


def _with_gradients(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    grads = [t.grad for t in tensors if may_have_grad(t) and t.grad is not None and is_xla(t.grad)]
    return list({id(t): t for t in [*tensors, *grads]}.values())


def may_have_grad(tensor: torch.Tensor) -> bool:
    """Whether autograd may give ``tensor`` a gradient."""
    return tensor.is_leaf and not isinstance(tensor, UnshardedParameter)


def _tensor_types() -> set[type]:
    kinds: set[type] = set()
    new: list[type] = [torch.Tensor]
    while new:
        kind = new.pop()
        if kind not in kinds:
            kinds.add(kind)
            new.extend(type.__subclasses__(kind))
    return kinds


def held(tensor: torch.Tensor) -> Held:
    """Looks ``tensor`` up without touching its value."""
    fields = dict(_FIELDS.findall(xlac.debug_info(tensor)))
    # A computation that is nothing but a device buffer is as good as the buffer.
    pending = fields["IR"] != "None" and "xla::device_data" not in fields["IR"]
    return Held(tensor, int(fields["TensorID"]), int(fields["AliasID"]), pending)


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether the value of an XLA tensor has been traced, but not computed."""
    return held(tensor).pending


class Kept:
    """The data of an XLA tensor, to be put back after in-place updates."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.data = torch.empty(local(tensor).shape, device=tensor.device, dtype=tensor.dtype)
        assign(self.data, tensor)

    def restore(self) -> None:
        assign(self.tensor, self.data)


def assign(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Lets ``tensor`` have the value of ``data``, of the same shape and dtype, without a trace.

    A copy in place is no computation on XLA: the tensor takes the value over, and so do its views.
    Where torch allows none (expanded tensors, inference mode), only the tensor itself does.
    """
    with (
        torch.no_grad(),
        on_local_parts(),
        torch.autograd._unsafe_preserve_version_counter(tensor),
    ):
        try:
            tensor.copy_(data)
        except RuntimeError:
            fill_([tensor], [data])


def is_xla(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is on the XLA device, and not one that only says so (a stand-in)."""
    try:
        return not has_own_operators(type(tensor)) and tensor.device.type == "xla"
    except Exception:  # a subclass in the middle of its construction
        return False

"""Tensors on the XLA device that are still referenced: those that a sync would compute."""

from __future__ import annotations

import gc
import re
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ... import xlac
from ...collectives.host_data import LARGE
from ...ranks.cpu.session import is_xla, objects_of
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
    (``gc.freeze``) until :meth:`close`, which also unfreezes what the caller froze. :meth:`all`
    includes ``before``, the tensors of the start, not ``saved``. :meth:`restore` restores their
    values, those of small parameters and buffers on the host, and gradients.
    """

    def __init__(self) -> None:
        gc.unfreeze()  # Python does not list frozen objects
        self.before = _with_gradients(self._found())
        self.saved = [SavedValue(tensor) for tensor in self.before]
        on_host = _on_host(objects_of(nn.Module))
        self._on_host = [(t, t.detach().clone()) for t in on_host if _is_small(t)]
        tensors = [*self.before, *on_host]
        self._grads = [(t, reduced_grad(t)) for t in tensors if may_have_grad(t)]
        self._hidden = {id(one.data) for one in self.saved}
        self._known: dict[int, weakref.ref] = {}
        gc.freeze()

    def all(self) -> list[torch.Tensor]:
        new = [tensor for tensor in self._found() if id(tensor) not in self._hidden]
        return _with_gradients([*self.before, *new])

    def note_models(self) -> None:
        """From now on, :meth:`has_new_model` counts what exists as known."""
        self._known = {id(one): weakref.ref(one) for one in _models()}

    def has_new_model(self) -> bool:
        """Whether a parameter was made or computed, or a module with parameters or buffers made."""
        models = _models()
        known = (self._known.get(id(one)) for one in models)
        if any(ref is None or ref() is not one for ref, one in zip(known, models, strict=True)):
            return True
        groups = [group for optimizer in objects_of(Optimizer) for group in optimizer.param_groups]
        trained = [one for group in groups for one in group["params"]]
        parameters = [one for one in [*self.before, *models] if isinstance(one, nn.Parameter)]
        return any(is_pending(one) for one in [*trained, *parameters])

    def restore(self) -> None:
        # Views first: an assignment to one also changes its base.
        for one in sorted(self.saved, key=lambda one: not is_view(one.tensor)):
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
        gc.unfreeze()

    @staticmethod
    def _found() -> list[torch.Tensor]:
        found = [tensor for tensor in objects_of(torch.Tensor) if is_xla(tensor)]
        for tensor in found:  # some are referenced only by autograd
            tensor._fix_weakref()
        return found


def _models() -> list[Any]:
    """Without those that existed at the start, which are frozen."""
    return [*objects_of(nn.Parameter), *filter(_own_tensors, objects_of(nn.Module))]


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Its parameters and buffers; none while it is being constructed."""
    kinds = (vars(module).get("_parameters"), vars(module).get("_buffers"))
    return [one for own in kinds for one in (own or {}).values() if isinstance(one, torch.Tensor)]


def _on_host(modules: list[nn.Module]) -> list[torch.Tensor]:
    """Parameters and buffers on the host, such as counters of averages."""
    tensors = {id(tensor): tensor for module in modules for tensor in _own_tensors(module)}
    plain = (one for one in tensors.values() if not overrides_dispatch(type(one)))
    return [tensor for tensor in plain if tensor.device.type == "cpu"]


def _is_small(tensor: torch.Tensor) -> bool:
    """Copies of large ones may exceed the memory."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_quantized
    return plain and tensor.layout is torch.strided and tensor.numel() < LARGE


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
    """Does not read the value of ``tensor``.

    A view stays as it was when it was last used: a sync does not compute it from its new base.
    """
    inner = torch._from_functional_tensor(tensor) if is_view(tensor) else tensor
    fields = dict(_FIELDS.findall(xlac.debug_info(inner)))
    # A computation that only returns a device buffer needs no execution.
    pending = fields["IR"] != "None" and "xla::device_data" not in fields["IR"]
    return LiveTensor(inner, int(fields["TensorID"]), int(fields["AliasID"]), pending)


def is_view(tensor: torch.Tensor) -> bool:
    return tensor._is_view() and torch._is_functional_tensor(tensor)


def is_pending(tensor: torch.Tensor) -> bool:
    return is_xla(tensor) and inspect_tensor(tensor).pending


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

    Where torch allows no copy in place (expanded), views keep their value.
    """
    preserve = torch.autograd._unsafe_preserve_version_counter
    # Inference tensors have no version, and change only in inference mode.
    mode = torch.inference_mode() if tensor.is_inference() else preserve(tensor)
    with torch.no_grad(), on_local_parts(), mode:
        try:
            tensor.copy_(data)
        except RuntimeError:
            fill_([tensor], [data])

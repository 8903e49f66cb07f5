"""The program of one step, and the buffers that it may overwrite."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch

from ... import xlac
from ...sharding.sharded_parameter import local
from ..protobuf import message_classes
from .live import LiveTensor, inspect_tensor

# Fields of xla/service/hlo.proto that a fingerprint ignores, and their parents.
_MESSAGES = {
    "Module": ["computations Computation* 3", "stack_frame_index bytes 17"],
    "Computation": ["instructions Instruction* 2"],
    "Instruction": ["metadata bytes 7"],
}
_NAME = re.compile(
    rb"(?:forward|backward|recompute|optimizer|all_gather|reduce_scatter|all_reduce)\[[^\[\]]{0,300}\]"
)


def fingerprint(hlo: bytes) -> str:
    """SHA-256 of a serialized ``HloModuleProto`` without metadata (scopes, files, lines)."""
    module = _module_class().FromString(hlo)
    module.ClearField("stack_frame_index")
    for computation in module.computations:
        for instruction in computation.instructions:
            instruction.ClearField("metadata")
    return hashlib.sha256(module.SerializeToString(deterministic=True)).hexdigest()


@cache
def _module_class() -> Any:
    return message_classes("xla_fsdp.traced", _MESSAGES)["Module"]


def scope_names(hlo: bytes) -> list[str]:
    """The names of modules and phases in the metadata, without the numbers of their uses."""
    return sorted({found.decode(errors="replace") for found in _NAME.findall(hlo)})


@dataclass(frozen=True)
class TracedProgram:
    """A program for the compiler.

    ``hlo``: a serialized ``HloModuleProto``. ``donated``: argument number to the number of the
    output in its buffer. ``arguments``: names such as ``blocks.3.mlp.weight``; "" if unknown.
    """

    hlo: bytes
    donated: Mapping[int, int]
    arguments: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Equal for programs that can share an executable."""
        return fingerprint(self.hlo)


@dataclass(frozen=True)
class PartitionedProgram:
    """One training step of all devices, which another framework lowered.

    Attributes:
        stablehlo: text or bytecode; its arguments carry shardings over ``devices``.
        fingerprint: equal for programs that differ only in files and lines.
        shardy: shardings are of the ``sdy`` dialect, not ``mhlo.sharding``.
        arguments: names; optimizer state is called ``exp_avg of NAME``.
        donated: as in ``TracedProgram``.
        elements: of all trained parameters.
        itemsize: bytes of an element in the compute dtype.
        model_flops: of a step on one device, as in ``program/flops.py``.
    """

    stablehlo: bytes
    fingerprint: str
    shardy: bool
    devices: int
    arguments: tuple[str, ...]
    donated: Mapping[int, int]
    elements: int
    itemsize: int
    model_flops: float

    @property
    def bound(self) -> int:
        """The ZeRO-3 bound, as in ``units.py``."""
        sent = 3 * self.elements * self.itemsize * (self.devices - 1) / self.devices
        return round(sent)


class StepBoundary:
    """The device buffers when the step began. Does not keep tensors alive."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._by_alias: dict[int, int] = {}  # alias id to buffer handle
        self._read: frozenset[int] = frozenset()
        live = [inspect_tensor(tensor) for tensor in tensors]
        self.note(live)
        # Views may stay computations on their base. An update would give them another id.
        self._views = frozenset(one.tensor_id for one in live if one.pending)

    def note(self, tensors: Iterable[LiveTensor]) -> None:
        known = [one for one in tensors if not one.pending]
        handles = xlac.buffer_handles([one.tensor for one in known])
        for one, handle in zip(known, handles, strict=True):
            self._by_alias[one.alias_id] = handle

    def has_pending(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Whether some of ``tensors`` were traced since, and are not computed."""
        live = map(inspect_tensor, tensors)
        return any(one.pending and one.tensor_id not in self._views for one in live)

    def handle_of(self, tensor: torch.Tensor) -> int | None:
        one = inspect_tensor(tensor)
        if one.alias_id not in self._by_alias and not one.pending:
            self.note([one])
        return self._by_alias.get(one.alias_id)

    def lower(
        self, tensors: Iterable[torch.Tensor], names: Mapping[int, str]
    ) -> TracedProgram | None:
        """The program that a sync would run now; ``None`` if nothing is pending.

        Its outputs are all pending ``tensors``; an update in place reuses the buffer if shape and
        dtype are equal. ``names``: by buffer handle.
        """
        live = [inspect_tensor(tensor) for tensor in tensors]
        # Several Python objects may have one value.
        pending = {one.tensor_id: one for one in live if one.pending}
        outputs = [one for key, one in pending.items() if key not in self._views]
        outputs.sort(key=lambda one: one.tensor_id)
        if not outputs:
            return None
        context = xlac.LoweringContext("step")
        context.build([one.tensor for one in outputs])
        arguments = context.device_parameter_id_tensor_mapping()
        numbers = sorted(arguments)
        handles = xlac.buffer_handles([arguments[n] for n in numbers])
        number_of = dict(zip(handles, numbers, strict=True))
        self._read = frozenset(handles)
        donated: dict[int, int] = {}
        for position, one in enumerate(outputs):
            number = number_of.get(self._by_alias.get(one.alias_id, -1))
            if number is None or number in donated:
                continue
            argument, output = local(arguments[number]), local(one.tensor)
            if (argument.shape, argument.dtype) == (output.shape, output.dtype):
                donated[number] = position
        by_number = {number: names.get(handle, "") for handle, number in number_of.items()}
        return TracedProgram(
            context.hlo(), donated, tuple(by_number.get(n, "") for n in range(len(numbers)))
        )

    def bytes_of_others(self, tensors: Sequence[LiveTensor]) -> int:
        """Unpadded bytes of ``tensors`` that the last program does not read."""
        handles = xlac.buffer_handles([one.tensor for one in tensors])
        buffers = {
            handle: local(one.tensor).numel() * one.tensor.dtype.itemsize
            for handle, one in zip(handles, tensors, strict=True)
            if handle not in self._read
        }
        return sum(buffers.values())

"""The program of one step as it goes to the compiler, with the state it may overwrite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ... import xlac
from ...sharding.sharded_parameter import local
from .bound import ZeroBound
from .fingerprint import fingerprint
from .live import Held, held


@dataclass(frozen=True)
class TracedProgram:
    """A program as it would go to the compiler.

    Attributes:
        hlo: the module, a serialized ``HloModuleProto``.
        donated: argument number to the number of the output that takes over its buffer.
        arguments: what each argument is, e.g. ``blocks.3.mlp.weight``; "" where nobody knows.
    """

    hlo: bytes
    donated: Mapping[int, int]
    arguments: tuple[str, ...]

    @cached_property
    def fingerprint(self) -> str:
        """Equal for programs that could share an executable."""
        return fingerprint(self.hlo)


@dataclass(frozen=True)
class PartitionedProgram:
    """One training step on all devices together, which somebody else lowered.

    Attributes:
        stablehlo: the module, as text or bytecode; its arguments carry shardings over ``devices``.
        fingerprint: the same for programs that differ in nothing but files and lines.
        shardy: shardings are of the ``sdy`` dialect, not ``mhlo.sharding``.
        devices: how many it is sharded over.
        arguments: what each argument is; state of the optimizer is called ``exp_avg of NAME``.
        donated: argument number to the number of the output that may take its buffer.
        elements: of all trained parameters.
        itemsize: bytes of an element in the dtype that parameters are computed in.
        model_flops: of a step on one device, by the convention of ``program/flops.py``.
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
    def bound(self) -> ZeroBound:
        """What ZeRO-3 training of the same parameters must send, as ``bound.py`` has it."""
        sent = 3 * self.elements * self.itemsize * (self.devices - 1) / self.devices
        return ZeroBound(round(sent), self.elements)


class StepBoundary:
    """What was on the device when the step began. The tensors themselves are not kept alive."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._by_alias: dict[int, int] = {}  # alias id to the handle of the buffer
        self._read: frozenset[int] = frozenset()  # handles of what was last lowered
        self.note([held(tensor) for tensor in tensors])

    def note(self, tensors: Iterable[Held]) -> None:
        """Adds tensors that have a buffer; the others are left out."""
        known = [one for one in tensors if not one.pending]
        handles = xlac.buffer_handles([one.tensor for one in known])
        for one, handle in zip(known, handles, strict=True):
            self._by_alias[one.alias_id] = handle

    def handle_of(self, tensor: torch.Tensor) -> int | None:
        """The buffer that ``tensor`` had when the step began, or got since; ``None`` if none."""
        one = held(tensor)
        if one.alias_id not in self._by_alias and not one.pending:
            self.note([one])
        return self._by_alias.get(one.alias_id)

    def lower(
        self, tensors: Iterable[torch.Tensor], names: Mapping[int, str]
    ) -> TracedProgram | None:
        """The program that would run now; ``None`` if nothing is pending.

        Its outputs are all live ``tensors`` that wait for a value, as in a sync. One that updates a
        tensor in place takes over that tensor's buffer if shape and dtype are the same, which is
        torch_xla's own rule. ``names`` gives names by buffer handle.
        """
        live = [held(tensor) for tensor in tensors]
        # Several Python objects may stand for one value.
        outputs = list({one.tensor_id: one for one in live if one.pending}.values())
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
            if number is not None and number not in donated and _fits(arguments[number], one):
                donated[number] = position
        by_number = {number: names.get(handle, "") for handle, number in number_of.items()}
        return TracedProgram(
            context.hlo(), donated, tuple(by_number.get(n, "") for n in range(len(numbers)))
        )

    def bytes_beside(self, tensors: Sequence[Held]) -> int:
        """What ``tensors``, which have buffers, take up that the program lowered last does not
        read, without the padding of layouts."""
        handles = xlac.buffer_handles([one.tensor for one in tensors])
        buffers = {
            handle: local(one.tensor).numel() * one.tensor.dtype.itemsize
            for handle, one in zip(handles, tensors, strict=True)
            if handle not in self._read
        }
        return sum(buffers.values())


def _fits(argument: torch.Tensor, output: Held) -> bool:
    return (
        local(argument).shape == local(output.tensor).shape
        and argument.dtype == output.tensor.dtype
    )

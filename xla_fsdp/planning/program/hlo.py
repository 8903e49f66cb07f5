"""Reads a program of XLA: a serialized ``HloModuleProto`` (xla/service/hlo.proto)."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from ...tpu.slices import Groups
from ..protobuf import message_classes

HBM, HOST = 0, 5  # memory spaces; layouts that name none are in HBM

# Fields of XLA's hlo.proto and xla_data.proto; strings are bytes, enumerations and lists of bools
# are numbers. Shapes stay bytes, of which most are equal. libtpu 0.0.51 and 0.0.21 write replica
# groups into different fields.
_MESSAGES = {
    "HloProto": ["hlo_module bytes 1"],
    "HloModule": ["name bytes 1", "entry_computation_id int64 6", "computations Computation* 3",
                  "schedule Schedule 7", "device_assignment DeviceAssignment 15"],
    "Schedule": ["sequences SequencesEntry* 1"],
    "SequencesEntry": ["key int64 1", "value Ids 2"],
    "Ids": ["ids int64* 1"],
    "DeviceAssignment": ["replica_count int64 1", "computation_count int64 2"],
    "Computation": ["instructions Instruction* 2", "id int64 5", "root_id int64 6"],
    "Instruction": ["name bytes 1", "opcode bytes 2", "shape bytes 3", "metadata Metadata 7",
                    "literal Literal 8", "parameter_number int64 9", "tuple_index int64 13",
                    "window Window 15", "convolution_dimension_numbers Convolution 16",
                    "custom_call_target bytes 28", "dot_dimension_numbers Dot 30", "id int64 35",
                    "operand_ids int64* 36", "called_computation_ids int64* 38",
                    "backend_config bytes 43", "replica_groups Ids* 49",
                    "source_target_pairs Pair* 52", "comparison_direction bytes 63",
                    "frontend_attributes Attributes 68", "collective_device_list DeviceList 87",
                    "iota_collective_device_list Iota 92",
                    "mesh_axes_replica_group_list MeshAxes 93"],
    "Shape": ["element_type int64 2", "dimensions int64* 3", "tuple_shapes bytes* 4",
              "layout Layout 5"],
    "Layout": ["minor_to_major int64* 1", "element_size_in_bits int64 7", "memory_space int64 8"],
    "Metadata": ["op_name bytes 2"],
    "Literal": ["preds int64* 2", "u8s bytes 3", "s32s int64* 4", "s64s int64* 5", "u32s int64* 6",
                "u64s uint64* 7", "s8s bytes 15", "u16s bytes 16", "s16s bytes 17"],
    "Window": ["dimensions WindowDimension* 1"],
    "WindowDimension": ["size int64 1", "stride int64 2", "padding_low int64 3",
                        "padding_high int64 4", "base_dilation int64 6"],
    "Convolution": ["kernel_output_feature_dimension int64 4"],
    "Dot": ["lhs_contracting_dimensions int64* 1", "lhs_batch_dimensions int64* 3"],
    "Pair": ["source int64 1", "target int64 2"],
    "Attributes": ["map MapEntry* 1"],
    "MapEntry": ["key bytes 1", "value bytes 2"],
    "DeviceList": ["replica_groups Ids* 1", "iota_replica_group_list Iota 2"],
    "Iota": ["num_devices_per_group int64 2", "iota_reshape_dims int64* 3",
             "iota_transpose_perm int64* 4"],
    "MeshAxes": ["mesh Mesh 1", "axes AxisRef* 2"],
    "Mesh": ["axes MeshAxis* 1"],
    "MeshAxis": ["size int64 2"],
    "AxisRef": ["mesh_axis_index int64 1"],
}  # fmt: skip
_NEWEST_FIELD = 93  # of an instruction, in the tested compilers
# By their numbers in xla_data.proto.
_DTYPES = (
    "invalid pred s8 s16 s32 s64 u8 u16 u32 u64 f16 f32 f64 tuple opaque c64 bf16 token c128"
    " f8e5m2 f8e4m3fn s4 u4 f8e4m3b11fnuz f8e5m2fnuz f8e4m3fnuz s2 u2 f8e4m3 f8e3m4 s1 u1"
    " f4e2m1fn f8e8m0fnu"
).split()
_TUPLE = _DTYPES.index("tuple")


@cache
def messages() -> Mapping[str, Any]:
    return message_classes("xla_fsdp.hlo", _MESSAGES)


@dataclass(frozen=True)
class Shape:
    """``order``: axes in memory, the fastest first. ``space``: 0 HBM, 1 VMEM, 2 synchronisation
    flags, 4 and 6 scalar memories, 5 the host. ``bits``: 0 for tokens.
    """

    dtype: str
    dims: tuple[int, ...]
    order: tuple[int, ...] = ()
    space: int = HBM
    bits: int = 0

    @property
    def bytes(self) -> int:
        """Without padding."""
        return (math.prod(self.dims) * self.bits + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class TupleShape:
    parts: tuple[Shape | TupleShape, ...]

    @cached_property
    def leaves(self) -> tuple[Shape, ...]:
        return tuple(leaf for part in self.parts for leaf in leaves(part))


def leaves(shape: Shape | TupleShape) -> tuple[Shape, ...]:
    return shape.leaves if isinstance(shape, TupleShape) else (shape,)


@lru_cache(maxsize=1 << 14)
def _shape(data: bytes) -> Shape | TupleShape:
    message = messages()["Shape"].FromString(data)
    if message.element_type == _TUPLE:
        return TupleShape(tuple(map(_shape, message.tuple_shapes)))
    dtype, layout = _DTYPES[message.element_type], message.layout
    in_name = re.search(r"\d+", dtype)  # f32, bf16, s4, f8e4m3fn, c64
    usual = 8 if dtype == "pred" else int(in_name[0]) if in_name else 0
    dims, order = tuple(message.dimensions), tuple(layout.minor_to_major)
    return Shape(dtype, dims, order, layout.memory_space, layout.element_size_in_bits or usual)


@dataclass(eq=False)
class Instruction:
    """``message``: its ``HloInstructionProto``. An asynchronous operation has the opcode and the
    computations of the operation inside, such as ``slice-start``, as in the text of HLO.
    """

    name: str
    opcode: str
    shape: Shape | TupleShape
    operands: tuple[Instruction, ...]
    called: tuple[HloComputation, ...]
    message: Any

    @cached_property
    def op_name(self) -> str:
        return _utf8(self.message.metadata.op_name)

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """The frontend attributes."""
        entries = self.message.frontend_attributes.map
        return {_utf8(entry.key): _utf8(entry.value) for entry in entries}

    @cached_property
    def backend_config(self) -> Mapping:
        """Empty if there is none, or if it is not JSON."""
        try:
            value = json.loads(self.message.backend_config)
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def groups(self) -> Groups:
        """The groups of devices of a collective; empty: all devices are one."""
        message, listed = self.message, self.message.collective_device_list
        if message.source_target_pairs:
            return tuple((pair.source, pair.target) for pair in message.source_target_pairs)
        if message.HasField("mesh_axes_replica_group_list"):
            mesh = message.mesh_axes_replica_group_list
            self._require_known_fields(mesh, mesh.mesh, *mesh.axes)
            sizes = [axis.size for axis in mesh.mesh.axes]
            along = [axis.mesh_axis_index for axis in mesh.axes]
            order = [axis for axis in range(len(sizes)) if axis not in along] + along
            return _iota_groups(sizes, order, math.prod(sizes[axis] for axis in along))
        for iota in (message.iota_collective_device_list, listed.iota_replica_group_list):
            if iota.iota_reshape_dims:
                order = list(iota.iota_transpose_perm)
                return _iota_groups(iota.iota_reshape_dims, order, iota.num_devices_per_group)
        groups = message.replica_groups or listed.replica_groups
        if not groups:
            self._require_known_fields(listed)
        return tuple(tuple(group.ids) for group in groups if group.ids)

    def _require_known_fields(self, *parts: Any) -> None:
        """Raises ValueError for fields that XLA added later, which may change the groups."""
        from google.protobuf.unknown_fields import UnknownFieldSet  # the plan extra

        later = [f.field_number for f in UnknownFieldSet(self.message)]
        found = [number for number in later if number > _NEWEST_FIELD]
        found += [field.field_number for part in parts for field in UnknownFieldSet(part)]
        if found:
            raise ValueError(
                f"the {self.opcode} {self.name} has fields that this release does not know "
                f"({found}), so its groups of devices are unknown. Plan with a tested compiler "
                "(compiler=)"
            )


def _iota_groups(dims: Sequence[int], order: Sequence[int], width: int) -> Groups:
    """Numbers from 0 on in the shape ``dims``, transposed, in rows of ``width``."""
    numbered = np.arange(math.prod(dims)).reshape(dims).transpose(order)
    return tuple(map(tuple, numbered.reshape(-1, width).tolist()))


@dataclass(eq=False)
class HloComputation:
    """``instructions``: in the order of the schedule, if there is one."""

    instructions: Sequence[Instruction]
    root: Instruction

    @cached_property
    def parameters(self) -> tuple[Instruction, ...]:
        """In the order of their numbers."""
        found = [i for i in self.instructions if i.opcode == "parameter"]
        return tuple(sorted(found, key=lambda i: i.message.parameter_number))


@dataclass(eq=False)
class HloModule:
    """``instructions``: of all computations. ``devices``: the number of devices that run it."""

    name: str
    instructions: Sequence[Instruction]
    entry: HloComputation
    devices: int
    scheduled: bool


def parse_module(program: bytes) -> HloModule:
    """Raises ValueError if ``program`` is not a serialized HloModuleProto."""
    from google.protobuf.message import DecodeError  # the plan extra

    try:
        return _module(messages()["HloModule"].FromString(program))
    except (DecodeError, LookupError, RecursionError) as error:
        raise ValueError("not an HLO module, or damaged") from error


def module_in(proto: bytes) -> bytes:
    """The HloModuleProto in a serialized HloProto."""
    content: bytes = messages()["HloProto"].FromString(proto).hlo_module
    return content


def _module(module: Any) -> HloModule:
    orders = {entry.key: entry.value.ids for entry in module.schedule.sequences}
    computations: dict[int, HloComputation] = {}  # those that others call come first
    for computation in module.computations:
        messages = {message.id: message for message in computation.instructions}
        known: dict[int, Instruction] = {}
        for number in orders.get(computation.id, messages):
            message = messages[number]
            operands = tuple(known[operand] for operand in message.operand_ids)
            called = tuple(computations[one] for one in message.called_computation_ids)
            opcode, called = _unwrapped(_utf8(message.opcode), operands, called)
            shape = _shape(message.shape)
            name = _utf8(message.name)
            known[number] = Instruction(name, opcode, shape, operands, called, message)
        instructions = list(known.values())
        computations[computation.id] = HloComputation(instructions, known[computation.root_id])
    assigned = module.device_assignment
    return HloModule(
        name=_utf8(module.name),
        instructions=[i for one in computations.values() for i in one.instructions],
        entry=computations[module.entry_computation_id],
        devices=max(assigned.replica_count, 1) * max(assigned.computation_count, 1),
        scheduled=bool(orders),
    )


def _unwrapped(
    opcode: str, operands: Sequence[Instruction], called: tuple[HloComputation, ...]
) -> tuple[str, tuple[HloComputation, ...]]:
    kind, _, end = opcode.partition("-")
    if kind != "async":
        return opcode, called
    if end != "start":
        return f"{operands[0].opcode.rpartition('-')[0]}-{end}", called
    inside = called[0].root
    if len(called[0].instructions) > len(inside.operands) + 1:
        return opcode, called
    return f"{inside.opcode}-{end}", inside.called


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "replace")

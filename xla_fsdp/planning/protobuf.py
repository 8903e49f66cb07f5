"""Classes for protobuf messages of which only some fields are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_KINDS = {"int64": 3, "uint64": 4, "double": 1, "bytes": 12}  # all others are messages (11)


def message_classes(package: str, messages: Mapping[str, Sequence[str]]) -> Mapping[str, Any]:
    """The classes of ``messages``, by name. Fields that are not listed keep their values.

    Fields are name, type (* if repeated) and number, such as ``"planes XPlane* 1"``. A type is a
    number type, ``bytes`` or one of ``messages``. Maps are lists of entries.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # the plan extra

    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package)
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, kind, number in map(str.split, fields):
            label, plain = 3 if kind.endswith("*") else 1, kind.rstrip("*")
            one = message.field.add(name=field, number=int(number), label=label)
            one.type = _KINDS.get(plain, 11)
            if plain not in _KINDS:
                one.type_name = f".{package}.{plain}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in messages
    }

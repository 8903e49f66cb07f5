"""Read the file of a profile: planes that contain lines of events, as XLA's profiler writes them.

This module defines only the fields that it reads of XLA's xplane.proto and hlo.proto; protobuf
parses them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

_MOST_BYTES = 2 << 30  # the limit of protobuf for a message
_PACKAGE = "xla_fsdp.recorded"
# Strings are read as bytes, so that a name that is not UTF-8 does not make the file unreadable.
_KINDS = {"int64": 3, "uint64": 4, "double": 1, "string": 12, "bytes": 12}
# name: ((field, number, type, repeated), ...). A type that is not in _KINDS is a message here.
_MESSAGES = {
    "XSpace": (("planes", 1, "XPlane", True),),
    "XPlane": (
        ("name", 2, "string", False),
        ("lines", 3, "XLine", True),
        # Maps, which protobuf encodes as lists of entries.
        ("event_metadata", 4, "EventEntry", True),
        ("stat_metadata", 5, "StatEntry", True),
    ),
    "EventEntry": (("key", 1, "int64", False), ("value", 2, "XEventMetadata", False)),
    "StatEntry": (("key", 1, "int64", False), ("value", 2, "XStatMetadata", False)),
    "XLine": (
        ("name", 2, "string", False),
        ("timestamp_ns", 3, "int64", False),
        ("events", 4, "XEvent", True),
    ),
    "XEvent": (
        ("metadata_id", 1, "int64", False),
        ("offset_ps", 2, "int64", False),
        ("duration_ps", 3, "int64", False),
        ("stats", 4, "XStat", True),
    ),
    "XStat": (
        ("metadata_id", 1, "int64", False),
        ("double_value", 2, "double", False),
        ("uint64_value", 3, "uint64", False),
        ("int64_value", 4, "int64", False),
        ("str_value", 5, "string", False),
        ("bytes_value", 6, "bytes", False),
        ("ref_value", 7, "uint64", False),
    ),
    "XEventMetadata": (
        ("name", 2, "string", False),
        ("display_name", 4, "string", False),
        ("stats", 5, "XStat", True),
    ),
    "XStatMetadata": (("name", 2, "string", False),),
    "HloProto": (("hlo_module", 1, "bytes", False),),
}
_VALUES = tuple(name for name, _, _, _ in _MESSAGES["XStat"][1:])


@dataclass(frozen=True)
class Event:
    """Something that ran, in seconds of the trace's clock. ``stats``: its other properties."""

    name: str
    shown: str  # a shorter name, or ""
    begin: float
    end: float
    stats: Mapping[str, Any]


class Plane:
    """The events of one device, or of the host."""

    def __init__(self, message: Any) -> None:
        self.name = _text(message.name)
        self._lines = message.lines
        self._stats = {entry.key: _text(entry.value.name) for entry in message.stat_metadata}
        self._kinds = {
            entry.key: (
                _text(entry.value.name),
                _text(entry.value.display_name),
                self._read(entry.value.stats),
            )
            for entry in message.event_metadata
        }

    def kinds(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Name and stats of each defined kind of event, whether or not there are such events."""
        return ((name, stats) for name, _, stats in self._kinds.values())

    def events(self, line: str = "") -> Iterator[Event]:
        """Yield the events of the lines with this name, or of all lines."""
        for one in self._lines:
            if line in ("", _text(one.name)):
                for event in one.events:
                    name, shown, stats = self._kinds.get(event.metadata_id, ("", "", {}))
                    begin = 1e-9 * one.timestamp_ns + 1e-12 * event.offset_ps
                    end = begin + 1e-12 * max(event.duration_ps, 0)
                    own = self._read(event.stats) if event.stats else {}
                    yield Event(name, shown, begin, end, {**stats, **own})

    def _read(self, stats: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for stat in stats:
            given = [field for field in _VALUES if stat.HasField(field)]
            if given:
                value = getattr(stat, given[-1])
                if given[-1] == "str_value":
                    value = _text(value)
                elif given[-1] == "ref_value":  # frequent strings are stored in the table of names
                    value = self._stats.get(value, "")
                found[self._stats.get(stat.metadata_id, "")] = value
        return found


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def trace_in(folder: str | os.PathLike[str]) -> Path:
    """The newest trace in a TensorBoard folder; or the file itself, if ``folder`` is a file.

    Raises:
        FileNotFoundError: there is no trace.
    """
    path = Path(folder)
    if path.is_file():
        return path
    found = sorted(path.glob("plugins/profile/*/*.xplane.pb"))
    if not found:
        raise FileNotFoundError(
            f"{path}: has no trace (plugins/profile/*/*.xplane.pb): record one with "
            "xla_fsdp.profile or --profile_steps, and give the folder of the recording"
        )
    return max(found, key=lambda each: (each.parent.name, each.stat().st_mtime))


def read(path: Path) -> list[Plane]:
    """Read the planes of a trace.

    Raises:
        ValueError: the file is not a trace, or is damaged.
    """
    size = path.stat().st_size
    if size >= _MOST_BYTES:
        raise ValueError(
            f"{path}: has {size} bytes, the limit is {_MOST_BYTES}: record fewer steps"
        )
    try:
        space = messages()["XSpace"].FromString(path.read_bytes())
    except DecodeError as error:
        raise ValueError(f"{path}: is not a trace, or is damaged: record it again") from error
    planes = [Plane(plane) for plane in space.planes]
    if not planes:
        raise ValueError(f"{path}: is empty: the recording was interrupted; record it again")
    return planes


def hlo_module(data: bytes) -> bytes:
    """The module in an HloProto. Raises DecodeError if ``data`` is damaged."""
    module: bytes = messages()["HloProto"].FromString(data).hlo_module
    return module


def messages() -> Mapping[str, Any]:
    """The protobuf classes of the messages, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="recorded.proto", package=_PACKAGE)
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            one = message.field.add(name=field, number=number, label=3 if repeated else 1)
            one.type = _KINDS.get(kind, 11)
            if kind not in _KINDS:
                one.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
        for name in _MESSAGES
    }

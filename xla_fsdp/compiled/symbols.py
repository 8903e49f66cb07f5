"""Functions and tables of torch_xla's library that it does not export, found by their symbols."""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
import sys
from collections.abc import Iterable
from importlib.metadata import version
from typing import NamedTuple

import numpy as np

_EXPORTED = "PyInit__XLAC"
_SYMBOL_TABLE = 2  # sh_type of the section with the symbols
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2")]
    + [("value", "<u8"), ("size", "<u8")]
)


class Symbol(NamedTuple):
    """Where something of the library lies in this process's memory, and its size in bytes."""

    address: int
    size: int


def symbols_of(names: Iterable[str]) -> dict[str, Symbol]:
    """The symbols ``names`` of torch_xla's library, by name.

    A mangled name says what arguments a function takes, so a symbol that is found is the function
    that is meant.

    Raises:
        NotImplementedError: this is another release or machine than the names are known for, or the
            library lacks one of them.
    """
    found = version("torch_xla")
    machine = f"{sys.platform} {platform.machine()}"
    if not found.startswith("2.9.") or machine != "linux x86_64":
        raise NotImplementedError(
            f"this is torch_xla {found} on {machine}, not torch_xla 2.9 on linux x86_64"
        )
    import _XLAC

    offsets = _offsets(_XLAC.__file__, [*names, _EXPORTED])
    exported = getattr(ctypes.CDLL(_XLAC.__file__), _EXPORTED)
    start = ctypes.cast(exported, ctypes.c_void_p).value
    assert start is not None  # a function that was found is somewhere
    base = start - offsets.pop(_EXPORTED)[0]
    return {name: Symbol(base + offset, size) for name, (offset, size) in offsets.items()}


def _offsets(path: str, names: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Offset and size of each, from the table of symbols of a 64-bit ELF file."""
    found = {}
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        start = struct.unpack_from("<Q", data, 0x28)[0]
        size, count = struct.unpack_from("<HH", data, 0x3A)
        # name, type, flags, address, offset, size, link, ...
        sections = [
            struct.unpack_from("<IIQQQQIIQQ", data, start + place * size) for place in range(count)
        ]
        table = next((one for one in sections if one[1] == _SYMBOL_TABLE), None)
        if table is None:
            raise NotImplementedError(f"{path} was stripped of its symbols")
        strings = sections[table[6]]
        first, last = strings[4], strings[4] + strings[5]
        symbols = np.frombuffer(data[table[4] : table[4] + table[5]], _SYMBOL)
        for name in names:
            place = data.find(b"\0" + name.encode() + b"\0", first, last) + 1
            rows = symbols[symbols["name"] == place - first] if place else symbols[:0]
            if len(rows) != 1:
                raise NotImplementedError(f"{path} has {len(rows)} symbols {name}, not one")
            found[name] = (int(rows["value"][0]), int(rows["size"][0]))
    return found

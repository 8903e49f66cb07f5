"""Lets torch_xla 2.9 load the compiled programs that it wrote to disk.

To read one back torch_xla calls ``DeserializeExecutable`` of XLA's client, then ``Load``. Neither
the CPU's client nor that of a TPU has these: both answer "UNIMPLEMENTED: Deserializing serialized
executable not supported", and the program is compiled again, at every start
(github.com/pytorch/xla/issues/9094, open). What they have is ``LoadSerializedExecutable``, which
does both steps in one.

So two entries of the client's table of virtual functions get other values: the first step becomes
``LoadSerializedExecutable``, the second hands on what the first returned. Symbols that the library
brings tell where the table and the functions are and, by their mangled names, what arguments they
take. An entry is only replaced if it is the function that answers "UNIMPLEMENTED". Anything that
is not as expected leaves the library as it was.
"""

from __future__ import annotations

import ctypes
import mmap
import struct
from importlib.metadata import version
from typing import NoReturn

from .. import xlac


def repair(platform_name: str) -> None:
    """Makes the client of ``platform_name``, CPU or TPU, able to load programs.

    To be called before XLA's runtime starts. Doing it again changes nothing.

    Raises:
        NotImplementedError: not possible with this torch_xla, processor or operating system.
    """
    found = version("torch_xla")
    if not found.startswith("2.9."):
        _refuse(f"this is torch_xla {found}, not torch_xla 2.9")
    client = xlac.CLIENTS[platform_name]
    unable = (xlac.DESERIALIZE, xlac.LOAD)
    try:
        symbols = xlac.symbols_of([client.table, client.load_serialized, *unable])
    except NotImplementedError as error:
        _refuse(str(error))

    address, size = symbols[client.table]
    table = (ctypes.c_uint64 * (size // 8)).from_address(address)
    places = []
    for name in unable:
        function = symbols[name].address
        places.append([place for place, entry in enumerate(table) if entry == function])
    if not any(places):
        return  # repaired before
    if [len(found) for found in places] != [1, 1] or not _is_read_only(address):
        _refuse(f"the functions of xla::{client.name} are not as expected")
    deserialize, load = _functions(symbols[client.load_serialized].address)
    _write(address, size, table, {places[0][0]: deserialize, places[1][0]: load})


def _refuse(reason: str) -> NoReturn:
    raise NotImplementedError(
        f"compiled programs cannot be kept on disk: {reason}. Train without the compilation cache"
    )


def _functions(both_steps: int) -> tuple[int, int]:
    """Addresses of two new functions, which stay until the process ends.

    Not Python functions: they are called under a lock of torch_xla's and would wait there for the
    GIL, which a thread may hold that waits for that lock.

    Arguments come in registers. rdi: where the result goes, a status (1: OK) and a pointer;
    rsi: the client; rdx ...: what the function is called with; rax: where the result went.
    """
    enter = bytes.fromhex("f30f1efa")  # endbr64: processors may demand it where calls arrive
    libc = _libc()
    size = mmap.PAGESIZE
    page = libc.mmap(
        None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0
    )
    if page == ctypes.c_void_p(-1).value:
        _refuse("there is no memory for two functions")
    no_options = page + size // 2  # LoadOptions with nothing in it is all zeros
    deserialize = (
        enter
        + b"\x49\xb9"  # r9 = LoadOptions, the argument that the first step has not
        + struct.pack("<Q", no_options)
        + b"\x48\xb8"  # rax = LoadSerializedExecutable; the other arguments are the same
        + struct.pack("<Q", both_steps)
        + b"\xff\xe0"  # jump there
    )
    load = enter + bytes.fromhex(
        "488b02"  # rax = the pointer that rdx points to
        "48c70200000000"  # which is moved from
        "48c70701000000"  # the status is OK
        "48894708"  # the pointer is the result
        "4889f8c3"  # return rdi
    )
    ctypes.memmove(page, deserialize, len(deserialize))
    ctypes.memmove(page + 64, load, len(load))
    if libc.mprotect(page, size, mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        libc.munmap(page, size)
        _refuse("this system lets no process make functions at run time")
    return page, page + 64


def _is_read_only(address: int) -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            span, permissions = line.split()[:2]
            first, last = (int(text, 16) for text in span.split("-"))
            if first <= address < last:
                return permissions.startswith("r--")
    return False


def _write(start: int, size: int, table: ctypes.Array, entries: dict[int, int]) -> None:
    first = start // mmap.PAGESIZE * mmap.PAGESIZE
    length = start + size - first
    libc = _libc()
    # Tables of virtual functions are read-only once a library is loaded.
    if libc.mprotect(first, length, mmap.PROT_READ | mmap.PROT_WRITE) != 0:
        _refuse("this system lets no process change a library at run time")
    for place, entry in entries.items():
        table[place] = entry
    libc.mprotect(first, length, mmap.PROT_READ)


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None)
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [pointer, size, ctypes.c_int]
    libc.munmap.argtypes = [pointer, size]
    return libc

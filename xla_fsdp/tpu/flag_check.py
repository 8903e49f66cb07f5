"""Has libtpu read its flags, in a process of its own: ``python -I -S flag_check.py LIBRARY``.

libtpu reads ``LIBTPU_INIT_ARGS`` when its plugin is initialised, lists on standard error what it
does not know, and ends the process. Whoever asks puts a name in front that no libtpu knows, so that
it always ends there, before it looks for chips.
"""

import ctypes
import sys


class _Arguments(ctypes.Structure):
    """``PJRT_Plugin_Initialize_Args`` of pjrt_c_api.h."""

    _fields_ = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)]


class _Api(ctypes.Structure):
    """The beginning of ``PJRT_Api`` of pjrt_c_api.h."""

    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("version_struct_size", ctypes.c_size_t),
        ("version_extension_start", ctypes.c_void_p),
        ("major", ctypes.c_int),
        ("minor", ctypes.c_int),
        ("error_destroy", ctypes.c_void_p),
        ("error_message", ctypes.c_void_p),
        ("error_get_code", ctypes.c_void_p),
        ("plugin_initialize", ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_Arguments))),
    ]


def main(library: str) -> None:
    get_api = ctypes.CDLL(library).GetPjrtApi
    get_api.restype = ctypes.POINTER(_Api)
    arguments = _Arguments(ctypes.sizeof(_Arguments), None)
    get_api().contents.plugin_initialize(ctypes.byref(arguments))


if __name__ == "__main__":
    main(sys.argv[1])

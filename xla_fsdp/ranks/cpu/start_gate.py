"""Makes programs with collectives wait until the programs of all ranks have started.

XLA's CPU client ends the process after 10 seconds in a collective, while another rank may compile
for longer. So a program begins with a custom call, a handler of XLA's foreign function interface
(``xla/ffi/api/c_api.h``), that waits here without a limit.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p

import torch

from ... import xlac

_NAME = b"xla_fsdp.start_gate"
_PLATFORM = b"Host"
_TYPED = 4  # version of custom calls

_VERSION = (0, 1)  # of the interface
_METADATA = 1  # kind of extension
_EXECUTE = 3  # stage of a call
_ABORTED = 10  # code of an error


class StartGate:
    """``started``: programs with collectives of each rank in this launch."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self._waiting: set[int] = set()
        self._closed = False
        self._changed = threading.Condition()
        self._handler = _Handler(self._call)  # XLA keeps its address
        self._registered = False

    def open_for(self, size: int) -> None:
        """Raises NotImplementedError if torch_xla does not support several ranks on CPU."""
        if size > 1 and not self._registered:
            _register(self._handler)
            self._registered = True
        with self._changed:
            self.started = [0] * size
            self._waiting = set()
            self._closed = False

    def close(self) -> None:
        """Ends waiting programs with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def is_waiting(self, rank: int) -> bool:
        return rank in self._waiting

    def wait_for_all(self, rank: torch.Tensor) -> torch.Tensor:
        """Waits in the program, then is false; ``rank``: int32 of shape ``(1,)``."""
        name = _NAME.decode()
        return xlac.custom_call([rank], name, [[]], [torch.bool], True, "", _TYPED, {})[0]

    def _call(self, address: int) -> int | None:
        frame = _CallFrame.from_address(address)
        if frame.extension and frame.extension[0].kind == _METADATA:
            metadata = ctypes.cast(frame.extension, POINTER(_MetadataExtension))[0].metadata[0]
            metadata.version.major, metadata.version.minor = _VERSION
            return None
        if frame.stage != _EXECUTE:
            return None
        result = ctypes.cast(frame.results.values[0].contents.data, POINTER(ctypes.c_bool))
        result[0] = False
        rank = ctypes.cast(frame.operands.values[0].contents.data, POINTER(c_int32))[0]
        if self._enter(rank):
            return None
        error = _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, b"another rank failed")
        error.code = _ABORTED
        return frame.api[0].create_error(byref(error))

    def _enter(self, rank: int) -> bool:
        """Returns false if the launch failed meanwhile."""
        with self._changed:
            if not 0 <= rank < len(self.started) or self._closed:
                return False
            self.started[rank] += 1
            waiting = self._waiting
            waiting.add(rank)
            if len(waiting) == len(self.started):
                self._waiting = set()
                self._changed.notify_all()
            while waiting is self._waiting and not self._closed:
                self._changed.wait()
            return waiting is not self._waiting


class _Extension(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("kind", c_int), ("next", c_void_p)]


class _Version(ctypes.Structure):
    _fields_ = [
        *(("size", c_size_t), ("extension", c_void_p)),
        *(("major", c_int), ("minor", c_int)),
    ]


class _Metadata(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("version", _Version), ("traits", c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("extension", _Extension), ("metadata", POINTER(_Metadata))]


class _ErrorArguments(ctypes.Structure):
    _fields_ = [
        *(("size", c_size_t), ("extension", c_void_p)),
        *(("message", c_char_p), ("code", c_int)),
    ]


class _Bytes(ctypes.Structure):
    _fields_ = [("start", c_char_p), ("length", c_size_t)]


class _RegisterArguments(ctypes.Structure):
    _fields_ = [
        *(("size", c_size_t), ("extension", c_void_p)),
        *(("name", _Bytes), ("platform", _Bytes)),
        *(("instantiate", c_void_p), ("prepare", c_void_p), ("initialize", c_void_p)),
        *(("execute", c_void_p), ("traits", c_uint32)),
    ]


class _Api(ctypes.Structure):
    _fields_ = [
        *(("size", c_size_t), ("extension", c_void_p), ("version", _Version)),
        ("internal", c_void_p),
        ("create_error", ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArguments))),
        *(("error_message", c_void_p), ("destroy_error", c_void_p)),
        ("register", ctypes.CFUNCTYPE(c_void_p, POINTER(_RegisterArguments))),
    ]


class _Buffer(ctypes.Structure):
    _fields_ = [
        *(("size", c_size_t), ("extension", c_void_p), ("dtype", c_int)),
        *(("data", c_void_p), ("rank", c_int64), ("dimensions", POINTER(c_int64))),
    ]


class _Buffers(ctypes.Structure):
    _fields_ = [
        *(("size", c_size_t), ("extension", c_void_p), ("number", c_int64)),
        *(("kinds", POINTER(c_int)), ("values", POINTER(POINTER(_Buffer)))),
    ]


class _CallFrame(ctypes.Structure):
    _fields_ = [
        *(("size", c_size_t), ("extension", POINTER(_Extension)), ("api", POINTER(_Api))),
        *(("context", c_void_p), ("stage", c_int)),
        *(("operands", _Buffers), ("results", _Buffers)),
    ]


_Handler = ctypes.CFUNCTYPE(c_void_p, c_void_p)


def _register(handler: object) -> None:
    try:
        symbol = xlac.symbols_of([xlac.GET_FFI_API])[xlac.GET_FFI_API]
    except NotImplementedError as error:
        raise NotImplementedError(
            f"several ranks cannot run on this CPU: {error}. Use num_devices=1, or torch_xla 2.9 "
            "for Linux on x86-64"
        ) from error
    api = ctypes.CFUNCTYPE(POINTER(_Api))(symbol.address)()[0]
    found = api.version.major, api.version.minor
    if found != _VERSION:
        raise NotImplementedError(
            f"several ranks cannot run on this CPU: XLA's foreign function interface has version "
            f"{found}, not {_VERSION}. Use num_devices=1, or torch_xla 2.9"
        )
    arguments = _RegisterArguments(ctypes.sizeof(_RegisterArguments))
    arguments.name = _Bytes(_NAME, len(_NAME))
    arguments.platform = _Bytes(_PLATFORM, len(_PLATFORM))
    address = ctypes.cast(handler, c_void_p)  # type: ignore[arg-type]  # it is a function pointer
    arguments.execute = address
    if api.register(byref(arguments)):
        raise NotImplementedError("XLA refused to register a handler of custom calls")

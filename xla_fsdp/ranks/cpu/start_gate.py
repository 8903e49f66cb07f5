"""Makes programs with collectives wait until the programs of all ranks have started.

XLA's CPU client ends the process after 10 seconds in a collective, while another rank may compile
for longer. So a program begins with a custom call, a handler of XLA's foreign function interface
(``xla/ffi/api/c_api.h``), that waits here without a limit.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

import torch

from ... import xlac

_NAME = "xla_fsdp.start_gate"
_PLATFORM = b"Host"
_TYPED = 4  # version of custom calls

_VERSION = (0, 1)  # of the interface
_METADATA = 1  # kind of extension
_EXECUTE = 3  # stage of a call
_ABORTED = 10  # code of an error


class StartGate:
    """``started``: programs with collectives of each rank in this launch; ``waiting``: ranks."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.waiting: set[int] = set()
        self._closed = False
        self._changed = threading.Condition()
        self._handler = _HandlerFunction(self._call)  # XLA keeps its address
        self._registered = False

    def open_for(self, size: int) -> None:
        """Raises NotImplementedError if torch_xla does not support several ranks on CPU."""
        if size > 1 and not self._registered:
            _register_handler(self._handler)
            self._registered = True
        with self._changed:
            self.started = [0] * size
            self.waiting = set()
            self._closed = False

    def close(self) -> None:
        """Ends waiting programs with an error."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_for_all(self, rank: torch.Tensor) -> torch.Tensor:
        """Waits in the program, then is false; ``rank``: int32 of shape ``(1,)``."""
        return xlac.custom_call([rank], _NAME, [[]], [torch.bool], True, "", _TYPED, {})[0]

    def _call(self, address: int) -> int | None:
        frame = _CallFrame.from_address(address)
        if frame.extension and frame.extension[0].kind == _METADATA:
            metadata = ctypes.cast(frame.extension, POINTER(_MetadataExtension))[0].metadata[0]
            metadata.version.major, metadata.version.minor = _VERSION
            return None
        if frame.stage != _EXECUTE:
            return None
        ctypes.c_bool.from_address(frame.results.values[0].contents.data).value = False
        if self._enter(c_int32.from_address(frame.operands.values[0].contents.data).value):
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
            waiting = self.waiting
            waiting.add(rank)
            if len(waiting) == len(self.started):
                self.waiting = set()
                self._changed.notify_all()
            self._changed.wait_for(lambda: waiting is not self.waiting or self._closed)
            return waiting is not self.waiting


class _Extension(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("kind", c_int), ("next", c_void_p)]


class _Bytes(ctypes.Structure):
    _fields_ = [("start", c_char_p), ("length", c_size_t)]


def _structure(**fields: Any) -> Any:
    """A structure of the interface; each begins with its size and a pointer."""
    fields = {"size": c_size_t, "extension": c_void_p, **fields}
    return type("_Structure", (ctypes.Structure,), {"_fields_": list(fields.items())})


_Version = _structure(major=c_int, minor=c_int)


class _Metadata(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("version", _Version), ("traits", c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("extension", _Extension), ("metadata", POINTER(_Metadata))]


_ErrorArguments = _structure(message=c_char_p, code=c_int)
_RegisterArguments = _structure(
    name=_Bytes,
    platform=_Bytes,
    **dict.fromkeys(("instantiate", "prepare", "initialize", "execute"), c_void_p),
    traits=c_uint32,
)
_Api = _structure(
    version=_Version,
    internal=c_void_p,
    create_error=ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArguments)),
    error_message=c_void_p,
    destroy_error=c_void_p,
    register=ctypes.CFUNCTYPE(c_void_p, POINTER(_RegisterArguments)),
)
_Buffer = _structure(dtype=c_int, data=c_void_p, rank=c_int64, dimensions=POINTER(c_int64))
_Buffers = _structure(number=c_int64, kinds=POINTER(c_int), values=POINTER(POINTER(_Buffer)))
_CallFrame = _structure(
    extension=POINTER(_Extension),
    api=POINTER(_Api),
    context=c_void_p,
    stage=c_int,
    operands=_Buffers,
    results=_Buffers,
)
_HandlerFunction = ctypes.CFUNCTYPE(c_void_p, c_void_p)


def _register_handler(handler: object) -> None:
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
    arguments.name = _Bytes(_NAME.encode(), len(_NAME))
    arguments.platform = _Bytes(_PLATFORM, len(_PLATFORM))
    arguments.execute = ctypes.cast(handler, c_void_p)  # type: ignore[arg-type]  # a function
    if api.register(byref(arguments)):
        raise NotImplementedError("XLA refused to register a handler of custom calls")

"""Leaving a process in which rank threads are stuck inside XLA."""

from __future__ import annotations

import atexit
import ctypes

import torch_xla


def skip_destructors() -> None:
    """Makes the process end without waiting for XLA, its exit status kept.

    torch_xla's exit handler and the C++ static destructors would wait for programs that never end.
    glibc runs ``on_exit`` handlers last registered first, with the exit status as first argument:
    that of ``_exit``.
    """
    atexit.unregister(torch_xla._prepare_to_exit)
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)

"""Finds the place in the user's code where a rank is, as ``file:line in function``."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch
import torch_xla
import typing_extensions

from ..rank import current_rank


def _folder(path: str, up: int = 1) -> str:
    for _ in range(up):
        path = os.path.dirname(path)
    return os.path.abspath(path) + os.sep


_PACKAGES = (
    _folder(torch.__file__),
    _folder(torch_xla.__file__),
    _folder(__file__, up=3),
    os.path.abspath(typing_extensions.__file__),  # around deprecated functions: xm.mark_step
)
_STANDARD_LIBRARY = _folder(os.__file__)


def of_frame(frame: FrameType) -> str:
    """The innermost frame of user code at or below ``frame``, else ``frame``."""
    return frame_text(_users(frame) or frame)


def here() -> str:
    """On autograd's thread, the place of its rank's thread."""
    own = sys._getframe(1)
    context = current_rank()
    if _users(own) is None and context is not None:
        return of_thread(context.thread)
    return of_frame(own)


def of_thread(ident: int | None) -> str:
    """``ident`` is ``None`` until the thread begins."""
    if ident is None:
        return "the start of its function"
    frame = _users(sys._current_frames().get(ident))
    # After a rank's function, its thread runs only this package.
    return "the end of its function" if frame is None else frame_text(frame)


def _users(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    return frame


def is_users(frame: FrameType) -> bool:
    """Also true for functions of a script without a file (``python -c``, IPython)."""
    code = frame.f_code
    if code.co_filename.startswith("<"):
        return frame.f_globals.get("__name__") == "__main__" and code.co_name != "<module>"
    return not is_library(code.co_filename)


def is_library(filename: str) -> bool:
    if filename.startswith(_PACKAGES) or filename.startswith("<"):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename


def frame_text(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

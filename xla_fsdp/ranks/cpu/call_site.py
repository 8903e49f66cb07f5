"""Where in the user's code a rank is, as ``file:line in function``."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch
import torch_xla


def _folder(path: str, up: int = 1) -> str:
    for _ in range(up):
        path = os.path.dirname(path)
    return os.path.abspath(path) + os.sep


_PACKAGES = (_folder(torch.__file__), _folder(torch_xla.__file__), _folder(__file__, up=3))
_STANDARD_LIBRARY = _folder(os.__file__)


def of_frame(frame: FrameType | None) -> str:
    """The innermost frame of user code at or below ``frame``, else the innermost of all."""
    innermost = frame
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            return text(frame)
        frame = frame.f_back
    return text(innermost) if innermost is not None else "an unknown place"


def here() -> str:
    """The caller's place in user code."""
    return of_frame(sys._getframe(1))


def of_thread(ident: int | None) -> str:
    """Where the thread ``ident`` is now."""
    return of_frame(None if ident is None else sys._current_frames().get(ident))


def is_library(filename: str) -> bool:
    """Whether it is none of the user's files."""
    if filename.startswith(_PACKAGES) or filename.startswith("<"):
        return True
    return filename.startswith(_STANDARD_LIBRARY) and "site-packages" not in filename


def text(frame: FrameType) -> str:
    """As messages name it."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"

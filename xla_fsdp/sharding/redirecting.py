"""Functions of others changed themselves: scripts may have them already, by their own names."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any


def copied(
    function: Callable[..., Any], names: Mapping[str, Any] | None = None
) -> types.FunctionType:
    """Another function that does the same, with ``names`` instead of those in its module."""
    assert isinstance(function, types.FunctionType)
    known = {**function.__globals__, **names} if names else function.__globals__
    return types.FunctionType(
        function.__code__, known, function.__name__, function.__defaults__, function.__closure__
    )


def redirect(function: Callable[..., Any], to: Callable[..., Any]) -> None:
    """Has ``function`` do what ``to`` does."""
    assert isinstance(function, types.FunctionType)
    vars(function)["__signature__"] = inspect.signature(function)
    function.__kwdefaults__ = {"_to": to}
    function.__code__ = _call.__code__


def is_redirected(function: Callable[..., Any]) -> bool:
    """Whether :func:`redirect` was called with it."""
    return getattr(function, "__code__", None) is _call.__code__


def _call(*args: Any, _to: Callable[..., Any], **kwargs: Any) -> Any:
    return _to(*args, **kwargs)

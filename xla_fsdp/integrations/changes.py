"""What another library does otherwise from now on, function by function; can be undone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

_MISSING = object()


class UnknownReleaseError(ImportError):
    """An installed library is of a release whose code nobody has compared with what is changed."""


class Changes:
    """Functions of ``library`` that are called through one of ours.

    Args:
        library: the name of the distribution.
        known: its releases that the changes were written for and tested with.
        extra: what of this package to install for them.

    Raises:
        UnknownReleaseError: another one is installed.
    """

    def __init__(self, library: str, known: Sequence[str], extra: str = "hf") -> None:
        found = version(library).partition("+")[0]  # without the label of a build
        if found not in known:
            raise UnknownReleaseError(
                f"{library} {found} is installed; xla_fsdp.integrations.{library} changes its code "
                f"in places that were looked at in {', '.join(known)} only: "
                f"pip install '{library}=={known[-1]}' (or 'xla_fsdp[{extra}]')"
            )
        # Owner, name, how to find the original, and what to put there, given the original.
        self._wanted: list[tuple[Any, str, Callable[[], Any], Callable[[Any], Any]]] = []
        self._originals: list[tuple[Any, str, Any]] = []
        self._lock = threading.Lock()  # ranks may be threads

    def around(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator: ``owner.name(...)`` will be ``decorated(original, ...)``.

        Args:
            owner: a class or a module.
            name: a function of it, a static method or a method.
        """

        def note(replacement: Callable[..., Any]) -> Callable[..., Any]:
            self._wanted.append((
                owner, name, lambda: vars(owner)[name], lambda found: _around(found, replacement)
            ))  # fmt: skip
            return replacement

        return note

    def add(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name``, which is not there, will be ``value``."""
        self._wanted.append((owner, name, lambda: _MISSING, lambda _: value))

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name``, which is there, will be ``value``."""
        self._wanted.append((owner, name, lambda: getattr(owner, name), lambda _: value))

    def apply(self) -> None:
        """Makes all changes, unless they are made. If one of them fails, none is made."""
        with self._lock:
            if self._originals:
                return
            try:
                for owner, name, find, change in self._wanted:
                    original = find()
                    setattr(owner, name, change(original))
                    self._originals.append((owner, name, original))
            except BaseException:
                self._restore()
                raise

    def undo(self) -> None:
        """Puts everything back that :meth:`apply` has changed."""
        with self._lock:
            self._restore()

    def _restore(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _around(original: Any, replacement: Callable[..., Any]) -> Any:
    """A function, or a static method, that calls ``replacement`` with the original function."""
    static = isinstance(original, staticmethod)
    function = original.__func__ if static else original

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return replacement(function, *args, **kwargs)

    return staticmethod(changed) if static else changed

"""What another library does otherwise from now on, function by function; can be undone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any


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
        self._wanted: list[tuple[Any, str, Callable[..., Any]]] = []
        self._added: list[tuple[Any, str, Any]] = []
        self._replaced: list[tuple[Any, str, Any]] = []
        self._originals: list[tuple[Any, str, Any]] = []
        self._lock = threading.Lock()  # ranks may be threads

    def around(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator: ``owner.name(...)`` will be ``decorated(original, ...)``.

        Args:
            owner: a class or a module.
            name: a function of it, a static method or a method.
        """

        def note(replacement: Callable[..., Any]) -> Callable[..., Any]:
            self._wanted.append((owner, name, replacement))
            return replacement

        return note

    def add(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name``, which is not there, will be ``value``."""
        self._added.append((owner, name, value))

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """``owner.name``, which is there, will be ``value``."""
        self._replaced.append((owner, name, value))

    def apply(self) -> None:
        """Makes the changes, unless they are made."""
        with self._lock:
            if self._originals:
                return
            for owner, name, value in self._added:
                setattr(owner, name, value)
            for owner, name, value in self._replaced:
                self._originals.append((owner, name, getattr(owner, name)))
                setattr(owner, name, value)
            for owner, name, replacement in self._wanted:
                original = vars(owner)[name]
                self._originals.append((owner, name, original))
                static = isinstance(original, staticmethod)
                changed = _around(original.__func__ if static else original, replacement)
                setattr(owner, name, staticmethod(changed) if static else changed)

    def undo(self) -> None:
        """Puts everything back that :meth:`apply` has changed."""
        with self._lock:
            for owner, name, _ in self._added if self._originals else ():
                delattr(owner, name)
            while self._originals:
                owner, name, original = self._originals.pop()
                setattr(owner, name, original)


def _around(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    return changed

"""Changes of functions in another library. They can be undone."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

_MISSING = object()


class MissingNamesError(ImportError):
    """The installed release of a library lacks names that an integration uses."""


class Changes:
    """Replacements for functions of ``library``.

    Args:
        library: the name of the distribution.
        extra: the extra of this package that installs a tested release.
    """

    def __init__(self, library: str, extra: str = "hf") -> None:
        self._library = library
        self._extra = extra
        # Owner, name, a function that finds the original, and one that makes the replacement.
        self._wanted: list[tuple[Any, str, Callable[[], Any], Callable[[Any], Any]]] = []
        self._needed: list[tuple[Any, str]] = []
        self._originals: list[tuple[Any, str, Any]] = []
        self._lock = threading.Lock()  # ranks may be threads

    def need(self, owner: Any, *names: str) -> None:
        """Declares that the integration uses ``owner.name`` without changing it."""
        self._needed += [(owner, name) for name in names]

    def around(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator: ``owner.name(...)`` becomes ``decorated(original, ...)``.

        Args:
            owner: a class or a module.
            name: one of its functions, static methods or methods.
        """

        def note(replacement: Callable[..., Any]) -> Callable[..., Any]:
            self._needed.append((owner, name))
            self._wanted.append((
                owner, name, lambda: vars(owner)[name], lambda found: _around(found, replacement)
            ))  # fmt: skip
            return replacement

        return note

    def add(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``, which must not exist yet, to ``value``."""
        self._wanted.append((owner, name, lambda: _MISSING, lambda _: value))

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``, which must exist, to ``value``."""
        self._needed.append((owner, name))
        self._wanted.append((owner, name, lambda: getattr(owner, name), lambda _: value))

    def apply(self) -> None:
        """Makes all changes, unless they are already made. If one of them fails, none is made.

        Raises:
            MissingNamesError: the installed release lacks names that the integration uses. The
                message lists them.
        """
        with self._lock:
            if self._originals:
                return
            self._require_names()
            try:
                for owner, name, find, change in self._wanted:
                    original = find()
                    setattr(owner, name, change(original))
                    self._originals.append((owner, name, original))
            except BaseException:
                self._restore()
                raise

    def undo(self) -> None:
        """Restores everything that :meth:`apply` changed."""
        with self._lock:
            self._restore()

    def _require_names(self) -> None:
        missing = [
            f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
            for owner, name in self._needed
            if not hasattr(owner, name)
        ]
        if missing:
            raise MissingNamesError(
                f"{self._library} {version(self._library)} has no {', '.join(missing)}, which "
                f"xla_fsdp.integrations uses: pip install 'xla_fsdp[{self._extra}]' installs a "
                "release that has these names"
            )

    def _restore(self) -> None:
        while self._originals:
            owner, name, original = self._originals.pop()
            if original is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


def _around(original: Any, replacement: Callable[..., Any]) -> Any:
    """Makes a function or static method that calls ``replacement`` with the original function."""
    static = isinstance(original, staticmethod)
    function = original.__func__ if static else original

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        return replacement(function, *args, **kwargs)

    return staticmethod(changed) if static else changed

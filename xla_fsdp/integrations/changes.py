"""Changes of functions in another library, and the names of it that are used.

All names are checked before anything is changed. Changes can be undone.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from ..ranks.cpu.patches import Patches


class MissingNamesError(ImportError):
    """The installed release of a library lacks names that an integration changes or uses."""


def missing_names(library: str, names: str, extra: str = "hf") -> MissingNamesError:
    """The error of an installed release of ``library`` that lacks ``names``."""
    return MissingNamesError(
        f"{library} {version(library)} has no {names}, which xla_fsdp.integrations uses: "
        f"pip install 'xla_fsdp[{extra}]' installs a release that has these names"
    )


class Changes:
    """Replacements for functions of ``library``, and the other names of it that are used.

    Args:
        library: the name of the distribution.
        extra: the extra of this package that installs a tested release.
    """

    def __init__(self, library: str, extra: str = "hf") -> None:
        self._library = library
        self._extra = extra
        # Owner, name, and a function that makes the replacement from the original.
        self._around: list[tuple[Any, str, Callable[[Any], Any]]] = []
        self._set: list[tuple[Any, str, Any]] = []
        self._used: list[tuple[tuple[Any, str], ...]] = []  # alternatives of each name
        self._made = Patches()
        self._lock = threading.Lock()  # ranks may be threads

    def around(
        self, owner: Any, name: str, when: Callable[[Any], bool] | None = None
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """A decorator: ``owner.name(...)`` becomes ``decorated(original, ...)``.

        Args:
            owner: a class or a module.
            name: one of its functions, static methods or methods.
            when: of calls for whose first argument this returns False, nothing is changed.
        """

        def note(replacement: Callable[..., Any]) -> Callable[..., Any]:
            make = functools.partial(_call_with_original, replacement, when)
            self._around.append((owner, name, make))
            return replacement

        return note

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``, which need not exist, to ``value``."""
        self._set.append((owner, name, value))

    def require(self, owner: Any, *names: str) -> None:
        """Notes ``names`` of ``owner`` that are used and not changed.

        A name is that of a function, a field or another attribute of the class, not of instances:
        those raise AttributeError where they are used. ``function(parameter)`` is a parameter.
        """
        for name in names:
            self.require_one((owner, name))

    def require_one(self, *alternatives: tuple[Any, str]) -> None:
        """Notes an owner and a name, of which the installed release must have at least one: names
        of which each exists in only some of the allowed releases."""
        self._used.append(alternatives)

    @property
    def applied(self) -> bool:
        """Whether the changes are made."""
        with self._lock:
            return bool(self._made)

    def check(self) -> None:
        """Checks all names that are changed or used. Changes nothing.

        Raises:
            MissingNamesError: the installed release lacks some. The message lists them.
        """
        if self._made:
            return
        missing = [
            _full_name(owner, name) for owner, name, _ in self._around if name not in vars(owner)
        ]
        missing += [
            " or ".join(_full_name(owner, name) for owner, name in alternatives)
            for alternatives in self._used
            if not any(_has(owner, name) for owner, name in alternatives)
        ]
        if missing:
            raise missing_names(self._library, ", ".join(missing), self._extra)

    def apply(self) -> None:
        """Makes all changes, unless they are already made. If one of them fails, none is made.

        Raises:
            MissingNamesError: the installed release lacks names that the integration changes or
                uses. The message lists them, and nothing is changed.
        """
        with self._lock:
            if self._made:
                return
            self.check()
            try:
                for owner, name, make in self._around:
                    self._made.set(owner, name, make(vars(owner)[name]))
                for owner, name, value in self._set:
                    self._made.set(owner, name, value)
            except BaseException:
                self._made.undo()
                raise

    def undo(self) -> None:
        """Restores everything that :meth:`apply` changed."""
        with self._lock:
            self._made.undo()


def _full_name(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")


def _has(owner: Any, name: str) -> bool:
    """Whether ``owner`` has ``name``, as :meth:`Changes.require` describes it."""
    function, _, parameter = name.removesuffix(")").partition("(")
    if parameter:
        found = getattr(owner, function, None)
        return found is not None and parameter in inspect.signature(found).parameters
    if hasattr(owner, name):
        return True
    bases = owner.__mro__ if isinstance(owner, type) else ()
    return any(name in vars(base).get("__annotations__", {}) for base in bases)


def _call_with_original(
    replacement: Callable[..., Any], when: Callable[[Any], bool] | None, original: Any
) -> Any:
    """Makes a function or static method that calls ``replacement`` with the original function."""
    static = isinstance(original, staticmethod)
    function = original.__func__ if static else original

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        if when is None or when(args[0]):
            return replacement(function, *args, **kwargs)
        return function(*args, **kwargs)

    return staticmethod(changed) if static else changed

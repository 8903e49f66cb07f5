"""Changes of functions in another library. All names are checked first. Changes can be undone."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

from torch import nn

from ..ranks.cpu.patches import Patches
from ..sharding.state import is_sharded


class MissingNamesError(ImportError):
    """The installed release of a library lacks names that an integration changes or uses."""


def missing_names(library: str, names: str, extra: str = "hf") -> MissingNamesError:
    return MissingNamesError(
        f"{library} {version(library)} has no {names}, which xla_fsdp.integrations uses: "
        f"pip install 'xla_fsdp[{extra}]' installs a release that has these names"
    )


class LibraryChanges:
    """Replacements for functions of the distribution ``library``, and the other names of it that
    are used. ``extra`` of this package installs a tested release."""

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
        """A decorator: ``owner.name(...)``, a function, static method or method, becomes
        ``decorated(original, ...)`` in calls for whose first argument ``when`` is true, or all."""

        def note(replacement: Callable[..., Any]) -> Callable[..., Any]:
            make = functools.partial(_call_with_original, replacement, when)
            self._around.append((owner, name, make))
            return replacement

        return note

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets ``owner.name``, which need not exist."""
        self._set.append((owner, name, value))

    def require(self, owner: Any, *names: str) -> None:
        """Notes ``names`` of ``owner`` that are used and not changed: attributes of the class or
        module, or ``function(parameter)``."""
        for name in names:
            self.require_one((owner, name))

    def require_one(self, *alternatives: tuple[Any, str]) -> None:
        """Notes owners and names of which the installed release must have at least one."""
        self._used.append(alternatives)

    @property
    def applied(self) -> bool:
        with self._lock:
            return bool(self._made)

    def check(self) -> None:
        """Raises MissingNamesError, with all names that the installed release lacks."""
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
        """Makes all changes, or none: raises what :meth:`check` raises. May be called again."""
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
        with self._lock:
            self._made.undo()


def _full_name(owner: Any, name: str) -> str:
    return f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")


def _has(owner: Any, name: str) -> bool:
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
    static = isinstance(original, staticmethod)
    function = original.__func__ if static else original

    @functools.wraps(function)
    def changed(*args: Any, **kwargs: Any) -> Any:
        if when is None or when(args[0]):
            return replacement(function, *args, **kwargs)
        return function(*args, **kwargs)

    return staticmethod(changed) if static else changed


# By a module that all models of a library import: the part that adapts them, the changes if it
# cannot, the modules that define the methods, and the methods. Classes are not named: a name may be
# what is missing.
_LIBRARIES = {
    "transformers.modeling_utils": (
        "models",
        LibraryChanges("transformers"),
        ("transformers.modeling_utils", "transformers.generation.utils"),
        "save_pretrained push_to_hub generate num_parameters resize_token_embeddings".split(),
    ),
    "peft.peft_model": (
        "peft",
        LibraryChanges("peft"),
        ("peft.peft_model", "peft.tuners.tuners_utils"),
        "save_pretrained load_adapter merge_adapter merge_and_unload unload inject_adapter".split(),
    ),
}


def adapt_model(model: nn.Module) -> None:
    """Adapts a model that is being wrapped, if its library was imported.

    An integration changes nothing if the installed release lacks a name that it uses. The methods
    would then use one rank's shards, so they raise RuntimeError, and this warns.
    """
    for library, (part, changes, modules, names) in _LIBRARIES.items():
        if library not in sys.modules:
            continue
        try:
            adapting: Any = import_module(f".{part}", __package__)
        except ImportError as error:
            remedy = str(error)
            if not isinstance(error, MissingNamesError):
                remedy += ": pip install 'xla_fsdp[hf]' installs a release that works"
            if not changes.applied:
                _raise_in_methods(changes, modules, names, remedy)
            warnings.warn(
                f"{remedy}. Until then save_pretrained and generate of sharded models raise; "
                "full_state_dict returns the weights",
                stacklevel=3,
            )
        else:
            adapting.adapt(model)


def _raise_in_methods(
    changes: LibraryChanges, modules: Iterable[str], names: Iterable[str], reason: str
) -> None:
    for module in filter(None, map(sys.modules.get, modules)):
        for owner in vars(module).values():
            if isinstance(owner, type) and owner.__module__ == module.__name__:
                for name in vars(owner).keys() & names:
                    refuse = functools.partial(_raise, name, reason)
                    changes.around(owner, name, is_sharded)(refuse)
    changes.apply()


def _raise(
    name: str, reason: str, original: Any, model: Any, *args: Any, **kwargs: Any
) -> NoReturn:
    raise RuntimeError(
        f"{name} of {type(model).__name__} would use the shards of this rank, because models of "
        f"this library could not be adapted. {reason}. Until then, "
        "xla_fsdp.full_state_dict(model) returns the weights"
    )

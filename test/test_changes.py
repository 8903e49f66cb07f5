"""What integrations change in other libraries: all of it or none, and it can be undone."""

import types

import pytest
from on_ranks import raises

from xla_fsdp.integrations.changes import LibraryChanges, MissingNamesError

ORIGINAL = ["function", "method", "static", "attribute", None]
CHANGED = ["around function", "around method", "around static", "other", "new"]


@pytest.fixture
def library():
    """A module, a class, a function that returns their values, and changes of them."""

    class Owner:
        def method(self):
            return "method"

        @staticmethod
        def static():
            return "static"

        attribute = "attribute"

    module, changes = types.SimpleNamespace(function=lambda: "function"), LibraryChanges("torch")
    changes.set(Owner, "added", "new")
    changes.set(Owner, "attribute", "other")
    for where, name in ((module, "function"), (Owner, "static"), (Owner, "method")):
        changes.around(where, name)(lambda original, *args: f"around {original(*args)}")

    def values():
        found = [module.function(), Owner().method(), Owner.static(), Owner.attribute]
        return [*found, getattr(Owner, "added", None)]

    return Owner, values, changes


def test_changes_are_made_once_and_undone(library):
    owner, values, changes = library
    before = dict(vars(owner))
    for _ in range(2):
        changes.apply()
        changes.apply()
        assert changes.applied and values() == CHANGED
        changes.undo()
        changes.undo()
        assert values() == ORIGINAL and dict(vars(owner)) == before


def test_if_one_change_fails_none_is_made(library):
    _, values, changes = library
    changes.set(int, "attribute", None)  # a built-in type takes no attributes
    for _ in range(2):
        with pytest.raises(TypeError):
            changes.apply()
        assert values() == ORIGINAL


def test_missing_names_are_listed_and_nothing_is_changed(library):
    owner, values, changes = library
    for name in ("lost", "gone"):
        changes.around(owner, name)(lambda original: None)
    with pytest.raises(MissingNamesError) as failed:
        changes.apply()
    text = str(failed.value)
    where = f"test_changes.{owner.__name__}"
    assert f"has no {where}.lost, {where}.gone, which" in text
    assert text.startswith("torch ") and "pip install 'xla_fsdp[hf]'" in text
    assert values() == ORIGINAL


def named(parameter):
    return parameter


class Used:
    field: int

    @property
    def read(self):
        return self.only_read

    @classmethod
    def make(cls, option=None):
        return cls()


@pytest.mark.parametrize("name", ["field", "read", "make(option)"])
def test_used_names_that_are_there(library, name):
    _, values, changes = library
    changes.require(type("Derived", (Used,), {}), name)
    changes.apply()
    assert values() == CHANGED


@pytest.mark.parametrize("name", ["only_read", "gone", "make(choice)", "gone(option)"])
def test_used_names_that_are_missing(library, name):
    _, values, changes = library
    changes.require(Used, "field", name)
    with pytest.raises(MissingNamesError) as failed:
        changes.check()
    assert f"has no test_changes.Used.{name}, which" in str(failed.value)
    with pytest.raises(MissingNamesError):
        changes.apply()
    assert values() == ORIGINAL


def test_one_of_several_names_must_be_there(library):
    _, values, changes = library
    this_file = types.SimpleNamespace(named=named, __name__="file")
    changes.require_one((Used, "gone"), (this_file, "named(parameter)"))
    changes.check()
    changes.require_one((Used, "gone"), (this_file, "lost"))
    raises(MissingNamesError, r"no test_changes\.Used\.gone or file\.lost, which", changes.apply)
    assert values() == ORIGINAL

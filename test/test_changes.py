"""What integrations change in other libraries: all of it or none, and it can be undone."""

import types

import pytest

from xla_fsdp.integrations.changes import Changes, MissingNamesError


class Owner:
    def method(self):
        return "method"

    @staticmethod
    def static():
        return "static"

    attribute = "attribute"


def library():
    return types.SimpleNamespace(function=lambda: "function"), type("Owner", (), dict(vars(Owner)))


def values(module, owner):
    found = [module.function(), owner().method(), owner.static(), owner.attribute]
    return [*found, getattr(owner, "added", None)]


def changes_of(module, owner):
    changes = Changes("torch")
    changes.add(owner, "added", "new")
    changes.replace(owner, "attribute", "other")
    for where, name in ((module, "function"), (owner, "static"), (owner, "method")):
        changes.around(where, name)(lambda original, *args: f"around {original(*args)}")
    return changes


ORIGINAL = ["function", "method", "static", "attribute", None]
CHANGED = ["around function", "around method", "around static", "other", "new"]


def test_changes_are_made_once_and_undone():
    module, owner = library()
    before = dict(vars(owner))
    changes = changes_of(module, owner)
    for _ in range(2):
        changes.apply()
        changes.apply()
        assert values(module, owner) == CHANGED
        changes.undo()
        changes.undo()
        assert values(module, owner) == ORIGINAL and dict(vars(owner)) == before


@pytest.mark.parametrize("failing", ["around", "replace", "set"])
def test_if_one_change_fails_none_is_made(failing):
    module, owner = library()
    changes = changes_of(module, owner)
    if failing == "around":
        changes.around(owner, "gone")(lambda original: None)
    elif failing == "replace":
        changes.replace(owner, "gone", None)
    else:
        changes.add(1, "attribute", None)  # an int takes no attributes
    with pytest.raises((MissingNamesError, AttributeError)):
        changes.apply()
    assert values(module, owner) == ORIGINAL


def test_missing_names_are_listed_and_nothing_is_changed():
    module, owner = library()
    changes = changes_of(module, owner)
    changes.need(owner, "method", "lost")
    changes.around(owner, "gone")(lambda original: None)
    with pytest.raises(MissingNamesError) as failed:
        changes.apply()
    text = str(failed.value)
    assert "has no test_changes.Owner.lost, test_changes.Owner.gone, which" in text
    assert text.startswith("torch ") and "pip install 'xla_fsdp[hf]'" in text
    assert values(module, owner) == ORIGINAL

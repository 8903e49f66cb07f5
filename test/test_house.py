"""What docs/design/code-map.md says of where something is done, and import-linter cannot see."""

import ast
import re
from collections import Counter

import pytest
from conftest import ROOT

SOURCES = sorted((ROOT / "xla_fsdp").rglob("*.py"))
COLLECTIVES = {
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "collective_permute",
    "collective_broadcast", "broadcast_master_param", "reduce_gradients", "optimizer_step",
}  # fmt: skip


def calls(path, owner):
    """Names of what a file calls of ``owner``, a module by its usual name."""
    text = path.read_text(encoding="utf-8")
    return {
        node.func.attr
        for node in ast.walk(ast.parse(text if f"{owner}." in text else ""))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value).rpartition(".")[2] == owner
    }


@pytest.mark.parametrize(
    ("owner", "names", "homes"),
    [
        pytest.param(
            "xm", COLLECTIVES,
            {
                "collectives/world.py",
                "integrations/optimizers.py",  # gradients that no wrapper shards
                "integrations/lightning/collectives.py",  # what a strategy of theirs has
                "pods/stages.py",  # one in which a rank dies
            },
            id="collectives",
        ),
        pytest.param(
            "xlac", {"replace_data"}, {"sharding/freeing.py", "ranks/cpu/session.py"},
            id="exchanged data",
        ),
    ],
)  # fmt: skip
def test_is_done_in_one_place(owner, names, homes):
    found = {
        path.relative_to(ROOT / "xla_fsdp").as_posix()
        for path in SOURCES
        if calls(path, owner) & names
    }
    assert found == homes


def test_attributes_on_others_objects_have_one_meaning():
    """A name that begins with ``_xla_fsdp_`` marks tensors, modules or optimizers: two files that
    chose the same one would read each other's marks."""
    found = Counter(
        node.value
        for path in SOURCES
        if "_xla_fsdp_" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if node.value.startswith("_xla_fsdp_")
    )
    assert found and not {name: times for name, times in found.items() if times > 1}


GUESSES = ("_getframe", "f_back", "f_locals", "import dis", "__code__", "gc.get_objects")


@pytest.mark.parametrize("pattern", ["sharding/**/*.py", "optim/**/*.py", "offload.py"])
def test_the_engine_inspects_no_frames_and_no_code(pattern):
    found = {
        (path.name, word)
        for path in sorted((ROOT / "xla_fsdp").glob(pattern))
        for word in GUESSES
        if re.search(rf"\b{re.escape(word)}\b", path.read_text(encoding="utf-8"))
    }
    assert found == set()

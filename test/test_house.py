"""What docs/design/code-map.md says of where something is done, and import-linter cannot see."""

import ast
import re
from collections import Counter

import pytest
import torch
from conftest import ROOT
from torch.utils._device import _device_constructors

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
            "xlac", {"all_gather", "reduce_scatter"}, {"collectives/world.py"},
            id="collectives of xlac",
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


MAKES = {make.__name__ for make in _device_constructors() if hasattr(torch, make.__name__)}


def test_new_tensors_have_a_device():
    """Inside ``with torch.device("xla")`` they would be on that device. Programs of pods have no
    such context around them."""
    found = {
        (path.name, ast.unparse(node))
        for path in [*SOURCES, *(ROOT / "consolidate").rglob("*.py")]
        if ROOT / "xla_fsdp/pods" not in path.parents
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if ast.unparse(node.func.value) == "torch" and node.func.attr in MAKES
        if {"device", "out", None}.isdisjoint(keyword.arg for keyword in node.keywords)
    }
    assert found == set()


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


GUESSES = (
    r"_getframe", r"f_back", r"f_locals", r"(import dis|from dis)", r"__code__ =",
    r"gc\.get_objects",
    # Decisions by the name of a class, a module or a message.
    r"__module__.{0,20}startswith", r"type\(\w+\)\.__(name|qualname|module)__ (==|!=|in|not)",
    r"in str\((error|problem|exception)",
)  # fmt: skip
ENGINE = ("sharding/**/*.py", "scan/**/*.py", "collectives/**/*.py", "optim/**/*.py",
          "layers/**/*.py", "*.py")  # fmt: skip


@pytest.mark.parametrize("pattern", ENGINE)
def test_the_engine_inspects_no_frames_and_no_code(pattern):
    found = {
        (path.name, word)
        for path in sorted((ROOT / "xla_fsdp").glob(pattern))
        for word in GUESSES
        if re.search(rf"\b{word}(?!\w)", path.read_text(encoding="utf-8"))
    }
    assert found == set()


def replaced_functions(tree):
    """Assignments to attributes of libraries: ``nn.Module.to =``, ``vars(xm)[...] =``, and all
    calls of ``setattr`` on a module whose name a variable has."""
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, ast.Assign) else ()
        for target in map(ast.unparse, targets):
            if re.match(r"(vars\()?(torch|nn|xm|torch_xla|F|xr)\b|xlac\.\w+\.value", target):
                yield target
        if isinstance(node, ast.Call) and ast.unparse(node).startswith("setattr(_module, _name"):
            yield ast.unparse(node)


def test_the_engine_replaces_no_other_functions_of_libraries():
    found = {
        (path.name, one)
        for pattern in ENGINE
        for path in (ROOT / "xla_fsdp").glob(pattern)
        for one in replaced_functions(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == {
        # torch_xla makes new parameters in `to`: shared weights, hooks and attributes were lost.
        ("moves.py", "nn.Module.to"),
        # torch.utils.checkpoint, so that XLA frees and recomputes.
        ("remat.py", "setattr(_module, _name, _own)"),
        # They would mix shards of different parameters: they raise.
        ("optimizer_hook.py", "vars(xm)['broadcast_master_param']"),
        ("optimizer_hook.py", "xlac.gradients_to_average.value"),
    }

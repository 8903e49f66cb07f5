"""``xla_fsdp.xlac``: everything private of torch_xla, and what a release lacks of it."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch_xla
from conftest import ROOT
from on_ranks import raises

from xla_fsdp import xlac


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


NAMES = set(filter(is_private, (path.rpartition(".")[2] for path in xlac._USES)))
FOLDERS = ("xla_fsdp", "benchmarks", "examples")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def import_again():
    spec = importlib.util.spec_from_file_location("xlac_again", xlac.__file__)
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_the_installed_release_has_everything(run_script):
    result = run_script("import runpy; runpy.run_module('xla_fsdp.xlac', run_name='__main__')")
    count = len(xlac._USES) + len(xlac.SYMBOLS)
    assert result.stdout.startswith("torch_xla 2.9."), result.stderr
    assert result.stdout.endswith(f" has {count} of {count} private names\n")
    assert result.returncode == 0 and not xlac.missing()


@pytest.mark.parametrize("module", ["xlac", "compiler_options"])
def test_commands_without_arguments_reject_them(run_script, module):
    run = f"import runpy; runpy.run_module('xla_fsdp.{module}', run_name='__main__')"
    result = run_script(run, "extra")
    assert result.returncode == 2 and result.stderr.endswith("unrecognized arguments: extra\n")


@pytest.mark.parametrize(
    ("owner", "name", "use"),
    [
        pytest.param("_XLAC", "_xla_all_gather", "Concatenates the shards", id="bound"),
        pytest.param("_XLAC", "_xla_step_marker", "Compiles and starts", id="replaceable"),
        pytest.param("_XLAC.lowering.LoweringContext", "hlo", "The module", id="method"),
        pytest.param("_internal.tpu", "get_worker_ips", "Network addresses", id="of a TPU host"),
        pytest.param("_internal", "jax_workarounds", "", id="module"),
        pytest.param("runtime", "_WORLD_SIZE", "The cached xr.world_size()", id="variable"),
        pytest.param("", "_prepare_to_exit", "Waits for programs", id="of the package"),
    ],
)
def test_what_a_release_lacks_is_named(monkeypatch, capsys, owner, name, use):
    path = ".".join(filter(None, ("torch_xla", owner, name)))
    import_again()
    monkeypatch.delattr(xlac._find(owner), name)
    lacking = xlac.missing()
    assert lacking and all(one.startswith(path) for one in lacking)
    assert all(text.startswith(use) for text in lacking.values())
    assert xlac._report() == 1
    told = capsys.readouterr().out
    assert "".join(f"missing: {one}: {text}\n" for one, text in lacking.items()) in told
    raises(ImportError, f"lacks {', '.join(lacking)}, which xla_fsdp needs", import_again)


def test_symbols_that_a_release_lacks_are_named(monkeypatch):
    monkeypatch.setattr(xlac, "SYMBOLS", {**xlac.SYMBOLS, "_no_such": "Does something."})
    assert list(xlac.missing()) == ["_no_such"]
    monkeypatch.setattr(xlac.platform, "machine", lambda: "aarch64")
    lacking = xlac.missing()
    assert set(lacking) == set(xlac.SYMBOLS)
    assert "this is linux aarch64, but only linux x86_64" in lacking[xlac.LOAD]


def test_functions_of_a_step_are_those_of_torch_xla(monkeypatch):
    library = torch_xla._XLAC
    assert xlac.all_gather is library._xla_all_gather
    assert xlac.call_computation is library._xla_user_computation
    # While these may be replaced, and are seen to be.
    for function in (xlac.sync_device, xlac.sync_tensors, xlac.copy_to_host):
        assert function.value is getattr(library, function.name)
        monkeypatch.setattr(library, function.name, lambda *args: ("replaced", args))
        assert function("x") == ("replaced", ("x",))


def mentions(path: Path) -> set[str]:
    """Private names of torch_xla in a file: imported, as attributes, as strings."""
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in ("torch_xla", "_XLAC", *NAMES)):
        return set()
    code = ast.unparse(ast.parse(text))  # an import is one line
    found, aliases = {"_XLAC", *NAMES} & set(re.findall(r"\b_\w+", code)), ["torch_xla"]
    for module, names in re.findall(r"^\s*(?:from ([\w.]+) )?import (.+)$", code, re.MULTILINE):
        for name, _, alias in (one.partition(" as ") for one in names.split(", ")):
            if (module or name).partition(".")[0] == "torch_xla":
                aliases.append(alias or name)
                found |= set(filter(is_private, f"{module}.{name}".split(".")))
    used = rf"\b(?:{'|'.join(map(re.escape, aliases))})(?:\.\w+)*?\.(_[a-zA-Z]\w*)"
    return found | set(re.findall(used, code))


def test_no_other_file_mentions_them(tmp_path):
    found = {path.relative_to(ROOT).as_posix(): mentions(path) for path in FILES}
    assert "_XLAC" in found.pop("xla_fsdp/xlac.py")
    assert not {path: names for path, names in found.items() if names}
    for line, name in (
        ("import torch_xla as a; a._XLAC", "_XLAC"),
        ("import _XLAC", "_XLAC"),
        ("from torch_xla._internal import tpu", "_internal"),
        ("import torch_xla.core.xla_model as xm; xm._x.y", "_x"),
        ("import torch_xla.runtime as xr; setattr(xr, '_WORLD_SIZE', 1)", "_WORLD_SIZE"),
        ("from torch_xla.core.xla_model import _x", "_x"),
    ):
        file = tmp_path / "a.py"
        file.write_text(line)
        assert name in mentions(file), line

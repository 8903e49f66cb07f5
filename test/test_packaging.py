"""The wheel and the source distribution, built, and installed into an empty environment."""

import os
import re
import shutil
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from processes import run_command

ROOT = Path(__file__).resolve().parent.parent
BUILT_FROM = "setup.py pyproject.toml MANIFEST.in README.md LICENSE CHANGELOG.md".split()
FOLDERS = {"xla_fsdp": ROOT / "xla_fsdp", "xla_fsdp/consolidate": ROOT / "consolidate"}


def call(*arguments, cwd):
    """What the command printed. Nothing leads it to this checkout."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    return run_command(*arguments, cwd=cwd, env=environment).stdout


def sources():
    """The Python files that must be in a wheel, by their names there."""
    names = {
        f"{package}/{path.relative_to(folder).as_posix()}"
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*.py")
    }
    assert any(name.startswith("xla_fsdp/consolidate/") for name in names)
    return names


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of what packages are built from, links as links, nothing that was built here."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("xla_fsdp", "consolidate"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    assert (folder / "xla_fsdp/consolidate").is_symlink()
    return folder


@pytest.fixture(scope="module")
def built(checkout):
    # Without a download of setuptools: the one that is here will do, an old one, too.
    call(sys.executable, "-m", "build", "--no-isolation", checkout, cwd=checkout)
    return checkout / "dist"


@pytest.fixture
def empty(tmp_path):
    venv.create(tmp_path / "environment", with_pip=False)
    return tmp_path / "environment/bin/python"


def pip_install(python, *what, cwd):
    """Nothing is downloaded."""
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    call(*pip, "install", "--no-deps", "--no-index", *what, cwd=cwd)


def lend_packages(python):
    """Lets an environment import what is installed in this one, after what is installed there."""
    there = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd="/")
    (Path(there.strip()) / "lent.pth").write_text(sysconfig.get_path("purelib"))


@pytest.fixture(scope="module")
def wheel(built):
    """Names of files, and metadata."""
    (path,) = built.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        metadata = archive.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    return names, Parser().parsestr(metadata)


def test_a_wheel_has_every_file(wheel):
    names, fields = wheel
    found = {name for name in names if name.endswith(".py")}
    assert found == sources(), "a folder without __init__.py is no package"
    assert any(name.endswith("/LICENSE") for name in names)
    assert "Apache-2.0" in (fields["License"], fields["License-Expression"])
    assert "demo" in fields.get_all("Provides-Extra")


def test_both_ends_of_the_ranges_of_hf_are_tested(wheel):
    """`make test` has the newest releases, and `make test-oldest` the lower ends."""
    found = map(Requirement, wheel[1].get_all("Requires-Dist"))
    hf = [one for one in found if one.marker and one.marker.evaluate({"extra": "hf"})]
    assert {one.name for one in hf} == {"transformers", "accelerate", "peft"}
    oldest, newest = (
        dict(re.findall("^(.*)==(.*)$", (ROOT / "test" / name).read_text(), re.MULTILINE))
        for name in ("oldest-hf.txt", "newest-hf.txt")
    )
    for one in hf:
        ends = {each.operator: each.version for each in one.specifier}
        assert ends.keys() == {">=", "<"} and ends[">="] == oldest[one.name]
        major, minor = newest[one.name].split(".")[:2]
        assert ends["<"] == f"{major}.{int(minor) + 1}"


def test_a_source_distribution_has_every_file(built):
    (source,) = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    links = {name.removeprefix("xla_fsdp/") for name in sources() if "/consolidate/" in name}
    assert links | {n for n in sources() if "/consolidate/" not in n} <= names
    assert set(BUILT_FROM) <= names


@pytest.mark.slow
def test_a_wheel_is_used_where_it_is_installed(built, empty, tmp_path):
    (wheel,) = built.glob("*.whl")
    pip_install(empty, wheel, cwd=tmp_path)
    # Without torch: names are imported when they are used.
    where = "import xla_fsdp; print(xla_fsdp.__file__, xla_fsdp.__version__)"
    path, version = call(empty, "-c", where, cwd=tmp_path).split()
    assert Path(path).is_relative_to(tmp_path / "environment")
    assert version in wheel.name
    lend_packages(empty)
    assert call(empty, "-c", where, cwd=tmp_path).split() == [path, version]
    every = "import xla_fsdp; print(*(getattr(xla_fsdp, n).__name__ for n in xla_fsdp.__all__))"
    assert "XlaFullyShardedDataParallel" in call(empty, "-c", every, cwd=tmp_path).split()
    for command in ("xla_fsdp.consolidate", "xla_fsdp.preflight"):
        assert "--ckpt_" in call(empty, "-m", command, "--help", cwd=tmp_path)


@pytest.mark.full
def test_pip_installs_a_checkout(checkout, empty, tmp_path):
    lend_packages(empty)  # setuptools is one of them
    pip_install(empty, "--no-build-isolation", checkout, cwd=tmp_path)
    script = "import xla_fsdp.consolidate.format as f; print(f.__file__)"
    path = Path(call(empty, "-c", script, cwd=tmp_path).strip())
    assert path.is_relative_to(tmp_path / "environment")

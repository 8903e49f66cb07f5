"""Code of others, as it is published, with its imports changed: it trains as in plain torch.

Each client is installed into an environment of its own, on top of the packages that are here."""

import os
import subprocess
import sysconfig
import venv

import pytest
from conftest import ROOT

pytestmark = pytest.mark.full


@pytest.fixture
def install(tmp_path):
    """``install(requirement, ...)``: the Python of a new environment that has them."""

    def make(*requirements):
        folder = tmp_path / "environment"
        venv.create(folder, with_pip=False, symlinks=True)
        python = folder / "bin" / "python"
        where = sysconfig.get_path("purelib", vars={"base": str(folder)})
        here = sysconfig.get_path("purelib")
        with open(f"{where}/packages.pth", "w", encoding="utf-8") as file:
            file.write(f"{here}\n")
        command = [python, "-m", "pip", "install", "-q", "--no-deps", *requirements]
        subprocess.run(command, check=True, timeout=1500)
        return python

    return make


def run(python, script):
    done = subprocess.run(
        [python, ROOT / "test" / "clients" / script],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=1500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


TORCHTITAN = (
    "torchtitan==0.2.0", "torchdata==0.11.0", "tomli", "tyro", "docstring_parser", "typeguard",
    "datasets==4.1.0", "dill==0.4.0", "multiprocess==0.70.16", "pyarrow", "pandas", "httpx",
    "httpcore", "h11", "anyio",
)  # fmt: skip


def test_torchtitan(install):
    run(install(*TORCHTITAN), "torchtitan_llama.py")


def test_optimizers(install):
    run(install("timm==1.0.31", "torchao==0.14.1"), "optimizers.py")


def test_diffusers(install):
    run(install("diffusers==0.35.2", "importlib_metadata", "zipp"), "diffusers_training.py")


TRL = (
    "trl==1.16.0", "datasets==4.8.5", "dill==0.4.1", "multiprocess==0.70.19", "pyarrow", "pandas",
    "httpx", "httpcore", "h11", "anyio",
)  # fmt: skip


def test_trl(install):
    run(install(*TRL), "trl_sft.py")


def test_litgpt(install):
    run(install("litgpt==0.5.13"), "litgpt_adapter.py")

"""The notebook, run from its first cell to its last, and what a notebook is to ``launch``."""

import base64
import re

import nbformat
import pytest
from conftest import ROOT
from nbclient import NotebookClient

pytestmark = pytest.mark.full

NOTEBOOK = ROOT / "examples/quickstart.ipynb"


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """``execute(notebook)`` runs it in an empty folder; what its code cells printed."""
    for name in ("PJRT_DEVICE", "CPU_NUM_DEVICES", "XLA_THREAD_POOL_SIZE", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "settings"))
    folder = tmp_path / "notebook"
    folder.mkdir()

    def run(notebook):
        at = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=at).execute()
        return [
            "".join(output.text for output in cell.outputs if output.get("name") == "stdout")
            for cell in notebook.cells
            if cell.cell_type == "code"
        ]

    return run


def test_quickstart(execute):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) == 10
    assert not any(cell.get("outputs") for cell in notebook.cells), "committed with outputs"

    _, _, trained, planned, _, joined = execute(notebook)

    assert "4 ranks, each with 36,608 of 137,802 elements\n" in trained
    first, last = map(float, re.search(r"loss (.+) -> (.+)", trained).groups())
    assert 2 < first < 3 and last < 0.5
    accuracy = re.search(r"accuracy (.+)% on held-out images", trained)[1]
    assert 80 < float(accuracy) < 100
    assert planned.startswith("FITS: ") and "v5litepod-8, 8 devices (v5e)" in planned
    assert re.search(r"sent / bound +1.00 ×", planned)
    assert re.search(r"executables +1 of 3 ", planned)
    (picture,) = notebook.cells[7].outputs
    assert base64.b64decode(picture.data["image/png"])[:8] == b"\x89PNG\r\n\x1a\n"
    assert "wrote joined: 30 parameters (137802 elements)" in joined
    assert f"accuracy {accuracy}% in plain torch, {accuracy}% in shards" in joined

"""The table of Lightning in docs/reference/tested-combinations.md, against plain Lightning in one
process."""

import pytest
import torch
from lightning_cells import CELLS, Side, on_ranks

from xla_fsdp.testing import run_in_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

NEAR = {"bfloat16": 3e-2, "saving_for_resume": 5e-3, "resuming": 5e-3, "bf16-mixed": 5e-3}


@pytest.fixture(scope="module", autouse=True)
def jax_was_imported():
    """jax sets this variable where there is no TPU; Lightning alone then raises TypeError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        yield


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    side, found = Side(tmp_path_factory.mktemp("cells"), 0), {}
    for cell in dict.fromkeys(cell for cells in CELLS.values() for cell in cells):
        found[cell.__name__] = cell(side)
    return side.root, found


@pytest.fixture(scope="module")
def on(plain):
    """What was found on a number of ranks: one launch for each number."""
    return {ranks: run_in_ranks(on_ranks, ranks, plain[0], timeout=1500) for ranks in CELLS}


def compare(found, wanted, near):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            compare(found[name], value, NEAR.get(name, near))
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    else:
        assert found == pytest.approx(wanted, abs=near)


@pytest.mark.parametrize(
    "ranks, name", [(ranks, cell.__name__) for ranks, cells in CELLS.items() for cell in cells]
)
def test_cell(on, plain, ranks, name):
    compare(on[ranks][0][name], plain[1][name], NEAR.get(name, 1e-4))

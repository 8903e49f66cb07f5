"""The table of Lightning in docs/reference/tested-combinations.md, against plain Lightning in one
process."""

import functools

import pytest
import torch
from lightning_cells import CELLS, Side, on_ranks, resuming, saving_for_resume

from xla_fsdp.testing import run_in_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]

NEAR = {"bfloat16": 3e-2, "saving_for_resume": 5e-3, "resuming": 5e-3, "bf16-mixed": 5e-3}


@pytest.fixture(scope="module", autouse=True)
def jax_was_imported():
    """jax sets this variable where there is no TPU; Lightning alone then raises TypeError."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")
        yield


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """``found(ranks, cell)``: what was found on ranks, and in one process; one launch for all cells
    of a number of ranks."""
    side = Side(tmp_path_factory.mktemp("cells"), 0)
    plain = functools.cache(lambda cell: cell(side))
    on = functools.cache(
        lambda ranks: run_in_ranks(on_ranks, ranks, side.root, ranks, timeout=1500)[0]
    )

    def find(ranks, cell):
        if resuming in CELLS[ranks]:  # what four ranks, and one process, have saved
            on(4), plain(saving_for_resume)
        return on(ranks)[cell.__name__], plain(cell)

    return find


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
    "ranks, cell",
    [
        pytest.param(ranks, cell, id=f"{ranks}-{cell.__name__}")
        for ranks, cells in CELLS.items()
        for cell in cells
    ],
)
def test_cell(found, ranks, cell):
    on, plain = found(ranks, cell)
    compare(on, plain, NEAR.get(cell.__name__, 1e-4))

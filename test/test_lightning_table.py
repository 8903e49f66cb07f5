"""The table of Lightning in docs/reference/tested-combinations.md, against plain Lightning in one
process."""

import functools

import pytest
import torch
from lightning_cells import CELLS, Side, on_ranks, resuming, saving_for_resume

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
def found(tmp_path_factory):
    """``found(key, cell)``: what was found on ranks, and in one process; one launch for a key."""
    side = Side(tmp_path_factory.mktemp("cells"), 0)
    plain = functools.cache(lambda cell: cell(side))
    on = functools.cache(
        lambda key: run_in_ranks(on_ranks, key[0], side.root, key, timeout=1500)[0]
    )

    def find(key, cell):
        if cell is resuming:  # what four ranks, and one process, have saved
            on((4, False)), plain(saving_for_resume)
        return on(key)[cell.__name__], plain(cell)

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
    "key, cell",
    [
        pytest.param(
            key, cell, id=f"{key[0]}-{cell.__name__}", marks=() if key[1] else pytest.mark.slow
        )
        for key, cells in CELLS.items()
        for cell in cells
    ],
)
def test_cell(found, key, cell):
    on, plain = found(key, cell)
    compare(on, plain, NEAR.get(cell.__name__, 1e-4))

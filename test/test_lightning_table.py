"""The table of Lightning in docs/reference/tested-combinations.md, against plain Lightning in one
process."""

import functools
import re

import lightning_cells as cells
import pytest
import test_lightning as others
import torch
from conftest import ROOT
from lightning_cells import CELLS, Side, on_ranks, resuming, saving_for_resume

from xla_fsdp.testing import run_in_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

FIT = others.test_training_is_that_of_one_process
RESUME = others.test_another_number_of_ranks_and_plain_lightning_go_on
FABRIC = others.test_fabric_is_that_of_one_process
AVERAGES = others.test_a_module_averages_its_weights
RAISE = others.test_callbacks_that_replace_parameters_are_refused
# What tests each row of the page and its columns: cells, which run on the ranks of CELLS, and tests
# in test_lightning.py with the numbers of their ranks.
COLUMNS = "32-true", "bf16-mixed", "bf16-true", "with accumulation", "resumed"
ROWS = {
    "Trainer: no callback": {
        "32-true": {cells.tuner, (FIT, 2)},
        "bf16-mixed": {cells.resuming},
        "bf16-true": {cells.bfloat16},
        "with accumulation": {cells.resuming, (FIT, 2)},
        "resumed": {(RESUME, 1)},
    },
    "several optimizers, manual optimization, `toggle_optimizer`": {
        "32-true": {cells.manual},
        "resumed": {cells.manual},
    },
    "`ModelCheckpoint`: best, last, within an epoch": {
        "32-true": {cells.best_and_last, cells.best_and_last_sharded},
        "bf16-mixed": {cells.saving_for_resume},
        "with accumulation": {cells.saving_for_resume},
        "resumed": {cells.resuming},
    },
    "`EarlyStopping`": {
        "32-true": {cells.stopping_early, cells.early_stopping_resumed},
        "resumed": {cells.early_stopping_resumed},
    },
    "`GradientAccumulationScheduler`, clipping": {
        "32-true": {cells.accumulation_scheduler},
        "with accumulation": {cells.accumulation_scheduler},
    },
    "`LearningRateMonitor`, `CSVLogger`": {"32-true": {cells.learning_rates}},
    "`Timer`": {"32-true": {cells.timer}},
    "`ThroughputMonitor`, `DeviceStatsMonitor`": {"32-true": {cells.throughput}},
    "`BaseFinetuning`": {"32-true": {cells.finetuning}},
    "`BaseFinetuning`, `sync_batchnorm=True`": {"32-true": {cells.finetuning_batch_norm}},
    "`BackboneFinetuning`": {
        "32-true": {cells.finetuning_resumed},
        "resumed": {cells.finetuning_resumed},
    },
    "`LearningRateFinder`": {
        "32-true": {cells.rate_finder},
        "with accumulation": {cells.rate_finder},
    },
    "`Tuner.lr_find`, then `fit`": {"32-true": {cells.tuner}},
    "`Tuner.scale_batch_size` (`BatchSizeFinder`)": {"32-true": {cells.batch_size}},
    "a module that averages its weights": {"32-true": {(AVERAGES, 2)}},
    "a module that was pruned before `fit`": {"32-true": {cells.pruned_before}},
    "`StochasticWeightAveraging`, `WeightAveraging`, `ModelPruning`": dict.fromkeys(
        COLUMNS, {(RAISE,)}
    ),
    "Fabric: clipping, `save`, `load`": {
        "32-true": {cells.fabric, (FABRIC, 2)},
        "bf16-mixed": {cells.fabric},
        "with accumulation": {cells.fabric, (FABRIC, 2)},
        "resumed": {cells.fabric, (FABRIC, 2)},
    },
}

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


def ranks_of(tested):
    found = set()
    for each in tested:
        if isinstance(each, tuple):
            found |= set(each[1:])
        else:
            found |= {ranks for ranks, those in CELLS.items() if each in those}
    return found


def test_the_page_has_what_is_tested():
    text = (ROOT / "docs/reference/tested-combinations.md").read_text()
    table = text.partition("## Lightning")[2]
    lines = [line.strip("|").split("|") for line in table.splitlines() if line.startswith("|")]
    (_, *columns), _, *lines = [[part.strip() for part in line] for line in lines]
    assert tuple(columns) == COLUMNS
    page = {row: parts for row, *parts in lines}
    assert list(page) == list(ROWS)
    wrong = []
    for row, tests in ROWS.items():
        for column, there in zip(COLUMNS, page[row], strict=True):
            tested = tests.get(column, ())
            # The ranks that saved are not those that are compared.
            numbers = re.findall(r"\d+", re.sub(r"from \d+ ranks", "", there))
            right = ranks_of(tested)
            if set(map(int, numbers)) != right or (there == "–") == bool(tested):
                wrong.append(f"{row}, {column}: {there!r}, but tests run on ranks {right}")
    assert not wrong, "\n".join(wrong)


def test_all_cells_are_in_the_page():
    in_rows = {each for tests in ROWS.values() for tested in tests.values() for each in tested}
    run = {cell for those in CELLS.values() for cell in those}
    assert run == {each for each in in_rows if not isinstance(each, tuple)}


def compare(found, wanted, near):
    if isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for name, value in wanted.items():
            compare(found[name], value, NEAR.get(name, near))
    elif isinstance(wanted, torch.Tensor):
        torch.testing.assert_close(found, wanted, rtol=near, atol=near)
    else:
        assert found == pytest.approx(wanted, abs=near)


@pytest.mark.slow
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

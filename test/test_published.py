"""Published runs as they are planned."""

import json
import re
from dataclasses import replace

import pytest
import torch
from conftest import ROOT

from benchmarks import published
from benchmarks.decoder import Decoder, Model
from benchmarks.published_runs import NOT_PLANNED, RUNS
from xla_fsdp.tpu.chips import CHIPS
from xla_fsdp.tpu.topology import resolve


def test_models_are_the_sizes_that_were_published():
    """Parameters by name, and FLOPs by what a log states: 413.433 TFLOP/s over 3.443 s."""
    billions = {
        "8B": 8.03, "16B": 15.8, "32B": 31.4, "64B": 62.8, "22B": 22.1, "52B": 52.3, "6.7B": 6.65,
        "13B": 12.85, "20B": 20.2, "7B": 6.61, "70B": 70.55, "405B": 405.85,
    }  # fmt: skip
    for name, run in RUNS.items():
        if not name.startswith("ResNet"):
            size = next(size for size in billions if f" {size}" in f" {name}")
            assert run.sizes.parameters == pytest.approx(billions[size] * 1e9, rel=0.01), name
    llama = RUNS["Llama 3.1 8B, v6e-8"].sizes
    assert llama.flops() == pytest.approx(413.433e12 * 3.443, rel=0.01)


def test_utilization_of_2026_counts_half_of_causal_attention():
    """The seconds and the MFU that a source states agree with the sizes of the plan."""
    checked = 0
    for run in RUNS.values():
        if match := re.fullmatch(r"([\d.]+) s, ([\d.]+) %", run.published):
            flops = run.sizes.flops(causal=0.5) / resolve(run.slice).chip.device_flops
            assert float(match[1]) == run.seconds
            assert 100 * flops / run.seconds == pytest.approx(float(match[2]), abs=0.1), run.name
            checked += 1
    assert checked == 12


def test_decoder_with_copied_keys_is_the_same_model_and_weights_have_their_dtype():
    sizes = Decoder(2, 16, 4, 8, 32, vocabulary=11, length=8, batch=2, groups=2, kernel=False)
    tokens = torch.arange(16).view(2, 8) % 11
    losses = []
    for one in (sizes, replace(sizes, repeated=True)):
        torch.manual_seed(0)
        model = Model(one, _Blocks)
        losses.append(model(tokens, tokens).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    narrow = Model(replace(sizes, weights="bfloat16"), _Blocks)
    assert {p.dtype for p in narrow.parameters()} == {torch.bfloat16}


class _Blocks(torch.nn.ModuleList):
    def forward(self, x, *others):
        for block in self:
            x = block(x, *(other.to(x.dtype) for other in others))
        return x


def test_every_run_has_a_slice():
    for run in RUNS.values():
        assert resolve(run.slice).chip.family == run.chip
        assert resolve(run.slice).devices % run.replicas == 0
    assert all(NOT_PLANNED.values())


def test_chips_have_the_corrections_of_the_stored_rows():
    rows = json.loads(published.RESULTS.read_text())
    for name in published._chips():
        factor, runs = published.correction(rows, name)
        assert CHIPS[name].published == (round(factor, 2), runs)
    slower = {name: {**row, "step": 2 * row["step"], "again": 0} for name, row in rows.items()}
    assert published.correction(slower, "v3")[0] < 0.6
    assert published.correction(rows, "v2") == (1.0, 0)


def test_a_plan_that_does_not_fit_is_made_again_with_inputs_on_the_host(monkeypatch):
    asked = []

    def once(run):
        asked.append(getattr(run.sizes, "offload", None))
        return {"fits": asked[-1] is True, "step": 1.0 + len(asked)}

    monkeypatch.setattr(published, "_planned_once", once)
    row = published.planned(RUNS["32B, v5litepod-256"])
    assert (asked, row["offloaded"], row["step"], row["step_in_hbm"]) == ([False, True], True, 3, 2)
    for name, offload in (("Llama 3.1 70B, v6e-64", True), ("ResNet-50, v3-8", None)):
        asked.clear()
        assert "offloaded" not in published.planned(RUNS[name]) and asked == [offload]


def test_page_and_stored_table_have_the_stored_rows():
    table = published.markdown(json.loads(published.RESULTS.read_text()))
    assert published.RESULTS.with_suffix(".md").read_text() == f"{table}\n"
    page = (ROOT / "docs/design/published-runs.md").read_text(encoding="utf-8")
    for line in table.splitlines():
        if line.startswith(("|", "By published time")):
            assert line in page


def test_table_of_rows(tmp_path, capsys):
    row = {"step": 4.0, "compute": 3.0, "collective": 2.0, "exposed": 1.0, "again": 0.557,
           "model_flops": 1.4e15, "peak": 918e12, "hbm": 2**34, "fits": True,
           "compile_s": 1.0, "notes": []}  # fmt: skip
    out = tmp_path / "rows.json"
    out.write_text(json.dumps({"Llama 3.1 8B, v6e-8": row, "22B, v4-128": {"refusal": "no"}}))
    published.main(["--known", "--out", str(out)])
    table = capsys.readouterr().out
    assert "| 4.000 | 3.443 | +0 % | 38.1 | " in table, "MFU of all that is planned"
    assert "Did not fit, so no time: 22B, v4-128: no" in table
    assert out.with_suffix(".md").read_text() == table
    with pytest.raises(SystemExit):
        published.main(["no such run"])
    assert "--list" in capsys.readouterr().err
    full = "Llama 3 8B, v6e-4, flash"
    assert [n for n in RUNS if published._means(full, n)] == [full]
    assert len([n for n in RUNS if published._means("8B, v6e-4", n)]) > 2

"""xla_fsdp.profile: a trace of some steps, with the names of a plan in it."""

import json
import warnings

import pytest
import torch
from reports import make
from test_report_pictures import Page
from test_trace_beside import table
from torch import nn

from xla_fsdp.planning.__main__ import main
from xla_fsdp.planning.recorded import read_trace


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        import xla_fsdp

        wrap = xla_fsdp.XlaFullyShardedDataParallel
        self.blocks = nn.ModuleList([wrap(nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def train(rank, folder, steps, rows=2, enter_late=False):
    import contextlib

    import torch_xla
    import torch_xla.core.xla_model as xm

    import xla_fsdp

    torch.manual_seed(0)
    model = xla_fsdp.XlaFullyShardedDataParallel(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, compiled = [], []

    def step():
        loss = model(torch.full((rows, 8), rank + 1.0).to("xla")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
        compiled.append(xla_fsdp.compilation_counts().compiled)

    if enter_late:
        step()
    recording = xla_fsdp.profile(folder, steps) if steps else contextlib.nullcontext()
    # What catches warnings is the process's, and ranks are its threads.
    with contextlib.ExitStack() as only_rank_0:
        caught = []
        if rank == 0:
            caught = only_rank_0.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
        xm.rendezvous("warnings are caught")
        with recording as profiler:
            for _ in range(5):
                step()
                if steps:
                    profiler.step()
        xm.rendezvous("all have warned")
    told = [str(one.message) for one in caught if "no names" in str(one.message)]
    return losses, compiled, steps and profiler.file, told, torch_xla._XLAC._get_ir_debug()


# First in this file: a trace also holds the programs that its process ran before.
def test_a_trace_without_names_is_told_of(run_ranks, tmp_path):
    (_, _, file, told, _), _ = run_ranks(train, 2, str(tmp_path), (1, 2), rows=3, enter_late=True)
    assert file is not None and "compiled before xla_fsdp.profile was entered" in told[0]


def test_a_trace_has_the_names_of_a_plan_and_is_compared_with_one(run_ranks, tmp_path, capsys):
    first, second = run_ranks(train, 2, str(tmp_path / "trace"), (1, 4))
    # In the same process: the program that was compiled with names is the one without.
    plain = run_ranks(train, 2, "", None)
    assert [first[0], second[0]] == [one[0] for one in plain]
    assert plain[0][1][-1] == first[1][-1]
    _, compiled, file, told, debug = first
    assert compiled[0] == compiled[-1]  # once, with names; the steps after have the same program
    assert not told and not debug and second[2] is None
    assert list((tmp_path / "trace/plugins/profile").glob("*/*.xplane.pb")) == [file]
    trace = file.read_bytes()
    for (
        name
    ) in "forward[blocks.0] backward[blocks.1] optimizer[ all_gather[ reduce_scatter[".split():
        assert name.encode() in trace, name

    recorded = read_trace(tmp_path / "trace")
    assert (recorded.source, recorded.device, recorded.steps) == (str(file), "2 CPU ranks", 3)
    assert recorded.on_cpu and recorded.ranks == 2 and recorded.seconds < recorded.period
    assert {"blocks.0", "blocks.1", "blocks.1.weight"} < recorded.modules
    spans = [(slot.begin, slot.end) for slot in recorded.slots]
    assert min(spans)[0] == 0 and 0 < max(end for _, end in spans) < 1
    phases = {slot.phase for slot in recorded.slots if slot.lane == "compute"}
    assert {"forward", "backward", "optimizer"} <= phases
    gathers = [s for s in recorded.slots if s.module == "blocks.0.weight" and s.phase == "forward"]
    assert sum(slot.lane == "collective" for slot in gathers) == 2  # of two ranks
    took = {share.kind for share in recorded.shares if share.seconds > 0}
    assert took == {"compute", "all-gather", "reduce-scatter"}

    # A plan made by hand of three such blocks.
    report = type(make()).from_json(make(blocks=3).to_json().replace(".mlp", ""))
    beside = report.compare_trace(tmp_path / "trace")
    kinds, unit = table(beside, "By kind"), table(beside, "By unit")
    assert {"forward compute", "backward compute", "all-gather, forward"} <= set(kinds)
    assert kinds["forward compute"]["modelled"] == "27.000 ms"
    assert kinds["reduce-scatter, backward"]["modelled"] == "–"
    assert unit["blocks.1: compute"]["modelled"] == "18.000 ms"
    assert float(unit["blocks.1: compute"]["measured"].split()[0]) > 0
    assert unit["blocks.2: compute"]["measured"] == unit["blocks.2: compute"]["ratio"] == "–"
    shares = [row["share"] for row in unit.values() if row["share"] != "–"]
    assert sum(float(share.removesuffix(" %")) for share in shares) == pytest.approx(100, abs=1)
    text = str(beside)
    assert "are not those of a TPU" in text and "Only in the plan: blocks.2." in text
    assert "Only in the trace: blocks.0.bias, blocks.0.weight" in text

    # The command: both timelines on one page, which needs nothing else.
    report.save(tmp_path / "plan.json")
    command = [str(tmp_path / "plan.json"), "--trace", str(tmp_path / "trace")]
    assert main([*command, "--plot", str(tmp_path / "both.html")]) == 0
    assert capsys.readouterr().out == text + "\n"
    written = (tmp_path / "both.html").read_text(encoding="utf-8")
    page = Page(written)
    assert page.tags.count("img") == 2 and not page.fetched
    words = "".join(page.words)
    assert "Modelled" in words and "Measured: step " in words and "blocks.1: collectives" in words
    # And for Perfetto.
    assert main([*command, "--plot", str(tmp_path / "both.trace.json")]) == 0
    events = json.loads((tmp_path / "both.trace.json").read_text())["traceEvents"]
    (one,) = [event for event in events if event["name"] == "fusion.1"]
    assert one["args"]["module"] == "blocks.0" and one["dur"] == pytest.approx(3000)
    measured = {e["args"].get("module") for e in events if e["pid"] == 1 and "args" in e}
    assert "blocks.1.weight" in measured
    capsys.readouterr()
    for path, said in (
        ("both.png", "allowed are .html, .trace.json"),
        ("no/both.html", "make the folder"),
    ):
        assert main([*command, "--plot", str(tmp_path / path)]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
    other = type(report).from_json(report.to_json().replace("blocks.", "layers."))
    with pytest.raises(ValueError, match="another model than the plan: its modules are blocks.0, "):
        other.compare_trace(file)


def test_wrong_use_is_told(tmp_path):
    import xla_fsdp

    for steps in ((3, 3), (-1, 2)):
        with pytest.raises(ValueError, match=r"steps must be \(a, b\) with 0 <= a < b"):
            xla_fsdp.profile(tmp_path, steps)
    for steps in (3, (1.0, 2), (True, 2)):
        with pytest.raises(TypeError, match="steps must be two"):
            xla_fsdp.profile(tmp_path, steps)
    with pytest.raises(ValueError, match="folder is empty"):
        xla_fsdp.profile("", (1, 2))
    with pytest.raises(TypeError, match=r"ranks must be a tuple of numbers, such as \(0,\), got 0"):
        xla_fsdp.profile(tmp_path, (1, 2), 0)

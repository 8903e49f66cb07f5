"""xla_fsdp.profile: a trace of some steps, with the names of a plan in it."""

import warnings

import pytest
import torch
from torch import nn


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


def test_a_trace_has_the_names_of_a_plan(run_ranks, tmp_path):
    first, second = run_ranks(train, 2, str(tmp_path / "trace"), (2, 4))
    # In the same process: the program that was compiled with names is the one without.
    plain = run_ranks(train, 2, "", None)
    assert [first[0], second[0]] == [one[0] for one in plain]
    assert plain[0][1][-1] == first[1][-1]
    _, compiled, file, told, debug = first
    assert compiled[0] == compiled[-1]  # once, with names; the steps after have the same program
    assert not told and not debug
    assert second[2] is None and file.exists()
    (found,) = (tmp_path / "trace/plugins/profile").glob("*/*.xplane.pb")
    assert found == file
    trace = file.read_bytes()
    for name in ("forward[blocks.0]", "backward[blocks.1]", "all_gather[", "reduce_scatter["):
        assert name.encode() in trace, name


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

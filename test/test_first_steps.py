"""What makes the first steps on CPU ranks cheap: one program for all of them, and it is kept."""

import json

import pytest
import torch
import torch_xla
from torch import nn, optim

import xla_fsdp
from xla_fsdp.compiled import cache as compile_cache
from xla_fsdp.testing import run_in_ranks

OPTIMIZERS = {
    "AdamW": lambda p: optim.AdamW(p, lr=0.01),
    "AdamW, capturable": lambda p: optim.AdamW(p, lr=0.01, capturable=p[0].is_xla),
    "Adam, amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "NAdam": lambda p: optim.NAdam(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.5),
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    # The first momentum is the gradient, undampened: another program.
    "SGD, dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
}


def train(make, wrap, device):
    """Weights after three steps, the optimizer's state, and programs compiled in each step."""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)))
    optimizer = make(list(model.parameters()))
    batch = torch.randn(8, 4).to(device)
    programs = [sum(xla_fsdp.compilation_counts())]
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if device == "xla":
            torch_xla.sync()
        programs.append(sum(xla_fsdp.compilation_counts()))
    state = [
        {key: torch.as_tensor(value).detach().cpu() for key, value in values.items()}
        for values in optimizer.state_dict()["state"].values()
    ]
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return weights, state, [b - a for a, b in zip(programs, programs[1:], strict=False)]


@pytest.fixture(scope="module")
def on_a_rank():
    def every(rank):
        wrap = xla_fsdp.XlaFullyShardedDataParallel
        return {name: train(make, wrap, "xla") for name, make in OPTIMIZERS.items()}

    return run_in_ranks(every, 1)[0]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_program_for_all_steps(name, on_a_rank):
    weights, state, programs = on_a_rank[name]
    assert programs[1:] == [int(name == "SGD, dampening"), 0]
    plain_weights, plain_state, _ = train(OPTIMIZERS[name], lambda model: model, "cpu")
    assert [values.keys() for values in state] == [values.keys() for values in plain_state]
    mine = weights + [value for values in state for value in values.values()]
    theirs = plain_weights + [value for values in plain_state for value in values.values()]
    for sharded, plain in zip(mine, theirs, strict=True):
        # A shard is flat and has padding at its end.
        values = sharded.flatten()[: plain.numel()]
        torch.testing.assert_close(values, plain.flatten(), rtol=1e-4, atol=1e-6)


def test_other_constants_stay_constants(run_ranks):
    def texts(rank):
        class Makes(optim.Optimizer):
            def step(self):
                with torch.no_grad():
                    inside = torch.zeros(3, device="xla"), torch.full_like(value, 2.0)
                with torch.enable_grad():  # as the forward of a closure
                    return *inside, torch.zeros(3), torch.zeros(3, device="xla")

        value = torch.ones(2).to("xla")
        *inside, on_host, forward = Makes([value], {}).step()
        assert on_host.device.type == "cpu"
        with torch.no_grad():
            after = torch.zeros(3, device="xla")
        return [torch_xla._XLAC._get_xla_tensors_text([t]) for t in (*inside, forward, after)]

    (texts,) = run_ranks(texts, 1)
    assert ["device_data" in text for text in texts] == [True, True, False, False]


STARTS = """
import json, torch, xla_fsdp

def add(rank):
    return (torch.ones(3).to("xla") * 2).sum().item()

if __name__ == "__main__":
    assert xla_fsdp.launch(add, num_devices=1) == [6.0]
    print(json.dumps(xla_fsdp.compilation_counts()))
"""


def test_launch_keeps_programs(run_script, tmp_path):
    def start(flags):
        env = {"XLA_FLAGS": flags, "PJRT_DEVICE": "CPU", "XDG_CACHE_HOME": str(tmp_path)}
        env["XLA_FSDP_COMPILATION_CACHE_FOLDER"] = ""
        done = run_script(STARTS, env=env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), len(list(tmp_path.glob("xla_fsdp/ranks/cpu-*/*-*-*")))

    level = "--xla_backend_optimization_level="
    (compiled, cached), kept = start(f"{level}0")
    assert compiled > 0 and cached == 0 and kept == compiled
    assert start(f"{level}0") == ([0, compiled], kept)
    assert start(f"{level}1") == ([compiled, 0], 2 * kept)


class TestWhereProgramsAreKept:
    NAME = "XLA_FSDP_COMPILATION_CACHE_FOLDER"

    @pytest.fixture
    def opened(self, monkeypatch):
        """Folders that were opened, each refused if its name says so."""
        folders = []

        def open_(folder, part, limit):
            folders.append((folder, limit))
            if folder.name == "full":
                raise OSError(28, "No space left on device; name a folder")
            if folder.name == "elsewhere":
                raise NotImplementedError

        xlac = torch_xla._XLAC
        monkeypatch.setattr(xlac, "_xla_computation_cache_is_initialized", lambda: False)
        monkeypatch.setattr(compile_cache, "_open", open_)
        # Undone at the end, with what the function sets.
        monkeypatch.setenv("XLA_FSDP_COMPILATION_CACHE", "")
        return folders

    def test_in_a_folder_that_is_named(self, opened, monkeypatch, tmp_path):
        monkeypatch.setenv(self.NAME, str(tmp_path))
        compile_cache.keep_by_default()
        compile_cache.keep_by_default()
        assert opened == [(tmp_path, 1 << 30)]

    def test_nowhere(self, opened, monkeypatch):
        monkeypatch.setenv(self.NAME, "none")
        compile_cache.keep_by_default()
        monkeypatch.setenv(self.NAME, "")
        monkeypatch.setenv("XLA_PERSISTENT_CACHE_PATH", "/torch_xla's")
        compile_cache.keep_by_default()
        assert opened == []

    def test_a_folder_that_is_named_must_be_usable(self, opened, monkeypatch, tmp_path):
        monkeypatch.setenv(self.NAME, str(tmp_path / "full"))
        with pytest.raises(OSError, match="No space left"):
            compile_cache.keep_by_default()

    def test_without_the_usual_folder_there_is_a_warning(self, opened, monkeypatch, tmp_path):
        monkeypatch.delenv(self.NAME)
        monkeypatch.setattr(compile_cache, "_in_the_users_cache", lambda name: tmp_path / "full")
        with pytest.warns(UserWarning, match=f"name a folder, or set {self.NAME} to one, or to"):
            compile_cache.keep_by_default()

    def test_where_it_is_impossible_programs_are_compiled(self, opened, monkeypatch, tmp_path):
        monkeypatch.setenv(self.NAME, str(tmp_path / "elsewhere"))
        compile_cache.keep_by_default()
        assert len(opened) == 1

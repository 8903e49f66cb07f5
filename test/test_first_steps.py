"""What makes the first steps on CPU ranks cheap: one program for all of them."""

import pytest
import torch
import torch_xla
from torch import nn, optim

import xla_fsdp
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

"""detect_divergence: who made the first value that is not finite, and which rank differs."""

import pytest
import torch
from lazy_modules import torch_xla, xr
from torch import nn

import xla_fsdp


class Planted(nn.Module):
    """A linear layer that makes a NaN of its output, or of the gradient of its input."""

    def __init__(self, where, rank, at):
        super().__init__()
        self.linear, self.spectrum = nn.Linear(8, 8), Spectrum()
        self.where, self.rank, self.at, self.calls = where, rank, at, 0

    def forward(self, x):
        self.calls += 1
        bad = float("nan") if (xr.global_ordinal(), self.calls) == (self.rank, self.at) else 1.0
        # Data, not a number in the program, which all ranks share.
        bad = torch.full((), bad, device="cpu").to(x.device)
        y = self.linear(x)
        if self.where == "complex":
            self.spectrum.factor = bad
            return self.spectrum(y)
        return y * bad if self.where == "forward" else Backward.apply(y, bad)


class Spectrum(nn.Module):
    """A complex output with a NaN, which the module around it leaves out."""

    def forward(self, y):
        return torch.complex(y, y * self.factor)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, bad):
        ctx.save_for_backward(bad)
        return y * 1

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Model(nn.Module):
    def __init__(self, where, rank, at, checkpointed):
        super().__init__()
        wrap = xla_fsdp.XlaFullyShardedDataParallel
        first, second, third = nn.Linear(8, 8), Planted(where, rank, at), nn.Linear(8, 8)
        if checkpointed:
            second = xla_fsdp.checkpoint_module(second)
        self.first, self.blocks = wrap(first), nn.ModuleList([wrap(second), wrap(third)])

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x).real)
        return x


def train(rank, where, planted_on, at, every=1, checkpointed=False, tell=None):
    torch.manual_seed(0)
    model = xla_fsdp.XlaFullyShardedDataParallel(Model(where, planted_on, at, checkpointed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    try:
        with xla_fsdp.detect_divergence(model, every=every) as divergence:
            for step in range(1, 5):
                x = torch.full((2, 8), rank + 1.0).to("xla")
                loss = model(x).square().mean()
                loss.backward()
                norm = model.clip_grad_norm_(1.0)
                optimizer.step()
                # As data: ranks with other numbers in their programs wait for each other forever.
                told = torch.tensor(1.25 if tell == step and rank == 1 else 1.0)
                norm = norm * told.to("xla")
                divergence.step(loss, grad_norm=norm)
                optimizer.zero_grad()
                torch_xla.sync()
                losses.append(loss.item())
    except xla_fsdp.DivergenceError as error:
        return str(error), error.step, error.ranks, error.module
    return losses


LATER = "is not finite on rank 1; on further ranks (1) a later value is not finite"


@pytest.mark.parametrize(
    "where, at, checkpointed, module, message",
    [
        ("forward", 2, False, "blocks.0", "the output of blocks.0"),
        ("complex", 2, False, "blocks.0.spectrum", "the output of blocks.0.spectrum"),
        *(
            ("backward", at, checkpointed, "blocks.0",
             "the gradient of the output of blocks.0.linear, from blocks.0 itself,")
            # A checkpointed module gets its graph in its second call, which is in the backward.
            for at, checkpointed in ((1, False), (2, True))
        ),
    ],
)  # fmt: skip
def test_a_nan_of_one_rank(run_ranks, where, at, checkpointed, module, message):
    (found, *rest), other = run_ranks(train, 2, where, 1, at, checkpointed=checkpointed)
    assert (found, *rest) == other  # every rank knows
    step = 1 if where == "backward" else 2
    assert rest == [step, [1], module]
    assert found == f"step {step}: {message} {LATER}"


def test_a_rank_that_differs(run_ranks):
    found = run_ranks(train, 2, "none", -1, 0, tell=3)
    for message, *rest in found:
        assert rest == [3, [1], None]
        assert message.startswith("step 3: grad_norm must be the same on all ranks, but it is ")
        assert "except on rank 1: " in message


def test_steps_between_are_not_looked_at_and_nothing_changes(run_ranks):
    # Between two looks: the NaN is in the weights when it is looked at.
    (message, step, *_), _ = run_ranks(train, 2, "forward", 1, 2, every=3)
    assert step == 3 and "step 3: " in message
    plain = run_ranks(train, 2, "none", -1, 0, every=10)
    looked = run_ranks(train, 2, "none", -1, 0, every=1)
    for losses, expected in zip(looked, plain, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6) and len(losses) == 4


def test_wrong_use_is_told():
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="model must be a module, got int"):
        xla_fsdp.detect_divergence(3)
    for every in (0, True, 1.5):
        with pytest.raises(ValueError, match="every must be an int of at least 1"):
            xla_fsdp.detect_divergence(model, every)
    for rtol in (1.0, "0.1"):
        with pytest.raises(ValueError, match="rtol must be at least 0"):
            xla_fsdp.detect_divergence(model, rtol=rtol)

"""Ranks whose programs differ run together, if they trace the same collectives."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from launch_scripts import HEAD, LATE
from lazy_modules import torch_xla, xm
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import fully_shard, scan_blocks


def gather(value):
    return xm.all_gather(value.to("xla"))


STEP = """
def step(rank):
    gathered = xm.all_gather(torch.full((2,), rank + 1.5).to("xla"))
    torch_xla.sync()
    return gathered.tolist()
"""


@pytest.mark.slow
def test_a_rank_that_keeps_others_waiting_for_longer_than_xla_does(run_script):
    """Rank 1 reaches its program 12 s after rank 0's has started, as if it had compiled meanwhile.
    XLA ends the process after 10 s."""
    late = "before = lambda: time.sleep(12)"
    result = run_script(f"{HEAD}{LATE}{STEP}{late}\nprint(launch(step, (), 2))")
    assert result.stdout == f"{[[1.5, 1.5, 2.5, 2.5]] * 2}\n", result.stderr


def test_a_rank_whose_program_cannot_be_compiled(run_script):
    """Rank 0's program has started by then and waits for one that will not come."""
    result = run_script(
        f"""{HEAD}{LATE}{STEP}
def before():
    raise RuntimeError("does not compile")

try:
    launch(step, (), 2)
except RankError as error:
    assert error.rank == 1 and "does not compile" in str(error), error
    before = lambda: None
    print(launch(step, (), 2))
"""
    )
    assert result.stdout == f"{[[1.5, 1.5, 2.5, 2.5]] * 2}\n", result.stderr


WIDTH = 16  # of each weight both ranks have a half


class Experts(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        first, second = (expert(x) for expert in self.experts)
        if self.rank:
            return first * 0.25 + second
        return torch.sort(torch.tanh(first), -1).values + second * 0.5


class NovoGrad(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            state, norm = self.state[parameter], parameter.grad.square().sum()
            if not state:
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros([]).to(state["exp_avg"].device)
            if state["exp_avg_sq"] == 0:
                state["exp_avg_sq"].copy_(norm)
            else:
                state["exp_avg_sq"].mul_(0.98).add_(norm, alpha=0.02)
            update = parameter.grad / state["exp_avg_sq"].sqrt().add_(1e-8)
            state["exp_avg"].mul_(0.95).add_(update)
            parameter.add_(state["exp_avg"], alpha=-0.05)


def batch(rank, step, rows=8):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.5)


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable = lambda rank: [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    data: Callable = batch
    held: Callable = lambda parameters, rank: parameters
    optimizer: Callable = sgd


CASES = {
    "optimizers in another order": Case(held=lambda some, rank: some[::-1] if rank else some),
    "optimizers of fewer parameters": Case(
        held=lambda some, rank: [p for p in some if p.dim() == 1] if rank else some
    ),
    "batches of another length": Case(data=lambda rank, step: batch(rank, step, 4 + 3 * rank)),
    "NovoGrad": Case(optimizer=NovoGrad),
    "routing": Case(build=lambda rank: [Experts(rank), nn.Linear(WIDTH, WIDTH)]),
}
SCANNED = ("optimizers in another order", "batches of another length")


def plain_losses(case, size, steps):
    torch.manual_seed(0)
    model = nn.Sequential(*case.build(0))
    if case is CASES["optimizers of fewer parameters"]:
        first_half = (torch.arange(WIDTH) < WIDTH // 2).float()[:, None]
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.register_hook(lambda grad: grad * first_half)
    optimizer = case.optimizer(model.parameters())
    losses = [[] for _ in range(size)]
    for step in range(steps):
        for rank in range(size):
            for module in model.modules():
                if isinstance(module, Experts):
                    module.rank = rank
            loss = model(case.data(rank, step)).square().mean()
            (loss / size).backward()
            losses[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses


@pytest.mark.parametrize(
    "name, sharding",
    [*itertools.product(CASES, ["class", "in place"]), *((name, "scanned") for name in SCANNED)],
)
def test_losses_are_those_of_one_process(run_ranks, name, sharding):
    case = CASES[name]

    def train(rank):
        torch.manual_seed(0)
        units = case.build(rank)
        if sharding == "scanned":
            model = scan_blocks(units)
        elif sharding == "in place":
            model = fully_shard(nn.Sequential(*map(fully_shard, units)))
        else:
            model = FSDP(nn.Sequential(*map(FSDP, units)))
        optimizer = case.optimizer(case.held(list(model.parameters()), rank))
        losses = []
        for step in range(3):
            loss = model(case.data(rank, step).to(torch_xla.device())).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
            losses.append(loss.item())
        return losses

    want = plain_losses(case, 2, 3)
    assert run_ranks(train, 2) == [pytest.approx(one, rel=1e-5) for one in want]


def test_a_result_that_one_rank_alone_refers_to(run_ranks):
    def step(rank):
        found = []
        for number in range(3):
            first = gather(torch.full((2,), rank + 1.5))
            second = gather(first * 2)
            kept = [second] if rank else []
            del second
            torch_xla.sync()
            found.append([first.tolist(), [one.sum().item() for one in kept], number])
        return found

    gathered = [1.5, 1.5, 2.5, 2.5]
    expected = [[[gathered, [32.0] * rank, n] for n in range(3)] for rank in (0, 1)]
    assert run_ranks(step, 2) == expected


def test_channels_of_the_caller(run_ranks):
    def step(rank):
        own = {"groups": [[0, 1]], "pin_layout": False}
        first = xm.all_gather(torch.full((2,), rank + 1.5).to("xla"), channel_id=71, **own)
        second = gather(torch.full((2,), rank + 2.5))
        values = torch.arange(4.0).to("xla") + rank
        third = xm.reduce_scatter("sum", values, 1.0, 0, 2, channel_id=72, **own)
        kept = [first, second, third][:: -1 if rank else 1]
        del first, second, third
        torch_xla.sync()
        return [one.tolist() for one in kept[:: -1 if rank else 1]]

    want = [[1.5, 1.5, 2.5, 2.5], [2.5, 2.5, 3.5, 3.5]]
    assert run_ranks(step, 2) == [[*want, [1.0, 3.0]], [*want, [5.0, 7.0]]]


def test_values_go_through_as_they_are(run_ranks):
    special = [float("nan"), float("inf"), -float("inf"), 0.5, 2e-38]
    kinds = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.int32]

    def step(rank):
        gathered = [gather(torch.tensor(special)[start:]) for start in range(len(special))]
        gathered += [gather(torch.tensor([1, 0, 1], dtype=kind)) for kind in kinds]
        gathered.append(gather(torch.tensor([1.5 + 2j])))
        scattered = xm.reduce_scatter("sum", torch.tensor(special[:2]).to("xla"), 1.0, 0, 2)
        gathered.append(gather(torch.ones(2) + 0 * scattered.detach()[:0].sum()))
        torch_xla.sync()
        return [value.cpu() for value in gathered]

    want = [torch.tensor(special[start:] * 2) for start in range(len(special))]
    want += [torch.tensor([1, 0, 1] * 2, dtype=kind) for kind in kinds]
    want += [torch.tensor([1.5 + 2j] * 2), torch.ones(4)]
    for got in run_ranks(step, 2):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_an_optimizer_that_branches_on_a_value(run_ranks):
    class Branching(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                own = parameter.to_local()
                if own.cpu()[0] > 0:
                    own.mul_(0.5)
                else:
                    own.copy_(torch.tanh(own).sort().values)

    def train(rank):
        model = FSDP(nn.Linear(WIDTH, 3))
        for parameter in model.parameters():
            parameter.data.fill_(-1.0 if rank else 1.0)
        optimizer = Branching(model.parameters())
        for step in range(2):
            model(batch(rank, step).to("xla")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()
        return [parameter.to_local()[0].item() for parameter in model.parameters()]

    positive, negative = [0.25, 0.25], [torch.tensor(-1.0).tanh().tanh().item()] * 2
    assert run_ranks(train, 2) == [positive, pytest.approx(negative)]

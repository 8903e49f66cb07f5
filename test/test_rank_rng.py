"""Each rank draws the random numbers that a process of its own would draw."""

import random
import time
import types

import pytest
import torch
from lazy_modules import torch_xla, xm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

N = 4
IN_PLACE = "uniform", "normal", "exponential", "cauchy", "log_normal"
INITIALIZATION = {
    name: value
    for name, value in vars(nn.init).items()
    if name.endswith("_") and isinstance(value, types.FunctionType)
}


def build_model():
    model = nn.Sequential(
        nn.Linear(5, 7),
        nn.LSTM(7, 3, num_layers=2, dropout=0.5),
        nn.Embedding(4, 4),
        nn.Conv1d(2, 3, 3),
        nn.MultiheadAttention(8, 2),
        nn.TransformerEncoderLayer(8, 2, 16),
    )
    nn.init.orthogonal_(model[0].weight)
    nn.init.trunc_normal_(model[3].weight)
    return model


def draws():
    x = torch.ones(3)
    drawn = [
        torch.rand(2),
        torch.randn(2),
        torch.randint(100, (2,)),
        torch.randperm(5),
        torch.normal(0.0, 1.0, (2,)),
        torch.bernoulli(x / 2),
        torch.multinomial(x, 2),
        torch.poisson(x),
        torch.rand_like(x),
        torch.randn_like(x),
        torch.randint_like(x, 9),
        *(getattr(torch.empty(2), f"{name}_")() for name in IN_PLACE),
        torch.empty(2).geometric_(0.5),
        torch.empty(2, dtype=torch.int64).random_(50),
        torch.empty(2).bernoulli_(0.5),
        nn.functional.dropout(torch.ones(8)),
        nn.Dropout(0.5)(torch.ones(8)),
        nn.functional.gumbel_softmax(x),
        nn.functional.rrelu(-x, training=True),
        torch.distributions.Normal(0.0, 1.0).sample((2,)),
        torch.distributions.Dirichlet(x).sample(),
        torch.distributions.Gamma(x, x).sample(),
        torch.lobpcg(torch.diag(torch.arange(1.0, 10.0)), k=2)[0],
        torch.rand(2, generator=torch.default_generator),
    ]
    return [value.clone() for value in drawn]


def interleaved(rank, on_ranks):
    torch.manual_seed(7 if rank < 2 else rank)
    out = []
    for _ in range(10):
        out += [*draws(), *build_model().state_dict().values()]
        time.sleep(random.random() * 0.003)
    return out


def shuffled_loader_and_random_split(rank, on_ranks):
    torch.manual_seed(3 + rank)
    first, second = torch.utils.data.random_split(TensorDataset(torch.arange(20)), [12, 8])
    seen = []
    for _ in range(2):
        for (batch,) in DataLoader(first, batch_size=5, shuffle=True):
            seen.append(batch)
            time.sleep(random.random() * 0.003)
    return [*seen, torch.stack([second[i][0] for i in range(8)])]


def states(rank, on_ranks):
    torch.manual_seed(rank)
    assert torch.initial_seed() == rank
    before = torch.get_rng_state()
    first = torch.rand(3)
    time.sleep(0.01 * (N - rank))
    torch.set_rng_state(before)
    assert torch.equal(torch.rand(3), first)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(99)
        forked = torch.rand(3)
    assert torch.random.initial_seed() == rank
    return [first, forked, torch.rand(3)]


def loaded_by_a_thread(rank, on_ranks):
    import torch_xla.distributed.parallel_loader as pl

    torch.manual_seed(rank)
    loader = DataLoader(TensorDataset(torch.arange(12)), batch_size=3, shuffle=True)
    loader = pl.MpDeviceLoader(loader, torch_xla.device()) if on_ranks else loader
    return [batch.cpu() for (batch,) in loader]


def recomputed(rank, on_ranks):
    torch.manual_seed(rank)
    x = torch.ones(16).to("xla" if on_ranks else "cpu").requires_grad_()

    def block(x):
        return x * torch.rand(16).to(x.device)  # drawn on the CPU, again in backward

    if on_ranks:
        from torch_xla.utils.checkpoint import checkpoint
    else:
        from torch.utils.checkpoint import checkpoint
    y = checkpoint(block, x, use_reentrant=True)
    time.sleep(random.random() * 0.01)
    y.sum().backward()
    return [x.grad, torch.rand(2)]


def skips_what_is_loaded(original):
    return lambda tensor, *args, **kwargs: (
        tensor if getattr(tensor, "is_loaded", False) else original(tensor, *args, **kwargs)
    )


def with_replaced_functions(rank, on_ranks):
    """As Transformers 5 does while it builds a model: functions of its own in torch's place."""
    values = []
    if on_ranks:
        vars(nn.init).update({name: skips_what_is_loaded(f) for name, f in INITIALIZATION.items()})
    try:
        for _ in range(3):
            torch.manual_seed(rank)
            model = build_model()
            nn.init.sparse_(model[0].weight, 0.5)
            time.sleep(random.random() * 0.01)
            if on_ranks:
                nn.init.sparse_(torch.empty(5, 4, device="xla"), 0.5)
            else:  # what that draws on the CPU
                [torch.randperm(5) for _ in range(4)]
            values += [*model.parameters(), torch.rand(3)]
        if on_ranks:
            xm.rendezvous("built")  # ranks share the module whose functions are replaced
    finally:
        vars(nn.init).update(INITIALIZATION)
    return [value.detach() for value in values]


DRAWS = [interleaved, shuffled_loader_and_random_split, states, loaded_by_a_thread, recomputed]
DRAWS.append(with_replaced_functions)


@pytest.mark.parametrize("draw", DRAWS)
def test_ranks_draw_what_a_process_of_their_own_would(run_ranks, draw):
    for rank, got in enumerate(run_ranks(draw, N, True)):
        for index, (one, other) in enumerate(zip(got, draw(rank, False), strict=True)):
            assert torch.equal(one, other), f"rank {rank}, value {index}"


def test_device_random_numbers_are_the_ranks_own_too(run_ranks):
    def draw(rank):
        start = torch.rand(4, device="xla")
        torch_xla.sync()
        xm.set_rng_state(5 + rank % 2)
        dropped = nn.functional.dropout(torch.ones(32, device="xla"))
        torch_xla.sync()
        return start, dropped

    (start, even), (other_start, odd), (_, even_again), (_, odd_again) = run_ranks(draw, N)
    assert torch.equal(start, other_start)
    assert torch.equal(even, even_again) and torch.equal(odd, odd_again)
    assert not torch.equal(even, odd)


@pytest.mark.parametrize("n", [1, 2])
def test_workers_start_every_call_from_the_same_state(run_ranks, n):
    def draw(rank):
        return torch.rand(2), torch.rand(2, device="xla")

    for first, again in zip(run_ranks(draw, n), run_ranks(draw, n), strict=True):
        assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])

"""Scanned blocks whose parameters are gathered while the block before computes."""

from __future__ import annotations

import pytest
import torch
from test_scan import Model
from test_special_uses import trace_as_on_tpu
from torch import nn

DEPTH = 3  # of the model: odd, so that what takes two blocks at a time has one left


def trained(prefetch, rank, options):
    """Losses, norms, weights and buffers of two steps of two batches each, clipped."""
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel, scan_blocks

    torch.manual_seed(3)
    model = Model(lambda blocks: scan_blocks(blocks, prefetch=prefetch, **options))
    model = XlaFullyShardedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    generator, found = torch.Generator().manual_seed(rank), []
    for _ in range(2):
        for _ in range(2):
            x = torch.randn(2, 4, 5, generator=generator).to(torch_xla.device())
            loss = (model(x) - x).float().square().mean()
            loss.backward()
        norm = model.clip_grad_norm_(0.7)
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            evaluated = model(x).float().sum()
        torch_xla.sync()
        found += [loss.item(), norm.item(), evaluated.item()]
    return found, {name: value.cpu() for name, value in model.state_dict().items()}


def require_same(rank, rtol=0.0, **options):
    (ours, state), (theirs, without) = (trained(how, rank, options) for how in (True, False))
    assert ours == pytest.approx(theirs, rel=rtol, abs=0.0)
    assert state.keys() == without.keys()
    for name, value in without.items():
        torch.testing.assert_close(state[name], value, rtol=rtol, atol=rtol)
    assert state["blocks.1.count"] == 6  # forwards: each block's own buffers are written


def on_two_ranks(rank):
    require_same(rank, shard_param_on_dim_0=True)
    trace_as_on_tpu()
    require_same(rank, compute_dtype=torch.bfloat16)


def on_four_ranks(rank):
    require_same(
        rank, sharding_groups=[[0, 1], [2, 3]], sharding_rank=rank % 2, sharding_world_size=2,
        replication_groups=[[0, 2], [1, 3]],
    )  # fmt: skip
    require_same(rank, reshard_after_forward=2)
    trace_as_on_tpu()
    # XLA on a CPU fuses, and so rounds, some of it otherwise: 7.5291286 for 7.5291281.
    require_same(rank, 1e-5, reshard_after_forward=2)


@pytest.mark.parametrize("check, ranks", [(on_two_ranks, 2), (on_four_ranks, 4)])
def test_equals_the_loop_without_bit_for_bit(run_ranks, check, ranks):
    run_ranks(check, ranks)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + nn.functional.dropout(self.linear(x), 0.5)


def draws(rank):
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp import scan_blocks

    found = []
    for prefetch in (True, False):
        torch.manual_seed(1)
        blocks = scan_blocks((Noisy() for _ in range(DEPTH)), prefetch=prefetch)
        xm.set_rng_state(7 + rank)
        x = torch.ones(8, 64).to(torch_xla.device()).requires_grad_()
        blocks(x).square().sum().backward()
        found.append([x.grad.cpu(), *(p.grad.cpu() for p in blocks.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert found[0][0].std() > 0.1  # some were dropped


def test_draws_the_same_random_numbers(run_ranks):
    run_ranks(draws, 2)


def unrolled(rank):
    """Every number of bodies an iteration gives the same, whatever is left over."""
    import torch_xla

    from xla_fsdp.scan.loop import loop

    device = torch_xla.device()
    rows, more = (torch.randn(5, 3, generator=torch.Generator().manual_seed(n)) for n in (1, 2))

    def body(carry, slices, constants):
        (total, count), (own, following), (scale,) = carry, slices, constants
        noise = torch.rand_like(own)
        return [total * scale + own * following, count + 1], [total + following, noise]

    for reverse in (False, True):
        kinds = []
        for unroll in (1, 2, 3, 5, 9):
            carry = [torch.ones(3).to(device), torch.zeros(()).to(device)]
            scale = torch.full((3,), 0.5).to(device)
            stacked = [rows.to(device), more.to(device)]
            how = {"seed": 11, "reverse": reverse, "ahead": [1], "unroll": unroll}
            (total, count), made = loop(body, carry, stacked, [scale], device, **how)
            kinds.append([total.cpu(), *(one.cpu() for one in made)])
            assert count.item() == 5
        total, order = torch.ones(3), range(5)
        for i in reversed(order) if reverse else order:
            after = max(i - 1, 0) if reverse else min(i + 1, 4)
            torch.testing.assert_close(kinds[0][1][i], total + more[after])
            total = total * 0.5 + rows[i] * more[after]
        torch.testing.assert_close(kinds[0][0], total)
        assert len({float(row.sum()) for row in kinds[0][2]}) == 5  # each draws for itself
        for other in kinds[1:]:
            for ours, theirs in zip(other, kinds[0], strict=True):
                assert torch.equal(ours, theirs), reverse


def test_several_bodies_an_iteration(run_ranks):
    run_ranks(unrolled, 1)


def refused(rank):
    from xla_fsdp import scan_blocks

    with pytest.raises(TypeError, match="prefetch must be True or False, got 2"):
        scan_blocks([Noisy()], prefetch=2)


def test_says_what_is_wrong(run_ranks):
    run_ranks(refused, 1)

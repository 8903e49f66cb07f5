"""``torch_xla.core.xla_model`` on CPU ranks gives what it gives on TPU."""

import time

import numpy as np
import pytest
import torch
import torch_xla.core.functions as xf
from lazy_modules import torch_xla, xm, xr
from on_ranks import on_each_rank, raises, slow

from xla_fsdp.ranks.rank import current_rank


# The scope groups tests by worker.
@pytest.fixture(params=[1, 2, 3, slow(4)], scope="session")
def ranks(request):
    return request.param


def rows(n, shape=(6, 2)):
    """What rank r holds: different on every rank, small integers so that sums are exact."""
    base = torch.arange(float(np.prod(shape))).reshape(shape) % 5 + 1
    return [base + rank for rank in range(n)]


def same(found, expected):
    assert torch.equal(found.cpu(), expected)


@on_each_rank()
def test_all_reduce(rank):
    n = xr.world_size()
    held = rows(n)
    stack = torch.stack(held)
    flags = torch.stack([torch.tensor([1, 2, 4, 7], dtype=torch.int32) + r for r in range(n)])
    x, own = held[rank].to("xla"), flags[rank].to("xla")
    same(xm.all_reduce("sum", x), stack.sum(0))
    same(xm.all_reduce("mul", x), stack.prod(0))
    same(xm.all_reduce("min", x), stack.amin(0))
    same(xm.all_reduce("max", x), stack.amax(0))
    torch.testing.assert_close(xm.all_reduce(xm.REDUCE_SUM, x, scale=1 / n).cpu(), stack.mean(0))
    all_bits, any_bit = (xm.all_reduce(kind, own) for kind in (xm.REDUCE_AND, xm.REDUCE_OR))
    same(all_bits, torch.from_numpy(np.bitwise_and.reduce(flags.numpy())))
    same(any_bit, torch.from_numpy(np.bitwise_or.reduce(flags.numpy())))
    in_place = [x.clone(), own.clone(), x[0].clone()]
    assert xm.all_reduce(xm.REDUCE_SUM, in_place, scale=2.0) is in_place
    same(x, held[rank])
    if n > 1:  # torch_xla leaves the inputs alone on one device, scale or not
        same(in_place[0], stack.sum(0) * 2)
        same(in_place[1], flags.sum(0, dtype=torch.int32) * 2)
        same(in_place[2], stack.sum(0)[0] * 2)


@on_each_rank()
def test_all_gather(rank):
    n = xr.world_size()
    held = rows(n)
    long, flat = torch.cat(held), torch.cat([h[0] for h in held])
    x = held[rank].to("xla")
    output = torch.zeros(6 * n, 2).to("xla")
    assert xm.all_gather(x, output=output, pin_layout=False) is output
    outputs = [torch.zeros(6 * n, 2).to("xla"), torch.zeros(2 * n).to("xla")]
    assert xm.all_gather([x, x[0]], output=outputs, pin_layout=False) is outputs
    lists = xm.all_gather([x, x[0]], pin_layout=False)
    for pair in (lists, outputs, xm.all_gather_bucketized([x, x[0]])):
        same(pair[0], long)
        same(pair[1], flat)
    same(output, long)
    same(xm.all_gather(x), long)
    same(xm.all_gather(x, dim=-1), torch.cat(held, dim=-1))


@on_each_rank()
def test_reduce_scatter(rank):
    n = xr.world_size()
    stack, wide = torch.stack(rows(n, (12, 2))), torch.stack(rows(n, (2, 12)))
    mine = slice(rank * 12 // n, (rank + 1) * 12 // n)
    total = stack.sum(0)[mine]
    x, y = stack[rank].to("xla"), wide[rank].to("xla")
    output = torch.zeros(12 // n, 2).to("xla")
    assert xm.reduce_scatter("sum", x, 1.0, 0, n, output=output) is output
    same(output, total)
    same(xm.reduce_scatter("sum", x, 1.0, 0, n), total)
    same(xm.reduce_scatter("min", x, 1.0, 0, n), stack.amin(0)[mine])
    same(xm.reduce_scatter("max", x, 1.0, 0, n), stack.amax(0)[mine])
    same(xm.reduce_scatter("sum", x, 0.5, 0, n, pin_layout=False), total * 0.5)
    same(xm.reduce_scatter("sum", y, 1.0, 1, n), wide.sum(0)[:, mine])
    for scatter in (xm.reduce_scatter, xm.reduce_scatter_bucketized):
        once, twice = scatter("sum", [x, x * 2], 1.0, 0, n)
        same(once, total)
        same(twice, total * 2)


@on_each_rank()
def test_all_to_all_and_permute(rank):
    n = xr.world_size()
    held = [torch.arange(float(n * n * 2)).reshape(n, n * 2) + 100 * r for r in range(n)]
    x = held[rank].to("xla")
    same(xm.all_to_all(x, 0, 1, n), torch.cat([h.chunk(n, 0)[rank] for h in held], 1))
    same(xm.all_to_all(x, -1, 0, n), torch.cat([h.chunk(n, -1)[rank] for h in held], 0))
    same(xm.collective_permute(x, [[r, (r + 1) % n] for r in range(n)]), held[rank - 1])
    # Not in the first element: torch_xla orders collectives through it, which spreads NaN.
    infinite = x.clone()
    infinite[0, -1] = float("inf")
    first = xm.collective_permute(infinite, [[0, n - 1]]).cpu()
    if rank == n - 1:
        assert first[0, -1] == float("inf") and torch.equal(first[1:], held[0][1:])
    else:
        assert torch.equal(first, torch.zeros_like(first)), "ranks without a source get zeros"


@on_each_rank(4)
def test_groups(rank):
    groups = [[0, 2], [1, 3]]
    group = groups[rank % 2]
    held, place = rows(4, (4,)), group.index(rank)
    members = [held[r] for r in group]
    x = held[rank].to("xla")
    same(xm.all_reduce("sum", x, groups=groups), sum(members))
    same(xm.all_gather(x, groups=groups), torch.cat(members))
    same(xm.reduce_scatter("sum", x, 1.0, 0, 2, groups=groups), sum(members).chunk(2)[place])
    exchanged = torch.cat([m.chunk(2)[place] for m in members])
    same(xm.all_to_all(x, 0, 0, 2, groups=groups), exchanged)


@on_each_rank()
def test_rendezvous_and_mesh_reduce(rank):
    n = xr.world_size()
    shared = {"rank": rank, "values": [rank] * 2}
    copies = xm.mesh_reduce("copies", shared, list)
    copies[rank]["values"].append("mine")
    assert xm.rendezvous("tag", bytes([rank])) == [bytes([r]) for r in range(n)]
    assert xm.xla_rendezvous(b"", tag="empty") == [b""] * n
    assert xm.mesh_reduce("loss", float(rank), np.mean) == sum(range(n)) / n
    total = xm.mesh_reduce("tensor", torch.full((2,), float(rank)).to("xla"), sum)
    same(total, torch.full((2,), float(sum(range(n)))))
    assert xm.mesh_reduce("numpy", np.float64(rank), max) == n - 1
    assert shared == {"rank": rank, "values": [rank] * 2}, "ranks must not share objects"


@on_each_rank(2)
def test_rendezvous_rejects_what_it_can_not_do(rank):
    raises(ValueError, "all 2 ranks", xm.rendezvous, "some", replicas=[0])
    raises(TypeError, "bytes", xm.rendezvous, "text", "payload")


@on_each_rank()
def test_data_parallel_training_helpers(rank):
    n = xr.world_size()
    torch.manual_seed(0)
    plain = torch.nn.Linear(3, 2)
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 2).to("xla")
    xm.broadcast_master_param(model)
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        same(got, want)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, plain)]
    model(torch.arange(3.0).to("xla") + rank).sum().backward()
    xm.optimizer_step(optimizers[0])
    sum(plain(torch.arange(3.0) + r).sum() for r in range(n)).div(n).backward()
    optimizers[1].step()
    torch_xla.sync()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.cpu(), want)


@on_each_rank(3)
def test_differentiable_functions_and_sync_batch_norm(rank):
    norm = xf.SyncBatchNorm(4).to("xla")
    x = (torch.arange(24.0).reshape(6, 4) * (rank + 1)).to("xla").requires_grad_()
    out = norm(x)
    xf.all_gather(out * out).sum().backward()
    torch_xla.sync()
    whole = torch.cat([torch.arange(24.0).reshape(6, 4) * (r + 1) for r in range(3)])
    want = torch.nn.BatchNorm1d(4)(whole)[rank * 6 : rank * 6 + 6]
    torch.testing.assert_close(out.cpu(), want, rtol=1e-4, atol=1e-5)
    assert x.grad.isfinite().all()


@on_each_rank(3)
def test_save_closures_and_autograd_are_the_ranks_own(rank, tmp_path):
    seen = []
    x = torch.ones(2, device="xla", requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append((current_rank().rank, xr.global_ordinal())))
    y.register_hook(lambda grad: seen.append(str(torch_xla.device())))
    y.sum().backward()
    assert seen == [(rank, rank), f"xla:{rank}"]
    seen.clear()
    x = torch.full((2,), float(rank)).to("xla")
    total = xm.all_reduce("sum", x)
    xm.add_step_closure(lambda t: seen.append(t.tolist()), args=(total,))
    torch_xla.sync()
    assert seen == [[3.0, 3.0]]
    xm.save({"total": xm.all_gather(x)}, tmp_path / "master.pt")
    xm.rendezvous("saved")
    xm.save({"x": x}, tmp_path / f"{rank}.pt", master_only=False)
    assert torch.load(tmp_path / "master.pt")["total"].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert torch.load(tmp_path / f"{rank}.pt")["x"].tolist() == [float(rank)] * 2
    assert str(torch_xla.device()) == str(x.device) == f"xla:{rank}"
    assert (xr.global_ordinal(), xr.local_ordinal(), xr.world_size()) == (rank, rank, 3)
    assert xm.is_master_ordinal() is xm.is_master_ordinal(local=False) is (rank == 0)


def test_scans_are_captured_by_one_rank_at_a_time(run_ranks):
    inside = []

    def add(carry, x):
        inside.append(xr.global_ordinal())
        time.sleep(0.2)
        assert len({*inside}) == 1
        inside.clear()
        return carry + x, carry * x

    def step(rank):
        from torch_xla.experimental.scan import scan

        start = torch.full((2,), float(rank), device="xla", requires_grad=True)
        carry, y = scan(add, start, torch.ones(3, 2, device="xla"))
        (carry.sum() + y.sum()).backward()
        return carry.tolist(), start.grad.tolist()

    for rank, found in enumerate(run_ranks(step, 3)):
        assert found == ([rank + 3.0] * 2, [4.0] * 2)

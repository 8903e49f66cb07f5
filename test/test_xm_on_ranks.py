"""``torch_xla.core.xla_model`` on CPU ranks gives what it gives on TPU."""

import time

import numpy as np
import pytest
import torch
from lazy_modules import torch_xla, xm, xr


# The scope groups tests by worker.
@pytest.fixture(params=[1, 2, 3, pytest.param(4, marks=pytest.mark.slow)], scope="session")
def n(request):
    return request.param


def rows(n, shape=(6, 2)):
    """What rank r holds: different on every rank, small integers so that sums are exact."""
    base = torch.arange(float(np.prod(shape))).reshape(shape) % 5 + 1
    return [base + rank for rank in range(n)]


def test_all_reduce(run_ranks, n):
    def step(rank):
        x = rows(n)[rank].to("xla")
        flags = torch.tensor([1, 2, 4, 7], dtype=torch.int32).to("xla") + rank
        out = {kind: xm.all_reduce(kind, x) for kind in ("sum", "mul", "min", "max")}
        out["scaled"] = xm.all_reduce(xm.REDUCE_SUM, x, scale=1 / n)
        out["and"] = xm.all_reduce(xm.REDUCE_AND, flags)
        out["or"] = xm.all_reduce(xm.REDUCE_OR, flags)
        in_place = [x.clone(), flags.clone(), x[0].clone()]
        assert xm.all_reduce(xm.REDUCE_SUM, in_place, scale=2.0) is in_place
        return out, in_place, x

    held = rows(n)
    stack = torch.stack(held)
    flags = torch.stack([torch.tensor([1, 2, 4, 7], dtype=torch.int32) + r for r in range(n)])
    for rank, (out, in_place, x) in enumerate(run_ranks(step, n)):
        assert torch.equal(x, held[rank]), "a tensor is not reduced in place"
        assert torch.equal(out["sum"], stack.sum(0))
        assert torch.equal(out["mul"], stack.prod(0))
        assert torch.equal(out["min"], stack.amin(0))
        assert torch.equal(out["max"], stack.amax(0))
        torch.testing.assert_close(out["scaled"], stack.mean(0))
        assert torch.equal(out["and"], torch.from_numpy(np.bitwise_and.reduce(flags.numpy())))
        assert torch.equal(out["or"], torch.from_numpy(np.bitwise_or.reduce(flags.numpy())))
        if n > 1:  # torch_xla leaves the inputs alone on one device, scale or not
            assert torch.equal(in_place[0], stack.sum(0) * 2)
            assert torch.equal(in_place[1], flags.sum(0, dtype=torch.int32) * 2)
            assert torch.equal(in_place[2], stack.sum(0)[0] * 2)
            assert in_place[1].dtype == torch.int32


def test_all_gather(run_ranks, n):
    def step(rank):
        x = rows(n)[rank].to("xla")
        output = torch.zeros(6 * n, 2).to("xla")
        assert xm.all_gather(x, output=output, pin_layout=False) is output
        lists = xm.all_gather([x, x[0]], pin_layout=False)
        outputs = [torch.zeros(6 * n, 2).to("xla"), torch.zeros(2 * n).to("xla")]
        assert xm.all_gather([x, x[0]], output=outputs, pin_layout=False) is outputs
        bucketized = xm.all_gather_bucketized([x, x[0]])
        return xm.all_gather(x), xm.all_gather(x, dim=-1), output, lists, outputs, bucketized

    held = rows(n)
    long, flat = torch.cat(held), torch.cat([h[0] for h in held])
    for first, last, output, lists, outputs, bucketized in run_ranks(step, n):
        assert torch.equal(first, long)
        assert torch.equal(last, torch.cat(held, dim=-1))
        assert torch.equal(output, long)
        for pair in (lists, outputs, bucketized):
            assert torch.equal(pair[0], long) and torch.equal(pair[1], flat)


def test_reduce_scatter(run_ranks, n):
    def step(rank):
        x = rows(n, (12, 2))[rank].to("xla")
        y = rows(n, (2, 12))[rank].to("xla")
        output = torch.zeros(12 // n, 2).to("xla")
        assert xm.reduce_scatter("sum", x, 1.0, 0, n, output=output) is output
        return {
            **{kind: xm.reduce_scatter(kind, x, 1.0, 0, n) for kind in ("sum", "min", "max")},
            "scaled": xm.reduce_scatter("sum", x, 0.5, 0, n, pin_layout=False),
            "last": xm.reduce_scatter("sum", y, 1.0, 1, n),
            "output": output,
            "list": xm.reduce_scatter("sum", [x, x * 2], 1.0, 0, n),
            "buckets": xm.reduce_scatter_bucketized("sum", [x, x * 2], 1.0, 0, n),
        }

    stack = torch.stack(rows(n, (12, 2)))
    wide = torch.stack(rows(n, (2, 12))).sum(0)
    for rank, got in enumerate(run_ranks(step, n)):
        mine = slice(rank * 12 // n, (rank + 1) * 12 // n)
        total = stack.sum(0)[mine]
        assert torch.equal(got["sum"], total) and torch.equal(got["output"], total)
        assert torch.equal(got["min"], stack.amin(0)[mine])
        assert torch.equal(got["max"], stack.amax(0)[mine])
        assert torch.equal(got["scaled"], total * 0.5)
        assert torch.equal(got["last"], wide[:, mine])
        for pair in (got["list"], got["buckets"]):
            assert torch.equal(pair[0], total) and torch.equal(pair[1], total * 2)


def test_all_to_all_and_permute(run_ranks, n):
    def step(rank):
        x = (torch.arange(float(n * n * 2)).reshape(n, n * 2) + 100 * rank).to("xla")
        ring = xm.collective_permute(x, [[r, (r + 1) % n] for r in range(n)])
        # Not in the first element: torch_xla orders collectives through it, which spreads NaN.
        infinite = x.clone()
        infinite[0, -1] = float("inf")
        first = xm.collective_permute(infinite, [[0, n - 1]])
        return xm.all_to_all(x, 0, 1, n), xm.all_to_all(x, -1, 0, n), ring, first

    held = [torch.arange(float(n * n * 2)).reshape(n, n * 2) + 100 * r for r in range(n)]
    for rank, (rows_to_columns, columns_to_rows, ring, first) in enumerate(run_ranks(step, n)):
        want = torch.cat([h.chunk(n, 0)[rank] for h in held], 1)
        assert torch.equal(rows_to_columns, want)
        want = torch.cat([h.chunk(n, -1)[rank] for h in held], 0)
        assert torch.equal(columns_to_rows, want)
        assert torch.equal(ring, held[rank - 1])
        if rank == n - 1:
            assert first[0, -1] == float("inf") and torch.equal(first[1:], held[0][1:])
        else:
            assert torch.equal(first, torch.zeros_like(first)), "ranks without a source get zeros"


def test_groups(run_ranks):
    groups = [[0, 2], [1, 3]]

    def step(rank):
        x = rows(4, (4,))[rank].to("xla")
        return (
            xm.all_reduce("sum", x, groups=groups),
            xm.all_gather(x, groups=groups),
            xm.reduce_scatter("sum", x, 1.0, 0, 2, groups=groups),
            xm.all_to_all(x, 0, 0, 2, groups=groups),
        )

    held = rows(4, (4,))
    for rank, (reduced, gathered, scattered, exchanged) in enumerate(run_ranks(step, 4)):
        group = groups[rank % 2]
        place = group.index(rank)
        members = [held[r] for r in group]
        assert torch.equal(reduced, sum(members))
        assert torch.equal(gathered, torch.cat(members))
        assert torch.equal(scattered, sum(members).chunk(2)[place])
        assert torch.equal(exchanged, torch.cat([m.chunk(2)[place] for m in members]))


def test_rendezvous_and_mesh_reduce(run_ranks, n):
    def step(rank):
        shared = {"rank": rank, "values": [rank] * 2}
        copies = xm.mesh_reduce("copies", shared, list)
        copies[rank]["values"].append("mine")
        return (
            xm.rendezvous("tag", bytes([rank])),
            xm.xla_rendezvous(b"", tag="empty"),
            xm.mesh_reduce("loss", float(rank), np.mean),
            xm.mesh_reduce("tensor", torch.full((2,), float(rank)).to("xla"), sum),
            xm.mesh_reduce("numpy", np.float64(rank), max),
            shared,
        )

    for rank, (payloads, empty, mean, total, largest, shared) in enumerate(run_ranks(step, n)):
        assert payloads == [bytes([r]) for r in range(n)]
        assert empty == [b""] * n
        assert mean == sum(range(n)) / n
        assert torch.equal(total, torch.full((2,), float(sum(range(n)))))
        assert largest == n - 1
        assert shared == {"rank": rank, "values": [rank] * 2}, "ranks must not share objects"


def test_rendezvous_rejects_what_it_can_not_do(run_ranks):
    def step(rank):
        with pytest.raises(ValueError, match="all 2 ranks"):
            xm.rendezvous("some", replicas=[0])
        with pytest.raises(TypeError, match="bytes"):
            xm.rendezvous("text", "payload")

    run_ranks(step, 2)


def test_data_parallel_training_helpers(run_ranks, n):
    def step(rank):
        torch.manual_seed(rank)
        model = torch.nn.Linear(3, 2).to("xla")
        xm.broadcast_master_param(model)
        start = [p.detach().cpu() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batch = torch.arange(3.0).to("xla") + rank
        model(batch).sum().backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        return start, [p.detach().cpu() for p in model.parameters()]

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    want_start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    sum(model(torch.arange(3.0) + r).sum() for r in range(n)).div(n).backward()
    optimizer.step()
    for start, end in run_ranks(step, n):
        for got, want in zip(start, want_start, strict=True):
            assert torch.equal(got, want)
        for got, want in zip(end, model.parameters(), strict=True):
            torch.testing.assert_close(got, want)


def test_differentiable_functions_and_sync_batch_norm(run_ranks):
    def step(rank):
        import torch_xla.core.functions as xf

        norm = xf.SyncBatchNorm(4).to("xla")
        x = (torch.arange(24.0).reshape(6, 4) * (rank + 1)).to("xla").requires_grad_()
        out = norm(x)
        xf.all_gather(out * out).sum().backward()
        torch_xla.sync()
        return out.detach(), x.grad

    norm = torch.nn.BatchNorm1d(4)
    whole = torch.cat([torch.arange(24.0).reshape(6, 4) * (r + 1) for r in range(3)])
    want = norm(whole).detach()
    for rank, (out, grad) in enumerate(run_ranks(step, 3)):
        torch.testing.assert_close(out, want[rank * 6 : rank * 6 + 6], rtol=1e-4, atol=1e-5)
        assert grad.isfinite().all()


def test_names_imported_before_the_launch_work(run_script):
    result = run_script(
        """
import torch
from torch_xla.core.xla_model import all_reduce, all_gather, rendezvous
import torch_xla.core.xla_model as xm
from xla_fsdp import launch

def step(rank):
    x = torch.ones(2).to("xla") + rank
    rendezvous("a")
    return all_reduce("sum", x).tolist(), all_gather(x).tolist()

assert launch(step, (), 2) == [([3.0, 3.0], [1.0, 1.0, 2.0, 2.0])] * 2
assert all_reduce is xm.all_reduce and all_reduce.__module__ == "torch_xla.core.xla_model"
print("same")
"""
    )
    assert result.stdout == "same\n", result.stderr


def test_save_and_closures_are_the_ranks_own(run_ranks, tmp_path):
    def step(rank):
        seen = []
        x = torch.full((2,), float(rank)).to("xla")
        total = xm.all_reduce("sum", x)
        xm.add_step_closure(lambda t: seen.append((rank, t.tolist())), args=(total,))
        torch_xla.sync()
        xm.save({"x": x, "total": xm.all_gather(x)}, tmp_path / "master.pt")
        xm.rendezvous("saved")
        xm.save({"x": x}, tmp_path / f"{rank}.pt", master_only=False)
        device = torch_xla.device()
        return (
            seen,
            str(device),
            xr.global_ordinal(),
            xr.local_ordinal(),
            xr.world_size(),
            xm.is_master_ordinal(),
            xm.is_master_ordinal(local=False),
            str(torch.ones(1, device="xla").device),
        )

    for rank, got in enumerate(run_ranks(step, 3)):
        assert got == (
            [(rank, [3.0, 3.0])],
            f"xla:{rank}",
            rank,
            rank,
            3,
            rank == 0,
            rank == 0,
            f"xla:{rank}",
        )
    master = torch.load(tmp_path / "master.pt")
    assert master["total"].tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    for rank in range(3):
        assert torch.load(tmp_path / f"{rank}.pt")["x"].tolist() == [float(rank)] * 2


def test_autograd_thread_knows_its_rank(run_ranks):
    def step(rank):
        from xla_fsdp.ranks.rank import current_rank

        seen = []
        x = torch.ones(2, device="xla", requires_grad=True)
        y = x * 2
        y.register_hook(
            lambda grad: seen.append(
                (current_rank().rank, xr.global_ordinal(), str(torch_xla.device()))
            )
        )
        y.sum().backward()
        return seen

    for rank, seen in enumerate(run_ranks(step, 3)):
        assert seen == [(rank, rank, f"xla:{rank}")]


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

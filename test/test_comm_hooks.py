"""Communication hooks: each way to reduce equals plain torch that does the same unsharded."""

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from on_ranks import on_each_rank, only_full, raises, slow
from small_models import hybrid, trace_as_on_tpu, whole, wrapped
from torch import nn

from xla_fsdp import checkpoint_module, comm_hooks

WIDTH = 16


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(WIDTH, 24)
        self.inner = nn.Sequential(nn.Linear(24, 24), nn.Tanh())
        self.cube = nn.Parameter(0.2 * torch.randn(8, 4, 6))
        self.unused = nn.Linear(24, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)

    def forward(self, x):
        x = torch.tanh(self.frozen(self.inner(torch.tanh(self.first(x)))))
        return x @ self.cube.reshape(8, 24).t()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


WAYS = [(2, True), slow(4, False), only_full(2, False)]


def gradients_with(rank, hook, over="all", state=None, steps=1, **options):
    """Mean gradients of two micro-batches, the first inside no_sync, and of one more backward."""
    model = Matrices()
    checkpoint_module(model.inner)
    model = wrapped(model, "inner", **options)
    if hook is not None:
        model.register_comm_hook(state, hook, over)
    for _ in range(steps):
        with model.no_sync():
            model(batch(rank, 0).to("xla")).square().mean().backward()
        model(batch(rank, 1).to("xla")).square().mean().backward()
        model(batch(rank, 2).to("xla")).square().mean().backward()
    torch_xla.sync()
    named = model.named_parameters()
    return whole(model, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named})


@pytest.mark.parametrize("ranks,on_tpu", WAYS)
@on_each_rank()
def test_compressed_gradients_are_right_to_rounding(rank, on_tpu):
    trace_as_on_tpu(on_tpu)
    ranks = xr.world_size()
    plain = Matrices()
    for step in range(3):
        plain(torch.cat([batch(r, step) for r in range(ranks)])).square().mean().backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    kinds = [{}, {"flatten_parameters": True, "reshard_after_forward": False}]
    rows = {"shard_param_on_dim_0": True}
    kinds += [hybrid(rank), hybrid(rank) | rows] if ranks == 4 else [rows]
    seen = []

    def noted(state, bucket):
        seen.append(bucket.names)
        for name, gradient in zip(bucket.names, bucket.gradients(), strict=True):
            assert gradient.shape == plain.get_parameter(name).shape
        return comm_hooks.reduce_scatter_hook(None, bucket)

    def summed_by_hand(ranks_to_sum, bucket):
        assert (bucket.ranks, bucket.divisor) == (ranks_to_sum, ranks)
        return bucket.shard_of([bucket.all_reduce(g) / ranks for g in bucket.gradients()])

    for options in kinds:
        over = ["all", "replicas"] if "replication_groups" in options else ["all"]
        exact = gradients_with(rank, None, **options)
        for some, number in zip(over, (ranks, 2), strict=False):
            found = gradients_with(rank, summed_by_hand, some, number, **options)
            torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)
        for hook in (noted, comm_hooks.allreduce_hook):
            found = gradients_with(rank, hook, **options)
            torch.testing.assert_close(found, exact, rtol=0, atol=0)
        kinds_of = {comm_hooks.bf16_compress_hook: 2**-8, comm_hooks.fp16_compress_hook: 2**-11}
        for hook, digits in kinds_of.items():
            for some in over:
                found = gradients_with(rank, hook, some, **options)
                for name, value in expected.items():
                    error = (found[name] - value).norm() / value.norm()
                    assert 0 < error < digits * 1.5, (name, hook, some, error)
    # Without its gradient a parameter is in no bucket, unless it is flattened.
    assert not any("frozen" in name for names in seen for name in names)
    return len(seen)


@on_each_rank(2)
def test_what_is_no_hook_is_refused(rank):
    from torch.distributed.algorithms._comm_hooks.default_hooks import bf16_compress_hook as torchs
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import powerSGD_hook

    def backward(state, hook):
        model = wrapped(Matrices(), "inner")
        model.register_comm_hook(state, hook)
        model(batch(rank, 0).to("xla")).sum().backward()

    model = wrapped(Matrices(), "inner")
    ours = comm_hooks.bf16_compress_hook
    for error, said, given in (
        (TypeError, r"hook\(state, bucket\), got 3", (None, 3)),
        (TypeError, "is a hook of torch.*xla_fsdp.comm_hooks", (None, torchs)),
        (TypeError, "is a hook of torch", (None, powerSGD_hook)),
        (TypeError, "of two arguments.*torch FSDP", (None, lambda state, grad, output: None)),
        (TypeError, "function of two arguments", (None, lambda: None)),
        (ValueError, "over must be one of 'all', 'replicas', got 'some'", (None, ours, "some")),
        (ValueError, "over='replicas' .* has none. Wrap with repli", (None, ours, "replicas")),
    ):
        raises(error, said, model.register_comm_hook, *given)
    model.module.inner.register_comm_hook(None, ours)
    with pytest.raises(RuntimeError, match="'?the wrapper'? already has a communication hook"):
        model.register_comm_hook(None, ours)
    for state, hook, said in (
        (None, lambda state, bucket: None, "must return a tensor, the mean gradient"),
        (None, lambda state, bucket: bucket.gradients()[0], "return this rank's shard, of shape"),
        ("group", ours, r"takes no state.*register_comm_hook\(None, bf16_compress_hook\)"),
    ):
        raises((TypeError, ValueError), said, backward, state, hook)
    for name in ("PowerSGDState", "powerSGD_hook"):
        raises(ImportError, f"{name} was removed, .*bf16_compress_hook", getattr, comm_hooks, name)
    assert not hasattr(comm_hooks, "some_hook")
    backward(None, ours)  # the remedy

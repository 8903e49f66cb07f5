"""Communication hooks: each way to reduce equals plain torch that does the same unsharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_special_uses import trace_as_on_tpu, wrapped
from torch import nn

WIDTH, STEPS, RATE = 16, 5, 0.1


class Matrices(nn.Module):
    """Matrices of several shapes, one of them of three dimensions, and vectors."""

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


class Reference:
    """Algorithms 1 and 2 of arXiv 1905.13727, for all workers in one process.

    ``first_q(name, m, r)``: the Q to start from. Orthonormal columns come from a QR decomposition.
    """

    def __init__(self, first_q, rank, start=0, feedback=True, warm=True):
        self.first_q, self.rank, self.start = first_q, rank, start
        self.feedback, self.warm = feedback, warm
        self.step, self.q, self.errors = 0, {}, {}

    def mean(self, name: str, gradients: list[torch.Tensor]) -> torch.Tensor:
        """What all workers get for ``name``, whose own gradients these are."""
        shape, workers = gradients[0].shape, len(gradients)
        matrices = [g.reshape(g.shape[0], -1) for g in gradients] if len(shape) > 1 else []
        if self.step < self.start or not matrices:
            return sum(gradients) / workers
        n, m = matrices[0].shape
        r = min(n, m, self.rank)
        if n * m <= (n + m) * r * 1.0:
            return sum(gradients) / workers
        if self.feedback:
            errors = self.errors.get(name, [torch.zeros(n, m)] * workers)
            matrices = [one + error for one, error in zip(matrices, errors, strict=True)]
        if name not in self.q or not self.warm:
            self.q[name] = self.first_q(name, m, r, self.step + 1 if not self.warm else 0)
        p = sum(one @ self.q[name] for one in matrices) / workers
        basis = torch.linalg.qr(p).Q
        q = sum(one.t() @ basis for one in matrices) / workers
        self.q[name] = q
        self.errors[name] = [one - basis @ (one.t() @ basis).t() for one in matrices]
        return (basis @ q.t()).reshape(shape)


def unsharded(ranks: int, mean) -> dict[str, torch.Tensor]:
    """Weights after training with what ``mean(name, gradients of all ranks)`` makes of them."""
    model = Matrices()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        own = []
        for rank in range(ranks):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            own.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        for name, parameter in model.named_parameters():
            if name in own[0]:
                parameter.grad = mean(step, name, [one[name] for one in own])
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def sharded(rank: int, state, hook, over="all", **options: Any) -> dict[str, torch.Tensor]:
    import torch_xla

    model = wrapped(Matrices(), "inner", **options)
    model.register_comm_hook(state, hook, over)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    for step in range(STEPS):
        model(batch(rank, step).to("xla")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
    return full(model, dict(model.named_parameters()))


def full(model, tensors) -> dict[str, torch.Tensor]:
    """As ``whole``, where replicas must hold the same."""
    import torch_xla.core.xla_model as xm

    from xla_fsdp.consolidate import consolidate_sharded_state_dicts

    mine = {name: value.detach().cpu() for name, value in tensors.items()}
    ranks, size = xm.mesh_reduce("full", mine, list), model.world_size
    for number, one in enumerate(ranks):
        for name, value in one.items():
            torch.testing.assert_close(value, ranks[number % size][name], rtol=0, atol=0)
    return consolidate_sharded_state_dicts(ranks[:size], model.get_shard_metadata())


def hybrid(rank: int) -> dict[str, Any]:
    return {
        "sharding_groups": [[0, 1], [2, 3]],
        "sharding_rank": rank % 2,
        "sharding_world_size": 2,
        "replication_groups": [[0, 2], [1, 3]],
    }


def assert_close(found, expected, tolerance=2e-4) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance / 10)


def power_sgd(rank, cases, on_tpu):
    import torch_xla.runtime as xr

    from xla_fsdp.comm_hooks import PowerSGDState, powerSGD_hook

    if on_tpu:
        trace_as_on_tpu()
    ranks = xr.world_size()
    for options, given in cases:
        options = hybrid(rank) if options == "hybrid" else options
        state = PowerSGDState(min_compression_rate=1, **given)
        reference = Reference(
            state._random_q,
            state.matrix_approximation_rank,
            state.start_powerSGD_iter,
            state.use_error_feedback,
            state.warm_start,
        )

        def mean(step, name, gradients, reference=reference):
            reference.step = step
            return reference.mean(name, gradients)

        expected = unsharded(ranks, mean)
        assert_close(sharded(rank, state, powerSGD_hook, **options), expected)
        compressed = set(state.state_dict()["matrices"])
        # A parameter without a gradient counts as one with gradient zero in a flat vector.
        flat = {"unused.weight"} if options.get("flatten_parameters") else set()
        assert compressed - flat == {"first.weight", "inner.0.weight", "cube"}, compressed
        exact = unsharded(ranks, lambda step, name, gradients: sum(gradients) / len(gradients))
        assert any((exact[name] - expected[name]).abs().max() > 1e-3 for name in compressed - flat)


FED = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
POWER = {
    "2 ranks": (2, False, [({}, FED), ({"flatten_parameters": True}, {"start_powerSGD_iter": 0})]),
    "options": (
        2,
        False,
        [
            ({"shard_param_on_dim_0": True}, {"start_powerSGD_iter": 0, "warm_start": False}),
            ({}, {"start_powerSGD_iter": 1, "use_error_feedback": False, "random_seed": 5}),
        ],
    ),
    "4 ranks": (4, False, [({}, FED), ("hybrid", FED)]),
    "as on TPU": (2, True, [({}, FED)]),
}


@pytest.mark.parametrize("case", POWER)
def test_power_sgd_is_that_of_the_paper(run_ranks, case):
    ranks, on_tpu, cases = POWER[case]
    run_ranks(power_sgd, ranks, cases, on_tpu)


def over_replicas(rank):
    """Shards are averaged over replicas by PowerSGD, each for itself."""
    from xla_fsdp.comm_hooks import PowerSGDState, powerSGD_hook

    options = {**hybrid(rank), "shard_param_on_dim_0": True}
    state = PowerSGDState(min_compression_rate=1, start_powerSGD_iter=1)
    found = sharded(rank, state, powerSGD_hook, "replicas", **options)
    references = [Reference(state._random_q, 1, start=1) for _ in range(2)]

    def mean(step, name, gradients):
        # In each group of two ranks the mean, cut into the rows of either rank.
        groups = [(gradients[first] + gradients[first + 1]) / 2 for first in (0, 2)]
        rows = (groups[0].shape[0] + 1) // 2
        parts = []
        for number, reference in enumerate(references):
            reference.step = step
            mine = [one[number * rows : (number + 1) * rows] for one in groups]
            parts.append(reference.mean(name, mine))
        return torch.cat(parts)

    assert_close(found, unsharded(4, mean))
    kept = state.state_dict()["matrices"]
    assert {name: tuple(one["error"].shape) for name, one in kept.items()} == {
        "first.weight": (12, 16),
        "inner.0.weight": (12, 24),
        "cube": (4, 24),
    }


def test_power_sgd_over_replicas_keeps_errors_of_shards(run_ranks):
    run_ranks(over_replicas, 4)


def gradients_with(rank, hook, over="all", state=None, steps=1, **options):
    """Mean gradients of two micro-batches, the first inside no_sync, and of one more backward."""
    import torch_xla

    from xla_fsdp import checkpoint_module

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
    return full(model, {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in named})


def compressed(rank, on_tpu):
    import torch_xla.runtime as xr

    from xla_fsdp import comm_hooks

    if on_tpu:
        trace_as_on_tpu()
    ranks = xr.world_size()
    plain = Matrices()
    for step in range(3):
        every = torch.cat([batch(r, step) for r in range(ranks)])
        plain(every).square().mean().backward()
    expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    kinds = [{}, {"flatten_parameters": True, "reshard_after_forward": False}]
    kinds += [hybrid(rank)] if ranks == 4 else []
    seen = []

    def noted(state, bucket):
        seen.append(bucket.names)
        for name, gradient in zip(bucket.names, bucket.gradients(), strict=True):
            assert gradient.shape == plain.get_parameter(name).shape
        return comm_hooks.reduce_scatter_hook(None, bucket)

    for options in kinds:
        exact = gradients_with(rank, None, **options)
        for hook in (noted, comm_hooks.allreduce_hook):
            found = gradients_with(rank, hook, **options)
            for name, value in exact.items():
                torch.testing.assert_close(found[name], value, rtol=0, atol=0)
        for hook, digits in (
            (comm_hooks.bf16_compress_hook, 2**-8),
            (comm_hooks.fp16_compress_hook, 2**-11),
        ):
            overs = ["all", "replicas"] if "replication_groups" in options else ["all"]
            for over in overs:
                found = gradients_with(rank, hook, over, **options)
                for name, value in expected.items():
                    error = (found[name] - value).norm() / value.norm()
                    assert 0 < error < digits * 1.5, (name, hook, over, error)
    # Without its gradient a parameter is in no bucket, unless it is flattened.
    assert not any("frozen" in name for names in seen for name in names)
    return len(seen)


@pytest.mark.parametrize("ranks,on_tpu", [(2, False), (4, False), (2, True)])
def test_compressed_gradients_are_right_to_rounding(run_ranks, ranks, on_tpu):
    run_ranks(compressed, ranks, on_tpu)


# -- what is remembered, and what is refused ----------------------------------------------------


def remembers(rank):
    """Saved, loaded and resumed as if never interrupted; an infinite gradient leaves no trace."""
    import torch_xla

    from xla_fsdp.comm_hooks import PowerSGDState, powerSGD_hook

    def fresh(state):
        model = wrapped(Matrices(), "inner")
        model.register_comm_hook(state, powerSGD_hook)
        return model

    def state():
        return PowerSGDState(min_compression_rate=1, start_powerSGD_iter=0)

    def steps(model, numbers, scale=1.0):
        for step in numbers:
            model.zero_grad()
            (scale * model(batch(rank, step).to("xla")).square().mean()).backward()
            torch_xla.sync()
        return {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}

    first = state()
    through = fresh(first)
    steps(through, range(2))
    saved = first.state_dict()
    assert saved["iterations"]["cube"] == 2 and saved["matrices"]["cube"]["ranks"] == 2
    infinite = steps(through, [5], scale=float("inf"))
    assert not infinite["cube"].isfinite().all()
    after = first.state_dict()["matrices"]
    for name, one in saved["matrices"].items():
        assert torch.equal(after[name]["q"], one["q"])
        assert torch.equal(after[name]["error"], one["error"]) and one["error"].any()
    expected = steps(through, range(2, 4))

    second = state()
    second.load_state_dict(saved)
    found = steps(fresh(second), range(2, 4))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0)
    third = state()
    third.load_state_dict(saved, with_errors=False)
    assert any((steps(fresh(third), [2])[name] != value).any() for name, value in expected.items())

    # Of other ranks, another rank r, another model, and two models at once.
    for one in saved["matrices"].values():
        one["ranks"] = 3
    second.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="saved by 3 ranks.*with_errors=False"):
        steps(fresh(second), [0])
    other = PowerSGDState(None, 3, 0, 1)
    other.load_state_dict(saved)
    with pytest.raises(
        RuntimeError, match="loaded for another 'inner.0.weight'.*the same matrix_approx"
    ):
        steps(fresh(other), [0])
    with pytest.raises(
        RuntimeError, match="two models have a parameter 'inner.0.weight' and share one"
    ):
        steps(fresh(first), [0])
    model = Matrices()
    model = wrapped(model, "inner", compute_dtype=torch.float16)
    model.register_comm_hook(state(), powerSGD_hook)
    with pytest.raises(ValueError, match="are float16, which needs loss scaling"):
        steps(model, [0])


def test_power_sgd_remembers(run_ranks):
    run_ranks(remembers, 2)


def refusals(rank):
    from torch.distributed.algorithms._comm_hooks import default_hooks as torchs

    from xla_fsdp import comm_hooks

    def backward(state, hook):
        model = wrapped(Matrices(), "inner")
        model.register_comm_hook(state, hook)
        model(batch(rank, 0).to("xla")).sum().backward()

    model = wrapped(Matrices(), "inner")
    ours = comm_hooks.bf16_compress_hook
    for wrong, said in (
        (3, r"hook\(state, bucket\), got 3"),
        (torchs.bf16_compress_hook, "is torch's.*xla_fsdp.comm_hooks"),
        (lambda state, grad, output: None, "function of two arguments.*torch FSDP"),
        (lambda: None, "function of two arguments"),
    ):
        with pytest.raises(TypeError, match=said):
            model.register_comm_hook(None, wrong)
    with pytest.raises(ValueError, match="over must be one of 'all', 'replicas', got 'some'"):
        model.register_comm_hook(None, ours, "some")
    with pytest.raises(ValueError, match="over='replicas', but .* has none: give replication_gr"):
        model.register_comm_hook(None, ours, over="replicas")
    model.module.inner.register_comm_hook(None, ours)
    with pytest.raises(RuntimeError, match="'?the wrapper'? has a communication hook already"):
        model.register_comm_hook(None, ours)
    for state, hook, said in (
        (None, lambda state, bucket: None, "must return the mean gradient"),
        (None, lambda state, bucket: bucket.gradients()[0], "must be this rank's shard, of shape"),
        ("group", ours, r"has no state.*register_comm_hook\(None, bf16_compress_hook\)"),
        (None, comm_hooks.powerSGD_hook, "needs a PowerSGDState"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            backward(state, hook)
    for name, value in (
        ("process_group", "world"),
        ("matrix_approximation_rank", 0),
        ("start_powerSGD_iter", 1.5),
        ("min_compression_rate", 0),
        ("use_error_feedback", 1),
        ("warm_start", None),
        ("random_seed", -1),
    ):
        with pytest.raises((TypeError, ValueError), match=f"{name} must be .*got {value!r}"):
            comm_hooks.PowerSGDState(**{name: value})


def test_what_is_no_hook_is_refused(run_ranks):
    run_ranks(refusals, 2)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_orthonormal_columns(scale):
    from xla_fsdp.comm_hooks.orthogonal import orthonormal_columns

    p = torch.randn(20, 4, generator=torch.Generator().manual_seed(1)) * scale
    p[:, 2] = 3 * p[:, 0]  # says nothing new
    found = orthonormal_columns(p)
    right = torch.diag(torch.tensor([1.0, 1.0, 0.0, 1.0]))
    torch.testing.assert_close(found.t() @ found, right, rtol=1e-5, atol=1e-5)
    spanned = found @ (found.t() @ (p / scale))
    torch.testing.assert_close(spanned, p / scale, rtol=1e-4, atol=1e-4)
    assert not orthonormal_columns(torch.zeros(3, 2)).any()
    assert orthonormal_columns(torch.full((3, 2), float("nan"))).isnan().all()

"""Gradients that ``no_sync`` stores, lists of norms, values that torch takes from shards."""

import copy

import pytest
import torch
from on_ranks import on_each_rank
from torch import nn

from xla_fsdp import ShardedParameterError, XlaFullyShardedDataParallel, fully_shard, scan_blocks

FORMS = ("wrapper", "fully_shard")
X = torch.ones(4, 6)


def linear():
    torch.manual_seed(0)
    return nn.Linear(6, 6)


def sharded(form, module, **options):
    if form == "fully_shard":
        return fully_shard(module.to("xla"), **options)
    return XlaFullyShardedDataParallel(module, **options)


def backward_without_sync(form, model):
    if form == "fully_shard":
        model.set_requires_gradient_sync(False)
        model(X.to("xla")).square().mean().backward()
        model.set_requires_gradient_sync(True)
    else:
        with model.no_sync():
            model(X.to("xla")).square().mean().backward()


def norm_of_gradients(model):
    return nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()


@pytest.mark.parametrize("form", FORMS)
@on_each_rank(2)
def test_gradients_that_are_not_reduced_cannot_be_used(rank, form):
    model = sharded(form, linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("xla", init_scale=4.0)
    scaler.scale(torch.ones((), device="xla"))
    backward_without_sync(form, model)
    shards = list(model.parameters())
    grad = shards[0].grad
    assert (grad.shape, grad.dtype, grad.device.type) == ((6, 6), torch.float32, "xla")
    assert "UnreducedGradient('weight'" in repr(grad)
    for use in (
        lambda: nn.utils.get_total_norm([p.grad for p in shards]),
        lambda: nn.utils.clip_grad_norm_(shards, 1.0),
        lambda: nn.utils.clip_grad_value_(shards, 0.001),
        lambda: model.clip_grad_norm_(1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: grad.abs().max(),
        lambda: grad + shards[0],
        optimizer.step,
    ):
        text = "'weight' are stored by no_sync and not reduced.* Run the last backward before"
        with pytest.raises(RuntimeError, match=text):
            use()
    torch.optim.SGD(sharded(form, linear()).parameters(), lr=0.1).step()  # of another model
    model(X.to("xla")).square().mean().backward()
    plain = linear()
    (plain(X).square().mean() * 2).backward()
    assert norm_of_gradients(model) == pytest.approx(norm_of_gradients(plain))
    optimizer.step()


DROPS = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model": lambda model, optimizer: model.zero_grad(),
    "model, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    "deleted": lambda model, optimizer: [delattr(p, "grad") for p in model.parameters()],
    "foreach": lambda model, optimizer: torch._foreach_zero_([p.grad for p in model.parameters()]),
}


@pytest.mark.parametrize("form", FORMS)
@on_each_rank(1)
def test_stored_gradients_are_dropped_as_in_torch(rank, form):
    plain = linear()
    plain(X).square().mean().backward()
    for name, drop in DROPS.items():
        model = sharded(form, linear())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward_without_sync(form, model)
        drop(model, optimizer)
        model(X.to("xla")).square().mean().backward()
        assert norm_of_gradients(model) == pytest.approx(norm_of_gradients(plain)), name


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return x + self.norm(self.linear(x))


def blocks():
    torch.manual_seed(0)
    return [Block() for _ in range(3)]


USES = {
    "sum": lambda norms: torch.stack(norms).sum(),
    "max": lambda norms: torch.stack(norms).max(),
    "mean": lambda norms: torch.stack(norms).mean(),
    "norm of order 1": lambda norms: torch.linalg.vector_norm(torch.stack(norms), 1.0),
    "sum without a stack": sum,
}


@pytest.mark.parametrize("form", (*FORMS, "scanned", "flat"))
@on_each_rank(2)
def test_a_list_of_norms_is_that_of_parameters(rank, form):
    if form == "scanned":
        model = scan_blocks(blocks())
    else:
        flat = {"flatten_parameters": True} if form == "flat" else {}
        model = sharded(form, nn.Sequential(*blocks()), **flat)
    values = [p.detach() for p in model.parameters()]
    expected = [torch.norm(p.detach()) for p in nn.Sequential(*blocks()).parameters()]
    for name, use in USES.items():
        for kind, norms in (
            ("one by one", lambda: [torch.norm(p) for p in values]),
            ("foreach", lambda: torch._foreach_norm(values)),
        ):
            if form in ("scanned", "flat"):
                with pytest.raises(ShardedParameterError, match="contains several parameters"):
                    use(norms())
            else:
                assert use(norms()).item() == pytest.approx(use(expected).item()), (name, kind)
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(values)).to(values[0].device))
    assert total.item() == pytest.approx(torch.stack(expected).norm().item())
    with pytest.raises(ShardedParameterError, match="groups by name"):
        [p for p in scan_blocks(blocks()).parameters() if p.ndim >= 2]


@pytest.mark.parametrize("form", FORMS)
@on_each_rank(2)
def test_a_penalty_on_the_full_tensor_has_a_gradient(rank, form):
    model = sharded(form, linear())
    loss = model(X.to("xla") * (rank + 1)).square().mean()
    loss = loss + sum(p.full_tensor().square().sum() for p in model.parameters())
    loss.backward()
    with torch.no_grad():
        assert not next(model.parameters()).full_tensor().requires_grad
    plain = linear()
    loss = sum(plain(X * (rank + 1)).square().mean() for rank in range(2)) / 2
    (loss + sum(p.square().sum() for p in plain.parameters())).backward()
    for mine, its in zip(model.parameters(), plain.parameters(), strict=True):
        found = mine.grad.full_tensor().cpu()
        torch.testing.assert_close(found, its.grad, rtol=1e-5, atol=1e-6)


@on_each_rank(2)
def test_values_that_torch_takes_apart_are_right_or_raise(rank):
    p = next(sharded("wrapper", linear()).parameters())
    plain = linear().weight
    assert (p > 0).byte().min().item() == (plain > 0).byte().min().item() == 0
    assert (p > -9).byte().min().item() == 1
    least = torch.iinfo(torch.int64).min
    assert torch.full_like(p, 0, dtype=torch.int64).fill_(least).min().item() == least
    for call in (
        lambda: p.int().mean(),
        lambda: p.int().std(),
        lambda: torch.rand(p.shape, out=p.data),
        lambda: torch.randn(p.shape, out=p.data),
    ):
        with pytest.raises(ShardedParameterError):
            call()
    assert p.new_tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    assert torch.equal(p & 1 if not p.is_floating_point() else 1 * p, p)
    # As a file's values: `xm.save` makes them so.
    assert type(copy.copy(p)) is not type(p) and copy.copy(p).shape == p.to_local().shape

"""What operations do with sharded parameters: as one plain process has it, or an error by name."""

import copy
import functools
import io
import math

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank, raises, without_ranks
from small_models import (
    Computes,
    assert_same_gradients,
    here,
    hybrid,
    inputs,
    mean_square,
    mlp,
    wrapped,
)
from torch import nn

import xla_fsdp
import xla_fsdp.optim
from xla_fsdp import CPUOffload, CPUOffloadPolicy, ShardingStrategy, fully_shard, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP

BLOCKS = 2
FORMS = ("wrapper", "rows", "fully_shard", "scanned", "flat")


def layer() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(5, 7)


def forms(form: str):
    plain = layer()
    if form == "scanned":
        blocks = [copy.deepcopy(plain) for _ in range(BLOCKS)]
        with torch.no_grad():
            blocks[1].weight.mul_(-2)
        stacked = torch.stack([block.weight.detach() for block in blocks])
        model = scan_blocks([nn.Sequential(block, nn.Linear(7, 5)) for block in blocks])
        return model, dict(model.named_parameters())["0.weight"], nn.Parameter(stacked)
    if form == "flat":
        model = FSDP(copy.deepcopy(plain), flatten_parameters=True)
        vector = torch.cat([p.detach().reshape(-1) for p in plain.parameters()])
        return model, next(model.parameters()), nn.Parameter(vector)
    if form == "fully_shard":
        model = fully_shard(copy.deepcopy(plain).to("xla"))
    else:
        model = FSDP(copy.deepcopy(plain), shard_param_on_dim_0=form == "rows")
    return model, model.weight, plain.weight


LEAST = torch.iinfo(torch.int64).min

# Over all elements; those of one parameter raise where a tensor has several.
OF_ALL = {
    "sum": lambda p: p.sum(),
    "sum of squares": lambda p: (p * p).sum(),
    "max": lambda p: p.max(),
    "amin": lambda p: p.amin(),
    "any": lambda p: (p > 0.3).any(),
    "any of bytes": lambda p: (p > 0.3).byte().any(),
    "all": lambda p: (p > -9).all(),
    "least of bytes": lambda p: (p > 0).byte().min(),
    "least of equal bytes": lambda p: (p > -9).byte().min(),
    "least that is filled": lambda p: torch.zeros_like(p, dtype=torch.int64).fill_(LEAST).min(),
    "count_nonzero": lambda p: torch.count_nonzero(p > 0),
    "largest": lambda p: torch.nn.utils.get_total_norm([p], math.inf),
    "nan": lambda p: (p * float("nan")).max(),
    "exp": lambda p: p.exp().sum(),  # padding is 1 there
    "total norm": lambda p: torch.nn.utils.get_total_norm([p, p * 2]),
    "norm of norms": lambda p: torch.stack(torch._foreach_norm([p, p * 2])).norm(),
    "dist": lambda p: torch.stack([torch.dist(p, p * 2)]).norm(),
}
OF_ONE = {
    "mean": lambda p: p.mean(),
    "norm": lambda p: p.norm(),
    "norm 1": lambda p: torch.norm(p, 1),
    "norm 3": lambda p: torch.linalg.vector_norm(x=p, ord=3.0),
    "norm -1": lambda p: p.norm(-1),  # padding is infinite there
    "divided by its norm": lambda p: (p / torch.linalg.vector_norm(p)).exp().sum(),
    "norm inf": lambda p: p.norm(math.inf),
    "norm of bfloat16": lambda p: p.bfloat16().norm().float(),
    "std": lambda p: torch.std(p),
    "var": lambda p: p.var(unbiased=False),
}
OF_NORMS = {
    "sum": lambda norms: torch.stack(norms).sum(),
    "max": lambda norms: torch.stack(norms).max(),
    "mean": lambda norms: torch.stack(norms).mean(),
    "norm of order 1": lambda norms: torch.linalg.vector_norm(torch.stack(norms), 1.0),
    "sum without a stack": sum,
}
for name, call in OF_NORMS.items():
    OF_ONE[f"{name} of norms"] = lambda p, call=call: call([p.norm(), (p * 2).norm()])
    OF_ONE[f"{name} of a list"] = lambda p, call=call: call(torch._foreach_norm([p, p * 2]))
ELEMENTS = {
    "operators": lambda p: 1 - p * 2 / 3 + p**2,
    "compared": lambda p: (p > 0) & ~(p >= 0.2),
    "where": lambda p: torch.where(p > 0, p, torch.zeros_like(p)),
    "masked_fill": lambda p: p.masked_fill(p > 0, 2.0),
    "to": lambda p: p.double(),
    "clone": lambda p: p.detach().clone().add_(torch.tensor(1.0)),
    "foreach": lambda p: torch._foreach_add([p, p], [p * 2, p], alpha=2)[0],
    "sign": lambda p: p.sign().sqrt_() * p.relu(),
    "conj": lambda p: p.addcmul(p, p.conj()) + torch.conj(p) + p.real,
    "full": lambda p: torch.full_like(p, 3.0) * p.isfinite(),
    "one number": lambda p: p * p.new_full([1] * len(p.shape), 2.0),
    "keywords": lambda p: torch.abs_(input=p.clone())
    + torch.where(condition=p > 0, input=p, other=1),
    "floor": lambda p: p // 0.3,
    "initialized": lambda p: nn.init.constant_(nn.init.zeros_(nn.init.ones_(p.clone())), 0.5) + p,
    "copied number": lambda p: torch.zeros_like(p).copy_(torch.tensor(3.0)),
}
REFUSED = {
    "linear": lambda p: nn.functional.linear(torch.ones(2, 5, device="xla"), p),
    "view": lambda p: p.view(-1),
    "index": lambda p: p[0],
    "sum over rows": lambda p: p.sum(0),
    "norm over rows": lambda p: p.norm(dim=0),
    "more dimensions": lambda p: p * p.new_full([1] * (p.dim() + 1), 2.0),
    "full tensor beside": lambda p: p + torch.ones(p.shape, device="xla"),
    "into a plain tensor": lambda p: torch.zeros(p.shape, device="xla").copy_(p),
    "numpy": lambda p: p.detach().cpu().numpy(),
    "list": lambda p: p.tolist(),
    "iteration": lambda p: list(p),
    "random": lambda p: p.normal_(),
    **{name: getattr(nn.init, f"{name}_") for name in ("uniform", "orthogonal")},
    "eye": nn.init.eye_,
    "random like": lambda p: torch.rand_like(p),
    "random into": lambda p: torch.rand(p.shape, out=p.data),
    "mean of integers": lambda p: p.int().mean(),
    "transposed": lambda p: p.T,
    "where they are": lambda p: torch.where(p > 0),
    "part": lambda p: p.copy_(torch.zeros(3, device="xla")),
    "gather of xm": lambda p: xm.all_gather(p),
    "sum of xm": lambda p: xm.all_reduce("sum", [p.detach()], scale=0.5),
    "scatter of xm": lambda p: xm.reduce_scatter("sum", p, 1.0, 0, 2),
    "permutation of xm": lambda p: xm.collective_permute(p, [[0, 1], [1, 0]]),
    "exchange of xm": lambda p: xm.all_to_all(p, 0, 0, 2),
}


def close(found, expected):
    found = found.detach().cpu()
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("form", FORMS)
@on_each_rank(2)
def test_operations_are_as_in_one_process(rank, form):
    model, p, plain = forms(form)
    several = form in ("scanned", "flat")
    assert isinstance(p, nn.Parameter) and p.is_leaf and p.requires_grad
    for one in (p, p.detach(), torch.zeros_like(p)):
        assert one.shape == plain.shape
        if several and one is p:  # whose dimensions?
            raises(xla_fsdp.ShardedParameterError, "parameter groups by name", one.dim)
        else:
            assert one.dim() == one.ndim == plain.dim()
        assert one.numel() == plain.numel() and one.size() == plain.size()
        assert one.stride() == plain.stride() and len(one) == len(plain)
        assert one.size(0) == plain.size(0) and one.nbytes == plain.nbytes
    with torch.no_grad():
        close(p.full_tensor(), plain.detach())
        assert not p.full_tensor().requires_grad
        for name, call in ELEMENTS.items():
            found = call(p)
            assert found.shape == plain.shape, name
            close(found.full_tensor(), call(plain))
        for name, call in OF_ALL.items():
            found = call(p)
            assert type(found + 0) is torch.Tensor, name
            close(found + 0, call(plain) + 0)
        for call in OF_ONE.values():
            if several:
                with pytest.raises(xla_fsdp.ShardedParameterError, match="several parameters"):
                    call(p) + 0
            else:
                close(call(p) + 0, call(plain) + 0)
        for name, call in REFUSED.items():
            with pytest.raises(xla_fsdp.ShardedParameterError, match=r"full_tensor\(\)"):
                call(p)
                pytest.fail(name)
        assert torch.equal(p, p) and not torch.equal(p, p * 2)
        assert torch.allclose(p, p + 1e-9) and not torch.allclose(p, p + 1)
        assert torch.equal(input=p, other=p)
        with torch.enable_grad():
            raises(RuntimeError, "same number of tensors", torch._foreach_add, [p, p], [p])
        assert p.is_same_size(torch.zeros_like(p)) and not p.is_same_size(p.new_ones(3))
        assert (
            torch.result_type(p, p.new_ones(3)) == torch.result_type(scalar=2, tensor=p) == p.dtype
        )
        assert not torch.equal(torch.ones_like(p), p.new_ones(()))


@on_each_rank(2)
def test_numbers_promote_dtypes_as_in_one_process(rank):
    plain = nn.PReLU()
    plain.gain = nn.Parameter(torch.tensor(0.75))
    plain.bfloat16()
    model = FSDP(copy.deepcopy(plain))
    for p, own in zip(model.parameters(), plain.parameters(), strict=True):
        for number in (torch.tensor(2.0), torch.tensor(2), torch.tensor(2.0).bfloat16(), 2.0):
            given = number.to("xla") if isinstance(number, torch.Tensor) else number
            close((p.detach() * given).full_tensor(), own.detach() * number)
            assert torch.result_type(p, given) is torch.result_type(own, number)
    raises(TypeError, "0-d tensor", len, model.gain)
    with pytest.raises(xla_fsdp.ShardedParameterError, match=r"has shape \[1\]"):
        model.gain * torch.ones(1, device="xla")


@on_each_rank(2)
def test_complex_parameters(rank):
    values = torch.randn(11, dtype=torch.complex64, generator=torch.Generator().manual_seed(1))
    model = FSDP(Computes(lambda self, x: x, weight=nn.Parameter(values)))
    p = model.weight.detach()
    for call in (torch.sum, torch.mean, lambda one: torch.linalg.vector_norm(one) + 0):
        close(call(p), call(values))
    for call in (torch.var, torch.std, lambda one: torch.vdot(one, one), torch.max):
        raises(xla_fsdp.ShardedParameterError, "needs parameter 'weight'", call, p)


PENALTIES = {
    "norm": lambda p: p.norm(),
    "squares": lambda p: (p * p).sum(),
    "largest": lambda p: p.abs().max(),
    "mean": lambda p: (p - 0.1).abs().mean(),
    "zero": lambda p: (p * 0).norm(),
    "std": lambda p: p.std(),
    "centered": lambda p: (p - p.mean()).pow(4).sum(),
    "relative": lambda p: (p / p.norm()).exp().mean(),
    "relative by foreach": lambda p: torch._foreach_mul([p * 1], [p.norm()])[0].exp().mean(),
    # Elements that are equal share the gradient, on all ranks.
    "largest of equal": lambda p: p.clamp(-0.1, 0.1).max() - p.clamp(-0.1, 0.1).amin(),
    "norm inf of equal": lambda p: torch.linalg.vector_norm(p.clamp(-0.1, 0.1), math.inf),
    "norms inf of equal": lambda p: torch.stack(
        [torch.linalg.vector_norm(one, math.inf) for one in (p.detach(), p.clamp(-0.1, 0.1))]
    ).sum(),
}


@pytest.mark.parametrize("form", ["wrapper", "rows", "fully_shard"])
@on_each_rank(2)
def test_gradients_of_reductions(rank, form):
    model, p, plain = forms(form)
    for call in PENALTIES.values():
        p.grad = plain.grad = None
        call(p).backward()
        call(plain).backward()
        close(p.grad.full_tensor(), plain.grad)
        (grad,) = torch.autograd.grad(call(p), [p])
        close(grad.full_tensor(), plain.grad)
    full = torch.arange(35.0).view(7, 5)
    p.grad = plain.grad = None
    (p * 2).backward(full.to("xla"))
    (plain * 2).backward(full)
    close(p.grad.full_tensor(), plain.grad)
    (grad,) = torch.autograd.grad(p * 2, p, full.to("xla"))
    close(grad.full_tensor(), plain.grad)


@on_each_rank(2)
def test_values_are_full_tensors_and_files_have_plain_parts(rank):
    model, p, plain = forms("wrapper")
    p.note = plain.note = "of the user"
    full = torch.arange(35.0).view(7, 5)
    with torch.no_grad():
        p.copy_(full.to("xla"))
        close(p.full_tensor(), full)
        for device in ("xla", "cpu"):
            p.data = (full * 2).to(device)
            close(p.full_tensor(), full * 2)
        p.fill_(3)
        p[p > 2] = 4.0
        close(p.full_tensor(), torch.full((7, 5), 4.0))
        p.copy_(torch.full((1, 1), 3.0, device="xla"))
        p[p > 2] = torch.full((1,), 5.0, device="xla")
        close(p.full_tensor(), torch.full((7, 5), 5.0))
        p[...] = full.to("xla")
        close(p.full_tensor(), full)
    for device in ("cpu", "xla"):
        p.grad = full.to(device)
        assert p.grad is p.grad
        close(p.grad.full_tensor(), full)
    twin = copy.deepcopy(p)
    assert type(twin) is type(p) and twin.note == "of the user" and twin.grad is None
    close(twin.full_tensor(), full)
    assert type(model.bfloat16().weight) is type(p) and model.weight.note == "of the user"
    state = model.state_dict()
    assert {type(value) for value in state.values()} == {torch.Tensor}
    assert state["weight"].dim() == 1  # this rank's part
    model.load_state_dict({name: value + 1 for name, value in state.items()})
    close(model.weight.full_tensor().float(), (full + 1).bfloat16().float())
    for one in (model.weight, p.grad, model.weight * 2):
        file = io.BytesIO()
        torch.save(one, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is torch.Tensor and loaded.device.type == "cpu" and loaded.dim() == 1
    assert "weight" in repr(p) and "weight" in f"{p}"
    assert p.new_tensor([1.0, 2.0]).tolist() == [1.0, 2.0]
    # As a file's values: `xm.save` makes them so.
    assert type(copy.copy(p)) is not type(p) and copy.copy(p).shape == p.to_local().shape


RESULTS = {
    "normed": lambda grad: grad / torch.linalg.vector_norm(grad),
    "sharded": lambda grad: grad * 2,
    "full": lambda grad: getattr(grad, "full_tensor", grad.clone)() * 2,
    "part": lambda grad: getattr(grad, "to_local", grad.clone)() * 2,
    "nothing": lambda grad: None,
}


@on_each_rank(2)
def test_hooks_return_full_gradients_too(rank):
    for result in RESULTS.values():
        _, p, plain = forms("wrapper")
        for one in (p, plain):
            one.register_hook(result)
            one.square().sum().backward()
            twice = one * 2
            twice.register_hook(result)
            twice.square().sum().backward()
        close(p.grad.full_tensor(), plain.grad)
    p.register_hook(lambda grad: torch.zeros(3, device="xla"))
    with pytest.raises(RuntimeError, match="the result of a hook needs parameter 'weight'"):
        p.square().sum().backward()


OPTIMIZERS = {
    "ASGD": {}, "Adadelta": {}, "Adagrad": {}, "Adam": {"amsgrad": True}, "AdamW": {},
    "Adamax": {}, "NAdam": {}, "RAdam": {}, "RMSprop": {"momentum": 0.9, "centered": True},
    "Rprop": {}, "SGD": {"momentum": 0.9, "nesterov": True},
}  # fmt: skip


def nets(form="wrapper"):
    """A model, and plain parameters with its values: those of scanned blocks are stacked there."""
    torch.manual_seed(0)
    if form == "scanned":
        model = scan_blocks([nn.Linear(5, 5) for _ in range(BLOCKS)])
    else:
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        model = FSDP(model) if form == "wrapper" else fully_shard(model.to("xla"))
    full = [p.full_tensor().detach().cpu() for p in model.parameters()]
    return nn.ParameterList(map(nn.Parameter, full)), model


def give_gradients(plain, model, step):
    torch.manual_seed(step)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        theirs.grad = torch.randn(theirs.shape) * 3
        mine.grad = theirs.grad.to("xla")


def assert_same(plain, model):
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        close(mine.full_tensor(), theirs.detach())


UNITS = ("wrapper", "fully_shard", "scanned")


@pytest.mark.parametrize("form", UNITS)
@on_each_rank(2)
def test_optimizers_of_torch(rank, form):
    for name, options in OPTIMIZERS.items():
        plain, model = nets(form)
        kind = getattr(torch.optim, name)
        mine, theirs = (kind(one.parameters(), lr=0.1, **options) for one in (model, plain))
        for step in range(2):
            give_gradients(plain, model, step)
            norms = [nn.utils.clip_grad_norm_(one.parameters(), 1.0) for one in (model, plain)]
            close(norms[0], norms[1])
            mine.step()
            theirs.step()
            torch_xla.sync()
        assert_same(plain, model)
        saved = copy.deepcopy(mine.state_dict())
        found = [v for own in saved["state"].values() for v in own.values()]
        assert {type(value) for value in found if isinstance(value, torch.Tensor)} <= {torch.Tensor}
        for again in (mine, kind(model.parameters(), lr=0.1, **options)):
            again.load_state_dict(saved)
        give_gradients(plain, model, 5)
        again.step()
        theirs.step()
        assert_same(plain, model)


@pytest.mark.parametrize("form", UNITS)
@on_each_rank(2)
def test_averaged_models_and_clipped_values(rank, form):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    plain, model = nets(form)
    average = get_ema_multi_avg_fn(0.5)
    averages = [AveragedModel(one, multi_avg_fn=average) for one in (plain, model)]
    for step in range(2):
        give_gradients(plain, model, step)
        for one in (plain, model):
            nn.utils.clip_grad_value_(one.parameters(), 1.5)
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.sub_(parameter.grad * 0.1)
        for average, one in zip(averages, (plain, model), strict=True):
            average.update_parameters(one)
    assert_same(plain, model)
    assert_same(averages[0].module, averages[1].module)


WAYS_TO_COPY = {
    "copy_": lambda target, source: [a.copy_(b) for a, b in zip(target, source, strict=True)],
    "data": lambda target, source: [
        a.data.copy_(b.data) for a, b in zip(target, source, strict=True)
    ],
    "other": lambda target, source: [a.copy_(other=b) for a, b in zip(target, source, strict=True)],
    "foreach": lambda target, source: torch._foreach_copy_(target, source),
    "foreach_src": lambda target, source: torch._foreach_copy_(target, src=source),
    "slice": lambda target, source: [
        a.__setitem__(..., b) for a, b in zip(target, source, strict=True)
    ],
}


@pytest.mark.parametrize("form", UNITS)
@without_ranks  # programs of CPU ranks do not reuse the memory of their inputs
def test_an_update_in_place_leaves_what_was_copied(form):
    """The average of a frozen parameter, slow weights: torch_xla lets copies share a buffer."""
    model, other = nets(form)[1], nets(form)[1]
    source, target = list(model.parameters()), list(other.parameters())
    expected = [parameter.full_tensor().cpu() for parameter in source]
    with torch.no_grad():
        for copy_all in (*WAYS_TO_COPY.values(), None):
            if copy_all is None:
                other.load_state_dict(model.state_dict())
            else:
                copy_all(target, source)
            torch_xla.sync()
            torch._foreach_mul_(target, 2.0)
            torch_xla.sync()
            for value, mine, theirs in zip(expected, source, target, strict=True):
                assert torch.equal(mine.full_tensor().cpu(), value)
                assert torch.equal(theirs.full_tensor().cpu(), value * 2)
        target[0].copy_(5)
        assert (target[0].full_tensor() == 5).all()


@pytest.mark.parametrize("form", UNITS)
@on_each_rank(2)
def test_torchs_gradient_scaler(rank, form):
    for infinite in (False, True):
        plain, model = nets(form)
        give_gradients(plain, model, 0)
        mine, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, plain))
        scaler = torch.amp.GradScaler("xla", init_scale=2.0)
        scaler.scale(torch.ones((), device="xla"))
        for parameter in model.parameters():
            parameter.grad *= 2
        if infinite and rank == 0:
            parameter.grad.to_local().fill_(math.inf)
        scaler.step(mine)
        scaler.update()
        if not infinite:
            theirs.step()
        assert_same(plain, model)
        assert scaler.get_scale() == (1.0 if infinite else 2.0)


# They leave numbers, and NaN, where a shard has padding.
CHANGES = {"number": lambda grad: grad.add_(0.3), "nan": lambda grad: grad.div_(grad.clone())}


@on_each_rank(2)
def test_padding_of_gradients_does_not_count(rank):
    def changed(change):
        plain, model = nets()
        give_gradients(plain, model, 0)
        for one in (*plain.parameters(), *model.parameters()):
            change(one.grad)
        return plain, model

    for change in CHANGES.values():
        for norm_type in (1.0, 2.0, math.inf):
            plain, model = changed(change)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
            close(model.clip_grad_norm_(1.0, norm_type), norm)
        plain, model = changed(change)
        mine = xla_fsdp.optim.Adafactor(model.parameters())
        for optimizer in (mine, torch.optim.Adafactor(plain.parameters())):
            optimizer.step()
        assert_same(plain, model)
        _, model = changed(change)
        eight = xla_fsdp.optim.AdamW8bit(model.parameters(), min_8bit_size=0)
        scaler = torch.amp.GradScaler("xla", init_scale=2.0)
        scaler.scale(torch.ones((), device="xla"))
        before = [p.full_tensor() for p in model.parameters()]
        scaler.step(eight)
        for p, was in zip(model.parameters(), before, strict=True):
            assert ((p.full_tensor() - was).abs() > 1e-4).all()  # neither skipped nor NaN


def clip_in_two_steps(parameters, max_norm):
    """As torchtitan does, but for foreach=True, which torch does not allow on XLA."""
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@pytest.mark.parametrize("form", UNITS)
@on_each_rank(2)
def test_clipping_is_one_collective(rank, form):
    plain, model = nets(form)
    counts = []
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_, clip_in_two_steps):
        give_gradients(plain, model, 0)
        torch_xla.sync()
        norm = clip(model.parameters(), 1.0)
        counts.append(torch_xla._XLAC._get_xla_tensors_text([norm]).count("xla::all_gather"))
        close(norm, clip(plain.parameters(), 1.0))
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            close(mine.grad.full_tensor(), theirs.grad)
        torch_xla.sync()
    assert counts == [1, 1, 1]


@on_each_rank(1)
def test_nothing_is_missing_on_one_rank(rank):
    model = FSDP(layer())
    p, plain = model.weight, layer().weight
    with torch.no_grad():
        close(p.view(-1), plain.view(-1))
        close(p @ torch.ones(5, device="xla"), plain @ torch.ones(5))
        close(p.sum(0), plain.sum(0))
        p.add_(torch.ones(7, 5, device="xla"))
        close(p.full_tensor(), plain + 1)


@on_each_rank(2)
def test_shards_on_the_host(rank):
    model = FSDP(layer(), cpu_offload=CPUOffload())
    p, plain = model.weight, layer().weight
    with torch.no_grad():
        for calls in (ELEMENTS, OF_ALL, OF_ONE):
            for call in calls.values():
                found = call(p) + 0
                assert found.device.type == "cpu"
                close(found.full_tensor() if calls is ELEMENTS else found, call(plain) + 0)


def weighted_penalty(model, x):
    """What goes back to a norm is another number on each rank: its own batch's loss."""
    own = model(x).pow(2).mean()
    norms = [p.norm() for p in model.parameters()]
    largest = torch.stack(torch._foreach_norm(list(model.parameters()))).max()
    others = sum(p.max() + p.sum() for p in model.parameters())
    return own * (1 + sum(norms) + torch.stack(norms).mean() + largest + others)


def penalty_on_full_tensors(model, x):
    full = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
    return mean_square(model, x) + sum(p.square().sum() for p in full)


def gradient_penalty(model, x, power=2):
    norms = sum(p.norm() ** power for p in model.parameters())
    gradients = torch.autograd.grad(norms, list(model.parameters()), create_graph=True)
    return sum((g**3).sum() for g in gradients) * model(x).mean().detach()


def inside_of(inner):
    def compute(self, x):
        y = self.inner(x)
        decay = sum(p.square().sum() for p in self.inner.parameters()) + self.inner[0].bias.sum()
        return y * decay

    return Computes(compute, inner=inner)


LOSSES = {
    "weighted": (weighted_penalty, False),
    "of full tensors": (penalty_on_full_tensors, False),
    "of gradients": (gradient_penalty, False),
    "of gradients of norms": (functools.partial(gradient_penalty, power=1), False),
    "in a forward": (mean_square, True),
}
RANKS = 4
WRAPPINGS = {
    "wrapper": lambda rank, module: FSDP(module),
    "in place": lambda rank, module: fully_shard(module),
    "rows": lambda rank, module: FSDP(module, shard_param_on_dim_0=True),
    "hybrid": lambda rank, module: FSDP(module, **hybrid(rank)),
    "replicas": lambda rank, module: FSDP(module, sharding_strategy=ShardingStrategy.NO_SHARD),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.parametrize("case", LOSSES)
@on_each_rank(RANKS)
def test_gradients_of_reductions_in_a_loss(rank, case, wrapping):
    loss_of, inside = LOSSES[case]
    plain = inside_of(mlp()) if inside else mlp()
    sum(loss_of(plain, inputs(r)) / RANKS for r in range(RANKS)).backward()
    wrap = WRAPPINGS[wrapping]
    model = wrap(rank, mlp())
    model = wrap(rank, inside_of(model)) if inside else model
    loss_of(model, here(rank)).backward()
    found = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}
    expected = {name: p.grad for name, p in plain.named_parameters()}
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def on_host(**options):
    return wrapped(mlp(), "0", "1", "2", **options or {"cpu_offload": CPUOffload()})


ON_HOST = {
    "wrapper": {"cpu_offload": CPUOffload()},
    "in place": {"wrap": fully_shard, "offload_policy": CPUOffloadPolicy()},
    "streamed": {"cpu_offload": CPUOffload(stream=True)},
    "flat": {"cpu_offload": CPUOffload(), "flatten_parameters": True},
}
HOST_PENALTIES = {
    "squares": lambda p, old: p.square().sum(),
    "norm": lambda p, old: torch.linalg.vector_norm(p),
    "scaled by its norm": lambda p, old: (p * p.norm()).sum(),
    "away from a copy": lambda p, old: (p - 0.5 * old).square().sum() + torch.dist(p, 2 * old),
    "wider": lambda p, old: p.double().std().float(),
    "a list": lambda p, old: torch._foreach_norm([p, p])[1] + torch._foreach_mul([p], 2)[0].sum(),
    "largest": lambda p, old: p.abs().max() + p.mean(),
    "full": lambda p, old: getattr(p, "full_tensor", lambda: p)().square().sum(),
}
OF_ONE_PARAMETER = set(HOST_PENALTIES) - {"squares", "full"}


@pytest.mark.parametrize("form", ON_HOST)
@on_each_rank(4)
def test_a_loss_and_a_penalty_on_shards_on_the_host_in_one_backward(rank, form):
    """With collectives on two threads of autograd, ranks would have different orders."""
    plain, model = mlp(), on_host(**ON_HOST[form])
    everyone = [inputs(other) for other in range(4)]
    for name, penalty in HOST_PENALTIES.items():
        if form == "flat" and name in OF_ONE_PARAMETER:
            continue
        called = []
        hooks = [p.register_hook(called.append) for p in model.parameters()]
        for one, batches in ((plain, everyone), (model, [here(rank)])):
            one.zero_grad()
            old = [p.detach().clone() for p in one.parameters()]
            loss = sum(one(x).square().mean() for x in batches) / len(batches)
            pairs = zip(one.parameters(), old, strict=True)
            (loss + sum(penalty(p, before) for p, before in pairs)).backward()
        # What is cast on the host has a gradient of its own.
        assert len(called) == len(hooks) or name == "wider", f"{name}: a hook is called once"
        for hook in hooks:
            hook.remove()
        assert all(p.grad.device.type == "cpu" for p in model.parameters())
        assert_same_gradients(model, plain, atol=1e-5, msg=name)


@on_each_rank(2)
def test_gradients_of_a_penalty_on_shards_on_the_host(rank):
    plain, model = mlp(), on_host()
    plain_loss, loss = (sum(p.norm() for p in one.parameters()) for one in (plain, model))
    grads = torch.autograd.grad(plain_loss, list(plain.parameters()), retain_graph=True)
    for own, grad in zip(torch.autograd.grad(loss, list(model.parameters())), grads, strict=True):
        close(own.full_tensor(), grad)
    first, *rest = model.parameters()
    sum(p.norm() for p in model.parameters()).backward(inputs=[first])
    close(first.grad.full_tensor(), grads[0])
    assert all(p.grad is None for p in rest)
    with torch.no_grad():
        assert first.norm().device.type == "cpu"
    every, text = list(model.parameters()), "host .* was computed with create_graph"
    total = sum(p.norm() for p in every)
    raises(RuntimeError, text, torch.autograd.grad, total, every, create_graph=True)
    model.zero_grad()
    sum(p.norm() for p in model.parameters()).backward(create_graph=True)
    for own, grad in zip(model.parameters(), grads, strict=True):
        close(own.grad.full_tensor(), grad)


def with_a_number(p):
    for _ in range(4):
        p.grad = None
        (p * torch.tensor(2.0, requires_grad=True)).sum().backward()
    return p.grad


def changed_result(p):
    y = p * 1
    y += p
    y *= 2
    y.sum().backward()
    return p.grad


def added_to_another(p):
    total = torch.zeros_like(p)
    total += p * 2
    total.sum().backward()
    return p.grad


def assigned_by_mask(p):
    mask = p > 0.1
    with torch.no_grad():
        p[mask] = 0
    return p


def backward_of_values(p):
    (p * 2).backward(p.detach())
    (grad,) = torch.autograd.grad(p * 2, p, p.detach() * 3)
    return p.grad + grad


def averaged(p):
    mean, twice = p.detach().clone(), p * 2
    return mean.lerp_(twice.detach(), 0.5)


def added_without_graph(p):
    twice = p * 2
    with torch.no_grad():
        return p + twice


# Some arguments are on the host, others, which have a graph, on the device.
MIXTURES = [
    with_a_number, changed_result, added_to_another, assigned_by_mask, averaged,
    added_without_graph, backward_of_values,
    lambda p: torch.tensor(torch.allclose(p * 1, p)),
    lambda p: torch.tensor(torch.equal(p * 1, p)),
]  # fmt: skip


@on_each_rank(2)
def test_values_of_host_shards_on_both_devices(rank):
    for mixed in MIXTURES:
        shard = next(on_host().parameters())
        plain = shard.full_tensor().detach().cpu().requires_grad_()
        found = mixed(shard)
        found = found.full_tensor().cpu() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(found.detach(), mixed(plain).detach())


@on_each_rank(2)
def test_a_penalty_after_a_backward_that_raised(rank):
    model = on_host()
    shard = next(model.parameters())
    x = torch.ones(3, device="xla", requires_grad=True)
    other = x * 1  # older, so its backward is the last
    other.register_hook(lambda grad: 1 / 0)
    loss = other.sum() + shard.square().sum()
    raises(ZeroDivisionError, "", loss.backward)
    shard.grad = None
    shard.square().sum().backward()
    close(shard.grad.full_tensor(), 2 * shard.detach().full_tensor().cpu())

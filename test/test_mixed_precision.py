"""mixed_precision: what is computed, kept, cast and sent in which dtype."""

import functools
from typing import Any

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank, raises, slow
from small_models import WIDTH, gradients, here, inputs, inputs_of_all, mean_square, trace_as_on_tpu
from torch import nn

from xla_fsdp import MixedPrecision, full_state_dict, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP

NARROW = torch.bfloat16


class Probe(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((), 0.5))
        self.met: list[torch.dtype] = []

    def forward(self, x):
        weight = self.layer.weight
        self.met = [x.dtype, weight.dtype, self.scale.dtype]
        return (self.layer(x.to(weight.dtype)) * self.scale).to(weight.dtype)


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.first, self.second = Probe(), Probe()

    def forward(self, x):
        return self.second(self.first(x).float())


def built(inner: dict[str, Any], outer: dict[str, Any]):
    model = Wide()
    model.second = FSDP(model.second, **inner)
    return FSDP(model, **outer)


def ran(model: nn.Module, rank: int) -> dict[str, torch.Tensor]:
    model(here(rank)).float().square().mean().backward()
    torch_xla.sync()
    return gradients(model)


@pytest.mark.parametrize("ranks", [2, slow(4)])
@on_each_rank(timeout=1500)
def test_every_policy(rank):
    plain = Wide()
    mean_square(plain, inputs_of_all()).backward()
    theirs = {name: value.grad for name, value in plain.named_parameters()}

    def check(policy, first, second, bound=0.05, inner=None):
        policy = MixedPrecision(**policy)
        inner = policy if inner is None else MixedPrecision(**inner)
        model = built({"mixed_precision": inner}, {"mixed_precision": policy})
        ours = ran(model, rank)
        assert model.first.met == first and model.second.met == second
        for name, own in ours.items():
            assert own.dtype is torch.float32
            assert (own - theirs[name]).norm() <= bound * theirs[name].norm(), name
        with FSDP.summon_full_params(model, writeback=False):  # in the dtype of storage
            for own, value in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(own.detach().cpu(), value.detach(), rtol=0, atol=0)
        return ours

    wide = torch.float32
    narrow = {"param_dtype": NARROW}
    # torch's defaults: inputs are cast at the root, buffers not at all.
    same = check(narrow, [NARROW, NARROW, wide], [wide, NARROW, wide])
    check(narrow | {"cast_forward_inputs": True}, [NARROW, NARROW, wide], [NARROW, NARROW, wide])
    uncast = narrow | {"cast_root_forward_inputs": False}
    check(uncast, [wide, NARROW, wide], [wide, NARROW, wide])
    check(uncast | {"cast_forward_inputs": True}, [NARROW, NARROW, wide], [NARROW, NARROW, wide])
    check(narrow | {"buffer_dtype": NARROW}, [NARROW] * 3, [wide, NARROW, NARROW])
    check({}, [wide] * 3, [wide] * 3, bound=1e-5)
    check({"param_dtype": wide, "reduce_dtype": wide}, [wide] * 3, [wide] * 3, bound=1e-5)
    own = {"param_dtype": wide, "cast_forward_inputs": True}  # a part in float32
    check(narrow, [NARROW, NARROW, wide], [wide] * 3, inner=own)
    # Bit by bit what the options of this project give.
    exact = check(narrow | {"reduce_dtype": wide}, [NARROW, NARROW, wide], [wide, NARROW, wide])
    for found, widened in ((same, False), (exact, True)):
        options = {"compute_dtype": NARROW, "buffer_dtype": wide, "fp32_reduce_scatter": widened}
        torch.testing.assert_close(found, ran(built(options, options), rank), rtol=0, atol=0)
    assert any((same[name] != exact[name]).any() for name in same)
    model = FSDP(
        Wide(),
        auto_wrap_policy=lambda module, recurse, **_: recurse or isinstance(module, Probe),
        mixed_precision=MixedPrecision(**narrow),
        compute_dtype=NARROW,
    )
    ran(model, rank)
    assert model.first.met == [NARROW, NARROW, wide] and model.second.met == [wide, NARROW, wide]
    assert all(w.compute_dtype is NARROW for w in FSDP.fsdp_modules(model))


@on_each_rank(2)
def test_what_cannot_be_done_is_refused(rank):
    from torch.distributed.fsdp import MixedPrecision as Theirs

    half, ignored = torch.float16, "_module_classes_to_ignore"
    for text, fields in (
        *(
            (f"MixedPrecision.{name} must be one of torch.float32.*{wrong}", {name: wrong})
            for name in ("param_dtype", "reduce_dtype", "buffer_dtype")
            for wrong in (torch.int8, "bf16")
        ),
        ("torch.bfloat16 is not supported with param_dtype=None", {"reduce_dtype": NARROW}),
        ("reduce_dtype=torch.float16", {"reduce_dtype": half, "param_dtype": NARROW}),
        (f"{ignored} must be a list or tuple of module cl.*LayerNorm", {ignored: nn.LayerNorm}),
        (r"got \[1\]", {ignored: [1]}),
        *(
            (f"{name} must be True or False, got 1", {name: 1})
            for name in ("cast_forward_inputs", "keep_low_precision_grads")
        ),
    ):
        raises(ValueError, text, MixedPrecision, **fields)
    policy = MixedPrecision(param_dtype=NARROW)
    for match, options in (
        ("must be an xla_fsdp.MixedPrecision", {"mixed_precision": Theirs()}),
        ("compute_dtype=torch.float16 contradicts mixed_precision", {
            "mixed_precision": policy, "compute_dtype": torch.float16}),
        ("fp32_reduce_scatter=True contradicts", {
            "mixed_precision": policy, "fp32_reduce_scatter": True}),
        ("buffer_dtype=torch.bfloat16 contradicts", {
            "mixed_precision": policy, "buffer_dtype": NARROW}),
    ):  # fmt: skip
        raises(ValueError, match, FSDP, nn.Linear(2, 2), **options)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(8)
        self.first = Noting(nn.LayerNorm(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.second = Noting(nn.BatchNorm1d(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.layer(self.first(x))
        return x + torch.tanh(self.last(self.second(x)))


class Noting(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.met: list[torch.dtype] = []

    def forward(self, x):
        y = self.norm(x)
        self.met = [x.dtype, self.norm.weight.dtype, y.dtype]
        return y


@pytest.mark.parametrize("ranks, as_on_tpu", [(2, False), (4, True)])
@on_each_rank(timeout=1500)
def test_modules_that_stay_in_float32(rank, as_on_tpu):
    trace_as_on_tpu(as_on_tpu)
    # Of all ranks the same: batch norms know only of their own.
    same = torch.cat([inputs(number) for number in range(6)])
    plain = Normed()
    mean_square(plain, same).backward()
    theirs = {name: value.grad for name, value in plain.named_parameters()}
    wide = (nn.LayerNorm, nn.BatchNorm1d)
    for options, classes in (
        ({}, wide),
        ({"flatten_parameters": True}, list(wide)),
        ({"shard_param_on_dim_0": True}, None),
        ({"auto_wrap_policy": lambda module, recurse, **_: recurse or isinstance(module, Noting)},
         wide),
    ):  # fmt: skip
        given = {} if classes is None else {"_module_classes_to_ignore": classes}
        policy = MixedPrecision(param_dtype=NARROW, buffer_dtype=NARROW, **given)
        model = FSDP(Normed(), mixed_precision=policy, **options)
        first = NARROW if classes is None else torch.float32  # torch's default: batch norms
        for _ in range(2):
            model.zero_grad()
            model(same.to("xla")).float().square().mean().backward()
            torch_xla.sync()
            assert model.first.met == [NARROW, first, NARROW]
            assert model.second.met == [NARROW, torch.float32, NARROW]
        assert model.second.norm.running_mean.dtype is torch.float32
        ours = gradients(model)
        assert ours.keys() == theirs.keys()
        for name, own in ours.items():
            assert own.dtype is torch.float32
            assert (own - theirs[name]).norm() <= 0.05 * theirs[name].norm(), name


@on_each_rank(2, timeout=1500)
def test_gradients_may_stay_narrow(rank):
    def trained(keep, optimizer, inner):
        policy = MixedPrecision(
            param_dtype=NARROW,
            reduce_dtype=torch.float32 if inner else None,
            keep_low_precision_grads=keep,
            _module_classes_to_ignore=[nn.LayerNorm],
        )
        model = Normed()
        model.second = nn.Identity()
        if inner:
            model.layer = FSDP(model.layer, mixed_precision=policy)
        model = FSDP(model, mixed_precision=policy)
        made = optimizer(model.parameters(), 0.1)
        for step in range(4):
            with model.no_sync() if step == 0 else torch.enable_grad():
                model(here(rank, step)).float().square().mean().backward()
            if step:  # no_sync holds what the first left
                model.clip_grad_norm_(0.5)
            for name, parameter in model.named_parameters():
                if step:
                    low = keep and not name.startswith("first")
                    assert parameter.grad.dtype is (NARROW if low else torch.float32)
            if step % 2:
                made.step()
                made.zero_grad()
            torch_xla.sync()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    momentum = functools.partial(torch.optim.SGD, momentum=0.9)
    for optimizer, inner in ((torch.optim.SGD, False), (momentum, True)):
        ours, theirs = (trained(keep, optimizer, inner) for keep in (True, False))
        for name, value in theirs.items():
            assert value.dtype is ours[name].dtype
            torch.testing.assert_close(ours[name], value, rtol=0.05, atol=0.02, msg=name)
    raises(RuntimeError, "expected dtype", trained, True, torch.optim.AdamW, False)


@on_each_rank(2)
def test_scanned_modules_that_stay_in_float32(rank):
    torch.manual_seed(9)
    blocks = [nn.Sequential(Noting(nn.LayerNorm(WIDTH)), nn.Linear(WIDTH, WIDTH)) for _ in range(2)]
    plain = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
    mean_square(plain, inputs_of_all()).backward()
    expected = [(value.detach().clone(), value.grad) for value in plain.parameters()]
    policy = MixedPrecision(param_dtype=NARROW, _module_classes_to_ignore=[nn.LayerNorm])
    model = FSDP(nn.Sequential(scan_blocks(blocks, mixed_precision=policy)), mixed_precision=policy)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    model(here(rank)).float().square().mean().backward()
    optimizer.step()
    torch_xla.sync()
    assert model[0].module[0].met == [NARROW, torch.float32, NARROW]
    state = full_state_dict(model, rank0_only=False)
    for own, (value, grad) in zip(state.values(), expected, strict=True):
        assert (value - own - grad).norm() <= 0.05 * grad.norm()

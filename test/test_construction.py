"""Wrapping: policies, names, meta initialisation, values that come with a load, groups, moves."""

import copy
import functools
import math

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from on_ranks import on_each_rank, raises, slow
from safetensors.torch import save_file
from small_models import (
    WIDTH,
    Computes,
    assert_same_backward,
    assert_same_gradients,
    here,
    hybrid,
    inputs,
    inputs_of_all,
    mean_square,
    mlp,
    whole,
    wrapped,
)
from torch import nn

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.wrap import (
    always_wrap_policy,
    lambda_auto_wrap_policy,
    recursive_wrap,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)


class Box(nn.Module):
    def __init__(self, module, **options):
        super().__init__()
        self.module = module
        self.options = options


def wrapped_names(model: nn.Module, policy, **kwargs) -> list[str]:
    recursive_wrap(model, policy, Box, only_wrap_children=True, **kwargs)
    names = [name for name, module in model.named_modules() if isinstance(module, Box)]
    return [name.replace("module.", "").removesuffix(".module") for name in names]


def test_policies_choose_submodules():
    linear = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: type(m) is nn.Linear)
    assert wrapped_names(mlp(), linear) == ["0", "1.0", "2"]
    kinds = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential})
    assert wrapped_names(mlp(), kinds) == ["1"]
    assert wrapped_names(mlp(), always_wrap_policy) == ["0", "1", "1.0", "1.1", "2"]
    # 42 parameters in a square layer, 21 in the last.
    small = functools.partial(size_based_auto_wrap_policy, min_num_params=42)
    assert wrapped_names(mlp(), small) == ["0", "1.0"]
    assert wrapped_names(mlp(), size_based_auto_wrap_policy) == []
    assert size_based_auto_wrap_policy(mlp(), False, 100_000_000)
    assert not size_based_auto_wrap_policy(mlp(), False, 99_999_999)
    # Not inside of attention, and no lists.
    layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    model = nn.ModuleDict({"a": nn.MultiheadAttention(8, 2), "l": layers})
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=70)
    assert wrapped_names(model, policy) == ["l.0", "l.1"]
    # Only what has a forward.
    parameter = nn.Parameter(torch.ones(6))
    holders = {"scales": nn.ParameterDict({"a": parameter}), "holder": nn.Module()}
    holders |= {"shifts": nn.ParameterList([parameter]), "layers": nn.ModuleDict({"a": mlp()})}
    model = nn.Sequential(Computes(lambda self, x: x, **holders))
    everything = lambda module, recurse, unwrapped_params: True  # noqa: E731
    for policy in (always_wrap_policy, everything):
        names = wrapped_names(copy.deepcopy(model), policy)
        assert [name for name in names if "layers.a." not in name] == ["0", "0.layers.a"]


def test_overrides_and_shared_modules():
    model = mlp()
    model[0]._wrap_overrides = {"compute_dtype": torch.float32}
    model.append(model[0])
    recursive_wrap(
        model,
        functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda m: type(m) is nn.Linear),
        Box,
        compute_dtype=torch.bfloat16,
    )
    assert model[0] is model[3]
    assert model[0].options == {"compute_dtype": torch.float32}
    assert model[2].options == {"compute_dtype": torch.bfloat16}


@on_each_rank(3)
def test_a_wrapper_answers_as_its_module(rank):
    inner = mlp()
    inner[0].weight.no_decay = True
    model = wrapped(inner, "1")
    assert model[0].weight.no_decay and model[0].weight.dim() == 2
    assert model.module is inner and len(model) == 3 and model[2] is inner[2]
    assert isinstance(model[1], FSDP) and model[1].module[0].in_features == WIDTH
    assert (model.rank, model.world_size) == (rank, 3)
    assert f"rank={rank}, world_size=3" in repr(model)
    assert model.reshard_after_forward is True and model.compute_dtype is None
    with pytest.raises(AttributeError, match="nothing"):
        model.nothing  # noqa: B018
    raises(TypeError, "module must be a torch.nn.Module, got int", FSDP, 3)
    assert model.params_with_grad == [] and len(model.sharded_params) == 4
    assert model.get_original_names_and_sharded_parameters() == list(model.named_parameters())
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sizes["0.weight"] == WIDTH * WIDTH and sizes["2.bias"] == 3


@pytest.mark.parametrize("device", ["cpu", "xla"])
@on_each_rank(2)
def test_interleaved_construction_frees_layer_by_layer(rank, device):
    on = torch_xla.device() if device == "xla" else "cpu"
    layers, originals = [], []
    for _ in range(3):
        layer = nn.Linear(64, 64, device=on)
        originals.append(layer.weight)
        layers.append(FSDP(layer))
        assert all(weight.shape.numel() <= 1 for weight in originals)
    model = FSDP(nn.Sequential(*layers))
    assert sum(p.to_local().numel() for p in model.parameters()) == 3 * (64 * 64 // 2 + 128)
    assert model(torch.ones(2, 64, device="xla")).shape == (2, 64)


@pytest.mark.parametrize(
    "options", [{}, {"flatten_parameters": True}, {"shard_param_on_dim_0": True}], ids=str
)
@on_each_rank(3)
def test_loads_state_dicts_of_the_intree_class(rank, options):
    from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel as InTree

    theirs = mlp()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.125)
    expected = {name: value.clone() for name, value in theirs.state_dict().items()}
    intree_options = dict(options, pin_layout_in_collective_ops=False)
    theirs[1] = InTree(theirs[1], **intree_options)
    theirs = InTree(theirs, **intree_options)
    saved = {name: value.cpu() for name, value in theirs.state_dict().items()}
    model = wrapped(mlp(), "1", **options)
    model.load_state_dict(saved)
    torch.testing.assert_close(whole(model, model.state_dict()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("flatten", [False, True])
@on_each_rank(2)
def test_meta_modules_are_initialised_a_submodule_at_a_time(rank, flatten):
    model, held = nn.Sequential(), []

    class Counting(nn.Linear):
        def reset_parameters(self):
            super().reset_parameters()
            held.append(sum(p.numel() for p in model.parameters() if p.device.type == "cpu"))

    def build(linear):
        torch.manual_seed(0)
        blocks = [nn.Sequential(linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(6)]
        blocks.append(linear(WIDTH, WIDTH))
        blocks[6].weight = blocks[0][0].weight
        return blocks

    with torch.device("meta"):
        model.extend(build(Counting))
    model[2][0].weight.requires_grad_(False)
    model[6].weight.no_decay = True
    names = [name for name, _ in model.named_parameters()]
    units = ["1", "4"] if flatten else ["1", "6"]
    wrapper = wrapped(model, *units, flatten_parameters=flatten)
    if not flatten:
        assert [name for name, _ in wrapper.named_parameters()] == names
        assert 0 < max(held) <= WIDTH * WIDTH + 2 * WIDTH
        assert [n for n, p in wrapper.named_parameters() if not p.requires_grad] == ["2.0.weight"]
        assert wrapper[6].weight.no_decay and wrapper[0][0].weight is wrapper[6].weight
    assert all(p.device.type == "xla" for p in wrapper.parameters())
    full = whole(wrapper, wrapper.state_dict())
    assert torch.equal(full["6.weight"], full["0.0.weight"])
    assert full["3.1.weight"].eq(1).all() and full["3.0.weight"].std() > 0.1
    x = torch.randn(2, WIDTH)
    plain = nn.Sequential(*build(nn.Linear))
    plain.load_state_dict(full)
    ours = wrapper(x.to("xla")).detach().cpu()
    torch.testing.assert_close(ours, plain(x).detach(), rtol=1e-4, atol=1e-5)


@on_each_rank(2)
def test_meta_initialisation_functions_and_errors(rank):
    def build():
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(3, 3), nn.MultiheadAttention(4, 2), nn.BatchNorm1d(3))

    seen = []

    def fill(module):
        seen.append(type(module).__name__)
        module.to_empty(device="cpu", recurse=False)
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            nn.init.constant_(tensor, 2)

    model = FSDP(build(), param_init_fn=fill)
    full = whole(model, model.state_dict())
    assert all(value.float().eq(2).all() for value in full.values())
    kinds = ["Linear", "NonDynamicallyQuantizableLinear", "MultiheadAttention", "BatchNorm1d"]
    assert sorted(seen) == sorted(kinds)

    model = FSDP(build())
    full = whole(model, model.state_dict())
    # Attention initialises its projection's bias to zero, after the projection itself.
    assert full["1.out_proj.bias"].eq(0).all() and full["1.in_proj_weight"].std() > 0.1
    assert full["2.running_var"].eq(1).all() and full["2.num_batches_tracked"] == 0

    with pytest.raises(RuntimeError, match="left 'weight', 'bias' of module '0'"):
        FSDP(build(), param_init_fn=lambda module: None)


class Forgetful(nn.Module):
    """Its ``reset_parameters`` gives values, here zeros, to some of its tensors only."""

    def __init__(self, dtype, forgotten):
        super().__init__()
        self.forgotten = forgotten
        self.parameter = nn.Parameter(torch.empty(4, 3, dtype=dtype).t(), requires_grad=False)
        self.register_buffer("buffer", torch.empty(4, 3, dtype=dtype).t())

    def reset_parameters(self):
        for name in {"parameter", "buffer"} - {self.forgotten}:
            getattr(self, name).zero_()

    def forward(self, x):
        return x


@on_each_rank(2)
def test_meta_initialisation_misses_values_of_every_dtype(rank):
    dtypes = "float32 bfloat16 float8_e4m3fn complex64 int64 int8 uint8 uint16 bool".split()
    for dtype in (getattr(torch, name) for name in dtypes):
        for forgotten in ("parameter", "buffer"):
            with torch.device("meta"):
                model = Forgetful(dtype, forgotten)
            raises(RuntimeError, f"not initialize its {forgotten} '{forgotten}'", FSDP, model)
        if dtype in (torch.float32, torch.int64):  # zeros of any dtype are values
            with torch.device("meta"):
                model = FSDP(Forgetful(dtype, None))
            assert all(value.eq(0).all() for value in model.state_dict().values())


@on_each_rank(4)
def test_sharding_groups_without_replicas(rank):
    options = hybrid(rank)
    del options["replication_groups"]
    plain, model = mlp(), wrapped(mlp(), "1", **options)
    mean_square(model, here(rank)).backward()
    mine = slice(2 * (rank // 2), 2 * (rank // 2) + 2)
    mean_square(plain, torch.cat([inputs(r) for r in range(4)][mine])).backward()
    norm = model.clip_grad_norm_(0.01)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(norm.cpu(), expected)
    for own, value in zip(model.parameters(), plain.parameters(), strict=True):
        found = own.grad.full_tensor().cpu()
        torch.testing.assert_close(found, value.grad, rtol=1e-4, atol=1e-7)


@on_each_rank(3)
def test_gradient_divide_factors(rank):
    world = xr.world_size()
    model = wrapped(mlp(), "1")
    assert model.gradient_predivide_factor * model.gradient_postdivide_factor == world
    half = FSDP(mlp().half())
    assert half.gradient_predivide_factor == 2 and half.gradient_postdivide_factor == world / 2
    model.set_gradient_divide_factors(np.float32(2.0), 0.5, recursive=True)
    mean_square(model, here(rank)).backward()
    plain = mlp()
    mean_square(plain, inputs_of_all()).backward()
    for parameter in plain.parameters():
        parameter.grad *= world
    assert_same_gradients(model, plain)
    for value in (0, math.inf, True, "1"):
        with pytest.raises(ValueError, match=f"pre must be a positive number, got {value!r}"):
            model.set_gradient_divide_factors(value, 1, recursive=False)


@on_each_rank(2)
def test_clipping_over_two_worlds(rank):
    """A frozen unit with groups of its own adds nothing to the norm of the others."""
    model, plain = mlp(), mlp()
    for module in (model, plain):
        module[1].requires_grad_(False)
    alone = {"sharding_groups": [[0], [1]], "sharding_rank": 0, "sharding_world_size": 1}
    model[1] = FSDP(model[1], **alone)
    model = FSDP(model)
    mean_square(model, here(0)).backward()
    plain(inputs(0)).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
    torch.testing.assert_close(model.clip_grad_norm_(1e9).cpu(), expected, rtol=1e-4, atol=1e-6)


@on_each_rank(3)
def test_clipping_edges(rank):
    model = wrapped(mlp(), "1")
    assert model.clip_grad_norm_(1.0).item() == 0
    for wrong, message in ((0, "max_norm must be positive, got 0"), (-1, "got -1")):
        raises(ValueError, message, model.clip_grad_norm_, wrong)
    raises(ValueError, "norm_type must be positive, got", model.clip_grad_norm_, 1.0, norm_type=-2)
    plain = mlp()
    assert_same_backward(model, plain, rank)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9, 3)
    for options in ({}, {"groups": [[0, 1, 2]]}):
        ours = model.clip_grad_norm_(1e9, 3, **options)
        torch.testing.assert_close(ours.cpu(), expected, rtol=1e-4, atol=1e-6)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = nn.Embedding(9, WIDTH)
        self.first, self.second = nn.LSTM(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.embed.weight
        self.second.weight_hh_l0 = self.first.weight_hh_l0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.first(self.embed(tokens))
        return self.head(self.second(states)[0])


def tokens(rank: int) -> torch.Tensor:
    return torch.randint(9, (5, 2), generator=torch.Generator().manual_seed(rank))


@on_each_rank(2)
def test_moved_then_wrapped(rank):
    def trained(model, batch):
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        for _ in range(2):
            optimizer.zero_grad()
            mean_square(model, batch).backward()
            optimizer.step()

    plain = Tied()
    trained(plain, torch.cat([tokens(n) for n in range(2)], dim=1))
    assert not torch.equal(plain.head.weight, Tied().head.weight)
    for options in ({}, {"flatten_parameters": True}):
        model = Tied().to("xla")
        assert model.head.weight is model.embed.weight
        assert model.second._flat_weights[1] is model.first.weight_hh_l0
        assert len(list(model.parameters())) == len(list(plain.parameters()))
        model = FSDP(model, **options)
        trained(model, tokens(rank).to("xla"))
        for name, value in xla_fsdp.full_state_dict(model).items():
            torch.testing.assert_close(value.cpu(), plain.state_dict()[name], rtol=1e-4, atol=1e-5)


@on_each_rank(1)
def test_other_moves_are_those_of_torch(rank):
    model = Tied()
    weight = model.head.weight
    assert model.to(torch.float64) is model and model.head.weight is weight is model.embed.weight
    alike = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    alike[1].load_state_dict(copy.deepcopy(alike[0].state_dict()))
    alike.to("xla")
    assert alike[0].weight is not alike[1].weight
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3)))
    assert scripted.to(torch.float64)[0].weight.dtype == torch.float64


@on_each_rank(1)
def test_hooks_and_attributes_stay(rank):
    model, calls = nn.Linear(2, 2), []
    model.weight.register_hook(lambda grad: grad * 5)
    handle = model.bias.register_post_accumulate_grad_hook(lambda bias: calls.append(bias))
    model.weight.no_decay = True
    model.to("xla")
    model(torch.ones(1, 2).to("xla")).sum().backward()
    assert model.weight.no_decay and model.weight.grad.flatten().tolist() == [5.0] * 4
    assert len(calls) == 1 and calls[0] is model.bias
    handle.remove()
    model(torch.ones(1, 2).to("xla")).sum().backward()
    assert len(calls) == 1


BEFORE_ANY_NAME = """
import torch, torch_xla
import xla_fsdp

model = torch.nn.Module()
model.a, model.b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
model.b.weight = model.a.weight
model.to("xla")
assert model.a.weight is model.b.weight
"""


def test_from_the_import_on(run_script):
    done = run_script(BEFORE_ANY_NAME, env={"PJRT_DEVICE": "CPU"})
    assert done.returncode == 0, done.stderr


def deferred():
    torch.manual_seed(13)
    blocks = (nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 5)) for _ in range(2))
    model = Computes(
        lambda self, x: self.back(self.head(self.blocks(self.embed(x)) * self.scale)),
        embed=nn.Linear(WIDTH, 5, bias=False),
        blocks=nn.Sequential(*blocks),
        head=nn.Linear(5, WIDTH),
        back=nn.Linear(WIDTH, 5, bias=False),
    )
    model.back.weight = model.embed.weight
    model.register_buffer("scale", torch.linspace(0.5, 1.5, 5))
    return model


MISSING = ["head.weight", "head.bias"]


def built(kind):
    with torch.device("meta"):
        model = deferred()
    units = ["blocks.0", "blocks.1"] if kind == "nested" else []
    return wrapped(
        model, *units, param_init_fn=xla_fsdp.defer_init, flatten_parameters=kind == "flat"
    )


def raises_naming(names, absent, doing="the first forward", call=None):
    with pytest.raises(RuntimeError, match=f"{doing} was called before") as caught:
        call()
    for name in names:
        assert repr(name) in str(caught.value), (name, str(caught.value))
    for name in absent:
        assert repr(name) not in str(caught.value)


@pytest.mark.parametrize("ranks", [2, slow(4)])
@on_each_rank(timeout=1500)
def test_values_come_with_a_load_or_are_missed(rank, tmp_path):
    plain = deferred()
    state = {n: v.clone() for n, v in plain.state_dict().items() if n != "back.weight"}
    if rank == 0:
        save_file(state, f"{tmp_path}/model.safetensors")
        part = {name: value for name, value in state.items() if not name.startswith("head")}
        save_file(part, f"{tmp_path}/part.safetensors")
    saved = xla_fsdp.save_checkpoint(f"{tmp_path}/run", FSDP(deferred()), step=1)
    shards = {
        kind: FSDP(deferred(), flatten_parameters=kind == "flat") for kind in ("root", "flat")
    }
    every = torch.cat([inputs(r) for r in range(xr.world_size())])
    plain(every).square().mean().backward()
    x = here(rank)
    for kind in ("root", "nested", "flat"):
        model = built(kind)
        names = ["embed.weight", "blocks.0.0.weight", "head.bias", "scale"]
        for doing, call in (
            ("the first forward", lambda m=model: m(x)),
            ("saving", lambda m=model: xla_fsdp.save_checkpoint(f"{tmp_path}/none", m, step=1)),
            ("full_state_dict", lambda m=model: xla_fsdp.full_state_dict(m)),
            (r"state_dict\(\)", lambda m=model: m.state_dict()),
            ("clip_grad_norm_", lambda m=model: m.clip_grad_norm_(1.0)),
        ):
            raises_naming(names[:3], [], doing, call)
        every = torch.optim.SGD(model.parameters(), lr=0.1)
        raises_naming([names[0], names[2]], [], r"SGD.step\(\)", every.step)
        model = copy.deepcopy(model).double().float()
        raises_naming(names[:3], [], call=lambda m=model: m(x))
        loaded = xla_fsdp.load_weights(model, f"{tmp_path}/part.safetensors", strict=False)
        assert loaded.missing_keys == MISSING
        raises_naming(MISSING, names[:2] + ["scale"], call=lambda m=model: m(x))
        if kind == "nested":  # the rest by hand
            with FSDP.summon_full_params(model), torch.no_grad():
                model.head.weight.copy_(state["head.weight"])
                model.head.bias.copy_(state["head.bias"])
        elif kind == "flat":
            xla_fsdp.load_weights(model, tmp_path)
        else:
            xla_fsdp.load_checkpoint(saved, model)
        model(x).square().mean().backward()
        assert_same_gradients(model, plain)
    for kind in ("root", "flat"):
        model = built(kind)
        model.load_state_dict(shards[kind].state_dict())
        assert torch.equal(model(x).cpu(), shards[kind](x).cpu())
    model = built("nested")
    xla_fsdp.load_full_state_dict(model, state if rank == 0 else None)
    found = whole(model, model.state_dict())
    assert all(torch.equal(found[name], value) for name, value in state.items())
    model(x)


@on_each_rank(2, timeout=1500)
def test_values_of_scanned_blocks_come_with_a_load(rank):
    def model(device, **options):
        torch.manual_seed(3)
        with torch.device(device):
            blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        return (
            blocks if not options else FSDP(nn.Sequential(xla_fsdp.scan_blocks(blocks, **options)))
        )

    plain = nn.Sequential(*model("cpu"))
    sharded = model("meta", param_init_fn=xla_fsdp.defer_init)
    x = inputs(rank)
    for one in (sharded, copy.deepcopy(sharded)):
        raises_naming(["0.0.0.weight"], [], r"state_dict\(\)", one.state_dict)
    with torch.device("meta"):
        in_place = xla_fsdp.fully_shard(nn.Linear(WIDTH, 5), param_init_fn=xla_fsdp.defer_init)
    for one in (in_place, in_place.bfloat16(), copy.deepcopy(in_place)):
        raises_naming(["weight", "bias"], [], r"state_dict\(\)", one.state_dict)
    raises_naming(["0.0.0.weight", "0.2.0.bias"], [], call=lambda: sharded(x.to("xla")))
    state = {f"0.{name}": value for name, value in plain.state_dict().items()}
    part = {name: value for name, value in state.items() if not name.startswith("0.1")}
    xla_fsdp.load_full_state_dict(sharded, part, strict=False)
    raises_naming(["0.1.0.weight", "0.1.0.bias"], ["0.0.0.weight"],
                  call=lambda: sharded(x.to("xla")))  # fmt: skip
    xla_fsdp.load_full_state_dict(sharded, state)
    torch.testing.assert_close(sharded(x.to("xla")).cpu(), plain(x), rtol=1e-4, atol=1e-5)

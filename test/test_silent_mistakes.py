"""Uses that were silently wrong, and first mistakes: as plain torch, or a message with a remedy."""

import copy
import functools
import itertools
import re

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank, raises
from rank_warnings import every_rank_warns, warnings_of_ranks
from small_models import (
    WIDTH,
    Computes,
    assert_same_backward,
    assert_same_gradients,
    here,
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
from xla_fsdp import register_fsdp_forward_method, scan_blocks
from xla_fsdp.optim import LAMB, LARS, Adafactor


def clamped(weight):
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)


CHANGES = {
    "data": lambda layer: setattr(layer.weight, "data", layer.weight.detach() * 0.5),
    "data in place": lambda layer: layer.weight.data.mul_(0.5),
    "in place": lambda layer: clamped(layer.weight),
    "another": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach() * 0.5)),
}


def with_layer(compute, **more):
    torch.manual_seed(3)
    return Computes(compute, layer=nn.Linear(WIDTH, WIDTH), **more)


@on_each_rank(2)
def test_a_forward_may_compute_with_its_parameters_but_not_change_them(rank):
    for change, grad, late in itertools.product(CHANGES.values(), (True, False), (True, False)):

        def changes(self, x, change=change, late=late):
            y = self.layer(x) if late else None
            change(self.layer)
            return y if late else self.layer(x)

        with torch.set_grad_enabled(grad):
            with pytest.raises(RuntimeError, match="forward .* its parameter 'layer.weight'"):
                wrapped(with_layer(changes))(here(rank))
    for compute in (  # the remedy of the message, and another use
        lambda self, x: F.linear(x, self.layer.weight.clamp(-0.1, 0.1), self.layer.bias),
        lambda self, x: (x.cpu() @ self.layer.weight.cpu().t()).to(x.device),
    ):
        assert_same_backward(wrapped(with_layer(compute)), with_layer(compute), rank)
    for kind in (nn.Embedding, nn.EmbeddingBag):
        for option, value in (("max_norm", 0.1), ("scale_grad_by_freq", True), ("sparse", True)):
            with pytest.raises(ValueError, match=f"Embedding.* '0' has {option}={value}"):
                wrapped(nn.Sequential(kind(4, 4, **{option: value})))


@pytest.mark.parametrize("reshard", [True, False])
@on_each_rank(2)
def test_weights_changed_between_forward_and_backward_are_refused(rank, reshard):
    for way in ("step", "in place", "data", "load"):
        model = wrapped(mlp(), "1", reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        saved = copy.deepcopy(model.state_dict())
        loss = mean_square(model, here(rank))
        loss.backward(retain_graph=True)
        if way == "step":
            optimizer.step()
        for parameter in model.parameters():
            with torch.no_grad():
                if way == "in place":
                    parameter.mul_(2)
                if way == "data":
                    parameter.data = parameter * 2
        if way == "load":
            model.load_state_dict(saved)
        text = r"parameter '[\w.]*weight' was changed between a forward and its"
        raises(RuntimeError, text, loss.backward)
        model.zero_grad()
        mean_square(model, here(rank)).backward()  # the remedy


@on_each_rank(2)
def test_changes_that_the_backward_does_not_see_are_as_in_plain_torch(rank):
    torch.manual_seed(3)
    table = nn.Embedding(8, WIDTH)  # needs no weight in its backward: plain torch lets it change
    plain, model = table, wrapped(copy.deepcopy(table))
    for one, device in ((plain, "cpu"), (model, torch_xla.device())):
        out = one(torch.tensor([1, 2, 2]).to(device)).square().sum()
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(2)
        out.backward()
    assert_same_gradients(model, plain)


def with_complex_weight():
    def compute(self, x):
        y = x.to(torch.complex64) @ self.weight
        return 12 * (y.real * y.imag + y.imag)

    torch.manual_seed(3)
    return Computes(compute, weight=nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64)))


def multiplied(factor, model):
    """A middle layer's gradient alone; not of the padding, which is zero."""
    parameter = dict(model.named_parameters())["1.0.bias"]
    parameter.register_hook(lambda grad: torch.where(grad == 0, grad, grad * factor))


@pytest.mark.parametrize(
    "build, loss_of, factor",
    [
        pytest.param(with_complex_weight, lambda model, x: model(x).mean(), None, id="complex"),
        *((mlp, mean_square, float(factor)) for factor in ("nan", "inf")),
    ],
)
@on_each_rank(2)
def test_norms_of_unusual_gradients(rank, build, loss_of, factor):
    for norm_type in (1.0, 2.0, 3.0, float("inf")):
        plain, model = build(), wrapped(build(), *(["1"] if factor else []))
        for one, x in ((plain, inputs_of_all()), (model, here(rank))):
            if factor:
                multiplied(factor, one)
            loss_of(one, x).backward()
        norm = model.clip_grad_norm_(0.5, norm_type)
        # torch_xla replaces torch's function by one that fails for complex gradients.
        grads = [p.grad for p in plain.parameters()]
        expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]), norm_type)
        for grad in grads:
            grad.mul_((0.5 / (expected + 1e-6)).clamp(max=1.0))
        assert factor or expected > 0.5  # so that it matters
        torch.testing.assert_close(norm.cpu(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)
        assert_same_gradients(model, plain, equal_nan=True)


@on_each_rank(2)
def test_loss_scaling_asks_all_ranks(rank):
    def values(model):
        torch_xla.sync()
        return {name: p.detach().cpu() for name, p in model.named_parameters()}

    rows = {"shard_param_on_dim_0": True}  # no rank has padding alone
    host = {"cpu_offload": xla_fsdp.CPUOffload()}  # rank 1 has only padding of the first parameter
    ours, torchs = xla_fsdp.ShardedGradScaler, functools.partial(torch.amp.GradScaler, "xla")
    for bad, options, fused, make in [
        (None, rows, False, ours), (0, rows, False, ours), (1, rows, False, ours),
        (None, host, False, ours), (0, host, False, ours), (None, host, True, ours),
        (0, host, True, ours), (None, {}, False, torchs), (0, rows, False, torchs),
    ]:  # fmt: skip
        model, plain = wrapped(mlp(), **options), mlp()
        mine = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        scaler = make(init_scale=8.0, growth_interval=1)
        before = values(model)
        scaler.scale(mean_square(model, here(rank))).backward()
        if rank == bad:
            next(model.parameters()).grad.to_local()[0] = float("inf")
        if not fused:
            scaler.unscale_(mine)
            norm = model.clip_grad_norm_(1.0)
        scaler.step(mine)
        scaler.update()
        after = values(model)
        if bad is None:
            mean_square(plain, inputs_of_all()).backward()
            if not fused:
                expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
                torch.testing.assert_close(norm.cpu(), expected, rtol=1e-4, atol=1e-6)
            theirs.step()
            assert scaler.get_scale() == 16.0
            found = whole(model, model.state_dict())
            torch.testing.assert_close(found, plain.state_dict(), rtol=1e-4, atol=1e-6)
        else:
            assert scaler.get_scale() == 4.0
            assert all(torch.equal(before[name], after[name]) for name in before)
        assert len(set(xm.mesh_reduce("scale", scaler.get_scale(), list))) == 1

    model = wrapped(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(here(rank)).sum().backward()
    raises(RuntimeError, r"call optimizer.step\(\)", xm.optimizer_step, optimizer)
    raises(RuntimeError, "shards, such as that of '0.weight'", xm.reduce_gradients, optimizer)
    raises(RuntimeError, "'0.weight', by those of the first rank", xm.broadcast_master_param, model)
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    with pytest.raises(RuntimeError, match="needs parameter '0.weight'"):
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    # Those that a script has which imported them before it imported torch_xla, or wrapped.
    of_torch_xla = torch_xla._patched_functions.clip_grad_norm_
    for clip in (of_torch_xla, of_torch_xla._orig):
        torch.testing.assert_close(
            clip(model.parameters(), 1e9), model.clip_grad_norm_(1e9), rtol=1e-6, atol=0
        )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(8, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, i):
        assert self.embed.weight.shape == (8, WIDTH)  # as in plain torch
        assert self.embed.weight.dtype is torch.float32 and self.embed.weight.requires_grad
        return F.linear(self.encode(i), self.embed.weight)

    def encode(self, i):
        return self.body(self.embed(i))

    def size(self):
        return self.body.weight.shape[0] * 10


class Around(nn.Module):
    """Answers with what the module inside has, as a PeftModel does."""

    def __init__(self):
        super().__init__()
        self.base = Tied()

    def forward(self, i):
        return self.base(i)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base, name)


@pytest.mark.parametrize("rows", [False, True])
@on_each_rank(2)
def test_parameters_of_another_unit(rank, rows):
    i = torch.tensor([1, 2]).to("xla")
    model = wrapped(Tied(), "embed", shard_param_on_dim_0=rows)
    for one in (model, copy.deepcopy(model)):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                text = "needs parameter 'embed.weight', which is.*or exclude that module from the p"
                raises(RuntimeError, text, one, i)
    assert model.size() == 10 * WIDTH
    for kind in (Tied, Around):
        plain, model = kind(), wrapped(kind(), shard_param_on_dim_0=rows)
        raises(RuntimeError, "needs parameter '.*register_fsdp_forward_method", model.encode, i)
        register_fsdp_forward_method(model, "encode")
        model(i).square().sum().backward()
        model.encode(i).square().sum().backward()
        plain(i.cpu()).square().sum().backward()
        plain.encode(i.cpu()).square().sum().backward()
        assert_same_gradients(model, plain)
    raises(AttributeError, "has no method .decode.", register_fsdp_forward_method, model, "decode")
    register_fsdp_forward_method(plain, "encode")  # of no effect

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    attention.out_proj = FSDP(attention.out_proj)
    with pytest.raises(RuntimeError, match="needs parameter 'out_proj.weight'"):
        FSDP(attention)(*[torch.ones(2, 3, 8).to("xla")] * 3)


@on_each_rank(2)
def test_what_a_wrapper_can_not_use_is_refused(rank):
    model = wrapped(nn.Sequential(mlp()), "0")
    for move in (lambda: model.cpu(), lambda: nn.Sequential(model).to("cpu")):
        raises(RuntimeError, "shards of a wrapped module stay on xla", move)
    model.to("xla").double().float()
    flat = FSDP(mlp(), flatten_parameters=True)
    with pytest.raises(RuntimeError, match="module '0.0' are flattened into the vector of another"):
        FSDP(nn.Sequential(flat.module))
    FSDP(nn.Sequential(flat))(here(rank))

    plain, model = mlp(), wrapped(mlp(), "1")
    given = {name: torch.zeros_like(p) for name, p in plain.named_parameters()}
    given = {name: value.to("xla") for name, value in given.items()}
    with pytest.raises(RuntimeError, match="is not the shard that .*functional_call"):
        torch.func.functional_call(model, given, (here(rank),))
    again = torch.func.functional_call(model, dict(model.named_parameters()), (here(rank),))
    torch.testing.assert_close(again.cpu(), plain(inputs(rank)), rtol=1e-5, atol=1e-6)
    model.module[0].weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, device="xla"))
    raises(RuntimeError, "parameter '0.weight' is not the shard", model, here(rank))


@on_each_rank(2)
def test_names_are_those_of_plain_torch(rank):
    parent = nn.Sequential(wrapped(mlp(), "1"), nn.Linear(3, 3), wrapped(mlp()))
    parent.to("xla")
    plain = nn.Sequential(mlp(), nn.Linear(3, 3), mlp())
    expected = [name for name, _ in plain.named_parameters()]
    for one in (parent, plain):
        assert [name for name, _ in one.named_parameters()] == expected
        assert list(one.state_dict()) == expected
        names = list(dict.fromkeys(name for name, _ in one.named_modules()))
        assert names == [name for name, _ in plain.named_modules()]
    for name, _ in plain.named_modules():
        parent.get_submodule(name)
    state = parent.state_dict()
    state["0.1.0.weight"] = state["0.1.0.weight"][:3]
    state["2.0.other"] = state.pop("2.0.weight")
    with pytest.raises(RuntimeError) as failed:
        parent.load_state_dict(state)
    said = str(failed.value)
    for part in ('Missing key(s) in state_dict: "2.0.weight"', '"2.0.other"', "for 0.1.0.weight:"):
        assert part in said, said
    assert "_fsdp_wrapped_module" not in said
    state["0.1.0.weight"] = parent.state_dict()["0.1.0.weight"]
    found = parent.load_state_dict(state, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["2.0.weight"], ["2.0.other"])


@on_each_rank(2)
def test_attributes_set_on_the_wrapper_are_the_modules(rank):
    def tempered():
        return with_layer(
            lambda self, x: self.added(self.layer(x) * self.temperature * self.gain + self._depth),
            temperature=1.0,
            _depth=1,
        )

    plain, model = tempered(), wrapped(tempered())
    for one in (plain, model):
        one.temperature, one._depth, one.note = 3.0, 5, "mine"
        gain = torch.tensor(2.0, device="cpu" if one is plain else "xla")
        one.register_buffer("gain", gain, persistent=False)
        one.add_module("added", nn.ReLU())
    torch.testing.assert_close(model(here(rank)).cpu(), plain(inputs(rank)), rtol=1e-5, atol=1e-6)
    assert model.module.temperature == model.temperature == 3.0
    assert model.note == model.module.note == "mine"
    assert model.module.gain is model.gain and "gain" not in model.state_dict()
    del model.note
    assert not hasattr(model, "note") and not hasattr(model.module, "note")
    model.eval()
    assert not model.training and not model.module.training
    for one in (wrapped(mlp().eval()), scan_blocks([nn.Linear(WIDTH, WIDTH).eval()])):
        assert not one.training
        one.training = True
        assert one.module.training


@on_each_rank(2)
def test_likely_mistakes_are_told_of(rank):
    def built(**options):
        torch.manual_seed(rank)
        return wrapped(nn.Sequential(nn.Linear(WIDTH, WIDTH)), "0", **options)

    late, loaded = wrapped(mlp()), built()
    late.module.add_module("late", nn.Linear(3, 3).to("xla"))
    with every_rank_warns(rank, "'late.weight', 'late.bias' came into the model after"):
        late(here(rank))
    shared = mlp()
    shared[1][0].weight.data = shared[0].weight.data
    with every_rank_warns(rank, "'0.weight' and '1.0.weight' are different, but share memory"):
        wrapped(shared)
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    blocks[1].weight.data = blocks[0].weight.data
    with every_rank_warns(rank, "'0.weight' and '1.weight' are different, but share memory"):
        scan_blocks(blocks)
    model = built()
    with warnings_of_ranks(rank) as found:
        model(here(rank))
    assert rank or any("ranks built '0'" in one and "sync_module_states" in one for one in found)
    loaded.load_state_dict(copy.deepcopy(loaded.state_dict()))
    # Of the model that the warning was of, it is given once.
    for quiet in (model, loaded, wrapped(mlp(), "1"), built(sync_module_states=True)):
        with every_rank_warns(rank, None):
            quiet(here(rank))


class WithBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("mask", torch.rand(WIDTH) > 0.5)
        self.register_buffer("count", torch.randint(10, ()))

    def forward(self, x):
        return self.layer(x) * self.scale * self.mask + self.count


@pytest.mark.parametrize("options", [{}, {"flatten_parameters": True}])
@on_each_rank(3)
def test_states_of_rank_0_everywhere(rank, options):
    torch.manual_seed(10 + rank)
    model = nn.Sequential(WithBuffer(), WithBuffer())
    first = xm.mesh_reduce("first", model.state_dict(), lambda states: states[0])
    plain = copy.deepcopy(model)
    plain.load_state_dict(first)
    model = wrapped(model, "1", sync_module_states=True, **options)
    out = model(here(rank))
    torch_xla.sync()
    torch.testing.assert_close(out.cpu(), plain(inputs(rank)), rtol=1e-5, atol=1e-6)


def programs_of_states(rank, layers, width):
    torch_xla.sync()
    mine = torch.full((3,), rank + 1.0).to("xla")
    total = xm.all_reduce(xm.REDUCE_SUM, mine)  # pending all the while
    before = sum(xla_fsdp.compilation_counts())
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    wrapped(model, sync_module_states=True)
    found = sum(xla_fsdp.compilation_counts()) - before
    assert total.tolist() == [3.0] * 3
    return found


def test_states_of_rank_0_are_no_more_programs_for_more_layers(run_ranks):
    few, many = (run_ranks(programs_of_states, 2, n, width)[0] for n, width in ((2, 5), (6, 7)))
    assert few == many <= 3  # one for weights, one for biases, and the shards


REFERENCE_FIRST = """
import sys
import torch, torch_xla
from torch import nn
import xla_fsdp
from xla_fsdp.planning.tracing.step import trace_step

def train(rank=0):
    model = xla_fsdp.XlaFullyShardedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4).to("xla")).sum().backward()
    return rank

kind, started = sys.argv[1:]
if started == "started":  # the remedy that the message names
    if kind == "launch":
        xla_fsdp.launch(lambda rank: None, num_devices=2)
    else:
        torch_xla.device()
nn.Linear(4, 4)(torch.ones(2, 4)).sum().backward()
try:
    if kind == "launch":
        print(xla_fsdp.launch(train, num_devices=2))
    else:
        print(trace_step(train, 0, 2).program is not None)
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "kind, remedy, result",
    [
        ("launch", "xla_fsdp.launch(lambda rank: None, num_devices=2)", "[0, 1]"),
        ("plan", "Call torch_xla.device() before that backward", "True"),
    ],
)
def test_a_reference_in_plain_torch_comes_first(run_script, kind, remedy, result):
    refused = run_script(REFERENCE_FIRST, kind, "late")
    assert "this process ran a backward before XLA's runtime started" in refused.stdout
    assert remedy in refused.stdout
    assert run_script(REFERENCE_FIRST, kind, "started").stdout.endswith(f"{result}\n")


WIDE = 128


class Model(nn.Module):
    """Vectors as long as a shard: of these, one rank has all and the other nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.norm = nn.LayerNorm(WIDE)
        self.layer = nn.Linear(WIDE, 3)
        self.penalised = [self.layer.weight]

    def forward(self, x, penalty=False):
        y = self.layer(self.norm(x))
        return y.sum() + sum(p.square().sum() for p in self.penalised) if penalty else y


def layers_called_by_themselves(rank):
    x = torch.ones(2, WIDE).to("xla")
    for options in ({}, {"shard_param_on_dim_0": True}, {"flatten_parameters": True}):
        model = wrapped(Model(), **options)
        model(x)
        for call in (model.norm, model.layer, model.module):
            raises(RuntimeError, "(norm|layer).*is sharded here.*all the wrap", call, x)
        assert torch.equal(model(x).cpu(), Model()(x.cpu()))

    def reads(self, x):
        return nn.functional.linear(x, self.layer.weight)

    layer = wrapped(nn.Linear(WIDE, 6), shard_param_on_dim_0=True)
    with pytest.raises(RuntimeError, match="'weight', which is sharded here"):
        Computes(reads, layer=layer)(x)  # which has no wrapper itself
    model = wrapped(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDE, 6))))
    with pytest.raises(RuntimeError, match="weight.original.', which is sharded here"):
        print(model[0].weight)


def objects_kept_from_before(rank):
    plain = Model()
    before = list(plain.parameters())
    model = wrapped(plain)
    text = "square needs .*'layer.weight' in its wrapper.* empty.* shards from model.parameters"
    raises(RuntimeError, text, model, torch.ones(2, WIDE).to("xla"), penalty=True)
    text = "no effect.*'norm.bias' in its wrapper.*Freeze and unfreeze parameters of the wrapped"
    with pytest.raises(RuntimeError, match=text):
        before[1].requires_grad = False
    with pytest.raises(RuntimeError, match="to .data needs .*'norm.weight' in its wrapper"):
        before[0].data = torch.zeros(WIDE)
    before[0].requires_grad_()
    # What needs no values is answered. One that is tied to it finds its shards, if it can.
    assert before[0].dtype is torch.float32 and before[0].requires_grad and before[0].grad is None
    assert repr(before[0]) and before[0] in set(before) and isinstance(before[0], nn.Parameter)

    def holder():
        layer = nn.Linear(WIDE, 3, bias=False)
        layer.weight = before[2]
        return layer

    x = torch.ones(2, WIDE).to("xla")
    expected = wrapped(holder())(x)
    assert expected.shape == (2, 3)
    assert torch.equal(wrapped(holder().to("xla"))(x), expected)
    with pytest.raises(RuntimeError, match="'weight' of Linear is tied .* that was moved since"):
        wrapped(holder()._apply(lambda tensor: tensor.to("xla")))


def read_in_hooks(rank):
    """Around the wrapper, and in the backward, where no forward has gathered."""

    x = torch.ones(2, WIDE).to("xla")
    for register, hook in (
        ("register_forward_hook", lambda m, given, y: y * m.layer.weight.norm()),
        ("register_forward_pre_hook", lambda m, given: given[0] * m.layer.weight.norm()),
    ):
        model, plain = wrapped(Model()), Model()
        getattr(model, register)(hook)
        getattr(plain, register)(hook)
        given = torch.linspace(-1, 2, 2 * WIDE).view(2, WIDE)
        torch.testing.assert_close(model(given.to("xla")).cpu(), plain(given), rtol=1e-4, atol=1e-5)
    model, plain = wrapped(Model()), Model()
    for one in (model, plain):
        one.register_full_backward_pre_hook(lambda m, grads: (grads[0] * m.layer.weight.norm(),))
        one(x.to(next(one.parameters()).device)).sum().backward()
    assert_same_gradients(model, plain)
    model = wrapped(Model())
    shard, seen = next(model.parameters()), []
    model.register_full_backward_pre_hook(lambda *_: seen.append(shard.grad))
    for _ in range(2):
        model(x).sum().backward()
    assert seen[0] is None and seen[1] is shard.grad


def a_layer_replaced_later(rank):
    model = wrapped(Model())
    x = torch.ones(2, WIDE).to("xla")
    model(x).sum().backward()
    model.layer = nn.Linear(WIDE, 3).to("xla")
    model(x).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    match = r"parameter 2 of group 0 of this SGD, of shape \[3, 128\], is in no wrapper"
    with every_rank_warns(rank, match):
        optimizer.step()
    with every_rank_warns(rank, None):
        optimizer.step()


def penalised(penalty):
    torch.manual_seed(4)
    return Computes(
        lambda self, x: self.own(self.inside(x)).square().mean() + penalty(self),
        inside=nn.Linear(WIDE, WIDE),
        own=nn.Linear(WIDE, 3),
    )


def parameters_gone_through_in_a_forward(rank):
    """Norms are those of the full parameters. A vector of several has none of its own."""
    x = torch.ones(2, WIDE).to("xla")
    penalties = (
        lambda model: sum(p.norm() for p in model.parameters()),
        lambda model: sum(
            p.norm() for m in model.modules() for p in m._parameters.values() if p is not None
        ),
    )
    for penalty in penalties:
        plain = penalised(penalty)
        plain(x.cpu()).backward()
        model = wrapped(penalised(penalty), "inside")
        model(x).backward()
        assert_same_gradients(model, plain, atol=1e-4)
    model = wrapped(penalised(penalties[0]), "inside", flatten_parameters=True)
    raises(RuntimeError, "'inside.flat_param_0', which is .* contains several", model, x)

    def looks(model):
        for parameter in model.parameters():
            assert parameter.dtype is torch.float32 and parameter.device.type == "xla"
            assert isinstance(parameter, nn.Parameter) or parameter.grad_fn is not None
        model.inside.requires_grad_(False)
        (model.inside.bias if trained else next(model.inside.parameters())).requires_grad_(True)
        torch.nn.utils.clip_grad_norm_(model.inside.parameters(), 1.0)
        return 0.0

    for trained in (True, False):
        model = wrapped(penalised(looks), "inside")
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model(x)
        weight, bias = model.module.inside.sharded_params
        assert (weight.requires_grad, bias.requires_grad) == (not trained, trained)
        assert weight.grad.max().item() < 1
        copy.deepcopy(model)


class Negative(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        return -found if func is nn.functional.linear else found


def what_hangs_on_parameters(rank):
    def hooked(register):
        layer = nn.Linear(6, 6)
        getattr(layer.weight, register)(lambda given: None)
        return layer

    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        for wrap in (wrapped, lambda layer: scan_blocks([layer])):
            raises(RuntimeError, "weight' has a hook .*Register it", wrap, hooked(register))
    with pytest.raises(RuntimeError, match="'0.weight' has a hook from before"):
        wrapped(nn.Sequential(hooked("register_hook")), flatten_parameters=True)
    layer = nn.Linear(6, 6)
    layer.weight = Negative(layer.weight.detach())
    raises(TypeError, "'weight' is a Negative, which overrides operators", wrapped, layer)
    assert wrapped(nn.Sequential(layer), ignored_modules=[layer])
    layer = nn.Linear(6, 6)
    layer.bias.grad = torch.zeros(6)
    with every_rank_warns(rank, "'bias' has a gradient from before the wrapping"):
        wrapped(layer)

    def keeps(self, x):
        self.__dict__["kept"] = self.layer.weight
        return self.layer(x)

    model = wrapped(Computes(keeps, layer=nn.Linear(6, 6)), disable_reshard_on_root=False)
    model(here(rank))
    assert model.module.kept.sum().isnan()  # was freed since


def options(rank):
    # Ranks with different shards would average the gradients of these.
    for groups in ([[0, 1]], [[0, 2], [1, 3]]):
        with pytest.raises(ValueError, match="replication_groups=.* must contain each rank of"):
            wrapped(nn.Linear(6, 6), replication_groups=groups)
    model = wrapped(nn.Linear(6, 6))
    raises(ValueError, "each of the 2 ranks once", model.clip_grad_norm_, 1.0, groups=[[0]])


def padding_that_is_filled(rank):
    """What sets all elements of a shard sets those of its padding."""
    for make in (LAMB, LARS, Adafactor):
        plain, model = nn.Linear(6, 5), wrapped(nn.Linear(6, 5))
        for one in (plain, model):
            for parameter in one.parameters():
                nn.init.constant_(parameter, 0.5)
                parameter.grad = torch.zeros_like(parameter)
            x = torch.ones(2, 6, device=next(one.parameters()).device)
            one(x).square().sum().backward()
            make(one.parameters(), lr=0.1, weight_decay=0.1).step()
        found = whole(model, model.state_dict())
        torch.testing.assert_close(found, plain.state_dict(), rtol=1e-5, atol=1e-6)


@on_each_rank(2)
def test_each_is_right_or_refused(rank):
    layers_called_by_themselves(rank)
    parameters_gone_through_in_a_forward(rank)
    objects_kept_from_before(rank)
    read_in_hooks(rank)
    a_layer_replaced_later(rank)
    what_hangs_on_parameters(rank)
    options(rank)
    padding_that_is_filled(rank)


def moves(self, x):
    return self.layer(x.to(self.layer.weight.device))


def moves_and_fails(self, x):
    moves(self, x)
    raise RuntimeError("no such table")


VECTORS, SIGNALS = torch.ones(2, 4), torch.ones(2, 3, 8)
ON_THE_CPU = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), [SIGNALS]),
    "linear": (lambda: nn.Linear(4, 4), [VECTORS]),
    "embedding": (lambda: nn.Embedding(4, 4), [torch.tensor([1, 2])]),
    "lstm": (lambda: nn.LSTM(4, 4), [torch.ones(2, 2, 4)]),
    "attention": (lambda: nn.MultiheadAttention(4, 2), [VECTORS] * 3),
    "checkpointed": (lambda: xla_fsdp.checkpoint_module(nn.Conv1d(3, 4, 3)), [SIGNALS]),
    "scanned": (lambda: xla_fsdp.scan_blocks([nn.Linear(4, 4), nn.Linear(4, 4)]), [VECTORS]),
}


@on_each_rank(2)
def test_inputs_on_the_cpu(rank):
    for name, (build, given) in ON_THE_CPU.items():
        models = [build()] if name == "scanned" else [FSDP(build()), xla_fsdp.fully_shard(build())]
        if len(given) == 1:
            models.append(FSDP(nn.Sequential(build())))
        for model in models:
            with pytest.raises(RuntimeError) as caught:
                model(*given)
            message, shape = str(caught.value), tuple(given[0].shape)
            assert f"tensor of shape {shape} on cpu, while its parameters" in message, (name, model)
            assert message.count(f"move inputs there with .to('xla:{rank}')") == 1, (name, model)
            assert caught.value.__cause__ is not None
        models[0](*[value.to(f"xla:{rank}") for value in given])  # the remedy
    loss = wrapped(with_layer(lambda self, x, y: F.cross_entropy(self.layer(x), y)))
    target = torch.tensor([1, 2])
    raises(RuntimeError, r"shape \(2,\) on cpu", loss, here(rank), target)
    loss(here(rank), target.to("xla")).backward()
    assert wrapped(with_layer(moves))(inputs(rank)).device.type == "xla"
    with pytest.raises(RuntimeError, match=r"^no such table\n.* on cpu, while"):
        wrapped(with_layer(moves_and_fails))(inputs(rank))
    # All on the device: what torch says of it.
    with pytest.raises(RuntimeError) as caught:
        FSDP(nn.Linear(4, 4))(torch.ones(2, 5, device="xla"))
    assert type(caught.value) is RuntimeError and "move inputs" not in str(caught.value)


CONVOLUTIONS = {
    "one pixel": (lambda: nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2)),
    "float64": (lambda: nn.Conv2d(3, 4, 3).double(), torch.ones(2, 3, 8, 8, dtype=torch.float64)),
}


@on_each_rank(2)
def test_convolutions_that_compute_on_the_cpu(rank):
    for build, images in CONVOLUTIONS.values():
        for wrap in (FSDP, xla_fsdp.fully_shard):
            model, shape = wrap(build()), re.escape(str(tuple(images.shape)))
            with every_rank_warns(rank, f"tensor of shape {shape} on cpu and returned its result"):
                loss = model(images).sum()
            with pytest.raises(RuntimeError):
                loss.backward()
            with every_rank_warns(rank, None):  # the remedy
                model(images.to(f"xla:{rank}")).sum().backward()
    with every_rank_warns(rank, None), torch.no_grad():
        xla_fsdp.fully_shard(nn.Conv2d(1, 1, 1))(torch.ones(1, 1, 2, 2))


@on_each_rank(2)
def test_steps_without_sync(rank):
    for wrap in (FSDP, xla_fsdp.fully_shard):
        for every, warning in ((12, "the last 8 steps of SGD were traced, but none"), (4, None)):
            model = wrap(nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with every_rank_warns(rank, warning):
                for step in range(12):
                    model(torch.ones(2, 4).to("xla")).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step % every == every - 1:
                        torch_xla.sync()


@on_each_rank(2)
def test_a_policy_that_chooses_nothing(rank):
    of_class = xla_fsdp.transformer_auto_wrap_policy
    size = xla_fsdp.size_based_auto_wrap_policy

    def build():
        return nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Tanh(), nn.Linear(6, 6)))

    message = r"none of the submodules of Sequential, .* classes \(Linear, Sequential, Tanh\)"
    for policy, warning in [
        (functools.partial(of_class, transformer_layer_cls={nn.Transformer}), message),
        (lambda module, recurse, unwrapped_params: recurse, message),
        (functools.partial(of_class, transformer_layer_cls={nn.Linear}), None),
        (functools.partial(size, min_num_params=10**9), None),
        (xla_fsdp.always_wrap_policy, None),
    ]:
        with every_rank_warns(rank, warning):
            FSDP(build(), auto_wrap_policy=policy)
    with every_rank_warns(rank, None):  # there is nothing to choose
        FSDP(nn.Linear(6, 6), auto_wrap_policy=xla_fsdp.always_wrap_policy)

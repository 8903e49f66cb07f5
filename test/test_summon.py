"""Full parameters outside of a forward: what is read, changed, initialised equals plain torch."""

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from on_ranks import on_each_rank, only_full, raises, slow
from small_models import Computes, assert_same_gradients, trace_as_on_tpu, whole
from small_models import wrapped as wrap
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import scan_blocks

WIDTH, WORDS = 4, 5


class Model(nn.Module):
    """Tied across and inside units, frozen, without dimensions, without elements, recurrent."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(6)
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, 7)
        self.again = nn.Linear(WIDTH, 7)
        self.down = nn.Linear(7, WIDTH)
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.embed.weight
        self.again.weight = self.up.weight
        self.down.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, words):
        x = self.embed(words) * self.scale
        x = x + self.down(torch.tanh(self.up(x)) + self.again(x)) * self.gain + self.empty.sum()
        return self.head(self.rnn(x)[0])


KINDS = {
    "root": {},
    "nested": {},
    "flat": {"flatten_parameters": True},
    "dim0": {"shard_param_on_dim_0": True},
    "narrow": {"compute_dtype": torch.bfloat16},
}


def wrapped(kind: str):
    return wrap(Model(), *(("embed", "rnn") if kind == "nested" else ()), **KINDS[kind])


def words(rank: int) -> torch.Tensor:
    return torch.randint(WORDS, (2, 3), generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, plain: nn.Module, rank: int) -> None:
    every = torch.cat([words(r) for r in range(xr.world_size())])
    for one, x in ((model, words(rank).to("xla")), (plain, every)):
        (one(x).float() - 1).square().mean().backward()
    torch_xla.sync()


def assert_same_values(model: nn.Module, plain: nn.Module) -> None:
    ours = whole(model, dict(model.named_parameters(remove_duplicate=False)))
    for name, value in plain.named_parameters(remove_duplicate=False):
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-6, atol=1e-7)


def assert_is(model: nn.Module, plain: nn.Module, device: str = "xla") -> None:
    for duplicates in (True, False):
        ours = list(model.named_parameters(remove_duplicate=duplicates))
        theirs = list(plain.named_parameters(remove_duplicate=duplicates))
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        for (name, own), (_, value) in zip(ours, theirs, strict=True):
            assert isinstance(own, nn.Parameter) and own.device.type == device, name
            assert (own.shape, own.dtype) == (value.shape, value.dtype), name
            assert own.requires_grad == value.requires_grad, name
            torch.testing.assert_close(own.detach().cpu(), value.detach(), rtol=0, atol=0)
    assert list(model.state_dict()) == list(plain.state_dict())


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.mul_(0.5).add_(number / 64)  # saturates nothing
    model.up.bias.data = model.up.bias.data - 0.1
    model.head.bias.data.mul_(-1)
    model.gain.requires_grad_(False)
    model.gain.requires_grad_(True)


def refused(error, match, given, **options):
    with pytest.raises(error, match=match):
        with FSDP.summon_full_params(given, **options):
            raise AssertionError("not refused")


def reading_and_writing(rank, kind):
    plain, model = Model(), wrapped(kind)
    shards = list(model.parameters())
    values = [shard._version for shard in shards]
    with FSDP.summon_full_params(model):
        assert_is(model, plain)
        assert model.head.weight is model.module.embed.weight
        refused(RuntimeError, "summoned already", model)
    assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))
    assert [shard._version for shard in shards] == values  # nothing was changed, nothing written
    with FSDP.summon_full_params(model):
        change(model)
    change(plain)
    assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))
    assert_same_values(model, plain)
    for options in ({"offload_to_cpu": True}, {}):
        with FSDP.summon_full_params(model, **options):
            assert_is(model, plain, "cpu" if options else "xla")
            model.embed.weight.data[1] = 0.5
            model.up.weight.data.mul_(0.1)
        plain.embed.weight.data[1] = 0.5
        plain.up.weight.data.mul_(0.1)
        assert_same_values(model, plain)
    with FSDP.summon_full_params(model, writeback=False):
        change(model)
    with pytest.raises(KeyError, match="mine"):
        with FSDP.summon_full_params(model):
            change(model)
            raise KeyError("mine")
    assert_same_values(model, plain)
    with FSDP.summon_full_params(model, writeback=False, rank0_only=True, offload_to_cpu=True):
        if rank == 0:
            assert_is(model, plain, "cpu")
        else:
            assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))


def gradients_too(rank, kind):
    plain, model = Model(), wrapped(kind)
    train(model, plain, rank)
    assert_same_gradients(model, plain)
    with FSDP.summon_full_params(model):
        assert all(parameter.grad is None for parameter in model.parameters())
    with FSDP.summon_full_params(model, with_grads=True):
        for (name, own), value in zip(model.named_parameters(), plain.parameters(), strict=True):
            if value.grad is None and (kind != "flat" or not value.requires_grad):
                assert own.grad is None, name
            elif value.grad is not None:
                torch.testing.assert_close(own.grad.cpu(), value.grad, rtol=1e-4, atol=1e-6)
        model.up.weight.grad.mul_(3)
        model.gain.grad = None
        model.down.weight.grad = torch.ones_like(model.down.weight)
    plain.up.weight.grad.mul_(3)
    plain.gain.grad = None
    plain.down.weight.grad = torch.ones_like(plain.down.weight)
    assert_same_gradients(model, plain)
    with FSDP.summon_full_params(model, with_grads=True, offload_to_cpu=True):
        model.up.weight.grad.mul_(2)
    plain.up.weight.grad.mul_(2)
    assert_same_gradients(model, plain)
    assert_same_values(model, plain)
    with FSDP.summon_full_params(model):
        change(model)
    change(plain)
    model.zero_grad()
    plain.zero_grad()
    train(model, plain, rank)
    assert_same_gradients(model, plain)
    with model.no_sync():
        model(words(rank).to("xla")).sum().backward()
    refused(RuntimeError, "not reduced yet", model, with_grads=True)


def initialise(module: nn.Module) -> None:
    """What depends on what is there: a tied weight is met twice."""
    for name, parameter in module.named_parameters(recurse=False):
        with torch.no_grad():
            more = torch.arange(parameter.numel()).view(parameter.shape)
            parameter.mul_(3).add_(len(name) + more.to(parameter.device))


def applying(rank, kind):
    plain, model = Model(), wrapped(kind)
    assert model.apply(initialise) is model
    plain.apply(initialise)
    assert_same_values(model, plain)


@pytest.mark.parametrize("ranks", [2, slow(4)])
@on_each_rank(timeout=1500)
def test_full_parameters_are_read_and_written(rank):
    for kind in KINDS:
        reading_and_writing(rank, kind)
        applying(rank, kind)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, only_full(4)])
@on_each_rank(timeout=1500)
def test_with_gradients(rank):
    for kind in KINDS:
        if kind != "narrow":
            gradients_too(rank, kind)
    trace_as_on_tpu()
    gradients_too(rank, "nested")


@on_each_rank(2)
def test_parts_of_a_model_and_what_is_refused(rank):
    plain, model = Model(), wrapped("nested")
    inner = model.rnn
    flat_weights = inner.module._flat_weights
    with FSDP.summon_full_params(model, recurse=False):
        assert model.up.weight.shape == plain.up.weight.shape
        assert inner.module.weight_ih_l0.to_local().dim() == 1
        with FSDP.summon_full_params(inner):
            assert inner.module.weight_ih_l0.shape == plain.rnn.weight_ih_l0.shape
            assert inner.module._flat_weights[0] is inner.module.weight_ih_l0
            inner.module.weight_ih_l0.data.zero_()
        # Tied to a parameter that is held around it: the same one, written back once.
        with FSDP.summon_full_params(model.module.embed):
            assert model.module.embed.weight is model.head.weight
            model.module.embed.weight.data.mul_(2)
        refused(RuntimeError, "tied weights", model.module.embed, with_grads=True)
        model.head.weight.data.add_(1)
    plain.rnn.weight_ih_l0.data.zero_()
    plain.embed.weight.data.mul_(2).add_(1)
    assert inner.module._flat_weights[0] is flat_weights[0]
    assert_same_values(model, plain)
    with FSDP.summon_full_params(nn.Sequential(inner, nn.Linear(2, 2))):  # a parent unwrapped
        assert inner.module.weight_ih_l0.dim() == 2
    with FSDP.summon_full_params(nn.Linear(2, 2)):
        pass
    assert FSDP.fsdp_modules(model) == [model, model.module.embed, model.rnn]
    assert FSDP.fsdp_modules(model, root_only=True) == [model]
    several = [model.rnn, model.module.embed]
    assert FSDP.fsdp_modules(nn.ModuleList(several), root_only=True) == several
    assert FSDP.fsdp_modules(nn.Linear(2, 2)) == []

    refused(TypeError, "recurse must be True or False, got 1", model, recurse=1)
    refused(TypeError, "module must be a torch.nn.Module, got int", 3)
    refused(ValueError, "'Linear' belong to a wrapper around", model.module.up)
    scanned = FSDP(nn.Sequential(nn.Linear(4, 4), scan_blocks(nn.Linear(4, 4) for _ in range(2))))
    raises(ValueError, "xla_fsdp.full_state_dict", scanned.apply, initialise)

    def replaced():
        model.module.up.bias = nn.Parameter(torch.zeros(7))

    def reshaped():
        model.module.up.bias.data = torch.zeros(3, device="xla")

    for wrong, match in ((replaced, "'up.bias' is not the shard"), (reshaped, "shape \\(3,\\)")):
        with pytest.raises(RuntimeError, match=match):
            with FSDP.summon_full_params(model):
                model.module.up.weight.data.zero_()
                wrong()
    assert_same_values(model, plain)  # all or nothing

    class Asks(nn.Linear):
        def forward(self, x):
            with FSDP.summon_full_params(asking):
                return super().forward(x)

    asking = FSDP(Asks(4, 4))
    raises(RuntimeError, "cannot be summoned in a forward", asking, torch.ones(1, 4).to("xla"))


@on_each_rank(2)
def test_lists_of_full_parameters(rank):
    shapes, wrappers = [(3, WIDTH), (3,)], []

    def looks(self, x):
        listed = [*wrappers[-1].full_params]
        own = [self.inner.weight, self.inner.bias]
        assert all(a is b for a, b in zip(listed, own, strict=True))
        return self.inner(x)

    for flat in (False, True):
        model = FSDP(Computes(looks, inner=nn.Linear(WIDTH, 3)), flatten_parameters=flat)
        wrappers.append(model)
        model(torch.ones(2, WIDTH).to("xla")).sum().backward()
        with FSDP.summon_full_params(model):
            assert [tuple(p.shape) for p in model.full_params] == shapes
            held = list(model.parameters())
            assert all(a is b for a, b in zip(model.full_params, held, strict=True))
        with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
            if rank == 0:
                assert len(model.full_params) == 2
            else:
                with pytest.raises(RuntimeError, match="this rank has only its shards"):
                    model.full_params  # noqa: B018
        with pytest.raises(AttributeError):
            model.full_params = []
    assert FSDP(nn.Tanh()).full_params == []

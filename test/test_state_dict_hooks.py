"""State dicts of modules that say themselves what theirs is."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank, only_full, raises, slow
from small_models import Computes, wrapped
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys
from wrappings import assert_equal

import xla_fsdp
from xla_fsdp import full_state_dict, fully_shard, load_full_state_dict
from xla_fsdp.consolidate.errors import OtherRankError

WIDTH = 4


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.b = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.b.weight
        self.register_buffer("table", torch.linspace(0, 1, 3))

    def forward(self, x):
        return self.tied(self.b(self.a(x)))


class OwnMethods(Net):
    def state_dict(self, *args, **kwargs):
        own = super().state_dict(*args, **kwargs)
        return {f"net.{name}": value for name, value in own.items() if "b." not in name}

    def load_state_dict(self, state_dict, *args, **kwargs):
        given = {name.removeprefix("net."): value for name, value in state_dict.items()}
        return super().load_state_dict({**nn.Module.state_dict(self), **given}, *args, **kwargs)


class Folded(nn.Linear):
    """Saves a scaled weight under another name, and something of its own."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "doubled"] = 2 * self.weight.detach()
        destination[prefix + "bias"] = self.bias.detach()
        destination[prefix + "kind"] = "folded"

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        assert state_dict.pop(prefix + "kind") == "folded"
        state_dict[prefix + "weight"] = state_dict.pop(prefix + "doubled") / 2
        super()._load_from_state_dict(state_dict, prefix, *rest)


class WritesItself(nn.Linear):
    """Loads without torch's help, into the data of its parameters."""

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.weight.data = state_dict[prefix + "weight"].clone()
        self.bias.data.copy_(state_dict[prefix + "bias"])


class Replaced(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("seen", torch.zeros(2))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self.weight = nn.Parameter(state_dict[prefix + "weight"].clone())
        self.bias = nn.Parameter(state_dict[prefix + "bias"].clone())
        self.register_buffer("seen", state_dict[prefix + "seen"].clone())


class Stateful(nn.Linear):
    note = 0

    def get_extra_state(self):
        return {"note": self.note, "mean": self.weight.mean().item()}

    def set_extra_state(self, state):
        self.note = state["note"]


def with_b(kind):
    net = Net()
    net.b = kind(WIDTH, WIDTH)
    net.tied = nn.Linear(WIDTH, WIDTH)
    return net


def hooked():
    net = Net()

    def drop(module, state, prefix, metadata):
        del state[prefix + "table"]

    def half(module, state, prefix, metadata):
        state[prefix + "weight"] = state[prefix + "weight"].half()

    def rename(module, state, prefix, metadata):
        return type(state)((name.replace("a.0.", "first."), v) for name, v in state.items())

    def rename_back(module, state, prefix, *rest):
        for name in [name for name in state if "first." in name]:
            state[name.replace("first.", "a.0.")] = state.pop(name)

    def fill(state, prefix, *rest):
        state.setdefault(prefix + "table", torch.ones(3))

    net.register_state_dict_post_hook(drop)
    net.a[0].register_state_dict_post_hook(half)
    net._register_state_dict_hook(rename)
    net.register_load_state_dict_pre_hook(rename_back)
    net._register_load_state_dict_pre_hook(fill)
    return net


def prepared():
    net = Net()

    def clamp(module, prefix, keep_vars):
        with torch.no_grad():
            module.weight.clamp_(-0.1, 0.1)

    def forgive(module, incompatible):
        incompatible.missing_keys.clear()

    net.b.register_state_dict_pre_hook(clamp)
    net.register_load_state_dict_post_hook(forgive)
    return net


def halves_after_loading():
    net = Net()

    def halve(module, incompatible):
        with torch.no_grad():
            module.weight.mul_(0.5)
            module.num = 3

    net.b.register_load_state_dict_post_hook(halve)
    return net


def parametrized():
    net = Net()
    nn.utils.parametrizations.weight_norm(net.a[0])
    return net


MODELS = {
    "state_dict and load_state_dict": OwnMethods,
    "_save_to_state_dict": lambda: with_b(Folded),
    "data": lambda: with_b(WritesItself),
    "replaced": lambda: with_b(Replaced),
    "extra state": lambda: with_b(Stateful),
    "hooks": hooked,
    "pre-hook that changes values": prepared,
    "hook after loading": halves_after_loading,
    "parametrization": parametrized,
    "nothing of its own": Net,
}


def built(name, seed):
    torch.manual_seed(seed)
    net = MODELS[name]()
    with torch.no_grad():
        for buffer in net.buffers():
            buffer.add_(seed)
    return net


def hooked_afterwards(model):
    def rename(module, state, prefix, metadata):
        state[prefix + "later"] = state.pop(prefix + "table")

    def rename_back(module, state, prefix, *rest):
        state[prefix + "table"] = state.pop(prefix + "later")

    model.register_state_dict_post_hook(rename)
    model.register_load_state_dict_pre_hook(rename_back)
    return model


def wrap(net, form):
    if form == "in place":
        return wrapped(net, "a", "b", wrap=fully_shard)
    if form == "none":
        return net.to("xla")
    units = ["a"] if form == "nested" else []
    return wrapped(net, *units, flatten_parameters=form == "flat")


def same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert_equal(found[name], value)
        else:
            assert found[name] == pytest.approx(value), name


@pytest.mark.parametrize(
    "form",
    [
        "class",
        *(slow(form) for form in ("in place", "flat")),
        *(only_full(form) for form in ("nested", "none")),
    ],
)
@on_each_rank(2)
def test_full_state_is_what_the_module_makes_of_it(rank, form):
    for name in MODELS:
        if form != "class" and name == "pre-hook that changes values":
            continue
        later = hooked_afterwards if name == "nothing of its own" else lambda model: model
        expected = later(built(name, 1)).state_dict()
        model = later(wrap(built(name, 1), form))
        same(full_state_dict(model, rank0_only=False), expected)
        same(full_state_dict(copy.deepcopy(model), rank0_only=False), expected)

        for everywhere in (True, False):
            given = later(built(name, 2)).state_dict()
            plain = later(built(name, 1))
            keys = plain.load_state_dict(copy.deepcopy(given))
            model = later(wrap(built(name, 1), form))
            parameters = list(model.parameters())
            loaded = load_full_state_dict(model, given if everywhere or rank == 0 else None)
            assert loaded == (keys or _IncompatibleKeys([], [])), name
            assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
            same(full_state_dict(model, rank0_only=False), plain.state_dict())
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank))
            got = model.eval()(x.to("xla")).detach().cpu()
            assert torch.allclose(got, plain.eval()(x), atol=1e-5), (name, form)


def _rename_weight(module, state, prefix, metadata):
    state[prefix + "kernel"] = state.pop(prefix + "weight")
    state[prefix + "norm"] = module.weight.norm()


def _rename_weight_back(module, state, prefix, *rest):
    state[prefix + "weight"] = state.pop(prefix + "kernel")
    del state[prefix + "norm"]


def block(seen):
    module = Computes(lambda self, x: x + self.linear(x), linear=nn.Linear(WIDTH, WIDTH))
    module.register_buffer("seen", torch.full((2,), float(seen)))
    module.linear.register_state_dict_post_hook(_rename_weight)
    module.linear.register_load_state_dict_pre_hook(_rename_weight_back)
    return module


def of_blocks(seed, scan=lambda blocks: nn.Sequential(*blocks)):
    torch.manual_seed(seed)
    return Computes(lambda self, x: self.blocks(x), blocks=scan([block(n) for n in range(3)]))


@on_each_rank(2)
def test_files_and_scanned_blocks_go_the_same_way(rank, size, folder):
    expected = of_blocks(3)
    model = wrap(of_blocks(3, xla_fsdp.scan_blocks), "class")
    same(xla_fsdp.full_state_dict(model, rank0_only=False), expected.state_dict())
    other = of_blocks(4).state_dict()
    xla_fsdp.load_full_state_dict(model, other if rank == 0 else None)
    same(xla_fsdp.full_state_dict(model, rank0_only=False), other)

    names = "state_dict and load_state_dict", "hooks", "_save_to_state_dict", "hook after loading"
    for name in names:
        given = built(name, 2).state_dict()
        given = {n: value for n, value in given.items() if isinstance(value, torch.Tensor)}
        path = f"{folder}/{name}.pth"
        if rank == 0:
            torch.save(given, path)
        xm.rendezvous(path)
        if name != "_save_to_state_dict":  # has an entry that is no tensor
            plain = built(name, 1)
            plain.load_state_dict(torch.load(path))
            model = wrap(built(name, 1), "nested")
            xla_fsdp.load_weights(model, path)
            same(xla_fsdp.full_state_dict(model, rank0_only=False), plain.state_dict())

        model, path = wrap(built(name, 1), "nested"), f"{folder}/{name}.dcp"
        if name in ("hooks", "_save_to_state_dict"):
            raises(ValueError, "computes with parameters", xla_fsdp.to_dcp, path, model)
            state = xla_fsdp.full_state_dict(model)  # as the message says
            if rank == 0:
                dcp.save({"model": state}, checkpoint_id=path, no_dist=True)
            xm.rendezvous(path)
        else:
            xla_fsdp.to_dcp(path, model)
        read = built(name, 2).state_dict()
        dcp.load({"model": read}, checkpoint_id=path, no_dist=True)
        same(read, built(name, 1).state_dict())
        if name == "hook after loading":
            continue
        model = wrap(built(name, 2), "nested")
        xla_fsdp.from_dcp(path, model, allow_pickle=True)
        plain = built(name, 2)
        plain.load_state_dict(built(name, 1).state_dict())
        same(xla_fsdp.full_state_dict(model, rank0_only=False), plain.state_dict())


@on_each_rank(2)
def test_an_error_of_a_hook_is_raised_on_every_rank_and_changes_nothing(rank):
    def fail(*args):
        raise KeyError("of the user")

    net = Net()
    net.b.register_state_dict_post_hook(fail)
    model = wrap(net, "nested")
    raises((KeyError, OtherRankError), "of the user", full_state_dict, model)
    net.b._state_dict_hooks.clear()
    net.b.register_load_state_dict_pre_hook(fail)
    state, shards = full_state_dict(model, rank0_only=False), list(model.parameters())
    with pytest.raises((KeyError, OtherRankError), match="of the user"):
        load_full_state_dict(model, state if rank == 0 else None)
    assert type(model.module.a) is type(model)
    assert all(a is b for a, b in zip(shards, model.parameters(), strict=True))
    same(full_state_dict(model, rank0_only=False), state)

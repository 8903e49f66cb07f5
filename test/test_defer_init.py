"""Models on the meta device whose values come with a load, and what is said when they do not."""

import copy

import pytest
import torch
import torch_xla.runtime as xr
from on_ranks import on_each_rank
from safetensors.torch import save_file
from small_models import WIDTH, Computes, assert_same_gradients, here, inputs, whole
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import (
    defer_init,
    full_state_dict,
    fully_shard,
    load_checkpoint,
    load_full_state_dict,
    load_weights,
    save_checkpoint,
    scan_blocks,
)


class Conv1D(nn.Module):
    """As in GPT-2: a linear layer with a transposed weight, and no ``reset_parameters``."""

    def __init__(self, out, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, out).normal_(std=0.3))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(13)
        self.embed = nn.Linear(WIDTH, 5, bias=False)
        self.blocks = nn.ModuleList(
            nn.Sequential(Conv1D(WIDTH, 5), nn.Tanh(), Conv1D(5, WIDTH)) for _ in range(2)
        )
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 5))
        self.head = nn.Linear(5, WIDTH)
        self.back = nn.Linear(WIDTH, 5, bias=False)
        self.back.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.back(self.head(x * self.scale))


MISSING = ["head.weight", "head.bias"]


def built(kind):
    with torch.device("meta"):
        model = Model()
    if kind == "nested":
        for number, block in enumerate(model.blocks):
            model.blocks[number] = FSDP(block, param_init_fn=defer_init)
    return FSDP(model, param_init_fn=defer_init, flatten_parameters=kind == "flat")


def raises_naming(names, absent, doing="the first forward", call=None):
    with pytest.raises(RuntimeError, match=f"{doing} was called before") as caught:
        call()
    for name in names:
        assert repr(name) in str(caught.value), (name, str(caught.value))
    for name in absent:
        assert repr(name) not in str(caught.value)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@on_each_rank(timeout=1500)
def test_values_come_with_a_load_or_are_missed(rank, tmp_path):
    plain = Model()
    state = {n: v.clone() for n, v in plain.state_dict().items() if n != "back.weight"}
    if rank == 0:
        save_file(state, f"{tmp_path}/model.safetensors")
        part = {name: value for name, value in state.items() if not name.startswith("head")}
        save_file(part, f"{tmp_path}/part.safetensors")
    saved = save_checkpoint(f"{tmp_path}/run", FSDP(Model()), step=1)
    shards = {kind: FSDP(Model(), flatten_parameters=kind == "flat") for kind in ("root", "flat")}
    every = torch.cat([inputs(r) for r in range(xr.world_size())])
    plain(every).square().mean().backward()
    x = here(rank)
    for kind in ("root", "nested", "flat"):
        model = built(kind)
        names = ["embed.weight", "blocks.0.0.weight", "head.bias", "scale"]
        for doing, call in (
            ("the first forward", lambda m=model: m(x)),
            ("saving", lambda m=model: save_checkpoint(f"{tmp_path}/none", m, step=1)),
            ("full_state_dict", lambda m=model: full_state_dict(m)),
            (r"state_dict\(\)", lambda m=model: m.state_dict()),
            ("clip_grad_norm_", lambda m=model: m.clip_grad_norm_(1.0)),
        ):
            raises_naming(names[:3], [], doing, call)
        every = torch.optim.SGD(model.parameters(), lr=0.1)
        raises_naming([names[0], names[2]], [], r"SGD.step\(\)", every.step)
        model = copy.deepcopy(model).double().float()
        raises_naming(names[:3], [], call=lambda m=model: m(x))
        loaded = load_weights(model, f"{tmp_path}/part.safetensors", strict=False)
        assert loaded.missing_keys == MISSING
        raises_naming(MISSING, names[:2] + ["scale"], call=lambda m=model: m(x))
        if kind == "nested":  # the rest by hand
            with FSDP.summon_full_params(model), torch.no_grad():
                model.head.weight.copy_(state["head.weight"])
                model.head.bias.copy_(state["head.bias"])
        elif kind == "flat":
            load_weights(model, tmp_path)
        else:
            load_checkpoint(saved, model)
        model(x).square().mean().backward()
        assert_same_gradients(model, plain)
    for kind in ("root", "flat"):
        model = built(kind)
        model.load_state_dict(shards[kind].state_dict())
        assert torch.equal(model(x).cpu(), shards[kind](x).cpu())
    model = built("nested")
    load_full_state_dict(model, state if rank == 0 else None)
    found = whole(model, model.state_dict())
    assert all(torch.equal(found[name], value) for name, value in state.items())
    model(x)


@on_each_rank(2, timeout=1500)
def test_buffers_that_no_checkpoint_has(rank):
    def positions(device):
        with torch.device(device):
            weight = nn.Parameter(torch.ones(WIDTH))
            module = Computes(lambda self, x: x * self.weight + self.steps, weight=weight)
            module.register_buffer("steps", torch.arange(WIDTH).float(), persistent=False)
        return nn.Sequential(module)

    def loaded(init):
        model = FSDP(positions("meta"), param_init_fn=init)
        load_full_state_dict(model, {"0.weight": torch.ones(WIDTH)})
        return model

    expected = positions("cpu")(inputs(rank))
    model = loaded(defer_init)
    with pytest.raises(RuntimeError, match="before '0.steps' had values.* no checkpoint contains"):
        model(here(rank))
    with FSDP.summon_full_params(model):
        model.module[0].steps.copy_(torch.arange(WIDTH).float())
    assert torch.equal(model(here(rank)).cpu(), expected)

    def init(module):
        defer_init(module)
        module.steps = torch.arange(WIDTH).float()

    assert torch.equal(loaded(init)(here(rank)).cpu(), expected)


@on_each_rank(2, timeout=1500)
def test_values_of_scanned_blocks_come_with_a_load(rank):
    def model(device, **options):
        torch.manual_seed(3)
        with torch.device(device):
            blocks = [nn.Sequential(Conv1D(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        return blocks if not options else FSDP(nn.Sequential(scan_blocks(blocks, **options)))

    plain = nn.Sequential(*model("cpu"))
    sharded = model("meta", param_init_fn=defer_init)
    x = inputs(rank)
    for one in (sharded, copy.deepcopy(sharded)):
        raises_naming(["0.0.0.weight"], [], r"state_dict\(\)", one.state_dict)
    with torch.device("meta"):
        in_place = fully_shard(nn.Linear(WIDTH, 5), param_init_fn=defer_init)
    for one in (in_place, in_place.bfloat16(), copy.deepcopy(in_place)):
        raises_naming(["weight", "bias"], [], r"state_dict\(\)", one.state_dict)
    raises_naming(["0.0.0.weight", "0.2.0.bias"], [], call=lambda: sharded(x.to("xla")))
    state = {f"0.{name}": value for name, value in plain.state_dict().items()}
    part = {name: value for name, value in state.items() if not name.startswith("0.1")}
    load_full_state_dict(sharded, part, strict=False)
    raises_naming(["0.1.0.weight", "0.1.0.bias"], ["0.0.0.weight"],
                  call=lambda: sharded(x.to("xla")))  # fmt: skip
    load_full_state_dict(sharded, state)
    torch.testing.assert_close(sharded(x.to("xla")).cpu(), plain(x), rtol=1e-4, atol=1e-5)

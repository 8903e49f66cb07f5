"""ignored_modules and ignored_parameters: whole on every rank, and treated right everywhere."""

import copy
import functools

import pytest
import torch
import torch_xla
import torch_xla.runtime as xr
from on_ranks import on_each_rank, raises
from rank_warnings import every_rank_warns
from safetensors.torch import save_file
from small_models import WIDTH, here, inputs, mean_square, trace_as_on_tpu, whole
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import full_state_dict, load_checkpoint, load_weights, save_checkpoint
from xla_fsdp.consolidate.__main__ import main
from xla_fsdp.wrap import transformer_auto_wrap_policy


class Model(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(11)
        self.frozen = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.adapter = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.adapter.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.second(self.adapter(self.first(self.frozen(x)))) * self.scale
        return self.tied(x)


def built(kind: str):
    model = Model()
    ignored = {"ignored_modules": [model.frozen, model.adapter]}
    ignored["ignored_parameters"] = [model.scale]
    if kind == "states":
        ignored = {"ignored_states": iter([model.frozen, model.adapter, model.scale])}
    if kind == "auto":
        classes = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
        return FSDP(model, auto_wrap_policy=classes, **ignored)
    if kind in ("nested", "states"):
        model.first = FSDP(model.first)
    return FSDP(model, flatten_parameters=kind == "flat", **ignored)


IGNORED = ["frozen.0.weight", "frozen.0.bias", "frozen.1.weight", "frozen.1.bias",
           "adapter.weight", "adapter.bias", "scale"]  # fmt: skip


@pytest.mark.parametrize("ranks, kind", [(2, "auto"), (4, "nested"), (2, "flat"), (2, "states")])
@on_each_rank(timeout=1500)
def test_training_is_that_of_plain_torch(rank, kind):
    trace_as_on_tpu(kind == "nested")
    ranks = range(xr.world_size())
    for same in (True, False):
        plain, model = Model(), built(kind)
        plain.eval(), model.eval()  # of the frozen statistics
        before = {name: p for name, p in model.named_parameters() if name in IGNORED}
        assert sorted(before) == sorted(IGNORED)
        for name, parameter in before.items():
            expected = plain.get_parameter(name)
            assert parameter.shape == expected.shape and parameter.device.type == "xla"
            assert parameter.requires_grad == expected.requires_grad
        ours = torch.optim.SGD(model.parameters(), 0.3, 0.9)
        theirs = torch.optim.SGD(plain.parameters(), 0.3, 0.9)
        for step in range(2):
            model(inputs(0 if same else rank, step).to("xla")).square().mean().backward()
            every = [inputs(0 if same else r, step) for r in ranks]
            plain(torch.cat(every)).square().mean().backward()
            # Ranks whose ignored gradients differ must scale alike.
            order = 2.0 if step else torch.inf
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            for parameter in before.values():
                if parameter.grad is not None:
                    on_host = parameter.grad.to("cpu")
                    assert type(on_host) is type(copy.deepcopy(parameter.grad)) is torch.Tensor
                    assert on_host.norm().item() >= 0  # of this rank: no collective
            own = model.clip_grad_norm_(1e9, order)
            for torchs in (
                nn.utils.get_total_norm(grads, order),
                nn.utils.clip_grad_norm_(model.parameters(), 1e9, order),  # torch_xla's
                # torch_xla's norm of order inf of a plain tensor is 1.
                torch.linalg.vector_norm(
                    torch.stack([torch.norm(grad.detach(), order) for grad in grads]), order
                ),
                torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads, order)), order),
            ):
                torch.testing.assert_close(torchs.cpu(), own.cpu(), rtol=1e-5, atol=0)
            if not same or step:  # what ranks alike do not need does not harm
                model.average_ignored_gradients()
            else:
                for name, parameter in before.items():
                    assert (parameter.grad is None) == name.startswith("frozen")
            norm = model.clip_grad_norm_(0.05, order)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, order)
            with every_rank_warns(rank, "scale.*average_ignored" if same and not step else None):
                ours.step()
                torch_xla.sync()
            theirs.step()
            ours.zero_grad(), theirs.zero_grad()
            torch.testing.assert_close(norm.cpu(), expected, rtol=1e-4, atol=1e-6)
        assert all(dict(model.named_parameters())[name] is p for name, p in before.items())
        found = whole(model, model.state_dict())
        full = full_state_dict(model, rank0_only=False)
        torch.testing.assert_close(found, plain.state_dict(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(full, found, rtol=0, atol=0)


@on_each_rank(2)
def test_a_nan_of_one_rank_is_in_the_norm_of_all(rank):
    model = built("nested")
    mean_square(model, here(rank)).backward()
    grad = model.scale.grad
    if rank == 1:
        model.scale.grad = grad.clone().index_fill_(0, torch.tensor([1]).to("xla"), torch.nan)
    grad = model.scale.grad
    norms = [torch.linalg.vector_norm(grad, order) for order in (2, torch.inf)]
    found = [torch.max(grad), *norms, model.clip_grad_norm_(1.0, torch.inf)]
    assert all(value.isnan().item() for value in found)


def states(rank, folder):
    def trained(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        mean_square(model, here(0)).backward()
        model.average_ignored_gradients()
        optimizer.step()
        torch_xla.sync()
        return optimizer

    model = built("nested")
    optimizer = trained(model)
    full = full_state_dict(model, rank0_only=False)
    saved = save_checkpoint(f"{folder}/run", model, optimizer, step=1)
    assert "ignored" not in model.get_shard_metadata()
    model.second[0].bias.requires_grad_(False)
    assert set(model.get_shard_metadata()["ignored"]) == {*IGNORED, "tied.weight"}
    model.second[0].bias.requires_grad_(True)
    other = built("flat")
    fresh = trained(other)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    load_checkpoint(saved, other, fresh)
    torch.testing.assert_close(full_state_dict(other, rank0_only=False), full, rtol=0, atol=0)
    state, expected = fresh.state[other.scale], optimizer.state[model.scale]
    assert torch.equal(state["momentum_buffer"].cpu(), expected["momentum_buffer"].cpu())
    if rank == 0:
        values = {name: value + 1 for name, value in full.items() if name != "tied.weight"}
        save_file(values, f"{folder}/model.safetensors")
    load_weights(model, f"{folder}/model.safetensors")
    assert torch.equal(model.adapter.bias.cpu(), full["adapter.bias"] + 1)
    with FSDP.summon_full_params(model):
        shapes = {name: p.shape for name, p in model.named_parameters()}
        assert shapes == {name: p.shape for name, p in Model().named_parameters()}
        with torch.no_grad():
            model.adapter.bias.zero_()
            model.second[0].bias.zero_()
    found = full_state_dict(model, rank0_only=False)
    assert not found["adapter.bias"].any() and not found["second.0.bias"].any()
    assert torch.equal(found["scale"], full["scale"] + 1)
    copied = copy.deepcopy(model)
    with every_rank_warns(rank, None):
        copied(here(rank))
    narrow = Model()
    narrow = FSDP(
        narrow, ignored_modules=nn.ModuleList([narrow.frozen]), compute_dtype=torch.bfloat16,
        sync_module_states=True,
    )  # fmt: skip
    assert narrow.frozen[1].running_mean.dtype is torch.float32
    assert narrow.frozen[1].running_mean.device.type == "xla"
    assert not any(p is q for p in narrow.sharded_params for q in narrow.frozen.parameters())
    return {name: value.clone() for name, value in full.items()} if rank == 0 else None


def consolidated(rank, folder, full):
    model = built("nested")
    load_checkpoint(f"{folder}/run", model)
    torch.testing.assert_close(full_state_dict(model, rank0_only=False), full, rtol=0, atol=0)


def test_what_goes_in_and_out_of_files(run_ranks, tmp_path):
    full = run_ranks(states, 2, str(tmp_path), timeout=1500)[0]
    run_ranks(consolidated, 4, str(tmp_path), full, timeout=1500)
    (step,) = (tmp_path / "run").iterdir()
    main(["--ckpt_prefix", str(step), "--save_path", str(tmp_path / "whole.pth")])
    found = torch.load(tmp_path / "whole.pth", weights_only=True)
    assert all(torch.equal(found["model"][name], value) for name, value in full.items())


@on_each_rank(2)
def test_what_cannot_be_ignored_is_refused(rank):
    def refused(error, match, make=Model, **options):
        model = make()
        raises(error, match, FSDP, model, **{name: give(model) for name, give in options.items()})

    refused(TypeError, "ignored_modules must be an iterable of torch.nn.Module, got Linear",
            ignored_modules=lambda m: m.adapter)  # fmt: skip
    refused(TypeError, "must contain torch.nn.Module, got 'a'", ignored_modules=lambda m: ["a"])
    refused(TypeError, "must be an iterable of torch.nn.Parameter, got Parameter",
            ignored_parameters=lambda m: m.scale)  # fmt: skip
    refused(TypeError, "must contain torch.nn.Parameter, got Linear",
            ignored_parameters=lambda m: [m.adapter])  # fmt: skip
    refused(ValueError, "a Linear that is not inside the module to wrap",
            ignored_modules=lambda m: [nn.Linear(1, 1)])  # fmt: skip
    refused(ValueError, r"of shape \(2,\), is not in the module",
            ignored_parameters=lambda m: [nn.Parameter(torch.ones(2))])  # fmt: skip
    refused(ValueError, "nothing would be sharded", ignored_modules=lambda m: [m])
    refused(ValueError, "Pass either", ignored_states=lambda m: [m.scale],
            ignored_modules=lambda m: [m.adapter])  # fmt: skip

    def inner():
        model = Model()
        model.inner_weight = model.first[0].weight
        model.first = FSDP(model.first)
        return model

    refused(ValueError, "a wrapped XlaF", inner, ignored_modules=lambda m: [m.first])
    refused(ValueError, "is already sharded by an inner wrapper", inner,
            ignored_parameters=lambda m: [m._parameters["inner_weight"]])  # fmt: skip

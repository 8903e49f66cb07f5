"""Mistakes of a first script: errors that say what to do, and warnings of what would be slow."""

import functools
import re

import pytest
import torch
import torch_xla
from on_ranks import on_each_rank
from rank_warnings import every_rank_warns
from small_models import Computes
from torch import nn

import xla_fsdp
from xla_fsdp import XlaFullyShardedDataParallel as FSDP


def with_linear(compute):
    return FSDP(Computes(compute, linear=nn.Linear(4, 4)))


def moves(self, x):
    return self.linear(x.to(self.linear.weight.device))


def moves_and_fails(self, x):
    moves(self, x)
    raise RuntimeError("no such table")


VECTORS, SIGNALS = torch.ones(2, 4), torch.ones(2, 3, 8)
ON_THE_CPU = {
    "conv1d": (lambda: nn.Conv1d(3, 4, 3), [SIGNALS]),
    "conv2d": (lambda: nn.Conv2d(3, 4, 3), [torch.ones(2, 3, 8, 8)]),
    "linear": (lambda: nn.Linear(4, 4), [VECTORS]),
    "embedding": (lambda: nn.Embedding(4, 4), [torch.tensor([1, 2])]),
    "norm": (lambda: nn.BatchNorm1d(4), [VECTORS]),
    "lstm": (lambda: nn.LSTM(4, 4), [torch.ones(2, 2, 4)]),
    "attention": (lambda: nn.MultiheadAttention(4, 2), [VECTORS] * 3),
    "checkpointed": (lambda: xla_fsdp.checkpoint_module(nn.Conv1d(3, 4, 3)), [SIGNALS]),
    "scanned": (lambda: xla_fsdp.scan_blocks([nn.Linear(4, 4), nn.Linear(4, 4)]), [VECTORS]),
}


@on_each_rank(2)
def test_inputs_on_the_cpu(rank):
    for name, (build, inputs) in ON_THE_CPU.items():
        models = [build()] if name == "scanned" else [FSDP(build()), xla_fsdp.fully_shard(build())]
        if len(inputs) == 1:
            models.append(FSDP(nn.Sequential(build())))
        for model in models:
            with pytest.raises(RuntimeError) as caught:
                model(*inputs)
            message, shape = str(caught.value), tuple(inputs[0].shape)
            assert f"tensor of shape {shape} on cpu, while its parameters" in message, (name, model)
            assert message.count(f"move inputs there with .to('xla:{rank}')") == 1, (name, model)
            assert caught.value.__cause__ is not None
        models[0](*[value.to(f"xla:{rank}") for value in inputs])  # the remedy
    loss = with_linear(lambda self, x, y: nn.functional.cross_entropy(self.linear(x), y))
    target = torch.tensor([1, 2])
    with pytest.raises(RuntimeError, match=r"shape \(2,\) on cpu"):
        loss(VECTORS.to("xla"), target)
    loss(VECTORS.to("xla"), target.to("xla")).backward()
    assert with_linear(moves)(VECTORS).device.type == "xla"
    with pytest.raises(RuntimeError, match=r"^no such table\n.* on cpu, while"):
        with_linear(moves_and_fails)(VECTORS)
    # All on the device: what torch says of it.
    with pytest.raises(RuntimeError) as caught:
        FSDP(nn.Linear(4, 4))(torch.ones(2, 5, device="xla"))
    assert type(caught.value) is RuntimeError and "move inputs" not in str(caught.value)


CONVOLUTIONS = {
    "one pixel": (lambda: nn.Conv2d(1, 1, 1), torch.ones(1, 1, 2, 2)),
    "float64": (lambda: nn.Conv2d(3, 4, 3).double(), torch.ones(2, 3, 8, 8, dtype=torch.float64)),
    "dilated": (lambda: nn.Conv2d(1, 2, 3, dilation=2), torch.ones(1, 1, 16, 16)),
    "transposed": (lambda: nn.ConvTranspose2d(1, 1, 2), torch.ones(1, 1, 4, 4)),
    "3d": (lambda: nn.Conv3d(1, 1, 1), torch.ones(1, 1, 2, 2, 2)),
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

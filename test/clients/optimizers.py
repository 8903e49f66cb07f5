"""The optimizers of timm and torchao on shards: the weights of plain torch, or an error."""

import re

import timm.optim
import torch
import torchao.optim
from timm.optim import create_optimizer_v2
from torch import nn

import xla_fsdp

RANKS, STEPS = 2, 3
# These compute with rows, columns or matrices of a parameter.
NEED_MATRICES = r"c?adafactor(bvc?)?|c?(adam|sgd)p|n?(ada)?muon"
# These compile their step with torch.compile, which supports no tensors of other classes.
COMPILED = r"kron[cw]?|AdamW.*"
# These need CUDA or second derivatives.
NOT_HERE = r"bnb.*|fused.*|adahessian"
# These branch on a value, and run in both forms.
BRANCHING = r"novograd[cw]?"


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 128), nn.Tanh(), nn.Linear(128, 64))


def optimizers():
    """By name: a function that makes the optimizer of a model."""
    made = {}
    for name in timm.optim.list_optimizers():
        if re.fullmatch(NOT_HERE, name):
            continue
        made[name] = lambda m, name=name: create_optimizer_v2(m, name, lr=1e-2, weight_decay=0.05)
    for kind in (torchao.optim.AdamW8bit, torchao.optim.AdamW4bit, torchao.optim.AdamWFp8):
        made[kind.__name__] = lambda m, kind=kind: kind(m.parameters(), lr=1e-2)
    return made


def train(model: nn.Module, optimizer, device: str, rank: int = 0, ranks: int = 1) -> None:
    for step in range(STEPS):
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        model(x.to(device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(rank: int, names, shard=xla_fsdp.fully_shard) -> dict:
    """By name: the weights after training, or the error."""
    found = {}
    for name in names:
        try:
            model = build()
            model[0] = shard(model[0])
            model = shard(model)
            train(model, optimizers()[name](model), "xla", rank, RANKS)
            found[name] = xla_fsdp.full_state_dict(model, rank0_only=False)
        except (xla_fsdp.ShardedParameterError, torch._dynamo.exc.Unsupported) as error:
            found[name] = str(error)
    return found


if __name__ == "__main__":
    names = list(optimizers())
    (found, _) = xla_fsdp.launch(main, (names,), num_devices=RANKS)
    assert sum(isinstance(one, dict) for one in found.values()) > 65
    branching = [name for name in names if re.fullmatch(BRANCHING, name)]
    assert len(branching) == 3
    by_class = (branching, xla_fsdp.XlaFullyShardedDataParallel)
    (of_class, _) = xla_fsdp.launch(main, by_class, num_devices=RANKS)
    for name in names:
        if re.fullmatch(NEED_MATRICES, name):
            assert "is sharded here" in found[name], (name, found[name])
            continue
        if re.fullmatch(COMPILED, name):
            assert isinstance(found[name], str), name
            continue
        assert isinstance(found[name], dict), (name, found[name])
        plain = build()
        train(plain, optimizers()[name](plain), "cpu")
        for states in (found, of_class) if name in of_class else (found,):
            torch.testing.assert_close(
                states[name], dict(plain.state_dict()), rtol=1e-3, atol=2e-5,
                msg=lambda text, name=name: f"{name}: {text}",
            )  # fmt: skip

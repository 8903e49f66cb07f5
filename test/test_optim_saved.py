"""Optimizer state in checkpoints, also what is no value an element: factors, blocks of 8 bits."""

from __future__ import annotations

import pytest
import torch
from small_models import whole
from test_optim import EVERY, Block, plain, train, train_plain, wrapped

import xla_fsdp
from xla_fsdp.consolidate.errors import ModelMismatchError
from xla_fsdp.optim import Adafactor, AdamW8bit
from xla_fsdp.sharding.sharded_parameter import local

MAKES = {
    "adafactor": (lambda p: Adafactor(p, lr=0.65, weight_decay=0.1), Block),
    "8bit": (lambda p: AdamW8bit(p, lr=0.02, betas=(0.8, 0.9), min_8bit_size=0), Block),
    "small": (lambda p: AdamW8bit(p, lr=0.02, betas=(0.8, 0.9)), Block),
    **{name: EVERY[name] for name in ("lamb", "lars", "muon")},
}


def state_of(model, optimizer):
    return {
        (name, key): local(value.detach()).cpu()
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def torch_adafactor(parameters):
    return torch.optim.Adafactor(parameters, lr=0.65, weight_decay=0.1)


def close(found, expected, name):
    # Blocks of other ranks round the moments otherwise: a hundredth of a step or two.
    tolerance = 4e-3 if name == "8bit" else 2e-5
    torch.testing.assert_close(found, expected, rtol=2e-4, atol=tolerance)


def save_and_go_on(rank, folder, kinds, expected):
    for kind, name in kinds:
        make, block = MAKES[name]
        model = wrapped(kind, block)
        optimizer = make(model.parameters())
        train(model, optimizer, block, (1, 2))
        path = f"{folder}/{name}-{kind}"
        xla_fsdp.save_checkpoint(path, model, optimizer, step=2)
        full = xla_fsdp.full_state_dict(model), xla_fsdp.full_optim_state_dict(model, optimizer)
        if rank == 0:
            torch.save(full, f"{path}.pt")
        again = wrapped(kind, block)
        resumed = make(again.parameters())
        xla_fsdp.load_checkpoint(path, again, resumed)
        before, after = state_of(model, optimizer), state_of(again, resumed)
        assert before.keys() == after.keys()
        for (key, what), value in before.items():
            assert after[key, what].dtype is value.dtype and after[key, what].shape == value.shape
            if what != "variance" or kind != "flat":  # has elements of matrices, which are unused
                assert torch.equal(after[key, what], value), (kind, name, key, what)
        train(model, optimizer, block, (3, 4))
        train(again, resumed, block, (3, 4))
        found = whole(again, again.state_dict())
        torch.testing.assert_close(found, whole(model, model.state_dict()), rtol=0, atol=0)
        close(found, expected[name], name)


def on_other_ranks(rank, folder, pairs, expected):
    for kind, other, name in pairs:
        make, block = MAKES[name]
        model = wrapped(other, block)
        optimizer = make(model.parameters())
        full = torch.load(f"{folder}/{name}-{kind}.pt") if rank == 0 else (None, None)
        if other == "flat":
            xla_fsdp.load_full_state_dict(model, full[0])
            xla_fsdp.load_full_optim_state_dict(model, optimizer, full[1])
        else:
            xla_fsdp.load_checkpoint(f"{folder}/{name}-{kind}", model, optimizer)
        if name == "adafactor":
            wrong = torch.load(f"{folder}/{name}-{kind}.pt")[1]
            wrong["state"]["first.weight"]["row_var"] = torch.ones(3, 1)
            with pytest.raises(ModelMismatchError, match="'first.weight'.*'row_var' is .3, 1."):
                xla_fsdp.load_full_optim_state_dict(model, optimizer, wrong)
            wrong["param_groups"][0]["maximize"] = True
            with pytest.raises(ModelMismatchError, match="trained with maximize"):
                xla_fsdp.load_full_optim_state_dict(model, optimizer, {**wrong, "state": {}})
        train(model, optimizer, block, (3, 4))
        close(whole(model, model.state_dict()), expected[name], name)


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name, here, there",
    [
        pytest.param("adafactor", ["flat"], [("flat", "scan")], marks=SLOW),
        pytest.param("8bit", ["nested"], [("nested", "scan")], marks=SLOW),
        pytest.param("adafactor", ["flat", "nested"], [("nested", "flat")], marks=SLOW),
        pytest.param("small", ["nested"], [("nested", "flat")], marks=SLOW),
        pytest.param("lamb", ["nested"], [("nested", "dim0scan")], marks=SLOW),
        ("lars", ["nested"], [("nested", "flat")]),
        ("muon", ["nested"], [("nested", "dim0scan")]),
    ],
)
def test_state_is_saved_and_loads_elsewhere(run_ranks, tmp_path, name, here, there):
    make, block = MAKES[name]
    model = plain(block)
    expected = {name: train_plain(model, make(model.parameters()), (1, 2, 3, 4))}
    run_ranks(save_and_go_on, 2, str(tmp_path), [(kind, name) for kind in here], expected)
    pairs = [(*pair, name) for pair in there]
    run_ranks(on_other_ranks, 4, str(tmp_path), pairs, expected)
    for kind in here:
        in_plain_torch(f"{tmp_path}/{name}-{kind}.pt", expected[name], name)


def in_plain_torch(path, expected, name):
    weights, full = torch.load(path)
    make, block = MAKES[name]
    make = torch_adafactor if name == "adafactor" else make
    model = plain(block)
    optimizer = make(model.parameters())
    model.load_state_dict(weights)
    numbers = {n: i for i, (n, _) in enumerate(model.named_parameters())}
    state = {numbers[n]: own for n, own in full["state"].items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    close(train_plain(model, optimizer, (3, 4)), expected, name)

"""Which blocks ``scan_blocks`` takes for equal: those that are known to be, and no others."""

import collections
import functools
import threading

import pytest
import torch
from on_ranks import on_each_rank
from torch import nn
from torch.nn.utils import parametrize

from xla_fsdp.scan.blocks import scan_blocks


class Settings:
    def __init__(self, scale):
        self.scale = scale


class Slots:
    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale


class AlwaysEqual(Settings):
    def __eq__(self, other):
        return True


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def having(one, **attributes):
    for name, value in attributes.items():
        setattr(one, name, value)
    return one


def cached(scale):
    @functools.lru_cache
    def call(x):
        return scale * x

    return call


class Block(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.inner.value = value


# What makes an attribute of a number, and what a message calls it.
DECIDED = {
    "a number": (float, "inner.value: 2.0 in block 0, 3.0 in block 1"),
    "signs of zero": (lambda scale: 0.0 if scale == 2 else -0.0, "value: 0.0 in block 0, -0.0 in"),
    "an object": (Settings, "inner.value.scale: 2.0 in block 0, 3.0 in block 1"),
    "an object with slots": (Slots, "scale: 2.0 in block 0, 3.0 in block 1"),
    "an object that is equal to all": (AlwaysEqual, "inner.value.scale: 2.0"),
    "an object in itself": (lambda scale: having(one := Settings(scale), me=one), "scale: 2.0 in"),
    "objects in a dict": (lambda scale: {"a": [1, Settings(scale)]}, "inner.value.a[1].scale: 2.0"),
    "keys": (lambda scale: {scale: 1}, "inner.value: 2.0"),
    "a set": (lambda scale: {1.0, scale}, "inner.value: 2.0"),
    "an ordered dict": (lambda scale: collections.OrderedDict(a=scale), "2.0 in block 0"),
    "a closure": (lambda scale: lambda x: scale * x, "scale in inner.value: 2.0 in block 0, 3.0"),
    "a default": (lambda scale: lambda by=scale: by, "the defaults of inner.value[0][0]: 2.0"),
    "a method": (lambda scale: AlwaysEqual(scale).__eq__, "inner.value.scale: 2.0"),
    "a tensor": (lambda scale: torch.tensor([1.0, scale]), "inner.value: a tensor of shape (2,)"),
    "an attribute of a tensor": (lambda scale: having(torch.ones(2), scale=scale), "scale: 2.0 in"),
    "a module that is not registered": (lambda scale: [nn.Dropout(scale / 10)], ".p: 0.2 in"),
}
# Two of these cannot be told apart, nor be known to be equal.
UNDECIDED = {
    "a lock": lambda scale: threading.Lock(),
    "an object without anything": lambda scale: object(),
    "a cached function": cached,
    "a tensor without values": lambda scale: torch.empty(3, device="meta"),
    "a sparse tensor": lambda scale: torch.eye(2).to_sparse(),
}


@on_each_rank(1)
def test_attributes(rank):
    x = torch.ones(2, 4).to("xla")

    def refusal(*values):
        with pytest.raises(ValueError) as raised:
            scan_blocks([Block(value) for value in values])
        assert "name it in ignore=['value']" in str(raised.value)
        scan_blocks([Block(value) for value in values], ignore=["value"])
        scan_blocks([Block(values[0]) for _ in values])
        return str(raised.value)

    for name, (make, expected) in DECIDED.items():
        scan_blocks([Block(make(2.0)), Block(make(2.0))])
        message = refusal(make(2.0), make(3.0))
        assert expected in message, (name, message)
    undecided = UNDECIDED | {"a tensor on the device": lambda scale: torch.ones(3).to(x.device)}
    for name, make in undecided.items():
        message = refusal(make(2.0), make(2.0))
        assert "inner.value of blocks 0 and 1 cannot be compared" in message, (name, message)


@on_each_rank(1)
def test_parts_of_blocks(rank):
    def block(first="inner", method="forward", tag=1.0, doubled=True, swapped=False):
        found = Block(None)
        found.other = nn.Linear(4, 4)
        found.parts = [getattr(found, first), found.inner.weight]
        found.call = getattr(found.inner, method)
        found.function = lambda x: found.inner(x)
        found.inner.weight.scale = tag
        if doubled:
            parametrize.register_parametrization(found.other, "weight", Double())
        if swapped:
            found._modules.update(inner=found._modules.pop("inner"))
        return found

    scan_blocks([block(), block()])
    for other, expected in (
        ({"first": "other"}, "parts[0]"),
        ({"method": "extra_repr"}, "call"),
        ({"tag": 2.0}, "inner.weight.scale: 1.0 in block 0, 2.0 in block 1"),
        ({"doubled": False}, "other.parametrizations"),
        ({"swapped": True}, "in another order"),
    ):
        with pytest.raises(ValueError) as raised:
            scan_blocks([block(), block(**other)])
        assert expected in str(raised.value), (expected, str(raised.value))

"""The same models wrapped in every way, and trained: for tests of what goes in and out of them."""

from __future__ import annotations

import torch
from test_scan import Model
from torch import nn
from zoo import Zoo, batches, loss_of

KINDS = ("none", "root", "nested", "flat", "dim0")


def plain_zoo(seed: int = 3) -> Zoo:
    """With values of its own in every element, for one seed."""
    torch.manual_seed(seed)
    model = Zoo(blocks=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def zoo(kind: str, seed: int = 3, **options) -> nn.Module:
    """:func:`plain_zoo`, wrapped as one of ``KINDS``."""
    from checkpoint_runs import wrapped

    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    model = plain_zoo(seed)
    if kind == "nested":
        model.embed = FSDP(model.embed, **options)
    return wrapped("rows" if kind == "dim0" else kind, model, **options)


def stacked(kind: str, seed: int = 3, **options) -> nn.Module:
    """Equal blocks with buffers: ``plain``, ``nested``, or ``scan``."""
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import scan_blocks

    torch.manual_seed(seed)

    def around(blocks):
        if kind == "scan":
            return scan_blocks(blocks, **options)
        return nn.ModuleList(FSDP(b, **options) if kind == "nested" else b for b in blocks)

    model = Model(around)
    return model if kind == "plain" else FSDP(model, **options)


def step(model: nn.Module, optimizer, number: int, rank: int = 0, size: int = 1) -> torch.Tensor:
    """Trains on this rank's part of a batch; the loss of that part."""
    import torch_xla

    device = next(iter(model.parameters())).device
    if isinstance(getattr(model, "module", model), Zoo):
        tokens = batches(number + 1)[number].chunk(size)[rank].to(device)
        loss = loss_of(model(tokens), tokens)
    else:
        x = torch.randn(12, 4, 5, generator=torch.Generator().manual_seed(number))
        loss = model(x.chunk(size)[rank].to(device)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if device.type != "cpu":
        torch_xla.sync()
    return loss.detach()


def mean_loss(loss: torch.Tensor) -> float:
    import torch_xla.core.xla_model as xm

    return xm.mesh_reduce("loss", loss.item(), lambda losses: sum(losses) / len(losses))


def assert_equal(found, expected) -> None:
    """Nested dicts and lists, tensors in them bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert found.dtype is expected.dtype and found.shape == expected.shape
        assert found.device == expected.device and torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_equal(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    else:
        assert found == expected

"""``gather_dtype``: what is computed with is rounded as said, and nothing else is."""

from __future__ import annotations

import collections
import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from test_special_uses import trace_as_on_tpu
from test_wire import COLLECTIVE
from torch import nn

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
WIDTH = 512


def rounded(weight, ranks, columns, length, dtype, computed=torch.float32):
    """``weight`` as ranks compute with it: each sends rows of ``columns`` elements, and a block is
    ``length`` elements of one column."""
    flat = weight.float().flatten()
    each = math.ceil(flat.numel() / ranks / columns) * columns
    padded = F.pad(flat, (0, ranks * each - flat.numel()))
    blocks = []
    for shard in padded.view(ranks, -1, columns):
        for block in shard.split(length):
            scale = block.abs().amax(0) / LARGEST[dtype]
            scale = scale.where(scale.isfinite(), math.nan)
            if computed is torch.bfloat16:
                scale = scale.bfloat16().float()
            value = block / scale.where(scale != 0, torch.ones(()))
            value = value.clamp(-LARGEST[dtype], LARGEST[dtype])
            value = value.round() if dtype is torch.int8 else value.half().to(dtype).float()
            blocks.append(value * scale)
    return torch.cat(blocks).flatten()[: flat.numel()].view(weight.shape).to(computed)


def hostile():
    """Blocks of zeros, with NaN, with infinity, with outliers."""
    torch.manual_seed(1)
    weight = torch.randn(WIDTH, WIDTH) * 0.02
    weight[:, 3] = 0
    weight[5, 7], weight[300, 9], weight[130, 11] = math.nan, math.inf, 30.0
    weight[:, 12] *= 1e-6
    return weight


# By shape: rows as they travel, and lengths of blocks, of a rank of two and of four.
SHAPES = {
    (WIDTH, WIDTH): (512, {2: 256, 4: 128}),
    (384, 1024): (1024, {2: 192, 4: 96}),
    (700, 300): (128, {2: 256, 4: 256}),  # 821 and 411 rows: the last block has fewer
    (64, 64, 33): (128, {2: 256, 4: 256}),  # 528 and 264 rows
}


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        for number, shape in enumerate(SHAPES):
            value = torch.randn(shape) * 0.1 if number else hostile()
            self.register_parameter(f"w{number}", nn.Parameter(value))
        self.bias = nn.Parameter(torch.randn(200_000))

    def forward(self, x):
        self.seen = [torch.view_copy(p.detach(), p.shape) for p in self.parameters(recurse=False)]
        return x + sum(p.sum().float() for p in self.seen)


def values(rank, ranks, dtype, computed, rows=False):
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    plain = Weights()
    model = FSDP(Weights(), compute_dtype=computed, gather_dtype=dtype, shard_param_on_dim_0=rows)
    with torch.no_grad():
        model(torch.ones(1).to("xla"))
    seen = model.module.seen
    torch_xla.sync()
    return {
        name: (one.cpu(), value.detach())
        for one, (name, value) in zip(seen, plain.named_parameters(), strict=True)
    }


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_values_are_rounded_in_blocks(run_ranks, ranks):
    cases = [(torch.int8, None), (torch.int8, torch.bfloat16), (torch.float8_e4m3fn, None)]
    if ranks == 2:
        cases.append((torch.float8_e4m3fn, torch.bfloat16))
    for dtype, computed in cases:
        for found in run_ranks(values, ranks, ranks, dtype, computed):
            own = computed or torch.float32
            for (name, (seen, value)), (columns, lengths) in zip(
                found.items(), [*SHAPES.values(), (0, {})], strict=True
            ):
                assert seen.dtype is own
                expected = value.to(own)
                if name != "bias" and ranks > 1:
                    expected = rounded(value, ranks, columns, lengths[ranks], dtype, own)
                torch.testing.assert_close(seen, expected, rtol=0, atol=0, equal_nan=True)
            if ranks > 1:
                seen = found["w0"][0]
                assert not seen[:128, 7].isfinite().any() and not seen[256:384, 9].isfinite().any()
                assert seen[:, [c for c in range(WIDTH) if c not in (7, 9)]].isfinite().all()


class Block(nn.Module):
    """One matrix that travels in fewer bits, and what does not."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


def network():
    torch.manual_seed(3)
    blocks = nn.Sequential(Block(), Block())
    model = nn.Sequential(nn.Linear(6, WIDTH), blocks, nn.Linear(WIDTH, 4))
    blocks[1].linear.bias.requires_grad_(False)
    return model


def batch(rank, step=0):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(y):
    return y.float().square().sum(-1).mean()


def expected(ranks, length, steps=1):
    """Weights after an SGD step, and their gradients with what the blocks compute with."""
    exact, plain = network(), network()
    for block in plain[1]:
        weight = block.linear.weight
        weight.data = rounded(weight.detach(), WIDTH // length, WIDTH, length, torch.int8)
    for step in range(steps):
        loss_of(plain(torch.cat([batch(rank, step) for rank in range(ranks)]))).backward()
    for parameter, by in zip(exact.parameters(), plain.parameters(), strict=True):
        if by.grad is not None:
            parameter.data -= by.grad
    return exact.state_dict()


def nested(wrap_block=lambda block: block, **options):
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    wrap = functools.partial(FSDP, gather_dtype=torch.int8, **options)
    model = network()
    model[1] = nn.Sequential(*(wrap(wrap_block(block)) for block in model[1]))
    return wrap(model)


def scanned(**options):
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import scan_blocks

    model = network()
    model[1][1].linear.bias.requires_grad_(True)
    options["gather_dtype"] = torch.int8
    for block in model[1]:
        block.linear.bias.requires_grad_(False)
    model[1] = scan_blocks(model[1], **options)
    return FSDP(model, **options)


def in_place(**options):
    from xla_fsdp import fully_shard

    model = network()
    for block in model[1]:
        fully_shard(block, gather_dtype=torch.int8, **options)
    return fully_shard(model, gather_dtype=torch.int8, **options)


def offloaded():
    from xla_fsdp import CPUOffload

    return nested(cpu_offload=CPUOffload())


def checkpointed():
    from xla_fsdp import checkpoint_module

    return nested(checkpoint_module)


TWO = {"reshard_after_forward": 2, "disable_reshard_on_root": False}
USES = {
    2: {
        "nested": (nested, {}),
        "ZeRO-2": (nested, {"reshard_after_forward": False}),
        "recomputed": (checkpointed, {}),
        "accumulated": (nested, {}),
        "in place": (in_place, {}),
        "offloaded": (offloaded, {}),
        "scanned": (scanned, {}),
    },
    4: {
        "hybrid": (nested, {"device_mesh": [[0, 1], [2, 3]]}),
        "halves": (nested, TWO),
        "scanned halves": (scanned, TWO),
        "halves, in place": (in_place, {"reshard_after_forward": 2}),
    },
}


def after_a_step(rank, name, make, options):
    import torch_xla

    import xla_fsdp

    trace_as_on_tpu()
    model = make(**options)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    if name == "accumulated":
        with model.no_sync():
            loss_of(model(batch(rank, 1).to("xla"))).backward()
    loss_of(model(batch(rank).to("xla"))).backward()
    optimizer.step()
    torch_xla.sync()
    return xla_fsdp.full_state_dict(model, rank0_only=False)


def after_steps(rank, uses):
    return {name: after_a_step(rank, name, *use) for name, use in uses.items()}


@pytest.mark.parametrize("ranks", USES)
def test_gradients_are_those_of_the_rounded_weights_and_go_to_the_exact_ones(run_ranks, ranks):
    initial = network().state_dict()
    for found in run_ranks(after_steps, ranks, USES[ranks]):
        for name, weights in found.items():
            length = 256 if ranks == 2 or name == "hybrid" else 128
            wanted = expected(ranks, length, 2 if name == "accumulated" else 1)
            assert wanted.keys() == weights.keys(), name
            for key, value in wanted.items():
                if name.startswith("scanned") and key.endswith("linear.bias"):
                    continue  # frozen in both blocks
                step, by = weights[key].cpu() - initial[key], value - initial[key]
                torch.testing.assert_close(step, by, rtol=2e-4, atol=1e-5)

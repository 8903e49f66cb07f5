"""``CPUOffload(stream=True)``: training is what it is without, and little is on the device."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
from on_ranks import on_each_rank, without_ranks
from small_models import Computes
from torch import nn

from xla_fsdp import (
    CPUOffload,
    Report,
    checkpoint_module,
    plan,
    tune,
)
from xla_fsdp import XlaFullyShardedDataParallel as FSDP

WIDTH = 8


def streaming(**options):
    return {"cpu_offload": CPUOffload(stream=True), **options}


class Block(nn.Module):
    def __init__(self, dropped: float = 0.0):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropped)

    def forward(self, x):
        return self.dropout(x + self.down(torch.tanh(self.up(x))))


def stack(depth, wrap):
    blocks = nn.Sequential(*(wrap(Block()) for _ in range(depth)))
    first = nn.Linear(WIDTH, WIDTH)
    return Computes(lambda self, x: self.blocks(self.first(x)), first=first, blocks=blocks)


def held(model):
    return sum(
        any(tensor.copy.held is not None for tensor in block._unit.stored) for block in model.blocks
    )


@on_each_rank(2)
def test_little_is_on_the_device(rank):
    """However deep the model: the same programs, and the copies of one block when one starts."""
    options = streaming(compute_dtype=torch.bfloat16)
    programs = []
    for depth in (2, 4):
        torch.manual_seed(0)
        model = FSDP(stack(depth, lambda b: FSDP(checkpoint_module(b), **options)), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        found = []

        def step(model=model, optimizer=optimizer):
            x = torch.ones(4, WIDTH).to("xla")
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch_xla.sync()

        step()
        traffic = model.blocks[0]._unit.stream.traffic
        assert all(block._unit.stream.traffic is traffic for block in model.blocks)
        cut = traffic.cut

        def watched(cut=cut, found=found, model=model):
            found.append(held(model))
            cut()

        traffic.cut = watched
        step()
        assert found == [1] * 2 * depth and held(model) == 0
        compiled = met.counter_value("UncachedCompile") or 0
        step()
        assert (met.counter_value("UncachedCompile") or 0) == compiled
        programs.append(met.counter_value("CachedCompile") or 0)
        with torch.no_grad():
            model(torch.ones(4, WIDTH).to("xla"))
        assert found[4 * depth :] == [1] * depth and held(model) == 0


def dropout_is_replayed():
    options = streaming()
    blocks = [FSDP(checkpoint_module(Block(0.5)), **options) for _ in range(2)]
    model = FSDP(nn.Sequential(*blocks), **options)
    out = model(torch.ones(64, WIDTH).to("xla"))
    out.sum().backward()
    kept = (out != 0).float().cpu().sum(0)
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        grad = blocks[1].module.down.bias.grad.cpu()

    everywhere = torch.stack(xm.mesh_reduce("kept", kept, list)).mean(0)
    assert 0 < kept.sum() < 64 * WIDTH
    torch.testing.assert_close(grad, 2 * everywhere)


def assert_same_gradients(model, expected):
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        found = [p.grad if p.grad is None else p.grad.cpu() for p in model.parameters()]
    wanted = [p.grad for p in expected.parameters()]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def checkpoints_around_wrappers():
    from torch_xla.utils.checkpoint import checkpoint

    def outside(layer):
        return Computes(lambda self, x: checkpoint(self.layer, x), layer=layer)

    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    for way in (outside, checkpoint_module):
        torch.manual_seed(2)
        blocks = [Block() for _ in range(3)]
        expected = nn.Sequential(nn.Linear(WIDTH, WIDTH), *copy.deepcopy(blocks))
        inner = (way(FSDP(block, **streaming())) for block in blocks)
        model = FSDP(nn.Sequential(copy.deepcopy(expected[0]), *inner), **streaming())
        expected(x).square().mean().backward()
        model(x.to("xla")).square().mean().backward()
        assert_same_gradients(model, expected)


def wrappers_in_wrappers():
    def model(wrap):
        torch.manual_seed(1)
        frozen = Block().requires_grad_(False)
        inner = wrap(nn.Sequential(wrap(Block()), nn.ReLU(inplace=True), wrap(frozen)))
        return wrap(nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, wrap(Block())))

    expected, found = model(lambda m: m), model(lambda m: FSDP(m, **streaming()))
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        expected(expected(x)).square().mean().backward()
        found(found(x.to("xla"))).square().mean().backward()
    assert_same_gradients(found, expected)


def hooks(rank):
    options = streaming()
    model = FSDP(nn.Sequential(FSDP(Block(), **options), FSDP(Block(), **options)), **options)
    calls = []

    def hook(grad):
        calls.append(tuple(grad.shape))
        if len(calls) == 1:
            raise ArithmeticError("of a hook")

    # Of the last block, so that gradients of others are still to come.
    next(model.module[1].parameters()).register_hook(hook)
    x = torch.ones(2, WIDTH, requires_grad=True)
    with pytest.raises(ArithmeticError, match="of a hook"):
        model(x.to("xla")).sum().backward()
    for parameter in model.parameters():
        parameter.grad = None
    model(x.to("xla")).sum().backward()
    assert len(calls) == 2 and all(p.grad is not None for p in model.parameters())


def refusals():
    with pytest.raises(TypeError, match="CPUOffload.stream must be True or False, got 1"):
        CPUOffload(stream=1)
    with pytest.raises(ValueError, match="streams shards that are on the host"):
        CPUOffload(False, False, False, stream=True)
    block = FSDP(checkpoint_module(Block(), offload=True), **streaming())
    model = FSDP(nn.Sequential(nn.Linear(WIDTH, WIDTH), block), **streaming())
    with pytest.raises(RuntimeError, match="Leave offload or stream out"):
        model(torch.ones(2, WIDTH).to("xla"))


@on_each_rank(2)
def test_uses_and_refusals(rank):
    dropout_is_replayed()
    checkpoints_around_wrappers()
    wrappers_in_wrappers()
    hooks(rank)
    refusals()


@pytest.mark.slow
@without_ranks
def test_plan():
    width, depth, rows, ranks = 256, 4, 512, 4
    options = streaming(compute_dtype=torch.bfloat16)

    def wide():
        up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        return Computes(lambda self, x: x + self.down(F.gelu(self.up(x))), up=up, down=down)

    def step():
        blocks = (FSDP(checkpoint_module(wide()), **options) for _ in range(depth))
        model = FSDP(nn.Sequential(nn.Linear(width, width, bias=False), *blocks), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            model(torch.zeros(rows, width).to("xla")).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    report = plan(step, "v5litepod-4", cache=False, progress=False)
    root = 2 * width * width // ranks
    parts = report.parts
    # First and last block of either way have the root's share in their programs.
    assert sum(part.times for part in parts) == 2 * depth + 1 and len(parts) < 2 * depth
    assert max(part.times for part in parts) >= depth - 2
    copies = report.host.shards // 2  # bfloat16
    assert report.host.to_host == copies and report.host.to_device == 2 * copies - root
    assert {part.to_device for part in parts if part.times > 1} == {(copies - root) // depth}
    inputs = 2 * rows * width
    # Of the blocks' kept inputs all but its own are beside the last forward's program, at least.
    assert report.memory.beside >= (depth - 2) * inputs
    assert report.executables == 1 and report.wire_ratio == pytest.approx(1.0, abs=0.1)
    products = 6 * rows * (width * width + depth * 4 * width * width)
    assert report.timing.model_flops == pytest.approx(products, rel=0.01)
    link = (report.host.to_device + report.host.to_host) / report.host.link
    alone = sum(part.times * part.seconds for part in parts)
    assert alone < report.timing.step < alone + link
    with pytest.raises(ValueError, match="tune without stream"):
        tune(lambda settings: step(), "v5litepod-4", progress=False)
    assert str(report).count("forward of") >= 2 and "Parts of the step" in str(report)
    assert Report.from_json(report.to_json()).parts == parts

"""Scanned blocks against the same blocks wrapped singly."""

import copy
import functools
import os
import re
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
from on_ranks import on_each_rank, raises, slow, without_ranks
from planned import training_step
from small_models import Computes, trace_as_on_tpu
from torch import nn
from zoo import Attention

import xla_fsdp
from xla_fsdp import (
    XlaFullyShardedDataParallel,
    checkpoint_module,
    compiler_options,
    plan,
    scan_blocks,
)
from xla_fsdp.scan.loop import loop

WIDTH, DEPTH = 12, 3  # odd, so that what takes two blocks at a time has one left


class Block(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = Attention(width, 2)
        self.up = nn.Linear(width, 7)
        self.again = nn.Linear(width, 7)
        self.again.weight = self.up.weight
        self.down = nn.Linear(7, width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.gain = nn.Parameter(torch.rand(()))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.empty(64, 0))
        self.unused = nn.Linear(width, 3)
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fixed", torch.rand(width), persistent=False)

    def forward(self, x, mask=None, *, shift=0.0):
        self.count += 1
        x = x + self.attention(self.norm(x), causal=False) * self.scale
        nothing = self.empty.sum() + self.narrow.sum()
        hidden = F.gelu(self.up(x)) + torch.tanh(self.again(x)) + nothing
        x = x + self.gain * self.down(hidden) + self.frozen(x) * self.fixed.mean() + shift
        return x if mask is None else x * mask


class Model(nn.Module):
    def __init__(self, around):
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        blocks = [Block() for _ in range(DEPTH)]
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.blocks = around(blocks)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        hidden = self.first(x)
        mask = torch.ones(hidden.shape[1], 1, device=x.device)
        if isinstance(self.blocks, nn.ModuleList):
            for block in self.blocks:
                hidden = block(hidden, mask, shift=self.shift)
        else:
            hidden = self.blocks(hidden, mask, shift=self.shift)
        return self.last(hidden)


def _model(scanned, options, **more):
    fsdp = functools.partial(XlaFullyShardedDataParallel, **options)
    torch.manual_seed(3)

    def around(blocks):
        if scanned:
            return scan_blocks((block for block in blocks), **options, **more)
        return nn.ModuleList(map(fsdp, blocks))

    return fsdp(Model(around))


def trained(rank, scanned, options, hold=False, **more):
    """Losses, norms and outputs of two steps of two batches each; state and metadata after them."""
    model = _model(scanned, options, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)  # no state: steps are one program
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(2):
        for part in range(2):
            x = torch.randn(2, 4, 5, generator=generator).to("xla")
            with model.no_sync() if hold and part == 0 else torch.enable_grad():
                loss = (model(x) - x).float().square().mean()
                loss.backward()
        norm = model.clip_grad_norm_(0.7)
        optimizer.step()
        model.zero_grad()
        found += [loss.detach(), norm]
        if more:
            with torch.no_grad():
                found.append(model(x).float().sum())
        torch_xla.sync()
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    assert state["blocks.1.count"] == (6 if more else 4)
    return [value.item() for value in found], state, model.get_shard_metadata()


def assert_same(one, other, rtol, atol):
    (ours, state, metadata), (theirs, singly, described) = one, other
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    close(torch.tensor(ours), torch.tensor(theirs))
    close(state, singly)
    assert metadata == described


BFLOAT16, ROWS = {"compute_dtype": torch.bfloat16}, {"shard_param_on_dim_0": True}


@on_each_rank(3)
def test_equals_blocks_wrapped_singly(rank):
    """no_sync changes nothing but the bytes sent."""
    assert_same(*(trained(rank, scanned, {}, True) for scanned in (True, False)), 1e-5, 1e-6)


@pytest.mark.parametrize(
    "ranks, options, on_tpu, rtol",
    [
        (2, ROWS, False, 0.0),
        slow(2, BFLOAT16, True, 0.0),
        # XLA on a CPU fuses, and so rounds, some of it otherwise: 7.5291286 for 7.5291281.
        slow(4, {"reshard_after_forward": 2}, True, 1e-5),
    ],
)
@on_each_rank()
def test_prefetch_equals_the_loop_without(rank, options, on_tpu, rtol):
    trace_as_on_tpu(on_tpu)
    assert_same(*(trained(rank, True, options, prefetch=how) for how in (True, False)), rtol, rtol)


@on_each_rank(1)
def test_the_same_step_is_not_compiled_again(rank):
    model, counts = _model(True, {}), []
    x = torch.ones(2, 4, 5).to("xla")
    for _ in range(4):
        model(x).sum().backward()
        model.zero_grad()
        torch_xla.sync(wait=True)
        counts.append(sum(xla_fsdp.compilation_counts()))
    assert counts[3] == counts[1]


@torch.library.custom_op("xla_fsdp_test::half_kept", mutates_args=())
def half_kept(x: torch.Tensor) -> torch.Tensor:
    """A user's operator, which draws and whose ranks wait for each other."""
    kept = xm.all_reduce(xm.REDUCE_SUM, torch.ones_like(x)) / torch_xla.runtime.world_size()
    return kept * 2 * (torch.rand_like(x) < 0.5)


DROPS = {"torch": lambda x: F.dropout(x, 0.5), "own": lambda x: x * half_kept(x.detach())}


@pytest.mark.parametrize("drops", DROPS)
@on_each_rank(2)
def test_each_block_draws_for_itself_and_the_backward_draws_the_same(rank, drops):
    found = []
    even = torch.arange(4096, device="xla") % 2 == 0

    def dropped():
        def forward(self, x):
            x = DROPS[drops](x) * self.weight
            x[even] *= 1  # reads the mask, which has a value, on the host
            return x

        return Computes(forward, weight=nn.Parameter(torch.ones(4096)))

    for prefetch in (False, True):
        blocks = scan_blocks((dropped() for _ in range(2)), prefetch=prefetch)
        xm.set_rng_state(7 + rank)
        x = torch.ones(4096, device="xla", requires_grad=True)
        for _ in range(2):
            y = blocks(x)
            grads = torch.autograd.grad(y.sum(), [x, *blocks.parameters()])
            found.append([one.detach().cpu() for one in (y, *grads)])
    first, second, *prefetched = found
    for y, grad, *_ in (first, second):
        assert torch.equal(y, grad)
        # Two independent masks leave a quarter; standard deviation 0.007.
        assert (y > 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    # 0.0625 + 0.5625 of the elements agree by chance.
    assert (first[0] == second[0]).float().mean().item() == pytest.approx(0.625, abs=0.05)
    for ours, expected in zip(prefetched, (first, second), strict=True):
        assert all(map(torch.equal, ours, expected))


@on_each_rank(2)
def test_state_dicts_are_those_of_blocks_wrapped_singly(rank):
    scanned, singly = _model(True, {}), _model(False, {})
    x = torch.randn(2, 4, 5).to("xla")
    torch_xla.sync()
    with torch.no_grad():
        for shard in singly.parameters():
            shard.mul_(1.5)
    assert not scanned.load_state_dict(singly.state_dict()).missing_keys
    with torch.no_grad():
        torch.testing.assert_close(scanned(x).cpu(), singly(x).cpu())
        for shard in scanned.parameters():
            shard.mul_(0.5)
    singly.load_state_dict(scanned.state_dict())
    with torch.no_grad():
        for one in (scanned, copy.deepcopy(scanned)):
            torch.testing.assert_close(one(x).cpu(), singly(x).cpu())
    state = {name: value.cpu() for name, value in scanned.state_dict().items()}
    del state["blocks.1.up.bias"]
    state["blocks.2.gain"] = torch.zeros(3)
    state["blocks.9.gain"] = torch.zeros(3)
    with pytest.raises(RuntimeError) as raised:
        scanned.load_state_dict(state)
    for name in ("blocks.1.up.bias", "blocks.2.gain", "blocks.9.gain"):
        assert name in str(raised.value)


class Small(nn.Module):
    def __init__(self, width=4, bias=True, number=0, relu=False, double=False):
        super().__init__()
        self.number = number
        self.double = double
        self.norm = nn.LayerNorm(width)
        self.act = nn.ReLU() if relu else nn.GELU()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        y = self.linear(self.act(self.norm(x)))
        return torch.cat([y, y]) if self.double else x + y


@on_each_rank(1)
def test_says_what_is_wrong(rank):
    frozen, in_eval = Small(), Small().eval()
    frozen.norm.bias.requires_grad_(False)
    trainable = "norm.bias: parameter of shape (4,), float32, trainable in block"
    for blocks, options, expected in (
        ([], {}, "at least one block"),
        ([3], {}, "block 0 must be a torch.nn.Module, got int"),
        ([Small(), Small(relu=True)], {}, "act: GELU in block 0, ReLU in block 1"),
        ([Small(), Small(bias=False)], {}, "linear.bias: parameter of shape (4,), float32"),
        ([Small(), frozen], {}, trainable),
        ([Small(), in_eval], {}, "training: True in block 0, False in block 1"),
        ([Small(number=0), Small(number=1)], {}, "number: 0 in block 0, 1 in block 1"),
        ([nn.Sequential(nn.LSTM(4, 4))], {}, "recurrent"),
        ([XlaFullyShardedDataParallel(Small())], {}, "block 0 is wrapped"),
        ([checkpoint_module(Small())], {}, "forward of block 0 was replaced"),
        ([Small()], {"prefetch": 2}, "prefetch must be True or False, got 2"),
    ):
        raises((ValueError, TypeError), re.escape(expected), scan_blocks, blocks, **options)
    differing = scan_blocks([Small(number=0), Small(number=1)], ignore=["number"])
    assert len(differing) == 2
    x = torch.ones(2, 4, device="xla")
    text = re.escape("returned (4, 4), torch.float32 for an input of (2, 4)")
    raises(ValueError, text, scan_blocks([Small(double=True)]), x)
    raises(TypeError, "floating-point tensor as first argument, got torch", differing, x.long())


@on_each_rank(1)
def test_several_bodies_an_iteration(rank):
    device = torch_xla.device()
    rows, more = (torch.randn(5, 3, generator=torch.Generator().manual_seed(n)) for n in (1, 2))

    def body(carry, slices, constants):
        (total, count), (own, following), (scale,) = carry, slices, constants
        noise = torch.rand_like(own)
        return [total * scale + own * following, count + 1], [total + following, noise]

    for reverse in (False, True):
        kinds = []
        for unroll in (1, 2, 3, 5, 9):
            carry = [torch.ones(3).to(device), torch.zeros(()).to(device)]
            scale = torch.full((3,), 0.5).to(device)
            stacked = [rows.to(device), more.to(device)]
            how = {"seed": 11, "reverse": reverse, "ahead": [1], "unroll": unroll}
            (total, count), made = loop(body, carry, stacked, [scale], device, **how)
            kinds.append([total.cpu(), *(one.cpu() for one in made)])
            assert count.item() == 5
        total, order = torch.ones(3), range(5)
        for i in reversed(order) if reverse else order:
            after = max(i - 1, 0) if reverse else min(i + 1, 4)
            torch.testing.assert_close(kinds[0][1][i], total + more[after])
            total = total * 0.5 + rows[i] * more[after]
        torch.testing.assert_close(kinds[0][0], total)
        assert len({float(row.sum()) for row in kinds[0][2]}) == 5  # each draws for itself
        for other in kinds[1:]:
            for ours, theirs in zip(other, kinds[0], strict=True):
                assert torch.equal(ours, theirs), reverse


@on_each_rank(2)
def test_parameters_of_meta_blocks_are_stacked_under_one_blocks_names(rank):
    with torch.device("meta"):
        blocks = scan_blocks(Small() for _ in range(2))
    blocks(torch.ones(2, 4, device="xla")).sum().backward()
    parameters = dict(blocks.named_parameters())
    assert list(parameters) == ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
    for parameter in parameters.values():
        assert parameter.to_local().shape == (2, 128)
        # So small that every value is on the first rank, the other has padding.
        assert (parameter.grad.to_local().abs().sum().item() > 0) is (rank == 0)


def _deep(depth, scanned):
    from benchmarks.model import Block

    fsdp = functools.partial(XlaFullyShardedDataParallel, compute_dtype=torch.bfloat16)
    blocks = [Block(256, 4, causal=False) for _ in range(depth)]
    if scanned:
        inner = scan_blocks(blocks, compute_dtype=torch.bfloat16)
    else:
        inner = nn.Sequential(*(fsdp(checkpoint_module(block)) for block in blocks))
    return fsdp(nn.Sequential(nn.Linear(256, 256), inner))


@pytest.mark.slow
@without_ranks
def test_on_the_tpu_compiler(tmp_path):
    few, many, singly = (
        plan(
            training_step(functools.partial(_deep, *case), 4, 128, 256),
            "v3-8", cache=str(tmp_path), progress=False, ranks=[0, 7],
        )
        for case in ((2, True), (4, True), (4, False))
    )  # fmt: skip
    assert few.executables == many.executables == 1
    # One program for any depth, with loops that run as often as there are blocks.
    assert many.program_bytes <= 1.1 * few.program_bytes
    for report, depth in ((few, 2), (many, 4)):
        inside = [c for c in report.schedule.collectives if c.module.startswith("1.")]
        assert inside and {c.times for c in inside} == {depth}
        assert {c.phase for c in inside if c.kind == "all-gather"} == {"forward", "backward"}
    assert "1.qkv.weight" in {c.module for c in many.schedule.collectives}
    outside = sum(c.wire_bytes for c in few.schedule.collectives if c.times == 1)
    assert many.wire_bytes - outside == 2 * (few.wire_bytes - outside)
    assert many.program_bytes < singly.program_bytes
    assert many.wire_bytes == singly.wire_bytes
    assert many.bound_wire_bytes == singly.bound_wire_bytes
    assert many.memory.peak <= singly.memory.peak
    assert many.memory.required <= singly.memory.required


def _clipped_step():
    up, down = (512, 2048, False), (2048, 512, False)
    blocks = [nn.Sequential(nn.Linear(*up), nn.GELU(), nn.Linear(*down)) for _ in range(4)]
    blocks = scan_blocks(blocks, compute_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(512, 512), blocks, nn.Linear(512, 512))
    model = XlaFullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.randn(8, 256, 512).to("xla")).float().square().mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


@pytest.mark.slow
@without_ranks
def test_refused_where_gathers_run_beside_loops(tmp_path):
    def planned(**options):
        options = {"cache": str(tmp_path), "progress": False, "ranks": [0], **options}
        return plan(_clipped_step, "v6e:2x4", **options)

    with mock.patch.dict(os.environ):
        report = planned()
        assert report.fits
        assert any(c.asynchronous and c.times == 4 for c in report.schedule.collectives)
        compiler_options.add_to_environment()  # as launch does
        assert planned().from_cache
        # With this one the compiler dies of the program.
        beside = "--xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions"
        os.environ["LIBTPU_INIT_ARGS"] = f"{beside}=true"
        raises(RuntimeError, f"TPU v6 lite .*{beside}=true; take it out", planned)

"""Scanned blocks against the same blocks wrapped singly."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from test_comm_hooks import hybrid
from test_special_uses import trace_as_on_tpu
from torch import nn
from zoo import Attention

WIDTH, DEPTH = 12, 3  # odd, so that what takes two blocks at a time has one left


class Block(nn.Module):
    """Has parameters that are hard to shard, and takes a mask and a shift for all blocks."""

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
        self.unused = nn.Linear(width, 3)
        self.register_buffer("scale", torch.rand(width))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("fixed", torch.rand(width), persistent=False)

    def forward(self, x, mask=None, *, shift=0.0):
        self.count += 1
        x = x + self.attention(self.norm(x), causal=False) * self.scale
        hidden = F.gelu(self.up(x)) + torch.tanh(self.again(x)) + self.empty.sum()
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
    """Of blocks wrapped singly, or scanned; the scanned ones have ``more`` options."""
    from xla_fsdp import XlaFullyShardedDataParallel, scan_blocks

    fsdp = functools.partial(XlaFullyShardedDataParallel, **options)
    torch.manual_seed(3)

    def around(blocks):
        if scanned:
            return scan_blocks((block for block in blocks), **options, **more)
        return nn.ModuleList(map(fsdp, blocks))

    return fsdp(Model(around))


def trained(rank, scanned, options, hold=False, **more):
    """Losses, norms and outputs of two steps of two batches each; state and metadata after them."""
    import torch_xla

    model = _model(scanned, options, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)  # no state: steps are one program
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(2):
        for part in range(2):
            x = torch.randn(2, 4, 5, generator=generator).to(torch_xla.device())
            wait = model.no_sync() if hold and part == 0 else torch.enable_grad()
            with wait:
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
    # As many forwards: each block's own buffers are written.
    assert state["blocks.1.count"] == (6 if more else 4)
    return [value.item() for value in found], state, model.get_shard_metadata()


def assert_same(one, other, rtol, atol):
    (ours, state, metadata), (theirs, singly, described) = one, other
    close = functools.partial(torch.testing.assert_close, rtol=rtol, atol=atol)
    close(torch.tensor(ours), torch.tensor(theirs))
    assert state.keys() == singly.keys()
    for name, value in singly.items():
        close(state[name], value, msg=lambda text, name=name: f"{name}: {text}")
    assert metadata == described


HYBRID = {"hybrid": True}


def of_rank(rank, options):
    """``options`` with those of :func:`hybrid` in place of ``HYBRID``."""
    rest = {name: value for name, value in options.items() if name not in HYBRID}
    return options if rest == options else hybrid(rank) | rest


def both(rank, options, hold, close):
    options = of_rank(rank, options)
    assert_same(*(trained(rank, scanned, options, hold) for scanned in (True, False)), *close)


EXACT, NARROW = (1e-5, 1e-6), (2e-2, 2e-2)
BFLOAT16, ROWS = {"compute_dtype": torch.bfloat16}, {"shard_param_on_dim_0": True}
SLOW = [(4, HYBRID | ROWS, False, EXACT), (2, BFLOAT16, False, NARROW)]
FULL = [
    (1, {}, False, EXACT),
    (4, {}, False, EXACT),
    (2, ROWS, False, EXACT),
    (4, HYBRID, False, EXACT),
    (2, BFLOAT16 | {"fp32_reduce_scatter": True}, False, NARROW),
]


@pytest.mark.parametrize(
    "ranks, options, hold, close",
    [
        (3, {}, True, EXACT),  # no_sync changes nothing but the bytes sent
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.full) for case in FULL),
    ],
)
def test_equals_blocks_wrapped_singly(run_ranks, ranks, options, hold, close):
    run_ranks(both, ranks, options, hold, close)


def prefetched(rank, options, on_tpu, rtol):
    options = of_rank(rank, options)
    if on_tpu:
        trace_as_on_tpu()
    results = (trained(rank, True, options, prefetch=how) for how in (True, False))
    assert_same(*results, rtol, rtol)


@pytest.mark.parametrize(
    "ranks, options, on_tpu, rtol",
    [
        (2, ROWS, False, 0.0),
        pytest.param(2, BFLOAT16, True, 0.0, marks=pytest.mark.slow),
        pytest.param(4, HYBRID, False, 0.0, marks=pytest.mark.slow),
        pytest.param(4, {"reshard_after_forward": 2}, False, 0.0, marks=pytest.mark.slow),
        # XLA on a CPU fuses, and so rounds, some of it otherwise: 7.5291286 for 7.5291281.
        pytest.param(4, {"reshard_after_forward": 2}, True, 1e-5, marks=pytest.mark.slow),
    ],
)
def test_prefetch_equals_the_loop_without(run_ranks, ranks, options, on_tpu, rtol):
    run_ranks(prefetched, ranks, options, on_tpu, rtol)


def traced_once(rank):
    """Steps, and what torch_xla compiled in the last two of four."""
    import torch_xla

    import xla_fsdp

    model, counts = _model(True, {}), []
    x = torch.ones(2, 4, 5).to(torch_xla.device())
    for _ in range(4):
        model(x).sum().backward()
        model.zero_grad()
        torch_xla.sync(wait=True)
        counts.append(sum(xla_fsdp.compilation_counts()))
    return counts[3] - counts[1]


def test_the_same_step_is_not_compiled_again(run_ranks):
    assert run_ranks(traced_once, 1) == [0]


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))

    def forward(self, x):
        return F.dropout(x, 0.5) * self.weight


def dropped(rank):
    import torch_xla
    import torch_xla.core.xla_model as xm

    from xla_fsdp import scan_blocks

    found = []
    for prefetch in (False, True):
        blocks = scan_blocks((Dropped() for _ in range(2)), prefetch=prefetch)
        xm.set_rng_state(7 + rank)
        x = torch.ones(4096, device=torch_xla.device(), requires_grad=True)
        for _ in range(2):
            y = blocks(x)
            grads = torch.autograd.grad(y.sum(), [x, *blocks.parameters()])
            found.append([one.detach().cpu() for one in (y, *grads)])
    return found


def test_each_block_draws_for_itself_and_the_backward_draws_the_same(run_ranks):
    (first, second, *prefetched), _ = run_ranks(dropped, 2)
    for y, grad, *_ in (first, second):
        assert torch.equal(y, grad)
        # Two independent masks leave a quarter; standard deviation 0.007.
        assert (y > 0).float().mean().item() == pytest.approx(0.25, abs=0.05)
    # 0.0625 + 0.5625 of the elements agree by chance.
    assert (first[0] == second[0]).float().mean().item() == pytest.approx(0.625, abs=0.05)
    for found, expected in zip(prefetched, (first, second), strict=True):
        assert all(map(torch.equal, found, expected))


def exchanged(rank):
    """State dicts go both ways; what is wrong with one is said by the names of blocks."""
    import torch_xla

    scanned, singly = _model(True, {}), _model(False, {})
    x = torch.randn(2, 4, 5).to(torch_xla.device())
    torch_xla.sync()
    with torch.no_grad():
        for shard in singly.parameters():
            shard.mul_(1.5)
    assert not scanned.load_state_dict(singly.state_dict()).missing_keys
    with torch.no_grad():
        first = scanned(x), singly(x)
        for shard in scanned.parameters():
            shard.mul_(0.5)
    singly.load_state_dict(scanned.state_dict())
    with torch.no_grad():
        second = scanned(x), singly(x), copy.deepcopy(scanned)(x)
    state = {name: value.cpu() for name, value in scanned.state_dict().items()}
    del state["blocks.1.up.bias"]
    state["blocks.2.gain"] = torch.zeros(3)
    state["blocks.9.gain"] = torch.zeros(3)
    try:
        scanned.load_state_dict(state)
    except RuntimeError as error:
        return first, second, str(error)


def test_state_dicts_are_those_of_blocks_wrapped_singly(run_ranks):
    for first, second, message in run_ranks(exchanged, 2):
        torch.testing.assert_close(*first)
        torch.testing.assert_close(second[0], second[1])
        torch.testing.assert_close(second[0], second[2])
        for name in ("blocks.1.up.bias", "blocks.2.gain", "blocks.9.gain"):
            assert name in message


class Small(nn.Module):
    def __init__(self, width=4, bias=True, eps=1e-5, number=0, relu=False, double=False):
        super().__init__()
        self.number = number
        self.double = double
        self.norm = nn.LayerNorm(width, eps=eps)
        self.act = nn.ReLU() if relu else nn.GELU()
        self.linear = nn.Linear(width, width, bias=bias)

    def forward(self, x):
        y = self.linear(self.act(self.norm(x)))
        return torch.cat([y, y]) if self.double else x + y


def _hooked():
    block = Small()
    block.linear.register_forward_hook(lambda *_: None)
    return block


def _shared():
    first, second = Small(), Small()
    second.linear.weight = first.linear.weight
    return first, second


def _wrapped():
    from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module

    return XlaFullyShardedDataParallel(Small()), checkpoint_module(Small())


def _attempts():
    frozen, in_eval = Small(), Small().eval()
    frozen.norm.bias.requires_grad_(False)
    inner, checkpointed = _wrapped()
    double = Small(bias=False).to(torch.float64)
    return [
        ([], {}, "at least one block"),
        ([3], {}, "block 0 must be a torch.nn.Module, got int"),
        ([Small(), Small(relu=True)], {}, "act: GELU in block 0, ReLU in block 1"),
        ([Small(), Small(), Small(eps=1e-6)], {}, "norm.eps: 1e-05 in block 0, 1e-06 in block 2"),
        ([Small(), Small(bias=False)], {}, "linear.bias: parameter of shape (4,), float32"),
        ([Small(bias=False), double], {}, "float64, trainable in block 1"),
        ([Small(), frozen], {}, "norm.bias: parameter of shape (4,), float32, trainable in block"),
        ([Small(), in_eval], {}, "training: True in block 0, False in block 1"),
        ([Small(number=0), Small(number=1)], {}, "number: 0 in block 0, 1 in block 1"),
        ([_hooked()], {}, "hooks"),
        ([nn.Sequential(nn.LSTM(4, 4))], {}, "recurrent"),
        (_shared(), {}, "blocks 0 and 1 share the parameter linear.weight"),
        ([inner], {}, "block 0 is wrapped"),
        ([checkpointed], {}, "forward of block 0 was replaced"),
        ([Small()], {"reshard_after_forward": False}, "reshard_after_forward=False"),
        ([Small()], {"flatten_parameters": True}, "flatten_parameters=True"),
        ([Small()], {"compute_type": torch.float16}, "compute_type"),
        ([Small()], {"prefetch": 2}, "prefetch must be True or False, got 2"),
    ]


def refused(rank):
    import torch_xla

    from xla_fsdp import scan_blocks

    found = []
    for blocks, options, expected in _attempts():
        with pytest.raises((ValueError, TypeError)) as raised:
            scan_blocks(blocks, **options)
        found.append((expected, str(raised.value)))
    differing = scan_blocks([Small(number=0), Small(number=1)], ignore=["number"])
    x = torch.ones(2, 4, device=torch_xla.device())
    with pytest.raises(ValueError) as raised:
        scan_blocks([Small(double=True)])(x)
    found.append(("returned (4, 4), torch.float32 for an input of (2, 4)", str(raised.value)))
    with pytest.raises(TypeError) as raised:
        differing(x.long())
    found.append(("floating-point tensor as first argument, got torch.int64", str(raised.value)))
    with pytest.raises(TypeError) as raised:
        list(differing)
    found.append(("x = blocks(x)", str(raised.value)))
    return found, len(differing)


def test_says_what_is_wrong(run_ranks):
    ((found, length),) = run_ranks(refused, 1)
    assert length == 2
    for expected, message in found:
        assert expected in message, f"{expected!r} not in {message!r}"


def unrolled(rank):
    """Every number of bodies an iteration gives the same, whatever is left over."""
    import torch_xla

    from xla_fsdp.scan.loop import loop

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


def test_several_bodies_an_iteration(run_ranks):
    run_ranks(unrolled, 1)


def meta(rank):
    """Blocks without values get theirs one by one."""
    import torch_xla

    from xla_fsdp import scan_blocks

    with torch.device("meta"):
        blocks = scan_blocks(Small() for _ in range(2))
    y = blocks(torch.ones(2, 4, device=torch_xla.device()))
    y.sum().backward()
    return [
        (name, tuple(p.to_local().shape), p.grad.to_local().abs().sum().item())
        for name, p in blocks.named_parameters()
    ]


def test_parameters_are_stacked_under_one_blocks_names(run_ranks):
    names = ["norm.weight", "norm.bias", "linear.weight", "linear.bias"]
    ranks = run_ranks(meta, 2)
    for found in ranks:
        assert [name for name, *_ in found] == names
        assert {shape for _, shape, _ in found} == {(2, 128)}
    # So small that every value is on the first rank, the other has padding.
    assert all(total > 0 for *_, total in ranks[0])
    assert not any(total for *_, total in ranks[1])


def _planned_step(depth, scanned):
    def step():
        from benchmarks.model import Block
        from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module, scan_blocks

        fsdp = functools.partial(XlaFullyShardedDataParallel, compute_dtype=torch.bfloat16)
        blocks = [Block(256, 4, causal=False) for _ in range(depth)]
        if scanned:
            inner = scan_blocks(blocks, compute_dtype=torch.bfloat16)
        else:
            inner = nn.Sequential(*(fsdp(checkpoint_module(block)) for block in blocks))
        model = fsdp(nn.Sequential(nn.Linear(256, 256), inner))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 128, 256).to("xla")
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def planned(cache):
    from xla_fsdp import plan

    few, many, singly = (
        plan(_planned_step(*case), "v3-8", cache=cache, progress=False, ranks=[0, 7])
        for case in ((2, True), (4, True), (4, False))
    )
    assert few.executables == many.executables == 1
    # One program for any depth, with loops that run as often as there are blocks.
    assert many.program_bytes <= 1.1 * few.program_bytes
    for report, depth in ((few, 2), (many, 4)):
        inside = [c for c in report.schedule.collectives if c.module.startswith("1.")]
        assert inside and {c.times for c in inside} == {depth}
        assert {c.phase for c in inside if c.kind == "all-gather"} == {"forward", "backward"}
    assert "1.qkv.weight" in {c.module for c in many.schedule.collectives}
    # The same bytes for each further block.
    outside = sum(c.wire_bytes for c in few.schedule.collectives if c.times == 1)
    assert many.wire_bytes - outside == 2 * (few.wire_bytes - outside)
    assert many.program_bytes < singly.program_bytes
    assert many.wire_bytes == singly.wire_bytes
    assert many.bound_wire_bytes == singly.bound_wire_bytes
    # The compiler's own peak: arguments and temporaries.
    assert many.memory.peak <= singly.memory.peak
    assert many.memory.required <= singly.memory.required


@pytest.mark.slow
def test_on_the_tpu_compiler(elsewhere, tmp_path):
    elsewhere(planned, str(tmp_path))


class _Perceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def _clipped_step():
    from xla_fsdp import XlaFullyShardedDataParallel, scan_blocks

    blocks = scan_blocks([_Perceptron(512) for _ in range(4)], compute_dtype=torch.bfloat16)
    model = nn.Sequential(nn.Linear(512, 512), blocks, nn.Linear(512, 512))
    model = XlaFullyShardedDataParallel(model, compute_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.randn(8, 256, 512).to("xla")).float().square().mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def planned_with_and_without_gathers_beside_loops(cache):
    import os

    from xla_fsdp import plan
    from xla_fsdp.tpu import compiler_options

    def planned(**options):
        options = {"cache": cache, "progress": False, "ranks": [0], **options}
        return plan(_clipped_step, "v6e:2x4", **options)

    kept = dict(os.environ)
    try:
        report = planned()
        assert report.fits
        assert any(c.asynchronous and c.times == 4 for c in report.schedule.collectives)
        compiler_options.add_to_environment()  # as launch does
        assert planned().from_cache
        # With this one the compiler dies of the program.
        beside = "--xla_tpu_enable_async_collective_fusion_fuse_kloop_fusions"
        os.environ["LIBTPU_INIT_ARGS"] = f"{beside}=true"
        with pytest.raises(RuntimeError, match=f"TPU v6 lite .*{beside}=true; take it out"):
            planned()
    finally:
        os.environ.clear()
        os.environ.update(kept)


@pytest.mark.slow
def test_refused_where_gathers_run_beside_loops(elsewhere, tmp_path):
    elsewhere(planned_with_and_without_gathers_beside_loops, str(tmp_path))

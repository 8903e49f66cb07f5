"""``cpu_offload``, also with ``stream=True``: it trains as without, and what is held where."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from checkpoint_runs import Run, wrapped
from on_ranks import finish_step, on_each_rank, raises, slow, without_ranks
from small_models import Computes, here, inputs, mlp, trace_as_on_tpu
from torch import nn
from zoo import Zoo, batches, loss_of

import xla_fsdp
from xla_fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    Report,
    ShardedParameterError,
    checkpoint_module,
    fully_shard,
    plan,
    scan_blocks,
    tune,
)
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.optim import LAMB, MasterWeights

HOST = torch.device("cpu")


def streaming(**options):
    return {"cpu_offload": CPUOffload(stream=True), **options}


def offloaded(kind, model, **options):
    return wrapped(kind, model, cpu_offload=CPUOffload(), **options)


def streamed(kind, model, **options):
    return wrapped(kind, model, **streaming(**options))


def trained(rank, wrap, **options):
    """Losses, and this rank's shards."""
    torch.manual_seed(0)
    model = wrap("nested", Zoo(), **options)
    # Products with powers of two are exact, whether XLA or a kernel of torch rounds them or not
    # before it adds.
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.25, 0.5)
    losses = []
    for tokens in batches(3):
        mine = tokens.chunk(xr.world_size())[rank].to("xla")
        loss = loss_of(model(mine), mine)
        loss.backward()
        finish_step(optimizer)
        losses.append(loss.item())
    assert {p.device == HOST for p in model.parameters()} == {wrap is not wrapped}
    return losses, [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize(
    "ranks, wrap, on_tpu",
    [
        (1, offloaded, False),
        (2, streamed, False),
        slow(1, streamed, False),
        slow(2, streamed, True),
    ],
)
@on_each_rank()
def test_trains_as_without(rank, wrap, on_tpu):
    trace_as_on_tpu(on_tpu)
    options = {"compute_dtype": torch.bfloat16} if on_tpu else {}
    # XLA leaves out that a gradient is rounded to bfloat16 if it need not go anywhere. What it
    # fuses depends on what is in the program: the update is, without offload.
    close = 2e-2 if on_tpu else 0 if wrap is offloaded else 1e-5
    found, expected = (trained(rank, one, **options) for one in (wrap, wrapped))
    torch.testing.assert_close(found, expected, rtol=close, atol=close)


@on_each_rank(2)
def test_the_update_is_torchs_on_the_host_bit_for_bit(rank):
    torch.manual_seed(0)
    model = offloaded("nested", Zoo(), compute_dtype=torch.bfloat16)
    shards = [p for p in model.parameters() if p.requires_grad]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in shards]
    mine, theirs = (torch.optim.AdamW(p, lr=0.1, fused=True) for p in (shards, copies))
    for tokens in batches(2):
        for _ in range(2):  # accumulated on the host
            loss_of(model(tokens.to("xla")).float(), tokens.to("xla")).backward()
        for shard, twin in zip(shards, copies, strict=True):
            assert shard.grad is None or shard.grad.device == HOST
            assert shard.grad is None or shard.grad.dtype is torch.float32
            twin.grad = None if shard.grad is None else shard.grad.clone()
        mine.step()
        theirs.step()
        mine.zero_grad()
        torch_xla.sync()
        assert all(map(torch.equal, shards, copies))


def states_of(run):
    full = xla_fsdp.full_state_dict(run.model, rank0_only=False)
    return full, xla_fsdp.full_optim_state_dict(run.model, run.optimizer, rank0_only=False)


def saved(rank, offload, folder):
    run = Run("nested", rank, 2, cpu_offload=offload)
    run.train(0, 2)
    run.save(f"{folder}/now", 2)
    checkpointer = xla_fsdp.AsyncCheckpointer(f"{folder}/later")
    checkpointer.save(run.model, run.optimizer, run.scheduler, step=2)
    losses = run.train(2, 4)
    checkpointer.close()
    again = Run("nested", rank, 2, seed=5, cpu_offload=offload)
    again.load(f"{folder}/later")
    assert again.train(2, 4) == losses
    return losses, *states_of(run)


def resumed(rank, offload, folder):
    run = Run("root", rank, 4, seed=7)
    run.load(f"{folder}/now")
    losses = run.train(2, 4)
    full, states = states_of(run)
    back = Run("nested", rank, 4, seed=9, cpu_offload=offload)
    xla_fsdp.load_full_state_dict(back.model, full)
    xla_fsdp.load_full_optim_state_dict(back.model, back.optimizer, states)
    weights, again = states_of(back)
    torch.testing.assert_close((weights, again["state"]), (full, states["state"]), rtol=0, atol=0)
    return losses, full, states


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_checkpoints_with_other_ranks_and_without_offload(run_ranks, tmp_path, stream):
    offload = CPUOffload(stream=stream)
    losses, full, states = run_ranks(saved, 2, offload, str(tmp_path))[0]
    others, found, own = run_ranks(resumed, 4, offload, str(tmp_path))[0]
    torch.testing.assert_close(losses, others, rtol=1e-5, atol=1e-6)
    # Adam makes full steps of gradients that are nothing but rounding.
    torch.testing.assert_close(found, full, rtol=1e-2, atol=1e-3)
    assert own["state"].keys() == states["state"].keys()


def each(change):
    return lambda model: [change(parameter) for parameter in model.parameters()]


def summoned(model):
    with FSDP.summon_full_params(model):
        each(lambda p: p.data.mul_(0.5))(model)


def fused_step(model):
    """Its kernel does not count versions."""
    each(lambda p: setattr(p, "grad", torch.ones_like(p)))(model)
    torch.optim.SGD(model.parameters(), lr=0.5, fused=True).step()


def assigned_from_the_device(model):
    for parameter in model.parameters():
        parameter.data = parameter.grad = parameter.full_tensor() + 0.5


CHANGES = {
    "summoned": summoned,
    "by data": each(lambda p: p.data.add_(0.25)),
    "a fused step": fused_step,
    "loaded": lambda m: m.load_state_dict({k: v * 0.75 for k, v in m.state_dict().items()}),
    "assigned": each(lambda p: setattr(p, "data", p.data + 0.125)),
    "assigned from the device": assigned_from_the_device,
}


def changed_by_hand(rank):
    model = offloaded("root", mlp())
    x = here(0)

    def output():
        with torch.no_grad():
            return model(x).cpu()

    def assert_right(rtol=1e-4, atol=1e-5):
        with FSDP.summon_full_params(model, writeback=False, offload_to_cpu=True):
            values = {name: p.detach().clone() for name, p in model.named_parameters()}
        other = mlp()
        other.load_state_dict(values)
        found = output()
        torch.testing.assert_close(found, other(inputs(0)).detach(), rtol=rtol, atol=atol)
        return found

    before = output()
    for name, change in CHANGES.items():
        change(model)
        now = assert_right()
        assert not torch.allclose(now, before), name
        before = now
    for alias in (lambda p: p.data, lambda p: p.data.detach()):
        held = each(alias)(model)
        torch.testing.assert_close(output(), before)
        for one in held:
            one.mul_(2.0)
        before = assert_right()
        held.clear()
    model.to("xla")
    model.double()
    model.float()
    assert {p.device for p in model.parameters()} == {HOST}
    torch.testing.assert_close(output(), before)
    model.bfloat16()  # rounded, and back at the address where the values were
    model.float()
    assert not torch.equal(output(), before)
    assert_right(1e-5, 1e-6)
    loss = model(x).square().sum()
    fused_step(model)
    raises(RuntimeError, "was changed between a forward", loss.backward)


def cached_after_backward(rank):
    model, plain = fully_shard(mlp(), offload_policy=CPUOffloadPolicy()), mlp()
    model.set_reshard_after_backward(False)
    model(inputs(rank).to("xla")).sum().backward()
    for parameter in (*model.parameters(), *plain.parameters()):
        parameter.data.mul_(0.5)
    found = model(inputs(rank).to("xla")).detach().cpu()
    torch.testing.assert_close(found, plain(inputs(rank)).detach())


def some_on_the_device(rank):
    layers = mlp()
    model = FSDP(nn.Sequential(FSDP(layers[:2], cpu_offload=CPUOffload()), layers[2]))
    model(inputs(rank).to("xla")).square().mean().backward()
    with pytest.raises(ShardedParameterError, match=r"on the host .* model.clip_grad_norm_"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).cpu()
    torch.testing.assert_close(model.clip_grad_norm_(0.1).cpu(), norm)


def named_ones(rank):
    """Only parameters in ``inputs`` get gradients."""

    def blocks():
        torch.manual_seed(1)
        pairs = [nn.Sequential(mlp(), nn.Linear(3, 6)) for _ in range(2)]
        return scan_blocks(pairs, cpu_offload=CPUOffload())

    for make in (lambda: offloaded("root", mlp()), lambda: streamed("root", mlp()), blocks):
        model = make()
        x = here(rank).requires_grad_()
        shards = list(model.parameters())
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x)
        assert gradient.abs().sum() > 0 and x.grad is None
        model(x).square().sum().backward(inputs=shards[1:2])
        with pytest.raises(RuntimeError, match=r"are on the host .* backward\(inputs="):
            torch.autograd.grad(model(x).square().sum(), shards[:1])
        assert [p.grad is not None for p in shards] == [n == 1 for n in range(len(shards))]


def in_pieces(rank):
    """Buffers of a few bytes: gradients come and copies go piece by piece."""
    model, other = offloaded("root", mlp()), mlp()
    model._unit.host_gradients.most = 64
    for tensor in model._unit.tensors:
        tensor.copy.uploads.most = 64
    size = 4 * sum(p.to_local().numel() for p in model.parameters())
    for one in (model, copy.deepcopy(model)):
        other.zero_grad()
        uploads = one._unit.tensors[0].copy.uploads
        sent, received = uploads.sent, one._unit.host_gradients.received
        for _ in range(2):
            one(here(rank)).square().sum().backward()
        for number in range(2):
            (other(inputs(number)).square().sum()).backward()
        for name, parameter in one.named_parameters():
            expected = other.get_parameter(name).grad
            full = parameter.grad.full_tensor().cpu()
            torch.testing.assert_close(full, expected, rtol=1e-4, atol=1e-5)
        one.zero_grad()
        # Shards once, as they did not change; gradients of both backwards.
        assert uploads.sent - sent == size
        assert one._unit.host_gradients.received - received == 2 * size
    assert all(p.grad is None for p in model.parameters())


def refused(rank):
    for given in ((True, False, True), (False, True, True), (True, True, False)):
        raises(ValueError, r"CPUOffload\(parameters=.* is not supported", CPUOffload, *given)
    raises(TypeError, "CPUOffload.gradients must be True or False, got 1", CPUOffload, gradients=1)
    nothing = FSDP(mlp(), cpu_offload=CPUOffload(False, False, False))
    assert next(nothing.parameters()).device.type == "xla"
    model = offloaded("root", mlp().bfloat16())
    narrow = list(model.parameters())
    for make in (lambda: LAMB(narrow), lambda: MasterWeights(narrow, LAMB, lr=0.1)):
        raises(ValueError, "LAMB needs .*cpu_offload", make)
    tied = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    tied[0] = FSDP(tied[0], cpu_offload=CPUOffload())
    raises(ValueError, "'weight' is shared with another wrapper", FSDP, tied)
    raises(RuntimeError, "cannot be moved to cpu", model.cpu)


@pytest.mark.slow
@without_ranks
def test_plan():
    width, ranks = 1024, 8
    elements = 4 * (width * width + width)
    options = {"compute_dtype": torch.bfloat16, "cpu_offload": CPUOffload()}

    def step():
        layers = (torch.nn.Linear(width, width) for _ in range(4))
        model = FSDP(torch.nn.Sequential(*(FSDP(one, **options) for one in layers)), **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for _ in range(2):
            model(torch.zeros(64, width).to("xla")).float().square().mean().backward()
            model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            assert next(model.parameters()).numel() * ranks >= width * width

    report = xla_fsdp.plan(step, "v5litepod-8", ranks=[0], cache=False, progress=False)
    host, shards = report.host, 4 * elements // ranks
    assert (host.shards, host.gradients, host.ranks) == (shards, shards, ranks)
    assert 2 * shards <= host.state <= 2 * shards + 4 * 8  # and a count for every parameter
    assert host.to_host == host.to_device == shards // 2
    assert report.host_required == ranks * (4 * shards + host.buffers + host.state - 2 * shards)
    assert host.capacity == 384e9 and report.fits and report.fits_host
    # bfloat16 shards and the batch go in, bfloat16 gradients come out.
    assert report.memory.arguments < shards // 2 + 2**20
    assert report.memory.outputs < shards // 2 + 2**20
    assert "optimizer steps on the host" in str(report)
    small = xla_fsdp.Report.from_json(
        report.to_json().replace('"capacity": 384000000000', '"capacity": 9')
    )
    assert not small.fits and small.fits_device and "GB that a host of" in str(small)


WIDE = 8


class Block(nn.Module):
    def __init__(self, dropped: float = 0.0):
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)
        self.dropout = nn.Dropout(dropped)

    def forward(self, x):
        return self.dropout(x + self.down(torch.tanh(self.up(x))))


def stack(depth, wrap):
    blocks = nn.Sequential(*(wrap(Block()) for _ in range(depth)))
    first = nn.Linear(WIDE, WIDE)
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
            model(torch.ones(4, WIDE).to("xla")).float().square().mean().backward()
            finish_step(optimizer)

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
            model(torch.ones(4, WIDE).to("xla"))
        assert found[4 * depth :] == [1] * depth and held(model) == 0


def dropout_is_replayed(rank):
    options = streaming()
    blocks = [FSDP(checkpoint_module(Block(0.5)), **options) for _ in range(2)]
    model = FSDP(nn.Sequential(*blocks), **options)
    out = model(torch.ones(64, WIDE).to("xla"))
    out.sum().backward()
    kept = (out != 0).float().cpu().sum(0)
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        grad = blocks[1].module.down.bias.grad.cpu()

    everywhere = torch.stack(xm.mesh_reduce("kept", kept, list)).mean(0)
    assert 0 < kept.sum() < 64 * WIDE
    torch.testing.assert_close(grad, 2 * everywhere)


def assert_same_gradients(model, expected):
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        found = [p.grad if p.grad is None else p.grad.cpu() for p in model.parameters()]
    torch.testing.assert_close(found, [p.grad for p in expected.parameters()], rtol=1e-4, atol=1e-5)


def checkpoints_around_wrappers(rank):
    from torch_xla.utils.checkpoint import checkpoint

    def outside(layer):
        return Computes(lambda self, x: checkpoint(self.layer, x), layer=layer)

    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(0))
    for way in (outside, checkpoint_module):
        torch.manual_seed(2)
        blocks = [Block() for _ in range(3)]
        expected = nn.Sequential(nn.Linear(WIDE, WIDE), *copy.deepcopy(blocks))
        inner = (way(FSDP(block, **streaming())) for block in blocks)
        model = FSDP(nn.Sequential(copy.deepcopy(expected[0]), *inner), **streaming())
        expected(x).square().mean().backward()
        model(x.to("xla")).square().mean().backward()
        assert_same_gradients(model, expected)


def wrappers_in_wrappers(rank):
    def model(wrap):
        torch.manual_seed(1)
        frozen = Block().requires_grad_(False)
        inner = wrap(nn.Sequential(wrap(Block()), nn.ReLU(inplace=True), wrap(frozen)))
        return wrap(nn.Sequential(nn.Linear(WIDE, WIDE), inner, wrap(Block())))

    expected, found = model(lambda m: m), model(lambda m: FSDP(m, **streaming()))
    x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        expected(expected(x)).square().mean().backward()
        found(found(x.to("xla"))).square().mean().backward()
    assert_same_gradients(found, expected)


def gradients_of_input_gradients(rank):
    torch.manual_seed(1)
    expected = nn.Sequential(nn.Linear(WIDE, WIDE), Block(), Block())
    found = FSDP(nn.Sequential(*(FSDP(one, **streaming()) for one in copy.deepcopy(expected))))
    for model, device in ((expected, "cpu"), (found, "xla")):
        x = torch.ones(4, WIDE).to(device).requires_grad_()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            gradient.square().mean().backward()
    assert_same_gradients(found, expected)


def hooks_of_streams(rank):
    options = streaming()
    model = FSDP(nn.Sequential(FSDP(Block(), **options), FSDP(Block(), **options)), **options)
    calls = []

    def hook(grad):
        calls.append(tuple(grad.shape))
        if len(calls) == 1:
            raise ArithmeticError("of a hook")

    # Of the last block, so that gradients of others are still to come.
    next(model.module[1].parameters()).register_hook(hook)
    x = torch.ones(2, WIDE, requires_grad=True)
    raises(ArithmeticError, "of a hook", model(x.to("xla")).sum().backward)
    for parameter in model.parameters():
        parameter.grad = None
    model(x.to("xla")).sum().backward()
    assert len(calls) == 2 and all(p.grad is not None for p in model.parameters())


def refused_streams(rank):
    raises(TypeError, "CPUOffload.stream must be True or False, got 1", CPUOffload, stream=1)
    raises(ValueError, "streams shards that are on", CPUOffload, False, False, False, stream=True)
    block = FSDP(checkpoint_module(Block(), offload=True), **streaming())
    model = FSDP(nn.Sequential(nn.Linear(WIDE, WIDE), block), **streaming())
    raises(RuntimeError, "Leave offload or stream out", model, torch.ones(2, WIDE).to("xla"))


@pytest.mark.slow
@without_ranks
def test_plan_of_streams():
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
    assert report.memory.other_programs >= (depth - 2) * inputs
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


SHARDS = [
    changed_by_hand, cached_after_backward, some_on_the_device, named_ones, in_pieces, refused
]  # fmt: skip
WRAPPERS = [checkpoints_around_wrappers, wrappers_in_wrappers, gradients_of_input_gradients]
STREAMS = [dropout_is_replayed, *WRAPPERS, hooks_of_streams, refused_streams]


@pytest.mark.parametrize("uses", [SHARDS, STREAMS], ids=["shards", "streams"])
@on_each_rank(2)
def test_uses_and_refusals(rank, uses):
    for use in uses:
        use(rank)

"""What loops of scanned blocks carry: parts of parameters, hooks, and inputs stored on the host."""

import functools
import re

import pytest
import torch
import torch_xla
from on_ranks import finish_step, on_each_rank, raises, without_ranks
from planned import training_step
from small_models import Block, Computes, hybrid, trace_as_on_tpu
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module, comm_hooks, full_state_dict, plan, scan_blocks

DEPTH, STEPS, RATE = 3, 3, 0.1


def build(around=lambda blocks: nn.Sequential(*blocks)):
    torch.manual_seed(4)
    first, blocks = nn.Linear(5, 12), around([Block() for _ in range(DEPTH)])
    return Computes(lambda self, x: self.blocks(self.first(x)), first=first, blocks=blocks)


def scanned(**options):
    return build(functools.partial(scan_blocks, **options))


def batch(rank, step):
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def unsharded(ranks, change=lambda gradient: gradient):
    """Weights after training with means over the ranks of what ``change`` makes of gradients."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        own = []
        for rank in range(ranks):
            model.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            own.append([change(parameter.grad) for parameter in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *own, strict=True):
            parameter.grad = sum(gradients) / ranks
        optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def assert_close(found, expected, tolerance=2e-4):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)


def sharded(rank, hook=None, state=None, over="all", **options):
    model = FSDP(scanned(**options), **options)
    if hook is not None:
        model.register_comm_hook(state, hook, over)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        model(batch(rank, step).to("xla")).square().mean().backward()
        finish_step(optimizer)
    return full_state_dict(model, rank0_only=False)


@pytest.mark.slow
@on_each_rank(2)
def test_hooks_reduce_in_the_loop(rank):
    trace_as_on_tpu()
    expected = unsharded(2)
    plain = sharded(rank)
    torch.testing.assert_close(sharded(rank, comm_hooks.reduce_scatter_hook), plain, rtol=0, atol=0)
    assert_close(plain, expected)
    for hook, digits in ((comm_hooks.bf16_compress_hook, 8), (comm_hooks.fp16_compress_hook, 11)):
        found = sharded(rank, hook)
        assert sum((found[name] - value).abs().sum() for name, value in expected.items()) > 0
        assert_close(found, expected, 8 * 2**-digits)

    seen = []

    def clipped(limit, bucket):
        seen.append(bucket.names)
        return bucket.reduce(bucket.buffer().clamp(-limit, limit))

    limited = unsharded(2, lambda gradient: gradient.clamp(-0.02, 0.02))
    assert_close(sharded(rank, clipped, 0.02), limited)
    in_loop = [names for names in seen if any(name.startswith("blocks.") for name in names)]
    assert any("blocks.up.weight" in names for names in in_loop)
    assert len(set(in_loop)) * STEPS == len(in_loop)  # once a backward


@pytest.mark.slow
@on_each_rank(4)
def test_hooks_reduce_over_replicas(rank):
    replicas = sharded(rank, comm_hooks.bf16_compress_hook, over="replicas", **hybrid(rank))
    assert_close(replicas, unsharded(4), 2**-5)


@on_each_rank(1)
def test_a_hook_that_stores_gradients_of_the_loop_raises(rank):
    def backward(hook, state):
        model = FSDP(scanned())
        model.blocks.register_comm_hook(state, hook)
        model(batch(0, 0).to("xla")).square().mean().backward()

    def keeps(state, bucket):
        state.append(bucket.buffer())
        return bucket.reduce()

    def adds(state, bucket):
        state += bucket.buffer().sum()
        return bucket.reduce()

    for hook, state, said in (
        (keeps, [], "stored, or changed in place.*Wrap each block separately"),
        (adds, torch.zeros(()).to("xla"), r"of shapes \[\(\)\] that contain gradients"),
    ):
        raises(RuntimeError, said, backward, hook, state)
        torch_xla.sync()  # what was kept has values, if no sensible ones


@on_each_rank(4)
def test_a_backward_gathers_among_the_ranks_that_store_a_part(rank):
    trace_as_on_tpu()
    model = FSDP(scanned(reshard_after_forward=2))
    model(batch(rank, 0).to("xla")).sum().backward()
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([p.grad for p in model.blocks.parameters()])
    groups = re.findall(r" all-gather\(.*replica_groups=(\S+),", hlo)
    assert groups.count("{{0,1},{2,3}}") == 1 and groups.count("{{0,1,2,3}}") > 1, groups


def trained(rank, in_loop, offload, prefetch=False):
    def checkpointed(blocks):
        blocks = (checkpoint_module(block, offload=offload) for block in blocks)
        return nn.Sequential(*map(FSDP, blocks))

    model = scanned(offload=offload, prefetch=prefetch) if in_loop else build(checkpointed)
    model = FSDP(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        x = batch(rank, step).to("xla")[None, :, None].expand(1, 3, 8, 5)
        for _ in range(2):
            (0.5 * model(x).square().mean()).backward()
        finish_step(optimizer)
    return full_state_dict(model, rank0_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("on_tpu", [False, True])
@on_each_rank(2)
def test_values_are_those_without(rank, on_tpu):
    trace_as_on_tpu(on_tpu)
    expected = unsharded(2)
    for in_loop in (True, False):
        found = trained(rank, in_loop, True)
        assert_close(found, expected)
        if not on_tpu:  # the same program
            torch.testing.assert_close(found, trained(rank, in_loop, False), rtol=0, atol=0)
    assert_close(trained(rank, True, True, prefetch=True), expected)


@on_each_rank(1)
def test_what_is_offloaded_and_what_is_refused(rank):
    """Modules without a wrapper, inputs that stay, a loop one iteration long, and no backward."""
    trace_as_on_tpu()
    mask = torch.rand(16, 12).to("xla")

    class Masked(Block):
        def forward(self, x, mask, *, odd=None):
            return super().forward(x * mask) + (0 if odd is None else odd.sum())

    torch.manual_seed(0)
    block = Masked().to("xla")
    grads = []
    for offload in (False, True):
        checkpoint_module(block, offload=offload)  # the last call counts
        assert block.forward.offload is offload
        x = torch.linspace(-1, 1, 192).view(16, 12).to("xla").requires_grad_()
        odd = (x[:5, :3] * 2).clone()  # no rows of eight
        block(x * 1.0, mask, odd=odd).square().sum().backward()
        assert ("dynamic-update-slice" in torch_xla._XLAC._get_xla_tensors_hlo([x.grad])) is offload
        grads.append([x.grad.cpu(), *(p.grad.cpu() for p in block.parameters() if p.requires_grad)])
        block.zero_grad()
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        block(x, mask)
    single = scan_blocks([Block()], offload=True)
    single(x).sum().backward()
    torch_xla.sync()
    assert all(p.grad is not None for p in single.parameters() if p.requires_grad)
    for wrong in (lambda: checkpoint_module(block, offload=1), lambda: scan_blocks([], offload=1)):
        raises(TypeError, "offload must be True or False, got 1", wrong)


SIZE, INPUT = 256, 4 * 1024 * 256 * 2  # bytes of a block's input, in bfloat16


def gelu_layer():
    linear = nn.Linear(SIZE, SIZE)
    return Computes(lambda self, x: x + nn.functional.gelu(self.linear(x)), linear=linear)


@pytest.mark.slow
@pytest.mark.parametrize("scans", [True, False])
@without_ranks
def test_on_the_tpu_compiler(scans):
    depth = 16 if scans else DEPTH

    def model():
        narrow = {"compute_dtype": torch.bfloat16}
        layers = [gelu_layer() for _ in range(depth)]
        if scans:
            blocks = scan_blocks(layers, offload=True, **narrow)
        else:
            layers = (checkpoint_module(layer, offload=True) for layer in layers)
            blocks = nn.Sequential(*(FSDP(one, **narrow) for one in layers))
        return FSDP(nn.Sequential(nn.Linear(64, SIZE), blocks), **narrow)

    step = training_step(model, 4, 1024, 64)
    report = plan(step, "v5litepod-8", ranks=[0], cache=False, progress=False)
    held = report.memory.host_temporaries
    assert depth * INPUT <= held <= 1.01 * depth * INPUT, held / INPUT
    schedule = report.schedule
    assert schedule.to_host == depth * INPUT
    assert depth * INPUT <= schedule.to_device <= 1.01 * depth * INPUT
    assert report.memory.peak == max(schedule.curve)
    text = str(report)
    assert "Host memory for a device" in text and "to the step" in text
    if scans:
        assert report.memory.peak < 0.7 * depth * INPUT  # never all of them, nor all but one
        assert report.memory.required < 0.9 * depth * INPUT

"""``offload=True``: inputs of checkpointed modules and of scanned blocks wait on the host."""

import pytest
import torch
import torch_xla
from on_ranks import finish_step, on_each_rank, without_ranks
from planned import training_step
from test_comm_hooks import RATE
from test_scan_carries import DEPTH, STEPS, Block, Model, assert_close, batch, exact, unsharded
from test_special_uses import trace_as_on_tpu
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module, full_state_dict, plan, scan_blocks


def trained(rank, scanned, offload, prefetch=False):
    model = Model(scanned, **({"offload": offload, "prefetch": prefetch} if scanned else {}))
    if not scanned:
        blocks = (checkpoint_module(block, offload=offload) for block in model.blocks)
        model.blocks = nn.ModuleList(map(FSDP, blocks))
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
    expected = unsharded(2, exact)
    for scanned in (True, False):
        found = trained(rank, scanned, True)
        assert_close(found, expected)
        if not on_tpu:  # the same program
            torch.testing.assert_close(found, trained(rank, scanned, False), rtol=0, atol=0)
    assert_close(trained(rank, True, True, prefetch=True), expected)


@on_each_rank(1)
def test_what_is_offloaded_and_what_is_refused(rank):
    """Modules without a wrapper, inputs that stay, a loop one iteration long, and no backward."""
    trace_as_on_tpu()
    mask = torch.rand(16, 12).to("xla")

    class Masked(Block):
        def forward(self, x, mask, *, odd=None):
            return super().forward(x * mask, 1.0) + (0 if odd is None else odd.sum())

    torch.manual_seed(0)
    block = Masked().to("xla")
    grads = []
    for offload in (False, True):
        checkpoint_module(block, offload=offload)  # the last call counts
        assert block.forward.offload is offload
        x = torch.linspace(-1, 1, 192).view(16, 12).to("xla").requires_grad_()
        odd = (x[:5, :3] * 2).clone()  # no rows of eight
        block(x * 1.0, mask, odd=odd).square().sum().backward()
        hlo = torch_xla._XLAC._get_xla_tensors_hlo([x.grad])
        assert ("dynamic-update-slice" in hlo) is offload
        grads.append([x.grad.cpu(), *(p.grad.cpu() for p in block.parameters() if p.requires_grad)])
        block.zero_grad()
    torch.testing.assert_close(*grads)
    with torch.no_grad():
        block(x, mask)
    single = scan_blocks([Block()], offload=True)
    single(x, 1.0).sum().backward()
    torch_xla.sync()
    assert all(p.grad is not None for p in single.parameters() if p.requires_grad)
    for wrong in (lambda: checkpoint_module(block, offload=1), lambda: scan_blocks([], offload=1)):
        with pytest.raises(TypeError, match="offload must be True or False, got 1"):
            wrong()


WIDTH, INPUT = 256, 4 * 1024 * 256 * 2  # bytes of a block's input, in bfloat16


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + nn.functional.gelu(self.linear(x))


@pytest.mark.slow
@pytest.mark.parametrize("scans", [True, False])
@without_ranks
def test_on_the_tpu_compiler(scans):
    depth = 16 if scans else DEPTH

    def model():
        narrow = {"compute_dtype": torch.bfloat16}
        layers = [Layer() for _ in range(depth)]
        if scans:
            blocks = scan_blocks(layers, offload=True, **narrow)
        else:
            layers = (checkpoint_module(layer, offload=True) for layer in layers)
            blocks = nn.Sequential(*(FSDP(one, **narrow) for one in layers))
        return FSDP(nn.Sequential(nn.Linear(64, WIDTH), blocks), **narrow)

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

"""SyncBatchNorm: N ranks with a part of the batch each compute what one does on the whole."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from on_ranks import on_each_rank, raises, without_ranks
from planned import training_step
from torch import nn

from xla_fsdp import SyncBatchNorm, checkpoint_module, full_state_dict, plan, scan_blocks
from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp.ranks.rank import current_rank
from xla_fsdp.testing import CollectiveMismatchError

BATCH = 12
CLOSE = dict(rtol=2e-5, atol=2e-6)


class Residual(nn.Module):
    def __init__(self, inner, outer):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride=2, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outer)
        self.down = nn.Sequential(
            nn.Conv2d(inner, outer, 1, stride=2, bias=False), nn.BatchNorm2d(outer)
        )

    def forward(self, x):
        y = F.gelu(self.norm1(self.conv1(x)))
        return F.gelu(self.norm2(self.conv2(y)) + self.down(x))


def layers(kind):
    linear = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)]
    sequences = [nn.Conv1d(2, 5, 3), nn.BatchNorm1d(5, momentum=None, eps=1e-3), nn.Tanh()]
    without = nn.BatchNorm2d(4, track_running_stats=False)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(3)]
    return {
        "1d": (linear, (6,)),
        "1d of sequences": (sequences, (2, 9)),
        "2d": ([Residual(3, 4), Residual(4, 6)], (3, 8, 8)),
        "3d": ([nn.Conv3d(1, 4, 2), nn.BatchNorm3d(4, affine=False), nn.Sigmoid()], (1, 4, 3, 5)),
        "without running statistics": ([nn.Conv2d(2, 4, 3), without, nn.Tanh()], (2, 5, 5)),
        "far from zero": ([nn.BatchNorm1d(3, momentum=0.3), nn.Tanh(), nn.Linear(3, 3)], (3,)),
        "blocks": ([nn.Sequential(*blocks)], (4,)),
    }[kind]


def plain(kind):
    torch.manual_seed(1)
    parts, _ = layers(kind)
    model = nn.Sequential(*parts)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine:
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_()
    return model


def data(kind, steps):
    """Inputs of every step, each rank's part with a mean and a deviation of its own."""
    generator = torch.Generator().manual_seed(2)
    shape = (BATCH, *layers(kind)[1])
    spread = torch.linspace(0.5, 2.0, BATCH).view(-1, *[1] * (len(shape) - 1))
    # Far away from zero the square is ten million times the variance.
    far = 3000.0 if kind == "far from zero" else 0.0
    return [spread * torch.randn(shape, generator=generator) + spread + far for _ in range(steps)]


def train(model, inputs, sync=lambda: None):
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)  # no state: steps are one program
    losses, gradients = [], []
    for x in inputs:
        x = x.detach().requires_grad_()
        y = model(x)
        loss = (y * y + torch.sin(3 * y)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync()
        losses.append(loss.item())
        gradients.append(x.grad.detach().cpu())
    model.eval()
    with torch.no_grad():
        result = model(inputs[0]).cpu()
    return {"losses": losses, "gradients": gradients, "result": result}


@pytest.mark.parametrize(
    "kind, ranks, wrapping",
    [
        ("1d", 3, "checkpointed"),
        ("1d", 4, "root"),
        ("2d", 4, "nested"),
        ("1d of sequences", 4, "nested"),
        ("3d", 4, "checkpointed"),
        ("without running statistics", 4, "nested"),
        ("far from zero", 4, "checkpointed"),
        ("far from zero", 1, "nested"),
        ("blocks", 4, "scanned"),
    ],
)
@on_each_rank()
def test_sharded_equals_unsharded(rank, kind, wrapping):
    current_rank().as_on_tpu = wrapping == "nested"
    ranks, inputs = xr.world_size(), data(kind, 2)
    model = SyncBatchNorm.convert_sync_batchnorm(plain(kind))
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert norms and all(type(m) is SyncBatchNorm for m in norms)
    if wrapping == "root":
        model = FSDP(model)
    elif wrapping == "scanned":
        model = FSDP(nn.Sequential(scan_blocks(model[0])))
    else:
        around = checkpoint_module if wrapping == "checkpointed" else nn.Identity().forward
        model = FSDP(nn.Sequential(*(FSDP(around(layer)) for layer in model)))
    found = train(model, [x.chunk(ranks)[rank].to("xla") for x in inputs], torch_xla.sync)
    state = full_state_dict(model, rank0_only=False)
    wide = plain(kind).double()
    expected = train(wide, [x.double() for x in inputs])

    def close(ours, theirs, name="", atol=2e-6, rtol=2e-5):
        # There is 1e-4 between a float32 number of 3000 and the next.
        atol = 1e-3 if kind == "far from zero" and "running" not in name else atol
        torch.testing.assert_close(
            ours.double(), theirs, rtol=rtol, atol=atol, msg=lambda text: f"{name}: {text}"
        )

    losses = xm.mesh_reduce("losses", torch.tensor(found["losses"]), list)
    close(torch.stack(losses).mean(0), torch.tensor(expected["losses"]).double())
    close(found["result"], expected["result"].chunk(ranks)[rank])
    for ours, theirs in zip(found["gradients"], expected["gradients"], strict=True):
        # Ranks differentiate the mean over their part; FSDP takes the mean over ranks.
        close(ours / ranks, theirs.chunk(ranks)[rank])
    assert state.keys() == plain(kind).state_dict().keys()
    for name, value in plain(kind).state_dict().items():
        assert state[name].dtype is value.dtype
        close(state[name], wide.state_dict()[name].double(), name)
    buffers = [value.cpu() for value in model.buffers()]
    for others in xm.mesh_reduce("buffers", buffers, list):
        assert all(map(torch.equal, buffers, others))


def norm(features=3, **options):
    torch.manual_seed(4)
    one = SyncBatchNorm(features, **options)
    with torch.no_grad():
        if one.affine:
            one.weight.uniform_(0.5, 2.0), one.bias.normal_()
    return one.to("xla")


def whole_batch(shape=(BATCH, 3, 2, 2), seed=5):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return x + torch.arange(shape[0]).view(-1, *[1] * (len(shape) - 1)) / 3


@on_each_rank(4)
def test_evaluation_uses_running_statistics(rank):
    model, x = norm().eval(), whole_batch().chunk(4)[rank]
    with torch.no_grad():
        model.running_mean.copy_(torch.tensor([0.5, -1.0, 2.0]))
        model.running_var.copy_(torch.tensor([0.5, 1.0, 2.0]))
    torch_xla.sync()
    plain = nn.BatchNorm2d(3).eval()
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    torch_xla.sync()
    found = []
    for one, given in ((model, x.to("xla")), (plain, x.clone())):
        y = one(given.requires_grad_())
        y.square().sum().backward()
        assert not current_rank().pending  # no collective
        torch_xla.sync()
        found.append([t.detach().cpu() for t in (y, given.grad, one.weight.grad, one.bias.grad)])
    torch.testing.assert_close(*found, rtol=2e-5, atol=1e-5)
    assert model.num_batches_tracked.item() == 0
    torch.testing.assert_close(copy.deepcopy(model).cpu()(x), found[1][0], **CLOSE)


@on_each_rank(4)
def test_statistics_of_a_group(rank):
    model = norm(groups=[[0, 2], [1, 3]], momentum=1.0)
    assert "groups=[[0, 2], [1, 3]]" in repr(model)
    parts = whole_batch().chunk(4)
    y = model(parts[rank].to("xla"))
    torch_xla.sync()
    plain = nn.BatchNorm2d(3, momentum=1.0)
    plain.load_state_dict({n: v.cpu() for n, v in norm().state_dict().items()})
    first = rank % 2
    z = plain(torch.cat([parts[first], parts[first + 2]]))
    torch.testing.assert_close(y.cpu(), z.chunk(2)[rank // 2], **CLOSE)
    torch.testing.assert_close(model.running_var.cpu(), plain.running_var, **CLOSE)


@on_each_rank(4)
def test_one_value_a_rank_and_wrong_inputs(rank):
    row = torch.tensor([[1.0, 2.0, 5.0]])
    y = norm(affine=False)((row * (rank + 1)).to("xla"))
    torch_xla.sync()
    expected = nn.BatchNorm1d(3, affine=False)(row * torch.arange(1.0, 5.0)[:, None])
    torch.testing.assert_close(y.cpu(), expected[rank : rank + 1], **CLOSE)
    few, dimensions = "Expected more than 1 value per channel", r"takes \(N, 3, ...\), at least two"
    for make, shape, text in (
        (lambda: norm(groups=[[0], [1], [2], [3]]), (1, 3), few),
        (norm, (0, 3), few),
        (lambda: norm(groups=[[0, 2]]), (4, 3), "each of the 4 ranks once"),
        *((norm, shape, f"{dimensions} dimensions") for shape in ((3,), (4, 5), (4, 2, 3))),
    ):
        with pytest.raises(ValueError, match=text):
            make()(torch.ones(shape).to("xla"))
    raises(ValueError, r"on an XLA device, got cpu\. .* eval\(\)", norm().cpu(), torch.ones(4, 3))


@on_each_rank(4)
def test_statistics_are_float32_for_bfloat16_weights_and_inputs(rank):
    inputs = [whole_batch((BATCH, 6), seed).bfloat16() for seed in range(3)]
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=0.01), nn.Tanh())
    model = checkpoint_module(SyncBatchNorm.convert_sync_batchnorm(model))
    model = FSDP(model, compute_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    plain = nn.BatchNorm1d(6, momentum=0.01)
    for x in inputs:
        mine = x.chunk(4)[rank].to("xla").requires_grad_()
        theirs = x.float().requires_grad_()
        y = model(mine)
        y.float().square().sum().backward()
        torch_xla.sync()
        z = torch.tanh(plain(theirs))
        z.square().sum().backward()
        assert y.dtype is mine.grad.dtype is torch.bfloat16
        close = dict(rtol=0.02, atol=0.02)
        torch.testing.assert_close(y.float().cpu(), z.chunk(4)[rank], **close)
        torch.testing.assert_close(mine.grad.float().cpu(), theirs.grad.chunk(4)[rank], **close)
    state = model.state_dict()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert state[f"0.{name}"].dtype is plain.state_dict()[name].dtype
        torch.testing.assert_close(state[f"0.{name}"].cpu(), plain.state_dict()[name], **CLOSE)
    assert not model.get_shard_metadata()["buffers"]  # nothing was cast


def test_parts_of_different_sizes_are_an_error(run_ranks):
    def uneven(rank):
        norm()(torch.ones(2 + rank, 3).to("xla"))
        torch_xla.sync()

    raises(CollectiveMismatchError, "batch norm of 2 values a channel", run_ranks, uneven, 4)


def test_conversion_keeps_everything():
    model = plain("2d")
    model[0].norm1.eval()
    model[0].norm1.weight.requires_grad_(False)
    model[0].norm1.label = "mine"
    model[0].norm2.double()
    model[1].norm2 = model[1].norm1  # shared
    calls = []
    model[0].norm1.register_forward_hook(lambda *_: calls.append(1))

    def tensors():
        kinds = model.named_parameters, model.named_buffers
        return {name: id(one) for named in kinds for name, one in named(remove_duplicate=False)}

    before = tensors()
    keys, modes = list(model.state_dict()), [m.training for m in model.modules()]
    other = copy.deepcopy(model)

    assert SyncBatchNorm.convert_sync_batchnorm(model, groups=[[0, 1], [2, 3]]) is model
    assert tensors() == before
    assert list(model.state_dict()) == keys and [m.training for m in model.modules()] == modes
    converted = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert len(converted) == 5 and all(type(m) is SyncBatchNorm for m in converted)
    assert all(m.groups == ((0, 1), (2, 3)) for m in converted)
    assert model[0].norm1.label == "mine" and not model[0].norm1.weight.requires_grad
    assert model[1].norm2 is model[1].norm1
    x = data("2d", 1)[0]
    model.eval(), other.eval(), model[0].norm2.float(), other[0].norm2.float()
    ours = model(x)
    assert len(calls) == 1
    torch.testing.assert_close(ours, other(x), **CLOSE)
    SyncBatchNorm.convert_sync_batchnorm(model)
    assert model[0].norm1.groups == ((0, 1), (2, 3))
    for one in (nn.BatchNorm3d(2, momentum=None), nn.SyncBatchNorm(2, eps=1e-3)):
        assert type(SyncBatchNorm.convert_sync_batchnorm(one)) is SyncBatchNorm
        copied = copy.deepcopy(one)
        assert (copied.eps, copied.momentum) == (one.eps, one.momentum)
    kept = nn.Sequential(nn.InstanceNorm2d(3), nn.GroupNorm(1, 3))
    SyncBatchNorm.convert_sync_batchnorm(kept)
    assert [type(m) for m in kept] == [nn.InstanceNorm2d, nn.GroupNorm]


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Named(nn.BatchNorm2d):
    pass


def test_conversion_refuses_what_it_would_break():
    convert = SyncBatchNorm.convert_sync_batchnorm
    raises(TypeError, "must be a torch.nn.Module, got str", convert, "model")
    raises(ValueError, "an ordinal twice", convert, nn.BatchNorm1d(2), groups=[[0, 1], [1, 2]])
    grouped = nn.SyncBatchNorm(2)
    grouped.process_group = object()
    for one, message in (
        (Activated(2), "Activated '1' overrides forward"),
        (checkpoint_module(nn.BatchNorm2d(2)), "Convert before checkpoint_module"),
        (nn.LazyBatchNorm2d(), "Run the model once"),
        (grouped, "process_group"),
    ):
        model = nn.Sequential(nn.BatchNorm2d(2), one)
        raises(ValueError, message, convert, model)
        assert type(model[0]) is nn.BatchNorm2d  # untouched
    assert type(convert(Named(2))) is SyncBatchNorm


@on_each_rank(1)
def test_conversion_comes_before_wrapping(rank):
    convert = SyncBatchNorm.convert_sync_batchnorm
    model = nn.Sequential(nn.BatchNorm1d(4), FSDP(nn.Sequential(nn.BatchNorm1d(4))))
    for one in (model, FSDP(model)):
        raises(ValueError, "convert_sync_batchnorm before wrapping", convert, one)
    assert type(model[0]) is nn.BatchNorm1d
    beside = nn.Sequential(FSDP(nn.Linear(4, 4)), nn.BatchNorm1d(4))
    assert type(convert(beside)[1]) is SyncBatchNorm


@pytest.mark.slow
@without_ranks
def test_plan():
    def model():
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        layers = SyncBatchNorm.convert_sync_batchnorm(layers)
        return FSDP(layers, compute_dtype=torch.bfloat16)

    report = plan(training_step(model, 4, 3, 8, 8), "v3-8", cache=False, progress=False)
    assert report.executables == 1
    sent = [c for c in report.schedule.collectives if c.module.startswith("batch norm of 144")]
    found = [(c.kind, c.phase) for c in sent]
    assert found == [("all-gather", "forward"), ("all-reduce", "backward")]
    assert 0 < sum(c.wire_bytes for c in sent) < 1024

"""``gather_dtype``: what is computed with is rounded as said, and nothing else is."""

from __future__ import annotations

import collections
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
    for dtype, computed in cases if ranks > 1 else cases[:1]:  # one rank gathers nothing
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


class Kinds(nn.Module):
    """What travels in fewer bits: one matrix, the first. What does not: all that follows."""

    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)  # as the first
        self.at_the_bound = nn.Parameter(torch.randn(256, 512))
        self.vector = nn.Parameter(torch.randn(200_000))
        self.precise = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.whole = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.int32), requires_grad=False)
        self.mask = nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=torch.bool), requires_grad=False)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.norm, self.small_norm = nn.LayerNorm((WIDTH, WIDTH)), nn.LayerNorm(WIDTH)

    def forward(self, x):
        x = x @ self.matrix + x @ self.frozen + x @ self.precise.to(x.dtype)
        x = self.small_norm(self.norm(x.expand(WIDTH, -1))) * (
            self.scalar * self.whole * self.mask
        ).to(x.dtype)
        return (x[:1] @ self.at_the_bound.T + self.empty.sum()).sum() + self.vector[:3].sum()


def travelling(rank, dtype):
    """Gathers and reductions of a forward and backward, by kind and dtype, and their elements."""
    import torch_xla

    from xla_fsdp import MixedPrecision
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    trace_as_on_tpu()
    precision = MixedPrecision(torch.bfloat16, _module_classes_to_ignore=(nn.LayerNorm,))
    model = FSDP(Kinds(), mixed_precision=precision, gather_dtype=dtype)
    loss = model(torch.randn(1, WIDTH).to("xla"))
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([loss.detach(), *grads])
    found: dict[tuple[str, str], list[int]] = {}
    for kind, shape, name in COLLECTIVE.findall(hlo):
        found.setdefault((name, kind), []).append(math.prod(map(int, shape.split(","))))
    return {key: sorted(numbers) for key, numbers in found.items()}


def test_only_large_matrices_travel_in_fewer_bits(run_ranks):
    square, scales = WIDTH * WIDTH, 2 * 2 * WIDTH  # of two matrices, on two ranks
    for dtype, name in ((torch.int8, "s8"), (torch.float8_e4m3fn, "f8e4m3fn")):
        for found in run_ranks(travelling, 2, dtype):
            assert found["all-gather", name] == [square, square]
            # Scales go along with what is small, here in float32 because of a norm.
            (small, *norm) = found["all-gather", "f32"]
            assert small == 256 + 2 * WIDTH + scales and norm == [square, square]
            assert found["all-gather", "bf16"] == [256 * 512, 200_192, square]
            assert found["all-gather", "s32"] == [square] and ("all-gather", "f64") not in found
            reduced = [n for (kind, _), n in found.items() if kind == "reduce-scatter"]
            assert sum(map(len, reduced)) == 7, found


def exact_copies(rank, kind, folder):
    """Everything that reads or writes parameters outside of a step has them as they were."""
    import torch_xla

    import xla_fsdp
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    make, plain = {"nested": nested, "scanned": scanned}[kind], network().state_dict()
    model, other = (make(compute_dtype=torch.bfloat16) for _ in range(2))

    def require_same(values):
        assert values.keys() == plain.keys()
        for name, value in plain.items():
            assert values[name].dtype is value.dtype and torch.equal(values[name].cpu(), value)

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    loss_of(model(batch(rank).to("xla"))).backward()
    optimizer.step()
    torch_xla.sync()
    require_same(xla_fsdp.full_state_dict(model, rank0_only=False))
    if kind == "nested":
        with FSDP.summon_full_params(model):
            require_same({n: p.detach() for n, p in model.module.named_parameters()})
    xla_fsdp.save_checkpoint(folder, model, step=1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    xla_fsdp.load_checkpoint(folder, other)
    require_same(xla_fsdp.full_state_dict(other, rank0_only=False))


@pytest.mark.parametrize("kind", ["nested", "scanned"])
def test_what_is_read_saved_and_consolidated_is_exact(run_ranks, tmp_path, kind):
    from safetensors.torch import load_file

    from xla_fsdp.consolidate import consolidate_checkpoint

    run_ranks(exact_copies, 2, kind, str(tmp_path / "saved"))
    consolidate_checkpoint(str(tmp_path / "saved"), str(tmp_path / "whole"))
    (file,) = (tmp_path / "whole").glob("*.safetensors")
    found = load_file(file)
    for name, value in network().state_dict().items():
        assert torch.equal(found[name], value)


def refusals(rank):
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import fully_shard, scan_blocks

    def fails(error, message, wrap=FSDP, **options):
        with pytest.raises(error, match=message):
            wrap(nn.Linear(4, 4), **options)

    both = r"one of torch.int8, torch.float8_e4m3fn or None, got"
    for given in ("int8", 8, True):
        fails(TypeError, f"{both} {given!r}", gather_dtype=given)
    for given in (torch.bfloat16, torch.uint8, torch.float8_e4m3fnuz):
        fails(ValueError, f"{both} {given}; to gather in 16 bits pass compute_dtype",
              gather_dtype=given)  # fmt: skip
    fails(ValueError, "two bits of mantissa.*pass torch.float8_e4m3fn, or torch.int8",
          gather_dtype=torch.float8_e5m2)  # fmt: skip
    fails(ValueError, "exclude each other.*Leave flatten_parameters out",
          gather_dtype=torch.int8, flatten_parameters=True)  # fmt: skip
    fails(TypeError, both, fully_shard, gather_dtype="fp8")
    fails(TypeError, both, lambda block, **how: scan_blocks([block], **how), gather_dtype="fp8")
    assert FSDP(nn.Linear(4, 4)).fsdp_options.gather_dtype is None


def test_what_is_not_possible_is_said(run_ranks):
    run_ranks(refusals, 1)


def planned_bytes():
    """Bytes that a chip sends in the gathers of a step, by dtype."""
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel as FSDP
    from xla_fsdp import plan

    def step(dtype):
        wrap = functools.partial(FSDP, compute_dtype=torch.bfloat16, gather_dtype=dtype)
        # Two matrices in a unit that gathers for its backward, too.
        unit = nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024))
        model = wrap(nn.Sequential(wrap(unit)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(64, 1024).to("xla").requires_grad_()
        torch_xla.sync()
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found = []
    for dtype in (None, torch.int8):
        report = plan(
            functools.partial(step, dtype), "v5litepod-8", cache=False, progress=False, ranks=[0]
        )
        sent = collections.Counter()
        for one in report.schedule.collectives:
            sent[one.asked or one.kind, one.dtype] += one.wire_bytes * one.times
        found.append(sent)
    # The backward needs the second matrix only, but what is small comes together, both times. A
    # rank sends 7 of 8 parts of each gather.
    (plain, narrow), matrix, biases = found, 1024 * 1024, 2 * 2 * 1024
    assert plain["all-gather", "bf16"] == (3 * 2 * matrix + 2 * biases) * 7 // 8, plain
    assert narrow["all-gather", "s8"] == 3 * matrix * 7 // 8, narrow
    # Scales are of 16 bits, one for the 128 elements of a column that a rank has.
    scales = 2 * 2 * matrix // 128
    assert narrow["all-gather", "bf16"] == (2 * scales + 2 * biases) * 7 // 8, narrow
    assert narrow["reduce-scatter", "bf16"] == plain["reduce-scatter", "bf16"]


def test_bytes_of_a_plan(elsewhere):
    elsewhere(planned_bytes)

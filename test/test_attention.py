"""Attention by the kernel, which is interpreted here: equal to torch's, wherever it is called."""

import base64
import re

import pytest
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_builder as xb
from on_ranks import on_each_rank, only_full, raises, without_ranks
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel as FSDP
from xla_fsdp import checkpoint_module, plan, scan_blocks
from xla_fsdp.layers import scaled_dot_product_attention
from xla_fsdp.layers.attention import Splash, segment_mask, splash_attention

# heads, heads of keys, lengths of queries and keys, head dimension, dtype, causal, segments
FEW = [
    (4, 2, 128, 128, 64, torch.float32, True, True),
    (1, 1, 128, 256, 128, torch.float32, False, False),
    (2, 2, 128, 128, 64, torch.bfloat16, False, True),
]
MORE = [
    (2, 1, 256, 256, 64, torch.float32, True, False),
    (2, 1, 128, 256, 64, torch.float32, True, False),
    (1, 1, 256, 128, 64, torch.float32, True, False),
]
# Relative to the largest value; bfloat16 is rounded in other places.
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def inputs(heads, groups, length, keys, dim, dtype):
    generator = torch.Generator().manual_seed(length + dim)
    sizes = [(heads, length), (groups, keys), (groups, keys), (heads, length)]
    return [torch.randn(2, n, s, dim, generator=generator).to(dtype) for n, s in sizes]


def ids(length):
    first = torch.arange(length) // 50
    return torch.stack([first, first // 2])


def with_gradients(attend, q, k, v, weights):
    tensors = [t.clone().requires_grad_() for t in (q, k, v)]
    out = attend(*tensors)
    (out * weights).sum().backward()
    return [out.detach(), *(t.grad for t in tensors)]


@pytest.mark.parametrize("cases", [FEW, only_full(MORE)])
@on_each_rank(1, timeout=1500)
def test_values_and_gradients_are_those_of_torch(rank, cases):
    for *sizes, causal, segments in cases:
        tensors = [t.to("xla") for t in inputs(*sizes)]
        options = dict(is_causal=causal, enable_gqa=True, implementation="kernel")
        if segments:
            options["segment_ids"] = ids(sizes[2]).to("xla")
        found = with_gradients(
            lambda q, k, v, o=options: scaled_dot_product_attention(q, k, v, **o), *tensors
        )
        torch_xla.sync()
        with torch.no_grad():  # another kernel: it keeps nothing for a backward
            out = scaled_dot_product_attention(*tensors[:3], **options)
        assert torch.equal(out.cpu(), found[0].cpu())
        mask = segment_mask(ids(sizes[2]), causal) if segments else None

        def attend(q, k, v, mask=mask, causal=causal):
            causal = causal and mask is None
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, enable_gqa=True)

        for one, expected in zip(found, with_gradients(attend, *inputs(*sizes)), strict=True):
            assert one.dtype == expected.dtype
            error = (one.cpu().float() - expected.float()).abs().max()
            error /= expected.float().abs().max()
            assert error < CLOSE[expected.dtype], (sizes, causal, segments, error)


class Block(nn.Module):
    def __init__(self, implementation="kernel", width=128):
        super().__init__()
        self.implementation = implementation
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 2 * width)  # two heads of 64, one of keys and one of values
        self.out = nn.Linear(width, width)

    def forward(self, x, segment_ids=None):
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, 64)).transpose(1, 2)
        q, k, v = heads.split([2, 1, 1], 1)
        mixed = scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True, segment_ids=segment_ids,
            implementation=self.implementation,
        )  # fmt: skip
        return x + self.out(mixed.transpose(1, 2).flatten(2))


@pytest.mark.slow
@on_each_rank(1)
def test_in_checkpointed_and_scanned_blocks(rank):
    def gradients(way, device, implementation="kernel"):
        torch.manual_seed(5)
        blocks = [Block(implementation) for _ in range(2)]
        x = torch.randn(2, 128, 128).to(device).requires_grad_()
        y, segments = x, ids(128).to(device)
        for block in way(blocks):
            y = block(y, segments)
        y.square().sum().backward()
        return x.grad.cpu()

    expected = gradients(list, "cpu", "math")
    for way in (
        lambda blocks: [FSDP(checkpoint_module(block)) for block in blocks],
        lambda blocks: [scan_blocks(blocks)],
    ):
        torch.testing.assert_close(gradients(way, "xla"), expected, rtol=1e-4, atol=1e-4)


@on_each_rank(1)
def test_jax_looks_for_no_tpu_on_cpu_ranks(rank):
    from jax._src import xla_bridge

    assert list(xla_bridge.backends()) == ["cpu"] and not xla_bridge._backend_errors


def refused(expected, **given):
    q = torch.zeros(1, 2, 128, 64)
    arguments = {"query": q, "key": q, "value": q, **given}
    raises(ValueError, expected, scaled_dot_product_attention, **arguments)


def test_refusals_say_what_to_do():
    q = torch.zeros(1, 2, 128, 64)
    refused("dropout_p=0.1 .*Apply dropout", dropout_p=0.1)
    refused("2 query heads and 1 key heads.*enable_gqa=True", key=q[:, :1], value=q[:, :1])
    refused("cannot be combined with is_causal", is_causal=True, attn_mask=torch.ones(128, 128) > 0)
    refused(re.escape("segment_ids must be (batch, length) = (1, 128)"), segment_ids=ids(128))
    refused("on cpu, not on an XLA device.*implementation='auto'", implementation="kernel")
    refused("implementation must be", implementation="flash")


@on_each_rank(1)
def test_what_the_kernel_cannot_is_said_or_computed_by_torch(rank):
    half, mask = torch.bfloat16, torch.ones(128, 128, dtype=torch.bool, device="xla")
    for shape, dtype, given, said in (
        ((1, 1, 128, 32), half, {}, "multiples of 64 up to 256"),
        ((1, 1, 100, 64), half, {}, "lengths are 100 and 100 (of keys), but the kernel"),
        ((1, 1, 128, 64), torch.float16, {}, "torch.float16"),
        ((1, 1, 128, 64), half, {"attn_mask": mask}, "attn_mask was passed"),
    ):
        x = torch.zeros(shape, dtype=dtype, device="xla")
        with pytest.raises(ValueError, match=re.escape(said)):
            scaled_dot_product_attention(x, x, x, implementation="kernel", **given)
        assert scaled_dot_product_attention(x, x, x, **given).shape == x.shape


@pytest.mark.slow
@without_ranks
def test_plan():
    def step():
        model = scan_blocks([Block("auto") for _ in range(3)], compute_dtype=torch.bfloat16)
        x = torch.zeros(2, 512, 128, device="xla", dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    report = plan(step, "v5litepod-4", ranks=[0], cache=False, progress=False)
    kernels = [op for op in report.schedule.ops if op.name.startswith(("splash", "vmap_splash"))]
    # Forward, the same again in the backward, gradients of queries, of keys and values.
    assert [op.times for op in kernels] == [3] * 4
    assert [op.phase for op in kernels] == ["forward", *["backward"] * 3]
    # A product with the scores of all heads, 64 of their dimension filling half of a matrix unit,
    # is 2 x 4 x 512 x 512 x 128 FLOPs: two in the forward, three for queries, four for keys and
    # values. The second forward also writes 512 bytes a query, and is limited by its 3 MiB.
    assert sorted(op.cycles for op in kernels) == [4088, 5761, 6132, 8176]
    assert any("4 Pallas kernel(s): the modelled time" in note for note in report.schedule.notes)
    # Model FLOPs: products with what is visible, 6 a block; and of linear layers.
    pairs = 512 * 513 // 2
    attention = 6 * 2 * pairs * 64 * 2 * 2 * 3
    linear = 6 * 2 * 512 * (128 * 256 + 128 * 128) * 3
    assert report.timing.model_flops == attention + linear
    # No scores: they would be 2 x 2 x 512 x 512.
    assert not any(re.search(r"512,512", str(buffer)) for buffer in report.schedule.buffers)


def lowered_from(place, line, splash):
    """The kernel, and its program as text, if who calls it stands in the file ``place``."""
    import jax

    from xla_fsdp.layers.jax_call import _exported

    jax.clear_caches()  # what was traced before keeps the places of then
    names = {"lower": _exported, "function": splash_attention, "splash": splash}
    call = "\n" * line + "code = lower(function, splash, [((1, 2, 128, 64), 'bfloat16')] * 3)"
    exec(compile(call, place, "exec"), names)
    code = names["code"]
    (body,) = re.findall(rb'"body": ?"([^"]+)"', code)
    text = xb.get_computation_hlo(xb.computation_from_module_proto("kernel", code))
    return base64.b64decode(body), text


@without_ranks
def test_who_calls_a_kernel_is_not_in_the_program():
    from torch_xla._internal.jax_workarounds import jax_import_guard

    jax_import_guard()
    splash = Splash(True, 1.0, "tpu", matrix_unit=128, itemsize=2, residuals=True)
    places = [("/home/one/model.py", 3), ("/home/another/script.py", 70)]
    first, second = (lowered_from(*place, splash) for place in places)
    body, text = first
    assert b"stable_mosaic" in body and b".py" not in body
    assert "splash_mha_fwd" in text and ".py" not in text
    assert first == second

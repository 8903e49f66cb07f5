"""No full parameter outlives its use, whatever operator saved it for the backward.

Checked on the list of live XLA tensors while the step is still a pending graph: whatever is alive
when the step is compiled becomes a buffer of the program.
"""

import functools
import re

import pytest
import torch
import torch.nn.functional as F
import torch_xla
from on_ranks import on_each_rank
from small_models import Computes
from torch import nn

from xla_fsdp import XlaFullyShardedDataParallel, checkpoint_module
from xla_fsdp.layers import einsum, linear_cross_entropy

# Larger than any activation in these tests, so size alone tells a parameter from an activation.
ROWS, COLUMNS = 48, 40


def weighted(compute):
    weight = nn.Parameter(torch.randn(ROWS, COLUMNS) * 0.1)
    return Computes(lambda self, x: compute(x, self.weight), weight=weight)


def called(make, call):
    return Computes(lambda self, x: call(self.inner, x), inner=make())


def autocast(make, *arguments):
    """Casts inside of operators, where no Python is."""

    def compute(self, x):
        with torch.autocast("xla", dtype=torch.bfloat16):
            return self.inner(x).float()

    return Computes(compute, inner=make(*arguments))


def tied():
    def compute(self, x):
        return self.head(x * self.embed((x[:, 0].abs() * 7).long() % ROWS))

    embed, head = nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, ROWS, bias=False)
    head.weight = embed.weight
    return Computes(compute, embed=embed, head=head)


def lora():
    def compute(self, x):
        x = x.bfloat16()
        y = F.linear(x, self.base.weight.to(x.dtype), self.base.bias.to(x.dtype))
        down, up = (one.weight.to(x.dtype) for one in (self.down, self.up))
        return (y + x @ down.mT @ up.mT).float()

    base = nn.Linear(COLUMNS, ROWS).requires_grad_(False)
    return Computes(compute, base=base, down=nn.Linear(COLUMNS, 4), up=nn.Linear(4, ROWS))


def linear_and_view(x, w):
    return x @ w.t() + (x @ w.view(8, 6, -1)[1].mT).sum()


WEIGHTED = {
    "linear": lambda x, w: F.linear(x, w),
    "einsum": lambda x, w: torch.einsum("bk,nk->bn", x, w),
    "chunks": lambda x, w: torch.cat([F.linear(x, c) for c in w.chunk(3)], -1),
    "select and slice": lambda x, w: x[:, 2:11:3] * w[5, 2:11:3] + (x @ w.mT[:, 7:9]).sum(),
    "cast": lambda x, w: (x.bfloat16() @ w.bfloat16().t()).float(),
    "views of casts": lambda x, w: F.linear(x, w.half().float().view(4, 12, COLUMNS)[1]),
    "contiguous": lambda x, w: x @ w.t().contiguous(),
    "permute": lambda x, w: torch.tensordot(x, w.view(ROWS, 8, 5).permute(2, 1, 0).flatten(0, 1), 1)
    * 0.1,
    "norm": lambda x, w: F.layer_norm(x, (COLUMNS,), w[0], w[1]),
    "einsum of layers": lambda x, w: einsum("bk,hdk->bhd", x, w.view(6, 8, -1)).flatten(1),
    "loss of layers": lambda x, w: linear_cross_entropy(
        x, w, torch.arange(6, device=x.device), reduction="none", chunk=16
    ),
    "queries": lambda x, w: F.scaled_dot_product_attention(w[None, :6], x[None], x[None])[0],
}
MODELS = {name: (weighted, compute) for name, compute in WEIGHTED.items()} | {
    "attention": (
        called,
        lambda: nn.MultiheadAttention(COLUMNS, 4, batch_first=True),
        lambda attend, x: attend(x[None], x[None], x[None], need_weights=False)[0],
    ),
    "lstm": (called, lambda: nn.LSTM(COLUMNS, 16, batch_first=True), lambda m, x: m(x[None])[0]),
    "conv": (called, lambda: nn.Conv1d(COLUMNS, ROWS, 3, padding=1), lambda c, x: c(x.t()[None])),
    "embedding": (
        called,
        lambda: nn.Embedding(ROWS, COLUMNS),
        lambda table, x: table((x[:, 0].abs() * 7).long() % ROWS) * x,
    ),
    "tied": (tied,),
    "lora": (lora,),
    "checkpointed": (
        called,
        lambda: checkpoint_module(
            nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Tanh(), nn.Linear(ROWS, COLUMNS))
        ),
        lambda module, x: module(x),
    ),
    "autocast of views": (autocast, weighted, linear_and_view),
    "autocast": (autocast, weighted, WEIGHTED["linear"]),
}
FURTHER = ("conv", "chunks", "einsum", "norm", "lora")
MODELS |= {f"autocast, {name}": (autocast, *MODELS[name]) for name in FURTHER}
LOOSE = {"cast", "lora"} | {name for name in MODELS if name.startswith("autocast")}


def live_sizes(device) -> list[int]:
    report = torch_xla._XLAC._xla_tensors_report(0, str(device))
    shapes = re.findall(r"Tensor: id=\d+, shape=\w+\[([\d,]*)\]", report)
    return [torch.Size(int(d) for d in s.split(",") if d).numel() for s in shapes]


def full_sized(model, x, large):
    """Output of a model, and how many tensors are full-sized after its forward and its backward."""
    device = torch_xla.device()
    torch_xla.sync()
    output = model(x)
    alive = sum(size >= large for size in live_sizes(device))
    output.square().mean().backward()
    return output.detach().cpu(), alive, sum(size >= large for size in live_sizes(device))


def built(factory, arguments, frozen, **options):
    def make():
        torch.manual_seed(1)
        module = factory(*arguments)
        return module.requires_grad_(False) if frozen else module

    inner = XlaFullyShardedDataParallel(make(), **options)
    return make(), XlaFullyShardedDataParallel(nn.Sequential(inner)), torch.randn(6, COLUMNS)


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize("name", MODELS)
@on_each_rank(2)
def test_saved_parameters_are_freed_and_rebuilt(rank, name, frozen):
    factory, *arguments = MODELS[name]
    plain, model, x = built(factory, arguments, frozen)
    large = max(p.numel() for p in plain.parameters())
    mine, theirs = x.to("xla").requires_grad_(), x.clone().requires_grad_()
    reference = plain(theirs)
    reference.square().mean().backward()
    output, alive, after = full_sized(model, mine, large)
    assert (alive, after) == (0, 0)
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found = {n: grad.full_tensor().cpu() for n, grad in grads.items()}
    expected = {f"0.{n}": p.grad for n, p in plain.named_parameters() if p.grad is not None}
    bound = 2e-2 if name in LOOSE else 1e-5
    close = functools.partial(torch.testing.assert_close, rtol=max(bound, 1e-4), atol=bound)
    close(output, reference.detach())
    close(mine.grad.cpu(), theirs.grad)
    close(found, expected)
    # What needs a gradient if the input does not: nothing that is only made of frozen parameters.
    made = model(x.to("xla"))
    assert made.requires_grad is plain(x).requires_grad
    if made.requires_grad:
        made.sum().backward()  # or saved outputs would stay in memory


@on_each_rank(2)
def test_zero2_keeps_parameters_until_the_backward(rank):
    """The check above can fail: with reshard_after_forward=False it sees the full parameter."""
    plain, model, x = built(weighted, [WEIGHTED["linear"]], False, reshard_after_forward=False)
    large = max(p.numel() for p in plain.parameters())
    _, alive, after = full_sized(model, x.to("xla").requires_grad_(), large)
    assert alive > 0 and after == 0

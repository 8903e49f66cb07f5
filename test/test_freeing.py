"""No full parameter outlives its use, whatever operator saved it for the backward.

Checked on the list of live XLA tensors while the step is still a pending graph: whatever is alive
when the step is compiled becomes a buffer of the program.
"""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.rnn import GRU  # torch_xla replaces nn.GRU by one that needs a device

# Larger than any activation in these tests, so size alone tells a parameter from an activation.
ROWS, COLUMNS = 48, 40


class Scale(torch.autograd.Function):
    """A user's own function that saves the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


class Weighted(nn.Module):
    def __init__(self, compute):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(ROWS, COLUMNS) * 0.1)
        self.compute = compute

    def forward(self, x):
        return self.compute(x, self.weight)


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(COLUMNS, 4, batch_first=True)

    def forward(self, x):
        return self.attention(x[None], x[None], x[None], need_weights=False)[0]


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.rnn = kind(COLUMNS, 16, batch_first=True)

    def forward(self, x):
        return self.rnn(x[None])[0]


class Convolve(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(COLUMNS, ROWS, 3, padding=1)

    def forward(self, x):
        return self.conv(x.t()[None])


class Embed(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, COLUMNS)

    def forward(self, x):
        return self.table((x[:, 0].abs() * 7).long() % ROWS) * x


class Autocast(nn.Module):
    """Casts inside of operators, where no Python is."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner() if isinstance(inner, type) else Weighted(inner)

    def forward(self, x):
        with torch.autocast("xla", dtype=torch.bfloat16):
            return self.inner(x).float()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(ROWS, COLUMNS)
        self.head = nn.Linear(COLUMNS, ROWS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(x * self.embed((x[:, 0].abs() * 7).long() % ROWS))


class Lora(nn.Module):
    """The base is frozen; compute is in bfloat16."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(COLUMNS, ROWS).requires_grad_(False)
        self.down, self.up = nn.Linear(COLUMNS, 4), nn.Linear(4, ROWS)

    def forward(self, x):
        x = x.bfloat16()
        y = F.linear(x, self.base.weight.to(x.dtype), self.base.bias.to(x.dtype))
        down, up = (one.weight.to(x.dtype) for one in (self.down, self.up))
        return (y + x @ down.mT @ up.mT).float()


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Tanh(), nn.Linear(ROWS, COLUMNS))
        from xla_fsdp import checkpoint_module

        checkpoint_module(self.inner)

    def forward(self, x):
        return self.inner(x)


WEIGHTED = {
    "linear": lambda x, w: F.linear(x, w),
    "matmul": lambda x, w: x @ w.t(),
    "bmm": lambda x, w: torch.bmm(x[None], w.t()[None]),
    "einsum": lambda x, w: torch.einsum("bk,nk->bn", x, w),
    "chunks": lambda x, w: torch.cat([F.linear(x, c) for c in w.chunk(3)], -1),
    "unbind": lambda x, w: torch.stack([(x * row).sum(-1) for row in w[:3].unbind()]),
    "select and slice": lambda x, w: x[:, 2:11:3] * w[5, 2:11:3] + (x @ w.mT[:, 7:9]).sum(),
    "cast": lambda x, w: (x.bfloat16() @ w.bfloat16().t()).float(),
    "views of casts": lambda x, w: F.linear(x, w.half().float().view(4, 12, COLUMNS)[1]),
    "contiguous": lambda x, w: x @ w.t().contiguous(),
    "permute": lambda x, w: torch.tensordot(x, w.view(ROWS, 8, 5).permute(2, 1, 0).flatten(0, 1), 1)
    * 0.1,
    "custom function": lambda x, w: Scale.apply(x, w),
    "norm": lambda x, w: F.layer_norm(x, (COLUMNS,), w[0], w[1]),
    "queries": lambda x, w: F.scaled_dot_product_attention(w[None, :6], x[None], x[None])[0],
    "twice": lambda x, w: F.linear(x, w) * (x @ w.t()),
}
MODELS = {name: (Weighted, compute) for name, compute in WEIGHTED.items()} | {
    "attention": (Attend,),
    "lstm": (Recurrent, nn.LSTM),
    "gru": (Recurrent, GRU),
    "conv": (Convolve,),
    "embedding": (Embed,),
    "tied": (Tied,),
    "lora": (Lora,),
    "checkpointed": (Checkpointed,),
    "autocast": (Autocast, WEIGHTED["linear"]),
    "autocast, conv": (Autocast, Convolve),
    "autocast of views": (Autocast, lambda x, w: x @ w.t() + (x @ w.view(8, 6, -1)[1].mT).sum()),
    "autocast, chunks": (Autocast, WEIGHTED["chunks"]),
    "autocast, einsum": (Autocast, WEIGHTED["einsum"]),
    "autocast, norm": (Autocast, WEIGHTED["norm"]),
    "autocast, lora": (Autocast, Lora),
}
LOOSE = {"cast", "lora"} | {name for name in MODELS if name.startswith("autocast")}


def live_sizes(device) -> list[int]:
    """Element counts of the pending XLA tensors on the device."""
    import torch_xla

    report = torch_xla._XLAC._xla_tensors_report(0, str(device))
    shapes = re.findall(r"Tensor: id=\d+, shape=\w+\[([\d,]*)\]", report)
    return [torch.Size(int(d) for d in s.split(",") if d).numel() for s in shapes]


def forward_backward(rank, factory, arguments, frozen, reshard):
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel

    torch.manual_seed(1)
    plain = factory(*arguments)
    if frozen:
        plain.requires_grad_(False)
    large = max(p.numel() for p in plain.parameters())
    x = torch.randn(6, COLUMNS)
    plain_x = x.clone().requires_grad_()
    reference = plain(plain_x)
    reference.square().mean().backward()
    expected = {n: p.grad for n, p in plain.named_parameters()}

    device = torch_xla.device()
    torch.manual_seed(1)
    module = factory(*arguments)
    if frozen:
        module.requires_grad_(False)
    inner = XlaFullyShardedDataParallel(module, reshard_after_forward=reshard)
    model = XlaFullyShardedDataParallel(nn.Sequential(inner))
    torch_xla.sync()
    mine = x.to(device).requires_grad_()
    output = model(mine)
    alive = sum(size >= large for size in live_sizes(device))
    output.square().mean().backward()
    after = sum(size >= large for size in live_sizes(device))
    grads = {n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}
    metadata = model.get_shard_metadata()
    # What needs a gradient if the input does not: nothing that is only made of frozen parameters.
    made = [plain(x), model(x.to(device))]
    needs = [one.requires_grad for one in made]
    if needs[1]:
        made[1].sum().backward()  # or saved outputs would stay in memory
    return (
        alive, after, grads, metadata, expected, reference.detach(), output.detach().cpu(),
        mine.grad.cpu(), plain_x.grad, needs,
    )  # fmt: skip


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "gru" else n for n in MODELS]
)
def test_saved_parameters_are_freed_and_rebuilt(run_ranks, name, frozen):
    from xla_fsdp.consolidate import consolidate_sharded_state_dicts

    factory, *arguments = MODELS[name]
    ranks = run_ranks(forward_backward, 2, factory, arguments, frozen, True)
    bound = 2e-2 if name in LOOSE else 1e-5
    tolerance = {"rtol": max(bound, 1e-4), "atol": bound}
    for alive, after, _, _, _, reference, output, x_grad, plain_x_grad, needs in ranks:
        assert (alive, after) == (0, 0)
        assert needs[0] == needs[1]
        torch.testing.assert_close(output, reference, **tolerance)
        torch.testing.assert_close(x_grad, plain_x_grad, **tolerance)
    metadata, expected = ranks[0][3:5]
    trained = {f"0.{key}": value for key, value in expected.items() if value is not None}
    for rank in ranks:
        assert {name for name, grad in rank[2].items() if grad is not None} == set(trained)
    metadata["parameters"] = {n: p for n, p in metadata["parameters"].items() if n in trained}
    if trained:
        shards = [{name: rank[2][name] for name in trained} for rank in ranks]
        whole = consolidate_sharded_state_dicts(shards, metadata)
        for name, value in trained.items():
            torch.testing.assert_close(whole[name], value, **tolerance)


def test_zero2_keeps_parameters_until_the_backward(run_ranks):
    """The check above can fail: with reshard_after_forward=False it sees the full parameter."""
    ranks = run_ranks(forward_backward, 2, Weighted, [WEIGHTED["linear"]], False, False)
    for alive, after, *_ in ranks:
        assert alive > 0 and after == 0


def stash(rank):
    import torch_xla

    from xla_fsdp import XlaFullyShardedDataParallel

    kept = []

    def compute(x, weight):
        kept.append(weight)
        return F.linear(x, weight)

    model = XlaFullyShardedDataParallel(
        nn.Sequential(XlaFullyShardedDataParallel(Weighted(compute)))
    )
    x = torch.ones(2, COLUMNS, device=torch_xla.device())
    loss = model(x).sum()
    sizes = [kept[0].shape.numel()]
    loss.backward()
    sizes.append(kept[0].shape.numel())
    with torch.no_grad():
        model(x)
    return [*sizes, kept[1].shape.numel()]


def test_freeing_resizes_the_tensor_to_one_element(run_ranks):
    assert run_ranks(stash, 2) == [[1, 1, 1]] * 2

"""A small transformer, and a script that trains it: the same lines in plain torch and sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, SEQUENCE, BATCH = 7, 8, 4, 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 11), nn.Linear(11, WIDTH)
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.gain * self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(1))

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(tokens))

    def squared(self) -> torch.Tensor:
        """Computes with a parameter of its own, outside of a forward."""
        return (self.embed.weight * self.embed.weight).sum()

    def product(self) -> torch.Tensor:
        """Needs all elements of it."""
        return self.embed.weight @ self.embed.weight.T


def build(seed: int = 3) -> Model:
    torch.manual_seed(seed)
    return Model()


def sharded(model: Model | None = None, /, **options: Any) -> Model:
    """From the inside out, as scripts for FSDP2 do it."""
    from xla_fsdp import fully_shard

    model = build() if model is None else model
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def wrapped(seed: int = 3, **options: Any) -> nn.Module:
    """By the class."""
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    model = build(seed)
    for number, layer in enumerate(model.layers):
        model.layers[number] = FSDP(layer, **options)
    return FSDP(model, **options)


def tokens(step: int, rank: int = 0, size: int = 1) -> torch.Tensor:
    """This rank's part of the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=generator).chunk(size)[rank]


def loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), batch.flatten())


def optimizer_for(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(parameters, lr=0.2)  # no state: all steps are one program


def train(
    model: nn.Module,
    rank: int = 0,
    size: int = 1,
    steps: int = 2,
    micro_batches: int = 1,
    method: str = "__call__",
    optimizer: torch.optim.Optimizer | None = None,
    first: int = 0,
) -> list[tuple[float, float]]:
    """Loss and norm of the gradients of every step: of this rank's part, and of all."""
    from xla_fsdp import FSDPModule

    optimizer = optimizer or optimizer_for(model)
    # With an offload policy parameters are on the host, and compute is not.
    sharded = isinstance(model, FSDPModule)
    device = torch.device("xla") if sharded else next(model.parameters()).device
    found = []
    for step in range(first, first + steps):
        total = torch.zeros((), device=device)
        for number in range(micro_batches):
            last = number == micro_batches - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
            batch = tokens(100 * number + step, rank, size).to(device)
            if method == "__call__":
                logits = model(batch)
            else:  # what only the methods of the model do
                logits = model.head(getattr(model, method)(batch))
            loss = loss_of(logits, batch) / micro_batches
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, norm))
        if device.type == "xla":
            import torch_xla

            torch_xla.sync()
    return [(loss.item(), norm.item()) for loss, norm in found]


def assert_like_plain(model, found, expected, plain, tolerance: float = 2e-5) -> None:
    """Losses, norms and weights, on every rank."""
    import torch_xla.core.xla_model as xm

    from xla_fsdp import full_state_dict

    everyone = xm.mesh_reduce("losses", [loss for loss, _ in found], list)
    means = [sum(losses) / len(losses) for losses in zip(*everyone, strict=True)]
    found = [(mean, norm) for mean, (_, norm) in zip(means, found, strict=True)]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    state = full_state_dict(model, rank0_only=False)
    assert list(state) == list(plain.state_dict())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=tolerance, atol=tolerance)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """In full, by name."""
    from xla_fsdp import XlaFullyShardedDataParallel as FSDP

    with FSDP.summon_full_params(model, writeback=False, with_grads=True):
        return {n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()}


def assert_like(found: nn.Module, expected: nn.Module) -> None:
    """The same gradients, where every rank has seen the same data."""
    grads = gradients(found)
    torch.testing.assert_close(
        grads, {n: p.grad for n, p in expected.named_parameters()}, rtol=2e-5, atol=1e-6
    )

"""The GPT-2 runs on TPU v4 with step times published by Hugging Face, as steps to plan.

"Large Scale Training of Hugging Face Transformers on TPUs With PyTorch/XLA FSDP"
(pytorch.org/blog/large-scale-training-hugging-face): slice, tokens a step, milliseconds a step and
model FLOPs utilisation of six models, and the settings of the smallest one. Model, optimizer and
wrapping are those of transformers 4.31, the version it names: what ``run_clm.py`` trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 50257
SEQUENCE = 1024
DROPOUT = 0.1  # GPT2Config's default, on in run_clm: attention, embedding, residual
PEAK = 275e12  # bfloat16 FLOP/s a chip: the only value that gives all six published MFU


@dataclass(frozen=True)
class Run:
    """One published run.

    ``layers``, ``width`` and ``heads`` are published only for the 2B. For the others, ``width`` is
    a multiple of 1024 and heads have 128, such that the parameters give the published MFU and FLOPs
    of a step. For each there are other pairs, with parameters within 5 %. ``batch``, of one device,
    follows from the published tokens of a step, without gradient accumulation.
    """

    name: str
    slice: str
    layers: int
    width: int
    heads: int
    batch: int
    step_ms: float  # published
    mfu: float  # published, %
    derived: bool = True  # whether layers, width and heads are derived

    @property
    def parameters(self) -> int:
        """The tied embedding counts once."""
        d = self.width
        return self.layers * (12 * d * d + 13 * d) + (VOCABULARY + SEQUENCE) * d + 2 * d

    @property
    def tokens(self) -> int:
        """Tokens of one device in one step."""
        return self.batch * SEQUENCE

    def published_mfu(self, seconds: float) -> float:
        """MFU in %, by the published rule: 6 FLOPs per parameter and token, none for attention."""
        return 100 * 6 * self.tokens * self.parameters / (seconds * PEAK)


RUNS = {
    run.name: run
    for run in (
        Run("2B", "v4-8", 18, 3072, 24, 32, 4191, 35.7, derived=False),
        Run("16B", "v4-64", 36, 6144, 48, 16, 14592, 38.8),
        Run("20B", "v4-128", 32, 7168, 56, 8, 7824, 45.1),
        Run("32B", "v4-128", 40, 8192, 64, 8, 12970, 44.4),
        Run("64B", "v4-256", 63, 9216, 72, 8, 25653, 44.7),
        Run("128B", "v4-512", 71, 12288, 96, 4, 30460, 37.7),
    )
}


class Conv1D(nn.Module):
    """A linear layer with a weight of shape (inputs, outputs), as in transformers' GPT-2.

    So sharding on dimension 0 splits the inputs, and the in-tree patch of ``nn.Linear`` does not
    apply.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x):
        flat = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return flat.view(*x.shape[:-1], -1)


class Block(nn.Module):
    """Attention and a perceptron, each after a norm; one unit to wrap."""

    def __init__(self, width: int, heads: int, dropout: float = DROPOUT):
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.ln_1 = nn.LayerNorm(width)
        self.c_attn = Conv1D(width, 3 * width)
        self.attn_proj = Conv1D(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.c_fc = Conv1D(width, 4 * width)
        self.mlp_proj = Conv1D(4 * width, width)
        past = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).tril()
        self.register_buffer("past", past, persistent=False)

    def forward(self, x):
        x = x + F.dropout(self.attn_proj(self._attend(self.ln_1(x))), self.dropout)
        h = self.c_fc(self.ln_2(x))
        # gelu_new of transformers, with the same operations
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        return x + F.dropout(self.mlp_proj(h), self.dropout)

    def _attend(self, x):
        # Shapes: b batch, s sequence, w width, h heads, d = w / h.
        b, s, w = x.shape
        parts = self.c_attn(x).split(w, dim=2)
        q, k, v = (part.view(b, s, self.heads, -1).transpose(1, 2) for part in parts)
        scores = q @ k.transpose(-1, -2) / math.sqrt(w // self.heads)  # (b, h, s, s)
        scores = torch.where(self.past, scores, torch.finfo(scores.dtype).min)
        mixed = F.dropout(scores.softmax(-1), self.dropout) @ v
        return mixed.transpose(1, 2).reshape(b, s, w)


class GPT2(nn.Module):
    """Returns the mean cross-entropy of the next token.

    Args:
        wrap: applied to each block as soon as it is built, so that the full model is never on the
            host.
    """

    def __init__(self, run: Run, layers: int, dropout: float, wrap: Callable[[Block], nn.Module]):
        super().__init__()
        self.dropout = dropout
        self.wte = nn.Embedding(VOCABULARY, run.width)
        self.wpe = nn.Embedding(SEQUENCE, run.width)
        self.h = nn.ModuleList(wrap(Block(run.width, run.heads, dropout)) for _ in range(layers))
        self.ln_f = nn.LayerNorm(run.width)

    def forward(self, tokens):  # (b, s)
        places = torch.arange(SEQUENCE, device=tokens.device)
        x = F.dropout(self.wte(tokens) + self.wpe(places), self.dropout)
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)  # tied; bfloat16 in 4.31
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Adafactor(torch.optim.Optimizer):
    """Adafactor as the Trainer of transformers uses it for ``--optim adafactor``.

    It has no relative step, no scaling by the parameter, no first moment, and a fixed rate (Shazeer
    and Stern, arXiv 1804.04235). It is not ``torch.optim.Adafactor``, which reads norms on the host
    for every parameter (``.item()``): on XLA each read splits the step.
    """

    def __init__(self, params, lr: float = 5e-5, decay: float = -0.8, eps: float = 1e-30):
        super().__init__(params, {"lr": lr, "decay": decay, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, self.state[p], group)

    def _update(self, p, grad, state, group) -> None:
        if not state:
            state["step"] = 0
            if grad.dim() > 1:
                state["exp_avg_sq_row"] = grad.new_zeros(grad.shape[:-1])
                state["exp_avg_sq_col"] = grad.new_zeros(grad.shape[:-2] + grad.shape[-1:])
            else:
                state["exp_avg_sq"] = torch.zeros_like(grad)
        state["step"] += 1
        state["RMS"] = _rms(p)  # unused without scaling, but computed
        beta = 1 - state["step"] ** group["decay"]
        square = grad**2 + group["eps"]
        if grad.dim() > 1:
            row, col = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            row.mul_(beta).add_(square.mean(-1), alpha=1 - beta)
            col.mul_(beta).add_(square.mean(-2), alpha=1 - beta)
            scale = (row / row.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
            update = scale * col.unsqueeze(-2).rsqrt() * grad
        else:
            state["exp_avg_sq"].mul_(beta).add_(square, alpha=1 - beta)
            update = state["exp_avg_sq"].rsqrt() * grad
        p.sub_(update / _rms(update).clamp(min=1.0) * group["lr"])


def _rms(tensor):
    return tensor.norm(2) / tensor.numel() ** 0.5


def step_for(
    run: Run, layers: int | None = None, dropout: float = DROPOUT
) -> Callable[[], torch.Tensor]:
    """The training step of ``run`` for :func:`xla_fsdp.plan`, by default with all layers.

    It uses in-tree FSDP with the published ``fsdp_config.json``: bfloat16, sharded on dimension 0,
    pinned layouts (a gather is an all-reduce of a padded tensor), each block checkpointed and
    wrapped. The Trainer clips gradients at a norm of 1 by default.
    """

    def step() -> torch.Tensor:
        from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel, checkpoint_module

        def wrap(module: nn.Module) -> nn.Module:
            return XlaFullyShardedDataParallel(
                module,
                compute_dtype=torch.bfloat16,
                shard_param_on_dim_0=True,
                pin_layout_in_collective_ops=True,
            )

        depth = run.layers if layers is None else layers
        model = wrap(GPT2(run, depth, dropout, lambda block: wrap(checkpoint_module(block))))
        optimizer = Adafactor(model.parameters())
        tokens = torch.zeros(run.batch, SEQUENCE, dtype=torch.long).to("xla")
        loss = model(tokens)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step

"""Mixtures of experts in shapes that do not depend on the data.

transformers looks for the tokens of each expert (``nonzero``, ``where``), whose number is only
known when the router has been computed: on XLA the step is cut there, every step is another program
and on every rank another one, and a plan, which has no values, loses the experts.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock


def use_static_experts(model: nn.Module) -> list[str]:
    """Has Mixtral's experts in ``model`` compute every token, weighted with 0 where the router did
    not choose them; call it on every rank, before or after wrapping.

    Outputs and gradients are those of the library to rounding, without dropping a token whatever
    the router does. The price: experts take ``num_local_experts / num_experts_per_tok`` times the
    operations, 4 in Mixtral 8x7B, in one program. An expert without tokens has the gradient zero
    where it had none, so that weight decay and momentum reach it.

    Returns:
        The names of the blocks, none if ``model`` has none of this kind.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MixtralSparseMoeBlock):
            block: Any = module
            block.forward = functools.partial(_every_token, module)
            found.append(name)
    return found


def _every_token(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, s, h] to [b, s, h], and the router's logits [b*s, experts]."""
    shape = hidden_states.shape
    if block.training and block.jitter_noise > 0:
        low, high = 1.0 - block.jitter_noise, 1.0 + block.jitter_noise
        hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(low, high)
    tokens = hidden_states.reshape(-1, shape[-1])  # [t, h]
    logits = block.gate(tokens)  # [t, e]
    chosen, which = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), block.top_k, dim=-1)
    chosen = (chosen / chosen.sum(dim=-1, keepdim=True)).to(tokens.dtype)  # [t, k]
    numbers = torch.arange(block.num_experts, device=which.device)
    # [t, e]: each expert is chosen once at most, so that nothing is rounded.
    weights = (chosen[..., None] * (which[..., None] == numbers)).sum(dim=1)
    total = torch.zeros_like(tokens)
    for number, expert in enumerate(block.experts):
        total = total + expert(tokens) * weights[:, number, None]
    return total.reshape(shape), logits

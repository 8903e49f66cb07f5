"""Mixtures of experts in shapes that do not depend on the data.

transformers looks for the tokens of each expert (``nonzero``, ``where``), whose number is only
known when the router has been computed: on XLA the step is cut there, every step is another program
and on every rank another one, and a plan, which has no values, loses the experts.

Blocks are known by the names of their classes, so that none need be imported.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def use_static_experts(model: nn.Module) -> list[str]:
    """Has the experts in ``model`` compute every token, weighted with 0 where the router did not
    choose them; call it on every rank, before or after wrapping.

    Of Mixtral, OLMoE, Qwen 2 and 3, DeepSeek V3, GLM 4 and Switch Transformers. Outputs and
    gradients are those of the library to rounding, without dropping a token that it does not drop
    (Switch's experts have a capacity). The price: experts take ``experts / chosen`` times the
    operations, 4 times in Mixtral 8x7B, in one program. An expert without tokens has the gradient
    zero where it had none, so that weight decay and momentum reach it.

    Returns:
        The names of the blocks, none if ``model`` has no experts.

    Raises:
        ValueError: it has experts of another kind.
    """
    blocks = {name: module for name, module in model.named_modules() if _is_block(module)}
    other = {name: kind for name, module in blocks.items() if (kind := _kind(module)) not in _KNOWN}
    if other:
        name, kind = next(iter(other.items()))
        raise ValueError(
            f"{name} is a {kind}, whose experts are not known here: known are "
            f"{', '.join(sorted(_KNOWN))}. On XLA they make another program in every step if they "
            "look for their tokens"
        )
    for module in blocks.values():
        method, static = _KNOWN[_kind(module)]
        setattr(module, method, functools.partial(static, module))
    return list(blocks)


def warn_of_dynamic_experts(model: nn.Module) -> None:
    """Has blocks in ``model`` warn in their first forward if they still look for tokens then."""
    for module in model.modules():
        method = _KNOWN.get(_kind(module), ("",))[0]
        if method and method not in vars(module) and not hasattr(module, _WATCHED):
            handle = module.register_forward_pre_hook(_warn)
            setattr(module, _WATCHED, handle)


# On a block: what removes the hook that warns.
_WATCHED = "_xla_fsdp_watched"


def _warn(block: Any, inputs: Any) -> None:
    getattr(block, _WATCHED).remove()
    kind = _kind(block)
    if _KNOWN[kind][0] not in vars(block):
        warnings.warn(
            f"the experts of {kind} look for their tokens, so that every step is another program, "
            "on every rank, and a plan has no experts: call "
            "xla_fsdp.integrations.experts.use_static_experts(model)",
            stacklevel=2,
        )


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _is_block(module: nn.Module) -> bool:
    return (
        isinstance(getattr(module, "experts", None), nn.Module)
        and type(module).__module__.startswith("transformers.")
        and _kind(module) not in _STATIC
    )


def _by_softmax(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, s, h] to [b, s, h], and the router's logits [b*s, experts]."""
    shape = hidden_states.shape
    noise = getattr(block, "jitter_noise", 0)
    if block.training and noise > 0:
        hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(
            1.0 - noise, 1.0 + noise
        )
    tokens = hidden_states.reshape(-1, shape[-1])  # [t, h]
    logits = block.gate(tokens)  # [t, e]
    chosen, which = torch.topk(F.softmax(logits, dim=1, dtype=torch.float), block.top_k, dim=-1)
    if getattr(block, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(dim=-1, keepdim=True)
    total = _by_index(block, tokens, which, chosen.to(tokens.dtype))
    if hasattr(block, "shared_expert"):
        total = total + F.sigmoid(block.shared_expert_gate(tokens)) * block.shared_expert(tokens)
    return total.reshape(shape), logits


def _by_index(
    block: Any, tokens: torch.Tensor, which: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Tokens [t, h], the numbers and weights of their experts [t, k], to [t, h]."""
    total = torch.zeros_like(tokens, dtype=weights.dtype)
    for number, expert in enumerate(block.experts):
        # Each expert is chosen once at most, so that nothing is rounded.
        weight = (weights * (which == number)).sum(dim=-1, keepdim=True)
        total = total + expert(tokens) * weight
    return total.to(tokens.dtype)


def _by_capacity(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, tuple]:
    """[b, s, h] to [b, s, h]; tokens beyond the capacity of their expert become 0."""
    mask, probabilities, logits = block.router(hidden_states)  # [b, s, e], [b, s, 1], [b, s, e]
    total = torch.zeros_like(hidden_states)
    for number, expert in enumerate(block.experts.values()):
        total = total + expert(hidden_states) * mask[..., number, None].to(hidden_states.dtype)
    return probabilities * total, (logits, torch.argmax(mask, dim=-1))


# The class of a block: its method that looks for tokens, and what stands for that.
_KNOWN: dict[str, tuple[str, Callable[..., Any]]] = {
    "MixtralSparseMoeBlock": ("forward", _by_softmax),
    "OlmoeSparseMoeBlock": ("forward", _by_softmax),
    "Qwen2MoeSparseMoeBlock": ("forward", _by_softmax),
    "Qwen3MoeSparseMoeBlock": ("forward", _by_softmax),
    "DeepseekV3MoE": ("moe", _by_index),
    "Glm4MoeMoE": ("moe", _by_index),
    "SwitchTransformersSparseMLP": ("forward", _by_capacity),
}
# These compute every token as they are.
_STATIC = frozenset(["Llama4TextMoe"])

"""Mixtures of experts with shapes that do not depend on the data, so that a step is one program.

Since Transformers 5, experts call the function that their configuration names. In earlier releases
this module recognizes blocks by their class names, so that it need not import them.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .changes import LibraryChanges, missing_names

NAME = "xla_fsdp"


def use_static_experts(model: nn.Module) -> list[str]:
    """Makes every expert in ``model`` compute every token, with the weight 0 for tokens that the
    router did not send to it. Call it on every rank, before or after wrapping.

    Outputs and gradients equal those of the library up to rounding. Experts compute ``experts /
    chosen`` times the operations (4 times in Mixtral 8x7B). An expert without tokens gets a zero
    gradient instead of none, so weight decay and momentum change it.

    Returns:
        The names of the blocks; an empty list if ``model`` has no experts.

    Raises:
        ValueError: ``model`` has experts of a class that is not supported.
    """
    register_experts()
    blocks = {name: module for name, module in model.named_modules() if _is_block(module)}
    for name, block in blocks.items():
        if not _has_interface(block.experts) and _class_name(_selector(block)) not in _KNOWN:
            raise ValueError(
                f"{name} is a {_class_name(block)}, whose experts are not supported. Supported "
                f"classes: {', '.join(sorted(_KNOWN))}. If these experts select their tokens, "
                "every step compiles another program on XLA. Use one of these classes, or "
                "Transformers 5"
            )
    for block in blocks.values():
        if _has_interface(block.experts):
            block.experts.config._experts_implementation = NAME
        else:
            target = _selector(block)
            method, static = _KNOWN[_class_name(target)]
            setattr(target, method, functools.partial(static, target))
    return list(blocks)


def register_experts() -> None:
    """Registers ``experts_implementation="xla_fsdp"``, which the default implementation then uses
    for XLA tensors; nothing before Transformers 5. Raises MissingNamesError."""
    from transformers import configuration_utils

    if find_spec("transformers.integrations.moe") is None:
        # Configurations of releases before 5 do not name a function either.
        config = getattr(configuration_utils, "PretrainedConfig", object)
        if hasattr(config, "_experts_implementation"):
            raise missing_names("transformers", "transformers.integrations.moe")
        return
    from transformers.integrations import moe

    used = LibraryChanges("transformers")
    used.require(moe, "ExpertsInterface", "ALL_EXPERTS_FUNCTIONS", "use_experts_implementation")
    # _has_interface reads what this decorator of experts classes sets.
    names = "has_gate", "has_bias", "is_transposed"
    used.require(moe, *(f"use_experts_implementation({name})" for name in names))
    used.require(configuration_utils.PretrainedConfig, "_experts_implementation")
    used.check()
    used.require(moe.ExpertsInterface, "register")
    used.check()
    if _DEFAULT not in moe.ALL_EXPERTS_FUNCTIONS:
        raise missing_names("transformers", f"experts implementation {_DEFAULT!r}")
    if NAME not in moe.ALL_EXPERTS_FUNCTIONS:
        default = moe.ALL_EXPERTS_FUNCTIONS[_DEFAULT]
        moe.ExpertsInterface.register(NAME, _by_function)
        moe.ExpertsInterface.register(_DEFAULT, functools.partial(_on_xla, default))


def warn_of_dynamic_experts(model: nn.Module) -> None:
    """Makes blocks in ``model`` warn in their first forward if they select tokens then."""
    for module in model.modules():
        if not _is_block(module) or hasattr(module, _WATCHED):
            continue
        if _has_interface(module.experts) or _class_name(_selector(module)) in _KNOWN:
            setattr(module, _WATCHED, module.register_forward_pre_hook(_warn_if_not_static))


# On a block: the handle of the hook that warns.
_WATCHED = "_xla_fsdp_watched"
_DEFAULT = "grouped_mm"


def _warn_if_not_static(block: Any, inputs: Any) -> None:
    getattr(block, _WATCHED).remove()
    if _has_interface(block.experts):
        way = block.experts.config._experts_implementation
        static = way in (NAME, _DEFAULT, "batched_mm")
    else:
        target = _selector(block)
        static = _KNOWN[_class_name(target)][0] in vars(target)
    if not static:
        warnings.warn(
            f"the experts of {_class_name(block)} select their tokens, so every step compiles "
            "another program on every rank, and plans miss the experts: call "
            "xla_fsdp.integrations.experts.use_static_experts(model)",
            stacklevel=2,
        )


def _class_name(module: nn.Module) -> str:
    return type(module).__name__


def _is_block(module: Any) -> bool:
    return (
        isinstance(getattr(module, "experts", None), nn.Module)
        and type(module).__module__.startswith("transformers.")
        and _class_name(module) not in _STATIC
    )


def _has_interface(experts: Any) -> bool:
    """Whether ``experts`` call the function that their configuration names."""
    names = ("num_experts", "has_gate", "has_bias", "is_transposed", "config")
    return all(hasattr(experts, name) for name in names)


def _selector(block: Any) -> Any:
    """The module whose method selects tokens: the experts, or the block around them."""
    return block.experts if _class_name(block.experts) in _KNOWN else block


def _on_xla(
    default: Callable[..., torch.Tensor], experts: Any, hidden: torch.Tensor, *routing: torch.Tensor
) -> torch.Tensor:
    compute = _by_function if hidden.is_xla else default  # type: ignore[attr-defined]
    return compute(experts, hidden, *routing)


def _by_function(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Tokens [t, h], the indices and weights of their experts [t, k], to [t, h]."""

    def linear(tokens: torch.Tensor, name: str, number: int) -> torch.Tensor:
        weight = getattr(experts, name)[number]
        bias = getattr(experts, f"{name}_bias")[number] if experts.has_bias else None
        return F.linear(tokens, weight.T if experts.is_transposed else weight, bias)

    first = "gate_up_proj" if experts.has_gate else "up_proj"
    activate = experts._apply_gate if experts.has_gate else experts.act_fn
    total = torch.zeros_like(hidden_states, dtype=top_k_weights.dtype)
    for number in range(experts.num_experts):
        found = linear(activate(linear(hidden_states, first, number)), "down_proj", number)
        if getattr(experts, "has_post_expert_norm", False):
            found = experts.post_expert_norm(found)
        # A token chooses an expert at most once, so the sum is exact.
        weight = (top_k_weights * (top_k_index == number)).sum(dim=-1, keepdim=True)
        total = total + found * weight
    return total.to(hidden_states.dtype)


def _by_softmax(block: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[b, s, h] to [b, s, h], and the logits of the router [b*s, experts]."""
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
    """Tokens [t, h], the indices and weights of their experts [t, k], to [t, h]."""
    total = torch.zeros_like(tokens, dtype=weights.dtype)
    for number, expert in enumerate(block.experts):
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


def _by_mask(
    experts: Any, hidden_states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Tokens [t, h], the mask of their experts [t, 1, e] and its weights [t, 1], to [t, h]."""
    total = torch.zeros_like(hidden_states)
    for number, expert in enumerate(experts.values()):
        total = total + expert(hidden_states) * (chosen[..., number] * weights)
    return total.to(hidden_states.dtype)


# The class of a block, or of its experts: the method that selects tokens, and its replacement.
_KNOWN: dict[str, tuple[str, Callable[..., Any]]] = {
    "MixtralSparseMoeBlock": ("forward", _by_softmax),
    "OlmoeSparseMoeBlock": ("forward", _by_softmax),
    "Qwen2MoeSparseMoeBlock": ("forward", _by_softmax),
    "Qwen3MoeSparseMoeBlock": ("forward", _by_softmax),
    "DeepseekV3MoE": ("moe", _by_index),
    "Glm4MoeMoE": ("moe", _by_index),
    "SwitchTransformersSparseMLP": ("forward", _by_capacity),
    "SwitchTransformersExperts": ("forward", _by_mask),  # since 5
}
# These compute every token without a change.
_STATIC = frozenset(["Llama4TextMoe"])

"""The attention kernel in models of other libraries: call ``install()`` before models are built."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from ..layers import attention
from .changes import LibraryChanges

NAME = "xla_fsdp"
patches = LibraryChanges("torch")


def install() -> None:
    """Makes ``F.scaled_dot_product_attention`` use the kernel where it supports the inputs.

    If transformers was imported before, in the main thread, it gets
    ``attn_implementation="xla_fsdp"``, which also uses the kernel for padded and packed sequences.

    Raises:
        ImportError: the installed torch or transformers lacks a name. Nothing is changed.
    """
    with_transformers = "transformers" in sys.modules
    if with_transformers:
        _check_transformers()
    patches.apply()
    if with_transformers:
        from transformers.masking_utils import AttentionMaskInterface
        from transformers.modeling_utils import AttentionInterface

        AttentionInterface.register(NAME, _transformers_attention)
        AttentionMaskInterface.register(NAME, _transformers_mask)


def uninstall() -> None:
    """Restores torch's function. Models with ``attn_implementation="xla_fsdp"`` keep it."""
    patches.undo()


@patches.around(F, "scaled_dot_product_attention")
def _attend(
    original: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    ours = attn_mask is None and not dropout_p and isinstance(query, torch.Tensor)
    # torch handles inputs that it broadcasts, or for which it raises its own errors.
    if ours and query.is_xla and not attention.misfit_of(query, key, value, enable_gqa):  # type: ignore[attr-defined]
        return attention.scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                    enable_gqa=enable_gqa)  # fmt: skip


def _check_transformers() -> None:
    from transformers import masking_utils, modeling_utils
    from transformers.integrations import flash_attention, sdpa_attention

    used = LibraryChanges("transformers")
    used.require(modeling_utils, "AttentionInterface")
    used.require(
        masking_utils,
        *("AttentionMaskInterface", "causal_mask_function", "sdpa_mask"),
        *("and_masks(mask_functions)", "packed_sequence_mask_function(packed_sequence_mask)"),
    )
    used.require(sdpa_attention, "sdpa_attention_forward")
    # _refuse_more reads it. The other names there belong to some models and cannot be checked.
    used.require(flash_attention, "flash_attention_forward(softcap)")
    used.check()


def _transformers_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Query, key and value (batch, heads, length, head dimension) to (batch, length, heads, head
    dimension). A mask of two dimensions is segment ids, from :func:`_transformers_mask`."""
    _refuse_more(module, kwargs)
    segments = None
    if attention_mask is not None and attention_mask.dim() == 2:
        if attention_mask.dtype != torch.int32:
            raise ValueError(
                f"{type(module).__name__} got a mask {tuple(attention_mask.shape)} of "
                f"{attention_mask.dtype}, which attn_implementation={NAME!r} does not support; "
                "use attn_implementation='sdpa' for this model"
            )
        segments, attention_mask = attention_mask, None
    if dropout or attention_mask is not None or kwargs.get("position_bias") is not None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if segments is not None:
            attention_mask = attention.segment_mask(segments, is_causal=True)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    out = attention.scaled_dot_product_attention(
        query, key, value, scale=scaling, enable_gqa=True, segment_ids=segments,
        is_causal=segments is not None or (bool(causal) and query.shape[2] > 1),
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _refuse_more(module: torch.nn.Module, given: dict[str, Any]) -> None:
    """Raises for variants of attention that the kernel would silently ignore."""
    more = [name for name in ("softcap", "s_aux", "head_mask") if given.get(name) is not None]
    more += [name for name in ("output_attentions",) if given.get(name)]
    if getattr(module, "scale_attn_weights", True) is False:
        more.append("scale_attn_weights=False")
    if getattr(module, "scale_attn_by_inverse_layer_idx", False):
        more.append("scale_attn_by_inverse_layer_idx=True")
    if "relative_key" in str(getattr(module, "position_embedding_type", "")):
        more.append(f"position_embedding_type={module.position_embedding_type!r}")
    if more:
        raise ValueError(
            f"{type(module).__name__} uses attention with {', '.join(more)}, which "
            f"attn_implementation={NAME!r} would ignore: use attn_implementation='eager' for "
            "this model, or change these options"
        )


def _transformers_mask(
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor | None:
    """``None`` for causal attention, segment ids (batch, length) for causal attention within each
    sequence of a packed or padded row, otherwise the mask of ``"sdpa"``."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # Releases before 5 pass the positions of the queries; later ones pass their number and offset.
    positions = others.get("cache_position")
    queries = others["q_length"] if positions is None else positions.shape[0]
    first = others.get("q_offset", 0)
    whole = kv_offset == 0 and kv_length == queries and isinstance(first, int) and first == 0
    packed = _packed_of(mask_function)
    if whole and mask_function is causal_mask_function:
        if attention_mask is None:
            return None
        # Padding becomes a separate segment, whose outputs are unused.
        if attention_mask.shape[-1] == kv_length:
            return attention_mask.to(torch.int32)
    if whole and packed is not None and attention_mask is None:
        return packed.to(torch.int32)
    return sdpa_mask(
        kv_length=kv_length, kv_offset=kv_offset, attention_mask=attention_mask,
        mask_function=mask_function or causal_mask_function, **others,
    )  # fmt: skip


def _packed_of(mask_function: Callable[..., Any] | None) -> torch.Tensor | None:
    """The sequence numbers, from closures, if ``mask_function`` is causal attention within each
    packed sequence. Release 5 compares positions within a sequence, which gives the same mask."""
    from transformers.masking_utils import causal_mask_function

    parts = _closure(mask_function, "and_masks").get("mask_functions", ())
    if len(parts) != 2:
        return None
    by_position = _closure(parts[0], "remap_positions_for_packed_sequence").get("mask_function")
    if causal_mask_function not in (parts[0], by_position):
        return None
    return _closure(parts[1], "packed_sequence_mask_function").get("packed_sequence_mask")


def _closure(function: Callable[..., Any] | None, maker: str) -> dict[str, Any]:
    """The closure variables of a function that ``maker`` returned, or else ``{}``."""
    if not getattr(function, "__qualname__", "").startswith(f"{maker}.<locals>"):
        return {}
    names = function.__code__.co_freevars  # type: ignore[union-attr]
    cells = function.__closure__ or ()  # type: ignore[union-attr]
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True))

"""Methods of transformers models that work differently while the model is sharded.

The first wrapper in a process that uses transformers imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from transformers.cache_utils import Cache
from transformers.generation.utils import GenerationMixin

# Not from transformers itself: it imports names lazily, which is unsafe with several threads.
from transformers.modeling_utils import ModuleUtilsMixin, PreTrainedModel

from ..sharding.state import is_sharded
from .changes import LibraryChanges
from .experts import register_experts, warn_of_dynamic_experts
from .full_weights import count_full_parameters, save_whole
from .generation import generate_sharded

changes = LibraryChanges("transformers")

# The names that full_weights.py and generation.py use or override.
changes.require(
    PreTrainedModel,
    *("device", "dtype", "base_model_prefix", "_no_split_modules"),
    *("save_pretrained(save_directory)", "save_pretrained(state_dict)"),
    "save_pretrained(is_main_process)",
)
changes.require(
    GenerationMixin,
    *("_has_unfinished_sequences", "_validate_generation_mode", "_prepare_cache_for_generation"),
    *("_supports_default_dynamic_cache", "_supports_logits_to_keep"),
)
changes.require_one(  # before 5, only models with an encoder have the first
    (PreTrainedModel, "get_encoder"),
    (GenerationMixin, "prepare_inputs_for_generation(cache_position)"),
)
changes.require_one(  # renamed in 5.24
    (GenerationMixin, "prepare_inputs_for_generation(cache)"),
    (GenerationMixin, "prepare_inputs_for_generation(past_key_values)"),
)
changes.require(
    Cache,
    *("update", "get_seq_length", "get_mask_sizes", "reorder_cache", "is_compileable"),
    "is_sliding",
)
changes.require_one((Cache, "get_max_length"), (Cache, "get_max_cache_shape"))


adapt = warn_of_dynamic_experts  # called with each module that is wrapped

changes.around(PreTrainedModel, "save_pretrained", is_sharded)(save_whole)
changes.around(GenerationMixin, "generate", is_sharded)(generate_sharded)


@changes.around(ModuleUtilsMixin, "num_parameters", is_sharded)
def _num_parameters(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> int:
    return count_full_parameters(model, *args, **kwargs)


@changes.around(PreTrainedModel, "resize_token_embeddings", is_sharded)
def _resize(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    sizes = (*args[:2], kwargs.get("new_num_tokens"), kwargs.get("pad_to_multiple_of"))
    if any(size is not None for size in sizes):
        raise RuntimeError(
            f"resize_token_embeddings of {type(model).__name__} was called on a wrapped model, "
            "whose embeddings are already sharded: call it before wrapping, and create the "
            "optimizer after wrapping"
        )
    # Without a size the method only returns the embeddings.
    return original(model, *args, **kwargs)


@changes.around(PreTrainedModel, "push_to_hub", is_sharded)
def _push(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(
        "push_to_hub of a wrapped model would upload from every rank: call "
        "save_pretrained(folder, push_to_hub=True) on every rank, which uploads from rank 0"
    )


changes.check()
register_experts()
changes.apply()

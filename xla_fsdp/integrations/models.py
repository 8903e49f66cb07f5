"""Methods of transformers models that work differently while the model is sharded.

The first wrapper in a process that uses transformers imports this module. Models that are not
sharded use the original methods.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from transformers.generation.utils import GenerationMixin

# Not from transformers itself: it imports names lazily, which is unsafe with several threads.
from transformers.modeling_utils import ModuleUtilsMixin, PreTrainedModel

from ..sharding.state import is_sharded
from .changes import Changes
from .experts import register, warn_of_dynamic_experts
from .generation import generate_sharded
from .saving import count_full_parameters, save_whole

changes = Changes("transformers")


def adapt(module: nn.Module) -> None:
    """Prepares ``module``, which is being wrapped."""
    warn_of_dynamic_experts(module)


@changes.around(PreTrainedModel, "save_pretrained")
def _save(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if is_sharded(model):
        return save_whole(original, model, *args, **kwargs)
    return original(model, *args, **kwargs)


@changes.around(GenerationMixin, "generate")
def _generate(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if is_sharded(model):
        return generate_sharded(original, model, *args, **kwargs)
    return original(model, *args, **kwargs)


@changes.around(PreTrainedModel, "resize_token_embeddings")
def _resize(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    size = args[0] if args else kwargs.get("new_num_tokens")
    multiple = args[1] if len(args) > 1 else kwargs.get("pad_to_multiple_of")
    # Without a size the method only returns the embeddings.
    if is_sharded(model) and not (size is None and multiple is None):
        _refuse_resize(type(model).__name__)
    return original(model, *args, **kwargs)


@changes.around(PreTrainedModel, "push_to_hub")
def _push(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if is_sharded(model):
        raise RuntimeError(
            "push_to_hub of a wrapped model would upload from every rank: call "
            "save_pretrained(folder, push_to_hub=True) on every rank, which uploads from rank 0"
        )
    return original(model, *args, **kwargs)


@changes.around(ModuleUtilsMixin, "num_parameters")
def _count(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if is_sharded(model):
        return count_full_parameters(model, *args, **kwargs)
    return original(model, *args, **kwargs)


def _refuse_resize(name: str) -> NoReturn:
    raise RuntimeError(
        f"resize_token_embeddings of {name} was called on a wrapped model, whose embeddings are "
        "already sharded: call it before wrapping, and create the optimizer after wrapping"
    )


changes.apply()
register()

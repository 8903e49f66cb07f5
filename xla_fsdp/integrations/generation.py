"""``generate()`` of sharded models: the search on the host, the model in programs of fixed shapes.

The search (choice of tokens, beams, stopping) is the library's own, on CPU tensors, so that its
random numbers and its ties are those of the plain model. Only what it calls differs: a view of the
model whose call computes on the device, on every rank the same few programs, until all have ended.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationMode

from ..collectives.random_state import at_rest
from ..tree import map_tensors, tensors_in
from .decoding import Decoding
from .fixed_cache import CrossCache, FixedCache

_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
# Of layers that keep keys and values by position.
_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_CPU = torch.device("cpu")


@torch.no_grad()
@at_rest()
def generate_sharded(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """``model.generate(*args, **kwargs)``; every rank must call it, each with inputs of its own.

    Prompts, batches and numbers of tokens may differ between ranks. Every wrapper gathers once a
    token (and the encoder's once); a rank that has ended goes on with the others. Results are where
    the inputs are, and random numbers are those of the CPU.

    Programs: one for prompts and one for further tokens, for each bucket of lengths (the next power
    of two, see :func:`set_length_buckets`), number of sequences and of cached positions.

    Raises:
        ValueError: an option that is not among those of greedy search, sampling and beams.
        RuntimeError: the model recomputes (``gradient_checkpointing``) and is in training.
    """
    if model.training and model.is_gradient_checkpointing:
        raise RuntimeError(
            "generate() needs a cache, which a model with gradient_checkpointing does not fill "
            "while it is in training: call model.eval() before, and model.train() after"
        )
    given = tensors_in((args, kwargs))
    home = given[0].device if given else _CPU
    view = _host_view(model, Decoding(model, length_buckets(model)))
    args, kwargs = map_tensors(lambda t: t.cpu(), (args, kwargs))
    result = original(view, *args, **kwargs)
    if not isinstance(result, torch.Tensor):
        result.past_key_values = None  # of padded lengths, on the device
    return map_tensors(lambda t: t.to(home), result)


_BUCKETS = "_xla_fsdp_length_buckets"


def set_length_buckets(model: nn.Module, lengths: Sequence[int]) -> None:
    """The lengths that ``model.generate`` pads prompts to, and that caches have room for.

    Longer ones get the next power of two. Each bucket that is met compiles two programs.

    Args:
        model: a model of transformers, or a wrapper around one.
        lengths: in tokens, ascending; empty for powers of two only, which is the default.

    Raises:
        ValueError, TypeError: ``lengths`` are not ascending positive numbers.
    """
    found = list(lengths)
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in found):
        raise TypeError(f"lengths must be whole numbers, got {found!r}")
    if found and (found[0] < 1 or any(a >= b for a, b in zip(found, found[1:], strict=False))):
        raise ValueError(f"lengths must be positive and ascending, got {found!r}")
    inner = getattr(model, "module", model)
    inner.__dict__[_BUCKETS] = tuple(found)


def length_buckets(model: nn.Module) -> tuple[int, ...]:
    """What :func:`set_length_buckets` was told."""
    return vars(model).get(_BUCKETS, ())


class _HostView:
    """The methods in which the view that the search gets differs from the model itself."""

    decoding: Decoding
    device = _CPU

    def __call__(self, **inputs: Any) -> Any:
        return self.decoding.step(inputs)

    def get_encoder(self) -> Any:
        return self.decoding.encoder()

    def _has_unfinished_sequences(
        self, this_peer_finished: Any, synced_gpus: bool, device: torch.device
    ) -> bool:
        return self.decoding.go_on(not bool(this_peer_finished))

    def _validate_generation_mode(self, mode: Any, config: Any, others: dict[str, Any]) -> None:
        refused = {
            "prefill_chunk_size": config.prefill_chunk_size is not None,
            "output_attentions": config.output_attentions,
            "output_hidden_states": config.output_hidden_states,
            "assistant_model": others.get("assistant_model") is not None,
            "custom_generate": others.get("custom_generate") is not None,
            "token_healing": config.token_healing,
            "guidance_scale": config.guidance_scale not in (None, 1),
        }
        wrong = [name for name, is_set in refused.items() if is_set]
        if mode not in _MODES or wrong:
            raise ValueError(
                f"generate() of a sharded model was asked for {', '.join(wrong) or mode}: it "
                "does greedy search, sampling and beams, without assistant, chunks, guidance, "
                "attentions or hidden states. Consolidate a checkpoint for the rest"
            )
        inherited: Any = super()
        inherited._validate_generation_mode(mode, config, others)

    def _prepare_cache_for_generation(
        self, config: Any, kwargs: dict[str, Any], mode: Any, batch: int, length: int
    ) -> None:
        if kwargs.get("past_key_values") is not None:
            raise ValueError(
                "past_key_values can not be given to generate() of a sharded model, which makes a "
                "cache of fixed size itself: give all tokens as input_ids"
            )
        model: Any = self
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
        if not model._supports_default_dynamic_cache() or not _KINDS.issuperset(kinds):
            raise ValueError(
                f"{type(self).__name__} keeps a state that is not keys and values by position, "
                "which generate() of a sharded model does not know; consolidate a checkpoint"
            )
        config.use_cache = True  # changes the time, not the result
        rows = batch * max(config.num_beams, config.num_return_sequences)
        slots = self.decoding.agree_on_cache(rows, length)
        cache: Any = FixedCache(slots)
        encoded = kwargs.get("encoder_outputs")
        if encoded is not None:
            cache = EncoderDecoderCache(cache, CrossCache(encoded[0].shape[1]))
        self.decoding.cache = kwargs["past_key_values"] = cache


def _host_view(model: Any, decoding: Decoding) -> Any:
    """An object with all that ``model`` has, of a class that is its own and :class:`_HostView`."""
    cls = type(model)
    own = {"decoding": decoding, "__module__": cls.__module__, "forward": cls.forward}
    view: Any = object.__new__(type(cls.__name__, (_HostView, cls), own))
    view.__dict__ = model.__dict__
    assert inspect.signature(view.forward) == inspect.signature(model.forward)
    return view

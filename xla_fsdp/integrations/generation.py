"""``generate()`` of sharded models: the library's search on CPU tensors calls a view of the model,
which computes on the device in programs of fixed shapes.

B: sequences of this rank (prompts times beams); R: the maximum of B over the ranks; q: positions of
the input; w: the maximum of q over the ranks, padded to its bucket, or 1; s: slots of the cache;
V: words.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch_xla
from torch import nn
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from ..checkpoint.rank_exchange import RankExchange
from ..collectives.random_state import synced_device
from ..collectives.world import World
from ..sharding.state import FSDPState, find_outer_wrappers, unit_of
from ..tree import map_tensors, tensors_in

_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.BEAM_SEARCH,
    GenerationMode.BEAM_SAMPLE,
)
# Types of layers that cache keys and values by position.
_KINDS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
_CPU = torch.device("cpu")
# On a model: the lengths passed to set_length_buckets.
_BUCKETS = "_xla_fsdp_length_buckets"
_PREPARED = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
# The argument of a model for its cache. Transformers 5 renamed it.
_CACHE = "cache" if "cache" in _PREPARED else "past_key_values"
# Whether models take positions as an argument. Others would read 2-D masks from the device.
_TAKES_POSITIONS = "cache_position" in _PREPARED
# Arguments that the search sets at each step, and that _Decoding sets itself.
_DECIDED = (
    *(_CACHE, "return_dict", "logits_to_keep", "output_attentions", "output_hidden_states"),
)
# Inputs with one column per position of the input.
_BY_POSITION = (
    *("input_ids", "inputs_embeds", "position_ids", "token_type_ids"),
    *("decoder_input_ids", "decoder_inputs_embeds", "decoder_position_ids"),
)
_SMALLEST_BUCKET = 16


@torch.no_grad()
@synced_device()
def generate_sharded(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Implements ``model.generate(*args, **kwargs)``. Every rank must call it with its own inputs,
    which may differ in everything. A rank that has finished takes part until all have.

    It compiles one program for prompts and one for further tokens, for each bucket of lengths,
    number of sequences and cache size.

    Raises:
        ValueError: an option is not supported; greedy search, sampling and beams are.
        RuntimeError: the model recomputes (``gradient_checkpointing``) and is in training mode.
    """
    recomputes = any(getattr(one, "gradient_checkpointing", False) for one in model.modules())
    if model.training and recomputes:
        raise RuntimeError(
            "generate() needs a cache, which a model with gradient_checkpointing does not fill "
            "in training mode: call model.eval() before, and model.train() after"
        )
    given = tensors_in((args, kwargs))
    home = given[0].device if given else _CPU
    view = _host_view(model, _Decoding(model, vars(model).get(_BUCKETS, ())))
    args, kwargs = map_tensors(lambda t: t.cpu(), (args, kwargs))
    result = original(view, *args, **kwargs)
    if not isinstance(result, torch.Tensor):
        setattr(result, _CACHE, None)  # it has padded lengths, and is on the device
    return map_tensors(lambda t: t.to(home), result)


def set_length_buckets(model: nn.Module, lengths: Sequence[int]) -> None:
    """Sets the lengths in tokens to which ``generate`` of ``model``, or of the model in a wrapper,
    pads prompts and caches. Longer ones, and by default all, use the next power of two.

    Raises:
        ValueError, TypeError: ``lengths`` are not ascending positive numbers.
    """
    found = list(lengths)
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in found):
        raise TypeError(f"lengths must be integers, got {found!r}")
    if found and (found[0] < 1 or any(a >= b for a, b in zip(found, found[1:], strict=False))):
        raise ValueError(f"lengths must be positive and ascending, got {found!r}")
    inner = getattr(model, "module", model)
    inner.__dict__[_BUCKETS] = tuple(found)


class _HostView:
    decoding: _Decoding
    device = _CPU

    def __call__(self, **inputs: Any) -> Any:
        return self.decoding.step(inputs)

    def get_encoder(self) -> Any:
        return self.decoding.encoder()

    def _has_unfinished_sequences(
        self, this_peer_finished: Any, synced_gpus: bool, device: torch.device
    ) -> bool:
        return self.decoding.wait_for_others(not bool(this_peer_finished))

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
                f"generate() of a sharded model does not support {', '.join(wrong) or mode}. It "
                "supports greedy search, sampling and beams, without assistant, chunks, guidance, "
                "attentions or hidden states. For these, consolidate a checkpoint and generate "
                "with the unsharded model"
            )
        inherited: Any = super()
        inherited._validate_generation_mode(mode, config, others)

    def _prepare_cache_for_generation(
        self, config: Any, kwargs: dict[str, Any], mode: Any, batch: int, length: int
    ) -> None:
        if kwargs.get(_CACHE) is not None:
            raise ValueError(
                f"{_CACHE} cannot be passed to generate() of a sharded model, which creates a "
                "cache of fixed size itself: pass all tokens as input_ids"
            )
        model: Any = self
        kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
        if not model._supports_default_dynamic_cache() or not _KINDS.issuperset(kinds):
            raise ValueError(
                f"{type(self).__name__} caches a state other than keys and values by position, "
                "which generate() of a sharded model does not support: consolidate a checkpoint "
                "and generate with the unsharded model"
            )
        config.use_cache = True  # changes the speed, not the result
        rows = batch * max(config.num_beams, config.num_return_sequences)
        slots = self.decoding.agree_on_cache(rows, length)
        cache: Any = _FixedCache(slots)
        encoded = kwargs.get("encoder_outputs")
        if encoded is not None:
            cache = EncoderDecoderCache(cache, _CrossCache(encoded[0].shape[1]))
        self.decoding.cache = kwargs[_CACHE] = cache


def _host_view(model: Any, decoding: _Decoding) -> Any:
    """An object with the attributes of ``model``, of a class derived from its class."""
    cls = type(model)
    own = {"decoding": decoding, "__module__": cls.__module__, "forward": cls.forward}
    view: Any = object.__new__(type(cls.__name__, (_HostView, cls), own))
    view.__dict__ = model.__dict__
    assert inspect.signature(view.forward) == inspect.signature(model.forward)
    return view


class _Decoding:
    """One call of ``generate`` on this rank."""

    def __init__(self, model: Any, buckets: tuple[int, ...]) -> None:
        self.model = model
        self.buckets = buckets
        self.cache: Any = None
        self.exchange = RankExchange()
        self.world = World.current()
        self.rows = 0  # R
        # A finished rank computes this again: inputs of one token, and its position.
        self._again: tuple[dict[str, Any], int] | None = None
        self._encoded = 0  # the length of the encoded prompts
        units = map(unit_of, find_outer_wrappers(model))
        self._units = [unit for unit in units if unit is not None]

    def bucket(self, length: int) -> int:
        power = max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
        return next((one for one in self.buckets if one >= length), power)

    def agree_on_cache(self, rows: int, length: int) -> int:
        """s, for ``rows`` sequences of at most ``length`` tokens on this rank."""
        self.rows, most = self._most("the size of its cache", rows, length)
        return self.bucket(most)

    def _most(self, what: str, *sizes: int) -> list[int]:
        every = self.exchange.gather_values(f"generate: {what}", list(sizes))
        return [max(column) for column in zip(*every, strict=True)]

    def encoder(self) -> Callable[..., Any]:
        encoder = self.model.get_encoder()
        forward = getattr(encoder, "module", encoder).forward

        @functools.wraps(forward)
        def encode(**inputs: Any) -> BaseModelOutput:
            tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
            if tokens is None or tokens.dim() not in (2, 3):
                raise ValueError(
                    f"the encoder of {type(self.model).__name__} takes no tokens, but generate() "
                    "of a sharded model needs input_ids: pass encoder_outputs instead"
                )
            own, length = tokens.shape[:2]
            rows, longest = self._most("its prompts", own, length)
            width = self.bucket(longest)
            mask = inputs.pop("attention_mask", None)
            if mask is None:
                mask = torch.ones(own, length, dtype=torch.long, device="cpu")
            self._encoded = length
            padded = map_tensors(lambda value: _filled(value, 1, width), inputs)
            padded["attention_mask"] = self._of_prompts(mask, width)
            padded = self._on_device(_more_rows(padded, own, rows))
            states = self._call(encoder, {**padded, "return_dict": True}).last_hidden_state
            torch_xla.sync()
            return BaseModelOutput(last_hidden_state=states.narrow(0, 0, own))

        encode.forward = forward  # type: ignore[attr-defined]  # its signature is read
        return encode

    def step(self, inputs: dict[str, Any]) -> CausalLMOutputWithPast:
        """Computes the scores [B, 1, V] of the next tokens, on the CPU."""
        tokens = next(inputs[name] for name in _BY_POSITION if inputs.get(name) is not None)
        own, length = tokens.shape[:2]
        first = self.slots.seen
        width = 1
        if self._again is None:
            width = self.bucket(self._most("the length of its input", length)[0])
        elif length != 1:
            raise ValueError(f"expected one new token per sequence, got {length}")
        padded = self._padded(inputs, own, torch.arange(width, device="cpu") + first)
        last = padded if width == 1 else _last_column(padded, length)
        self._again = last, first + length - 1
        scores: Any = self._compute(padded, first, length)
        self.slots.seen = first + length
        return CausalLMOutputWithPast(**{"logits": scores[:own], _CACHE: self.cache})

    def wait_for_others(self, unfinished: bool) -> bool:
        """Returns ``unfinished``; if false, first takes part in the forwards of all others."""
        while self.exchange.size > 1 and self._anybody(unfinished) and not unfinished:
            assert self._again is not None, "a rank with nothing to do has computed its prompt"
            self._compute(*self._again, 1)
        return unfinished

    @property
    def slots(self) -> _FixedCache:
        return getattr(self.cache, "self_attention_cache", self.cache)

    def _anybody(self, unfinished: bool) -> bool:
        flag = torch.tensor([float(unfinished)], device="cpu").to(self.world.device)
        flag = self.world.all_reduce_max(flag, "generate")
        torch_xla.sync()
        return bool(flag.item())

    def _padded(self, inputs: dict[str, Any], own: int, positions: torch.Tensor) -> dict[str, Any]:
        """Pads inputs of B = ``own`` sequences to R rows and w columns, at ``positions`` [w]."""
        given = {name: value for name, value in inputs.items() if name not in _DECIDED}
        width = len(positions)
        for name in _BY_POSITION:
            if given.get(name) is not None:
                given[name] = _filled(given[name], 1, width)
        if _TAKES_POSITIONS:
            given["cache_position"] = positions
        name = "attention_mask"
        if self.model.config.is_encoder_decoder:
            encoded = given["encoder_outputs"][0].shape[1]
            mask = given.get("attention_mask")
            if mask is None:
                mask = torch.ones(own, self._encoded or encoded, dtype=torch.long, device="cpu")
            given["attention_mask"] = self._of_prompts(mask, encoded)
            name = "decoder_attention_mask"
        masks = given.get(name)
        if not isinstance(masks, dict):  # one mask for all types of layers
            given[name] = self._mask(masks, own, positions)
        else:
            given[name] = {kind: self._mask(mask, own, positions) for kind, mask in masks.items()}
        return _more_rows(given, own, self.rows)

    def _mask(self, mask: torch.Tensor | None, own: int, positions: torch.Tensor) -> torch.Tensor:
        """Pads a mask [B, 1, q, s] to w rows, and opens rows in which all positions are masked:
        their output is unused, but must be finite."""
        if mask is None:  # causal
            if _TAKES_POSITIONS:
                return torch.ones(own, self.slots.length, dtype=torch.long, device="cpu")
            mask = torch.arange(self.slots.length, device="cpu") <= positions[:, None]
            mask = mask.expand(own, 1, -1, -1)
        elif mask.dim() != 4:
            if _TAKES_POSITIONS and self.model.config.is_encoder_decoder:
                return mask
            raise ValueError(
                f"{type(self.model).__name__} makes a mask of shape {tuple(mask.shape)} in "
                "generate(), and the shape changes with every token. generate() of a sharded model "
                "needs masks for all positions of a fixed cache: consolidate a checkpoint and "
                "generate with the unsharded model"
            )
        if mask.dtype is torch.bool:
            mask = mask | ~mask.any(-1, keepdim=True)
        else:  # it is added to scores; in bfloat16 the smallest number becomes -inf
            closed = mask <= torch.finfo(mask.dtype).min / 2
            mask = mask.masked_fill(closed.all(-1, keepdim=True), 0.0)
        return _filled(mask, 2, len(positions))

    def _of_prompts(self, mask: torch.Tensor, width: int) -> torch.Tensor:
        if mask.dim() == 2:
            mask = _filled(mask, 1, width, repeat=False)
            if not _TAKES_POSITIONS:
                mask = mask[:, None, None].bool()
                if self.model.config._attn_implementation == "eager":
                    least = torch.finfo(self.model.dtype).min
                    mask = torch.where(mask, 0.0, least).to(self.model.dtype)
        return mask

    def _compute(self, padded: dict[str, Any], first: int, length: int) -> torch.Tensor:
        """The scores [R, 1, V] after column ``length - 1`` of an input at position ``first``."""
        inputs = self._on_device(padded)
        last = torch.tensor([length - 1], device="cpu").to(self.world.device)
        if self.model._supports_logits_to_keep():
            inputs["logits_to_keep"] = last
        slots, seen = self.slots, self.slots.seen
        slots.seen = torch.tensor(first, device="cpu").to(self.world.device)
        outputs = self._call(self.model, {**inputs, _CACHE: self.cache, "return_dict": True})
        slots.seen = seen
        scores = outputs.logits
        if scores.shape[1] != 1:
            scores = scores.index_select(1, last)
        del outputs
        torch_xla.sync()
        return scores.cpu()

    def _call(self, function: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Calls ``function`` while wrappers around the model are unsharded."""
        for unit in reversed(self._units):
            function = functools.partial(_enter, unit, function)
        return function(**inputs)

    def _on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return map_tensors(lambda tensor: tensor.to(self.world.device), inputs)


def _enter(unit: FSDPState, function: Callable[..., Any], /, **kwargs: Any) -> Any:
    return unit.run(function, (), kwargs)


def _filled(tensor: torch.Tensor, dim: int, length: int, repeat: bool = True) -> torch.Tensor:
    """Pads ``tensor`` along ``dim`` to ``length``, with its last element or with zeros."""
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    last = last if repeat else torch.zeros_like(last)
    return torch.cat([tensor, *[last] * missing], dim)


def _more_rows(inputs: dict[str, Any], own: int, rows: int) -> dict[str, Any]:
    """Pads ``inputs`` from ``own`` to ``rows`` sequences by repeating the last one."""

    def more(tensor: torch.Tensor) -> torch.Tensor:
        return _filled(tensor, 0, rows) if tensor.dim() > 1 and tensor.shape[0] == own else tensor

    return {
        name: value if name == "cache_position" else map_tensors(more, value)
        for name, value in inputs.items()
    }


def _last_column(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    def at(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.narrow(dim, length - 1, 1)

    found = {**inputs}
    for name in _BY_POSITION:
        if found.get(name) is not None:
            found[name] = at(found[name], 1)
    if _TAKES_POSITIONS:
        found["cache_position"] = at(found["cache_position"], 0)
    for name in ("attention_mask", "decoder_attention_mask"):
        # A mask of the encoder's output has one row for all positions.
        found[name] = map_tensors(
            lambda mask: at(mask, 2) if mask.dim() == 4 and mask.shape[2] > 1 else mask,
            found.get(name),
        )
    return {name: value for name, value in found.items() if value is not None}


class _FixedCache(Cache):
    """A cache of ``length`` positions in every layer. With a sliding window, masks exclude some."""

    is_compileable = True  # the search then makes masks for all positions
    # Layers that need masks of another length, or have no keys: none.
    is_sliding: list[bool] = []
    is_linear: list[bool] = [False]
    is_dummy: list[bool] = []

    def __init__(self, length: int) -> None:
        super().__init__(layers=[])
        self.length = length
        # The number of filled positions; a tensor on the device during a forward.
        self.seen: Any = 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        while len(self.layers) <= layer_idx:
            self.layers.append(SimpleNamespace(keys=None, values=None))
        slots: Any = self.layers[layer_idx]
        if slots.keys is None:
            rows, heads, _, width = keys.shape
            slots.keys = keys.new_zeros(rows, heads, self.length, width)
            slots.values = values.new_zeros(rows, heads, self.length, values.shape[3])
        positions = torch.arange(keys.shape[2], device=keys.device) + self.seen
        slots.keys.index_copy_(2, positions, keys)
        slots.values.index_copy_(2, positions, values)
        return slots.keys, slots.values

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        return self.seen

    def get_mask_sizes(self, queries: Any, layer_idx: int) -> tuple[int, int]:
        return self.length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.length

    get_max_cache_shape = get_max_length  # its name before 5

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Rows beyond the length of ``beam_idx`` keep their place."""
        for slots in self.layers:
            assert slots.keys is not None and slots.values is not None  # there was a forward
            rest = torch.arange(len(beam_idx), slots.keys.shape[0], device="cpu")
            rows = torch.cat([beam_idx.cpu(), rest]).to(slots.keys.device)
            slots.keys = slots.keys.index_select(0, rows)
            slots.values = slots.values.index_select(0, rows)


class _CrossCache(_FixedCache):
    """The outputs of an encoder are the same for all beams of a sequence."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        pass

"""The model's part of ``generate()``: forwards in shapes that all ranks agree on.

B: sequences of this rank (prompts times beams), R: the most that any rank has, q: positions of the
input, w: q of the longest rank, in its bucket, or 1; s: slots of the cache; V: words.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_xla
from torch import nn
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutputWithPast

from ..checkpoint.meeting import Meeting
from ..collectives.world import World
from ..sharding.around import holders_outside
from ..tree import map_tensors
from ..wrapper_methods import WrapperMethods

# Inputs with one column a position of the input, and those with one a position of the prompt.
_BY_POSITION = (
    *("input_ids", "inputs_embeds", "position_ids", "token_type_ids"),
    *("decoder_input_ids", "decoder_inputs_embeds", "decoder_position_ids"),
)
_SMALLEST_BUCKET = 16


class Decoding:
    """One call of ``generate`` on this rank."""

    def __init__(self, model: Any, buckets: tuple[int, ...]) -> None:
        self.model = model
        self.buckets = buckets
        self.cache: Any = None
        self.meeting = Meeting()
        self.world = World.current()
        self.rows = 0  # R
        self._again: dict[str, Any] | None = None  # what a rank that has ended computes
        self._call = _inside_wrappers(model)

    def bucket(self, length: int) -> int:
        """The length that ``length`` is padded to."""
        power = max(_SMALLEST_BUCKET, 1 << (length - 1).bit_length())
        return next((one for one in self.buckets if one >= length), power)

    def agree_on_cache(self, rows: int, length: int) -> int:
        """s; every rank has ``rows`` sequences of at most ``length`` tokens."""
        self.rows, most = self._most("the size of its cache", rows, length)
        return self.bucket(most)

    def _most(self, what: str, *sizes: int) -> list[int]:
        every = self.meeting.gather(f"generate: {what}", list(sizes))
        return [max(column) for column in zip(*every, strict=True)]

    def encoder(self) -> Callable[..., Any]:
        """The encoder, to be called with inputs of this rank."""
        encoder = self.model.get_encoder()
        forward = getattr(encoder, "module", encoder).forward

        @functools.wraps(forward)
        def encode(**inputs: Any) -> BaseModelOutput:
            tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
            if tokens is None or tokens.dim() not in (2, 3):
                raise ValueError(
                    f"the encoder of {type(self.model).__name__} takes no tokens: "
                    "generate() of a sharded model needs input_ids; or give encoder_outputs"
                )
            own, length = tokens.shape[:2]
            rows, longest = self._most("its prompts", own, length)
            width = self.bucket(longest)
            if inputs.get("attention_mask") is None:
                inputs["attention_mask"] = torch.ones(own, length, dtype=torch.long)
            padded = {
                name: _filled(value, 1, width, repeat=name != "attention_mask")
                if isinstance(value, torch.Tensor)
                else value
                for name, value in inputs.items()
            }
            padded = self._on_device(_more_rows(padded, own, rows))
            states = self._call(encoder, {**padded, "return_dict": True}).last_hidden_state
            torch_xla.sync()
            return BaseModelOutput(last_hidden_state=states.narrow(0, 0, own))

        encode.forward = forward  # type: ignore[attr-defined]  # its signature is asked for
        return encode

    def step(self, inputs: dict[str, Any]) -> CausalLMOutputWithPast:
        """The scores [B, 1, V] of the next tokens, on the CPU."""
        positions = inputs["cache_position"]
        length = positions.shape[0]
        width = 1
        if self._again is None:
            width = self.bucket(self._most("the length of its input", length)[0])
        elif length != 1:
            raise ValueError(f"expected one new token a sequence, got {length}")
        own, padded = self._padded(inputs, width)
        self._again = padded if width == 1 else _last_column(padded, length)
        scores: Any = self._compute(padded, length)
        return CausalLMOutputWithPast(logits=scores[:own], past_key_values=self.cache)

    def go_on(self, unfinished: bool) -> bool:
        """Whether this rank has tokens to find; if not, only after all other ranks have found
        theirs, with forwards that go with theirs."""
        while self.meeting.size > 1 and self._anybody(unfinished) and not unfinished:
            assert self._again is not None, "a rank with nothing to do has computed its prompt"
            self._compute(self._again, 1)
        return unfinished

    def _anybody(self, unfinished: bool) -> bool:
        flag = torch.tensor([float(unfinished)]).to(self.world.device)
        flag = self.world.all_reduce_max(flag, "generate")
        torch_xla.sync()
        return bool(flag.item())

    def _padded(self, inputs: dict[str, Any], width: int) -> tuple[int, dict]:
        """B, and the inputs with R rows and w columns."""
        given = {**inputs}
        for name in ("past_key_values", "return_dict", "logits_to_keep", "output_attentions"):
            given.pop(name, None)
        given.pop("output_hidden_states", None)
        tokens = next(given[name] for name in _BY_POSITION if given.get(name) is not None)
        own, slots = tokens.shape[0], self.cache.get_max_cache_shape()
        for name in _BY_POSITION:
            if given.get(name) is not None:
                given[name] = _filled(given[name], 1, width)
        first = int(given["cache_position"][0])
        # A rank that waits for others may be past its slots; what it computes is dropped.
        given["cache_position"] = (torch.arange(width) + first).clamp(max=slots - 1)
        if self.model.config.is_encoder_decoder:
            encoded = given["encoder_outputs"][0].shape[1]
            given["attention_mask"] = _filled(given["attention_mask"], 1, encoded, repeat=False)
            mask = given.get("decoder_attention_mask")
            if mask is None:
                mask = torch.ones(own, slots, dtype=torch.long)
            given["decoder_attention_mask"] = self._mask(mask, width) if mask.dim() > 2 else mask
        else:
            given["attention_mask"] = map_tensors(
                lambda mask: self._mask(mask, width), given["attention_mask"]
            )
        return own, _more_rows(given, own, self.rows)

    def _mask(self, mask: torch.Tensor, width: int) -> torch.Tensor:
        """A mask [B, 1, q, s] for w rows, none of which leaves out everything: such a row would
        compute with nothing, and what comes of it must be finite. Nobody looks at it."""
        if mask.dim() != 4:
            raise ValueError(
                f"{type(self.model).__name__} makes a mask of shape {tuple(mask.shape)} while "
                "generating, which changes from token to token; generate() of a sharded model "
                "needs a model that takes masks for all positions of a fixed cache"
            )
        if mask.dtype is torch.bool:
            mask = mask | ~mask.any(-1, keepdim=True)
        else:  # to be added to scores, and in bfloat16 the least number becomes -inf
            closed = mask <= torch.finfo(mask.dtype).min / 2
            mask = mask.masked_fill(closed.all(-1, keepdim=True), 0.0)
        return _filled(mask, 2, width)

    def _compute(self, padded: dict[str, Any], length: int) -> torch.Tensor:
        """The scores [R, 1, V] after position ``length - 1`` of the input."""
        inputs = self._on_device(padded)
        last = torch.tensor([length - 1]).to(self.world.device)
        if self.model._supports_logits_to_keep():
            inputs["logits_to_keep"] = last
        own = getattr(self.cache, "self_attention_cache", self.cache)
        own.seen = inputs["cache_position"][0]
        outputs = self._call(
            self.model, {**inputs, "past_key_values": self.cache, "return_dict": True}
        )
        scores = outputs.logits
        if scores.shape[1] != 1:
            scores = scores.index_select(1, last)
        del outputs
        torch_xla.sync()
        return scores.cpu()

    def _on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return map_tensors(lambda tensor: tensor.to(self.world.device), inputs)


def _inside_wrappers(model: nn.Module) -> Callable[[Callable[..., Any], dict[str, Any]], Any]:
    """``call(function, kwargs)``: with the parameters gathered that wrappers around have."""
    holders = [one for one in holders_outside(model) if isinstance(one, WrapperMethods)]

    def call(function: Callable[..., Any], kwargs: dict[str, Any]) -> Any:
        for holder in reversed(holders):
            function = functools.partial(_enter, holder, function)
        return function(**kwargs)

    return call


def _enter(holder: WrapperMethods, function: Callable[..., Any], /, **kwargs: Any) -> Any:
    return holder._run(function, (), kwargs)


def _filled(tensor: torch.Tensor, dim: int, length: int, repeat: bool = True) -> torch.Tensor:
    """``tensor`` with its last element along ``dim`` repeated up to ``length``, or zeros there."""
    missing = length - tensor.shape[dim]
    if missing <= 0:
        return tensor
    last = tensor.narrow(dim, tensor.shape[dim] - 1, 1)
    last = last if repeat else torch.zeros_like(last)
    return torch.cat([tensor, *[last] * missing], dim)


def _more_rows(inputs: dict[str, Any], own: int, rows: int) -> dict[str, Any]:
    """``inputs`` with ``rows`` sequences instead of ``own``, the last repeated."""

    def more(tensor: torch.Tensor) -> torch.Tensor:
        return _filled(tensor, 0, rows) if tensor.dim() > 1 and tensor.shape[0] == own else tensor

    return {
        name: value if name == "cache_position" else map_tensors(more, value)
        for name, value in inputs.items()
    }


def _last_column(inputs: dict[str, Any], length: int) -> dict[str, Any]:
    """What a forward of one token takes, of what one of ``length`` real ones took."""

    def at(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.narrow(dim, length - 1, 1)

    found = {**inputs}
    for name in _BY_POSITION:
        if found.get(name) is not None:
            found[name] = at(found[name], 1)
    found["cache_position"] = at(found["cache_position"], 0)
    for name in ("attention_mask", "decoder_attention_mask"):
        found[name] = map_tensors(
            lambda mask: at(mask, 2) if mask.dim() == 4 else mask, found.get(name)
        )
    return {name: value for name, value in found.items() if value is not None}

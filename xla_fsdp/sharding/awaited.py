"""Parameters and buffers whose values a checkpoint will bring: which of them have not come yet.

``FSDP(meta_model, param_init_fn=loaded_later)`` shards a model without initialising it. Whatever
gives a shard values afterwards (a load of any kind, ``summon_full_params``) changes its stamp, so
nobody has to be told; only a load of some of the parameters in one vector says which they were.
Until then shards are NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..ranks.rank import is_pretending
from ..wording import some_of
from .freeing import Stamp, stamps

# On a tensor that loaded_later made: True. On a shard or a buffer: its Awaited.
_MARK = "_xla_fsdp_awaited"
# Names in a message.
SHOWN = 20
# Of a parameter within a holder: where its layout begins there, and its number in the layout.
Key = tuple[int, int]


def loaded_later(module: nn.Module) -> None:
    """For ``param_init_fn``: parameters of ``module`` on the meta device get values by a load.

    Nothing is initialised, and no parameter is whole anywhere: ``model = FSDP(meta_model,
    param_init_fn=loaded_later)``, then ``load_weights``, ``load_checkpoint``,
    ``load_full_state_dict`` or ``load_state_dict``. A forward before every parameter and buffer has
    values raises an error that names those that have none, and so does saving. What a checkpoint
    does not have (a new head, buffers that are not persistent) is given values in
    ``with FSDP.summon_full_params(model):``, or in a ``param_init_fn`` of your own that calls this
    function.
    """
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            empty = nn.Parameter(_nothing(parameter), parameter.requires_grad)
            setattr(empty, _MARK, True)
            module._parameters[key] = empty
    for key, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[key] = _nothing(buffer)
            setattr(module._buffers[key], _MARK, True)


def _nothing(like: torch.Tensor) -> torch.Tensor:
    """Of the shape and dtype of ``like``, all NaN (or 0), on the CPU, in next to no memory."""
    nan = like.is_floating_point() or like.is_complex()
    return torch.full((), float("nan") if nan else 0, dtype=like.dtype, device="cpu").expand(
        like.shape
    )


def comes_later(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` was made by :func:`loaded_later`, and stands for one without values."""
    return getattr(tensor, _MARK, None) is True


class Awaited:
    """A shard or buffer without values.

    Attributes:
        holder: the tensor, and
        names: the dotted names in the wrapped module of what it holds and has no values.
        spot: of a buffer, whose it is, and as what.
    """

    def __init__(
        self, holder: torch.Tensor, names: dict[Key, str], spot: tuple[nn.Module, str] | None = None
    ) -> None:
        self.names = names
        self.spot = spot
        self.partly = False  # the next assignment gives values to others than these
        self.wait_for(holder)

    def wait_for(self, holder: torch.Tensor) -> None:
        """From now on a change of the holder means that it has values."""
        self.holder = holder
        self.stamp: Stamp = stamps([holder])[0]
        setattr(holder, _MARK, self)

    def wait_on(self) -> None:
        """As :meth:`wait_for`: what changed the tensor that is there now gave it no values."""
        there = None if self.spot is None else self.spot[0]._buffers.get(self.spot[1])
        self.wait_for(self.holder if there is None else there)

    @property
    def has_come(self) -> bool:
        there = self.holder if self.spot is None else self.spot[0]._buffers.get(self.spot[1])
        return there is not self.holder or stamps([self.holder])[0] != self.stamp


def about_to_fill(holder: torch.Tensor, keys: Iterable[Key]) -> None:
    """Says that the next assignment to ``holder`` gives values to ``keys`` only."""
    awaited = getattr(holder, _MARK, None)
    if isinstance(awaited, Awaited):
        for key in keys:
            awaited.names.pop(key, None)
        awaited.partly = bool(awaited.names)


def was_filled(holder: torch.Tensor) -> None:
    """Says that ``holder`` was assigned to, as announced."""
    awaited = getattr(holder, _MARK, None)
    if isinstance(awaited, Awaited) and awaited.partly:
        awaited.partly = False
        awaited.wait_for(holder)


def still_awaited(awaited: list[Awaited]) -> list[Awaited]:
    """Those without values; the others are forgotten."""
    if awaited:
        for one in awaited:
            if one.has_come and getattr(one.holder, _MARK, None) is one:
                delattr(one.holder, _MARK)
        awaited[:] = [one for one in awaited if not one.has_come]
    return awaited


def require_filled(holders: Iterable[torch.Tensor], doing: str) -> None:
    """Raises RuntimeError if one of ``holders`` has no values yet; ``doing`` needs them."""
    found = [getattr(holder, _MARK, None) for holder in holders]
    require_come([("", [one for one in found if isinstance(one, Awaited)])], doing)


def require_come(labelled: Sequence[tuple[str, list[Awaited]]], doing: str) -> None:
    """Raises RuntimeError if something in a model has no values yet.

    Args:
        labelled: for every unit what its names begin with, and what it waits for.
        doing: what needs the values.
    """
    if is_pretending():
        return
    names = [
        label + name
        for label, awaited in labelled
        for one in still_awaited(awaited)
        for name in one.names.values()
    ]
    names = list(dict.fromkeys(names))
    if names:
        some = some_of([repr(name) for name in names], SHOWN)
        raise RuntimeError(
            f"{doing} before {some} had values, which param_init_fn=loaded_later and to_empty() "
            "leave to you: load them (load_weights, load_checkpoint, load_full_state_dict, "
            "load_state_dict), or assign them within `with FSDP.summon_full_params(model):`. "
            "Buffers that are not persistent are in no checkpoint"
        )

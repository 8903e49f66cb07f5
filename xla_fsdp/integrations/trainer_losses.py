"""The loss of a Trainer on several ranks: that of one process on the global batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import Trainer

from ..tree import keep_dtype

# On a Trainer during a training step: the number of micro-batches that it accumulates.
_MICRO_BATCHES = "_xla_fsdp_micro_batches"


@contextlib.contextmanager
def accumulating(trainer: Trainer) -> Iterator[None]:
    """Inside, losses are those of a training step; outside, those of an evaluation."""
    number = getattr(trainer, "current_gradient_accumulation_steps", 1)  # set by train()
    setattr(trainer, _MICRO_BATCHES, number)
    try:
        yield
    finally:
        delattr(trainer, _MICRO_BATCHES)


def global_loss(trainer: Trainer, compute: Callable[[Any], Any], num_items: Any) -> Any:
    """``Trainer.compute_loss``, right for losses that use ``num_items`` and for those that do not.

    ``num_items`` is the number of labels in all micro-batches of all ranks. The Trainer assumes
    that a loss which receives it is a sum divided by it. So it multiplies the loss by the number of
    ranks, because gradients are averaged over them, and it adds up the micro-batches. A mean (label
    smoothing, a router's loss, a model that ignores ``num_items``) becomes too large by both
    numbers. Whether a loss uses ``num_items`` cannot be known, and a loss can be the sum of both
    kinds. Therefore the loss receives the mean number of labels in a micro-batch of one rank. Then
    both kinds are means, and so is their sum: the mean over ranks and micro-batches is the loss
    on the global batch.

    Args:
        compute: ``Trainer.compute_loss`` as a function of ``num_items``. Returns the loss, or the
            loss and the outputs.
        num_items: what the Trainer counted; ``None`` if it did not count.
    """
    is_mean = not trainer.model_accepts_loss_kwargs or num_items is None
    if is_mean and trainer.compute_loss_func is None:
        return compute(num_items)  # which training_step divides by the micro-batches
    parts = getattr(trainer, _MICRO_BATCHES, 1)
    if num_items is not None:
        if trainer.args.average_tokens_across_devices:
            parts *= trainer.accelerator.num_processes  # by which compute multiplies
        num_items = num_items / parts
        if isinstance(num_items, torch.Tensor):
            keep_dtype(num_items)  # bfloat16 would round it
    found = compute(num_items)
    if isinstance(found, tuple):
        return found[0] / parts, *found[1:]
    return found / parts

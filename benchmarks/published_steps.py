"""Training steps of the models with published speeds, to be planned.

Blocks of decoders (``decoder.py``) are recomputed in the backward, as in most of the runs. Steps
are fully sharded by this package, whatever the source used. So the comparison is of the time of the
same arithmetic on the same slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import xla_fsdp

from .decoder import Decoder, decoder_step


@dataclass(frozen=True)
class ResNet50:
    """ResNet-50 of torchvision: 224 x 224 images, ``batch`` per device, computed in ``dtype``."""

    batch: int
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Images of a device in a step."""
        return self.batch


def resnet_step(sizes: ResNet50) -> Callable[[], torch.Tensor]:
    """A training step: SGD with momentum; each of the four stages is a unit."""
    dtype = getattr(torch, sizes.dtype)

    def step() -> torch.Tensor:
        from torchvision.models import resnet50

        def wrap(module: nn.Module) -> nn.Module:
            return xla_fsdp.XlaFullyShardedDataParallel(module, compute_dtype=dtype)

        model = resnet50()
        for name in ("layer1", "layer2", "layer3", "layer4"):
            setattr(model, name, wrap(getattr(model, name)))
        model = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        images = torch.zeros(sizes.batch, 3, 224, 224).to("xla")
        labels = torch.zeros(sizes.batch, dtype=torch.long).to("xla")
        loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def step_of(sizes: Decoder | ResNet50, replicas: int = 1) -> Callable[[], torch.Tensor]:
    """A training step for :func:`xla_fsdp.plan`."""
    return resnet_step(sizes) if isinstance(sizes, ResNet50) else decoder_step(sizes, replicas)

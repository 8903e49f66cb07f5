"""The networks of the examples in plain torch, and checks of the memory that they need."""

import difflib
import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from common.script import Stop, to_one_line
from torch import nn
from torchvision import models

# Blocks of torchvision's models: the units of --auto_wrap_policy=type_based.
BLOCKS = {
    models.convnext.CNBlock, models.densenet._DenseLayer, models.efficientnet.FusedMBConv,
    models.efficientnet.MBConv, models.maxvit.MaxVitLayer, models.mnasnet._InvertedResidual,
    models.mobilenetv2.InvertedResidual, models.mobilenetv3.InvertedResidual,
    models.regnet.ResBottleneckBlock, models.resnet.BasicBlock, models.resnet.Bottleneck,
    models.shufflenetv2.InvertedResidual, models.squeezenet.Fire,
    models.swin_transformer.SwinTransformerBlock, models.swin_transformer.SwinTransformerBlockV2,
    models.vision_transformer.EncoderBlock,
}  # fmt: skip


class VisionTransformer(nn.Module):
    """Pre-norm blocks on patches with learned positions; no class token, mean of all tokens.

    Args:
        image_size, patch_size: pixels along an edge; the first must be a multiple of the second.
        join: joins the blocks into one module. It gets an iterator, so each block can be sharded
            before the next one is created. Default: ``nn.Sequential``.
        pos_dropout, att_dropout, mlp_dropout: dropout probabilities after the positions, for the
            attention weights, and for the outputs of both halves of a block.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        embed_dim: int,
        num_heads: int,
        num_blocks: int,
        mlp_ratio: float = 4.0,
        num_classes: int = 1000,
        pos_dropout: float = 0.0,
        att_dropout: float = 0.0,
        mlp_dropout: float = 0.0,
        join: Callable[[Iterable[nn.Module]], nn.Module] = lambda blocks: nn.Sequential(*blocks),
    ) -> None:
        super().__init__()
        tokens = (image_size // patch_size) ** 2
        self.patch_embed = nn.Conv2d(3, embed_dim, patch_size, patch_size)
        self.pos_embed = nn.Parameter(torch.empty(1, tokens, embed_dim))
        self.pos_drop = nn.Dropout(pos_dropout)
        hidden = int(embed_dim * mlp_ratio)
        self.blocks = join(
            Block(embed_dim, num_heads, hidden, att_dropout, mlp_dropout) for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head = nn.Linear(embed_dim, num_classes)
        for layer in (self.patch_embed, self.head):
            initialize(layer)
        nn.init.normal_(self.pos_embed, std=0.02)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``images``: (batch, 3, image_size, image_size); returns (batch, num_classes) logits."""
        tokens = self.patch_embed(images).flatten(2).transpose(1, 2)  # (batch, tokens, embed_dim)
        tokens = self.blocks(self.pos_drop(tokens + self.pos_embed))
        return self.head(self.norm(tokens).mean(dim=1))


class Block(nn.Module):
    """Attention and a perceptron with one hidden layer, each after a norm and with a residual."""

    def __init__(
        self, width: int, heads: int, hidden: int, att_dropout: float, mlp_dropout: float
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=1e-6)
        self.attention = Attention(width, heads, att_dropout)
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.drop = nn.Dropout(mlp_dropout)
        for layer in (self.attention.qkv, self.attention.out, self.up, self.down):
            initialize(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(self.drop(F.gelu(self.up(self.norm2(x))))))


class Attention(nn.Module):
    """Attention of every token to every token."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (batch, heads, tokens, head width)
        weights = (q @ k.transpose(-2, -1) * (width // self.heads) ** -0.5).softmax(dim=-1)
        return self.out((self.drop(weights) @ v).transpose(1, 2).reshape(batch, tokens, width))


def initialize(layer: nn.Linear | nn.Conv2d) -> None:
    """Initializes weights with standard deviation 0.02, and the bias with zeros."""
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)


def torchvision_model(model: str, num_classes: int) -> nn.Module:
    """Builds a classifier of torchvision that only returns logits, also in training."""
    known = models.list_models(module=models)
    if model not in known:
        close = difflib.get_close_matches(model, known, n=3) or ["resnet50", "vit_b_16"]
        raise Stop(
            f"no model {model!r} among torchvision's {len(known)} classifiers, such as "
            f"{', '.join(close)}; torchvision.models.list_models(torchvision.models) lists them",
            code=2,
        )
    arguments: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if model in ("googlenet", "inception_v3"):
        # Auxiliary classifiers would return more results. These models' truncated normal weights
        # take minutes to sample, so use torch's default initialization.
        arguments |= {"aux_logits": False, "init_weights": False}
    return models.get_model(model, **arguments)


def try_out(options: SimpleNamespace) -> None:
    """Raises Stop if ``options.model`` cannot be trained with these flags. Computes nothing.

    The images may have a wrong size, the batch may be too small for batch norm, or there may be too
    little memory for the classes.
    """
    # With sync_batch_norm, one image on each rank is enough for batch statistics.
    batch_size = max(2, options.batch_size) if options.sync_batch_norm else options.batch_size
    try:
        with torch.device("meta"):
            network = torchvision_model(options.model, options.num_classes)
            network(torch.empty(batch_size, 3, options.image_size, options.image_size))
        parameters = sum(parameter.numel() for parameter in network.parameters())
    except NotImplementedError:
        # RegNet cannot be built on the meta device, but it supports any size. Count its last layer.
        parameters = options.num_classes
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise Stop(
            f"{options.model} cannot train on batches of {batch_size} images of "
            f"--image_size={options.image_size} with --num_classes={options.num_classes}: "
            f"{to_one_line(error)}",
            code=2,
        ) from error
    if not options.plan:
        require_for_training(parameters, "--model or --num_classes")


def sizes_of(options: SimpleNamespace) -> tuple[dict[str, Any], int]:
    """The arguments of the flags for a :class:`VisionTransformer`, and its parameter count."""
    for name, divisor in (("image_size", "patch_size"), ("embed_dim", "num_heads")):
        if getattr(options, name) % getattr(options, divisor):
            raise Stop(
                f"--{name}={getattr(options, name)} is not a multiple of "
                f"--{divisor}={getattr(options, divisor)}",
                code=2,
            )
    names = "image_size patch_size embed_dim num_heads num_blocks mlp_ratio num_classes".split()
    sizes = {name: getattr(options, name) for name in names}
    try:
        with torch.device("meta"):
            model = VisionTransformer(**sizes)
    except (OverflowError, RuntimeError) as error:
        values = ", ".join(f"--{name}={value}" for name, value in sizes.items())
        raise Stop(f"{values}: too large for a tensor; choose smaller values", code=2) from error
    return sizes, sum(parameter.numel() for parameter in model.parameters())


def require_for_training(parameters: int, smaller: str) -> None:
    """Raises Stop if CPU ranks, which share this machine's memory, have too little of it.

    Otherwise the system would kill the process silently. ``smaller``: flags that make the model
    smaller.
    """
    import xla_fsdp

    xla_fsdp.compilation_counts()  # chooses the device before it imports torch_xla
    import torch_xla.runtime as xr

    # In float32: the weight, its gradient, and two states of Adam.
    needed, memory = 16 * parameters, memory_of_the_machine()
    if xr.device_type() == "CPU" and needed > memory:
        raise Stop(
            f"{parameters:,} parameters, gradients and optimizer need {needed / 2**30:,.0f} GiB on "
            f"CPU ranks, but the machine has {memory / 2**30:,.0f} GiB: choose a smaller "
            f"{smaller}, or use a TPU; --plan=SLICE shows how much memory a TPU needs",
            code=2,
        )


def memory_of_the_machine() -> int:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(memory, int(file.read()))
    except (OSError, ValueError):  # not in a container, or the container has no limit
        return memory

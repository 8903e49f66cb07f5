"""The networks that the examples train, in plain torch, and whether a machine can hold them."""

import difflib
import os
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from common.script import Stop, in_a_line
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
    """Pre-norm blocks over patches, learned positions, no class token, mean of all tokens.

    Args:
        image_size, patch_size: pixels along an edge; the first a multiple of the second.
        join: makes one module of the blocks, which it takes one by one: each can be sharded before
            the next exists. Default: ``nn.Sequential``.
        pos_dropout, att_dropout, mlp_dropout: probabilities after the positions, on the attention
            weights, and on what both halves of a block return.
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
    """Attention, then a perceptron with one hidden layer, each behind a norm in a residual."""

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
    """Every token attends to every token."""

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
    """Normal weights of standard deviation 0.02, no bias."""
    nn.init.normal_(layer.weight, std=0.02)
    nn.init.zeros_(layer.bias)


def torchvision_model(model: str, num_classes: int) -> nn.Module:
    """One of torchvision's classifiers, which returns logits only, in training too."""
    known = models.list_models(module=models)
    if model not in known:
        close = difflib.get_close_matches(model, known, n=3) or ["resnet50", "vit_b_16"]
        such = f"among torchvision's {len(known)} classifiers, such as {', '.join(close)}"
        listed = "torchvision.models.list_models(torchvision.models) lists them"
        raise Stop(f"no model {model!r} {such}; {listed}", code=2)
    how: dict[str, Any] = {"weights": None, "num_classes": num_classes}
    if model in ("googlenet", "inception_v3"):
        # Their auxiliary classifiers would be further results. Drawing their truncated normals
        # takes minutes; the default is torch's own.
        how |= {"aux_logits": False, "init_weights": False}
    return models.get_model(model, **how)


def try_out(model: str, options: SimpleNamespace, batch_size: int, smaller: str) -> None:
    """Refuses what ``torchvision_model`` can not be trained on. Computes nothing.

    Images too small or not of the one size that it takes; a batch too small for batch norm; no
    model of that name; more classes than there is memory for, unless ``smaller`` flags help.
    """
    classes, size = options.num_classes, options.image_size
    try:
        with torch.device("meta"):
            network = torchvision_model(model, classes)
            network(torch.empty(batch_size, 3, size, size))
        parameters = sum(parameter.numel() for parameter in network.parameters())
    except NotImplementedError:
        # RegNet can not be built like this; it takes any size. Its last layer alone has these.
        parameters = classes
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        images = f"{batch_size} images of --image_size={size} with --num_classes={classes}"
        reason = in_a_line(error, 200)
        raise Stop(f"{model} can not train on batches of {images}: {reason}", code=2) from error
    # It is whole, in float32, before it is sharded.
    _require(parameters, 4, "before they are sharded", "model or --num_classes")
    if not options.plan:
        require_for_training(parameters, smaller)


def sizes_of(options: SimpleNamespace) -> tuple[dict[str, Any], int]:
    """Of a :class:`VisionTransformer` as the flags say, and how many parameters it has."""
    for whole, part in (("image_size", "patch_size"), ("embed_dim", "num_heads")):
        size, of = getattr(options, whole), getattr(options, part)
        if size % of:
            raise Stop(f"--{whole}={size} is not a multiple of --{part}={of}", code=2)
    if options.embed_dim * options.mlp_ratio < 1:
        ratio = f"--mlp_ratio={options.mlp_ratio} of --embed_dim={options.embed_dim}"
        raise Stop(f"{ratio} leaves no hidden width; at least {1 / options.embed_dim:g}", code=2)
    sizes = "image_size patch_size embed_dim num_heads num_blocks mlp_ratio num_classes".split()
    network = {name: getattr(options, name) for name in sizes}
    try:
        with torch.device("meta"):
            return network, sum(one.numel() for one in VisionTransformer(**network).parameters())
    except (OverflowError, RuntimeError) as error:
        sizes = ", ".join(f"--{name}={value}" for name, value in network.items())
        raise Stop(f"{sizes}: larger than any tensor; choose less", code=2) from error


def require_for_training(parameters: int, smaller: str) -> None:
    """The system would end CPU ranks without a word; all of them share this machine's memory.

    ``smaller``: flags that make the model smaller.
    """
    import xla_fsdp

    xla_fsdp.compilation_counts()  # imports torch_xla, and chooses the device before
    import torch_xla.runtime as xr

    if xr.device_type() == "CPU":
        instead = f"{smaller}, a TPU, or --plan=SLICE to see what that needs"
        # Of float32: the weight, its gradient, and two states of Adam.
        _require(parameters, 16, "with gradients and optimizer on CPU ranks", instead)


def _require(parameters: int, size: int, when: str, instead: str) -> None:
    needed, there = parameters * size, _memory_of_the_machine()
    if needed > there:
        take = f"{parameters:,} parameters take {needed / 2**30:,.0f} GiB {when}"
        has = f"the machine has {there / 2**30:,.0f} GiB"
        raise Stop(f"{take}, {has}: choose a smaller {instead}", code=2)


def _memory_of_the_machine() -> int:
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as file:
            return min(found, int(file.read()))
    except (OSError, ValueError):  # no container, or one without a limit
        return found

"""A small CLIP of open_clip with its loss over the examples of all ranks, against plain torch."""

import math

import open_clip.loss
import torch
from open_clip.loss import ClipLoss
from open_clip.model import CLIP

import xla_fsdp
from xla_fsdp.layers import all_gather_with_grad

RANKS, STEPS, BATCH = 2, 3, 4


def build() -> CLIP:
    torch.manual_seed(0)
    return CLIP(
        16,
        {"layers": 2, "width": 32, "head_width": 16, "patch_size": 8, "image_size": 16},
        {"layers": 2, "width": 32, "heads": 2, "context_length": 6, "vocab_size": 20},
    )


def gathered(image, text, **options):
    """The line that changes open_clip: its own gather needs process groups of torch."""
    return all_gather_with_grad(image), all_gather_with_grad(text)


def train(model: CLIP, device: str, rank: int = 0, ranks: int = 1):
    # The two groups of open_clip's training script.
    named = [(n, p, p.ndim < 2 or "bn" in n or "bias" in n) for n, p in model.named_parameters()]
    groups = [
        {"params": [p for _, p, excluded in named if excluded is one], "weight_decay": decay}
        for one, decay in ((True, 0.0), (False, 0.2))
    ]
    assert all(len(group["params"]) > 4 for group in groups)
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    # Every rank computes the loss of its own examples, compared with those of all ranks.
    loss_of = ClipLoss(local_loss=True, gather_with_grad=True, rank=rank, world_size=ranks)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 3, 16, 16, generator=generator).chunk(ranks)[rank]
        texts = torch.randint(1, 20, (BATCH, 6), generator=generator).chunk(ranks)[rank]
        optimizer.zero_grad()
        loss = loss_of(*model(images.to(device), texts.to(device)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=2.0)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        losses.append(loss.item())
    return losses


def main(rank: int):
    model = build()
    for block in (*model.visual.transformer.resblocks, *model.transformer.resblocks):
        xla_fsdp.fully_shard(block)
    xla_fsdp.fully_shard(model)
    return train(model, "xla", rank, RANKS), xla_fsdp.full_state_dict(model)


if __name__ == "__main__":
    open_clip.loss.gather_features = gathered
    results = xla_fsdp.launch(main, num_devices=RANKS)
    plain = build()
    losses = train(plain, "cpu")
    found = [sum(one) / RANKS for one in zip(*(result[0] for result in results), strict=True)]
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0][1], dict(plain.state_dict()), rtol=1e-3, atol=1e-4)

"""diffusers' DiT, noise schedule, learning rate schedule and EMA, against plain torch.

Layers are recomputed by diffusers' own gradient checkpointing. Only the wrapping and the device
differ; see examples/unconditional_image_generation of diffusers for the loop.
"""

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

import xla_fsdp

RANKS, STEPS, BATCH, SIZE = 2, 3, 4, 8


def build() -> DiTTransformer2DModel:
    torch.manual_seed(0)
    model = DiTTransformer2DModel(
        sample_size=SIZE, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2,
        attention_head_dim=8, norm_num_groups=4, num_embeds_ada_norm=10, dropout=0.0,
    ).train()  # fmt: skip
    for module in model.modules():
        if hasattr(module, "dropout_prob"):  # it replaces labels at random, for guidance
            module.dropout_prob = 0.0
    model.enable_gradient_checkpointing()
    assert model.is_gradient_checkpointing
    return model


def train(model, device: str, rank: int = 0, ranks: int = 1):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scheduler = get_scheduler(
        "cosine", optimizer=optimizer, num_warmup_steps=1, num_training_steps=STEPS + 1
    )
    noises = DDPMScheduler(num_train_timesteps=100)
    average = EMAModel(model.parameters(), decay=0.9)
    losses = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        shape = BATCH, 4, SIZE, SIZE
        images, noise = (torch.randn(shape, generator=generator) for _ in range(2))
        times = torch.randint(100, (BATCH,), generator=generator)
        labels = torch.randint(10, (BATCH,), generator=generator)
        images, noise, times, labels = (
            each.chunk(ranks)[rank].to(device) for each in (images, noise, times, labels)
        )
        noisy = noises.add_noise(images, noise, times)
        found = model(noisy, times, class_labels=labels).sample
        loss = torch.nn.functional.mse_loss(found, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.item())
    return losses, average


def states(model, average):
    """The weights, and their average in the place of the weights."""
    trained = xla_fsdp.full_state_dict(model, rank0_only=False)
    average.copy_to(model.parameters())
    return trained, xla_fsdp.full_state_dict(model, rank0_only=False)


def main(rank: int):
    model = build()
    # The model itself calls this part of its first block, after the last one.
    for layer in (model.transformer_blocks[0].norm1.emb, *model.transformer_blocks):
        xla_fsdp.fully_shard(layer)
    xla_fsdp.fully_shard(model)
    losses, average = train(model, "xla", rank, RANKS)
    return losses, *states(model, average)


if __name__ == "__main__":
    (first, trained, averaged), (second, *_) = xla_fsdp.launch(main, num_devices=RANKS)
    plain = build()
    losses, average = train(plain, "cpu")
    found = [sum(pair) / RANKS for pair in zip(first, second, strict=True)]
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    average.copy_to(plain.parameters())
    for state, right in ((trained, expected), (averaged, dict(plain.state_dict()))):
        torch.testing.assert_close(state, right, rtol=1e-3, atol=1e-4)
